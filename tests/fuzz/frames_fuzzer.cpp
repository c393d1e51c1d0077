// Throws arbitrary bytes, and frames that are sealed as a peer would seal them but say anything, at the receiving half of
// a framed connection. It writes nowhere but into posted memory, ends what it ends once, and finds the same whether the
// bytes come all at once or a few at a time. Anything else, and whatever a sanitizer sees, ends the program.
//
// The input is a program: each step posts a receive or a send, lets the other half write, or feeds bytes or a frame.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ddp/core/digest.hpp>
#include <ddp/transport/framed/frame_inbox.hpp>
#include <ddp/transport/framed/frame_outbox.hpp>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "input.hpp"

namespace {

using fuzz::expect;
using fuzz::reader;

constexpr std::uint64_t key = 0x1234;

// Adds up what it is given: a fuzzer, and this program, can make that fit.
struct additive_checksum {
    std::uint64_t sum = 0;
    void reset() noexcept { sum = 0; }
    [[clang::no_sanitize("address", "undefined", "coverage")]] void update(ddp::const_bytes piece) noexcept {
        std::byte const* const data = piece.data();
        for (std::size_t i = 0, n = piece.size(); i < n; ++i) sum += static_cast<std::uint64_t>(data[i]);
    }
    std::uint64_t value() noexcept { return sum; }
};

// What a message may have as its length: about the limits of blocks and frames, or anything.
std::uint64_t length_from(reader& in) {
    constexpr std::array<std::uint64_t, 8> small = {0, 1, 64, 959, 960, 961, 4096, 1000};
    constexpr std::array<std::uint64_t, 4> large = {ddp::frame_payload_bytes - 1, ddp::frame_payload_bytes,
                                                    ddp::frame_payload_bytes + 1, 2 * ddp::frame_payload_bytes + 7};
    std::uint8_t const choice = in.byte();
    if (choice < 200) return small[choice % small.size()];
    if (choice < 210) return large[choice % large.size()];
    return choice < 250 ? in.number<std::uint16_t>() : in.number<std::uint64_t>();
}

// One end of a connection, which is told the same things as others.
class end {
public:
    end(bool checked, std::uint32_t blocks, std::size_t piece)
        : out_(key + 1, checked, blocks), in_(key, checked, blocks, out_), piece_(piece) {}
    ~end() {
        ddp::completion_list ended;
        in_.end_all(ddp::op_status::aborted, ended);
        out_.end_all(ddp::op_status::aborted, ended);
        finish(ended);
        for (auto const& o : operations_) expect(o->ended == 1, "every operation ends once");
    }

    void post(bool sends, ddp::identity const& id, std::size_t size) {
        operation& o = *operations_.emplace_back(std::make_unique<operation>());
        o.memory = std::make_unique_for_overwrite<std::byte[]>(size);
        o.node.tag = {id, 1};
        o.node.data = o.memory.get();
        o.node.size = size;
        o.node.sends = sends;
        ddp::completion_list done;
        if (sends)
            out_.post(o.node);
        else
            in_.post(o.node, done);
        finish(done);
    }
    // As framed does it: plan, one scattered read of what there is, took.
    void feed(ddp::const_bytes bytes) {
        std::array<ddp::mutable_bytes, inbox::max_segments> list;
        std::array<std::byte, 4096> staging;
        std::size_t const piece = std::max(piece_, bytes.size() / 64);  // a large frame takes its time as it is
        while (!bytes.empty()) {
            std::size_t const count = in_.plan(list, staging);
            std::size_t took = 0;
            expect(count > 0, "there is always somewhere to read to");
            for (std::size_t i = 0; i < count && took < piece && !bytes.empty(); ++i) {
                expect(!list[i].empty(), "no buffer is empty");
                std::size_t const n = std::min({bytes.size(), list[i].size(), piece - took});
                std::memcpy(list[i].data(), bytes.data(), n);
                bytes = bytes.subspan(n);
                took += n;
            }
            bool const said_all = in_.said_goodbye();
            std::uint32_t const frames = in_.frames();
            ddp::completion_list done;
            static std::vector<std::byte> spill(inbox::max_read);
            in_.took(took, spill, done);
            expect(!said_all || in_.frames() == frames || !in_.error().empty(), "goodbye is the last word");
            finish(done);
            ddp::failure record;
            if (in_.take_record(record)) ++records_;
        }
    }
    void write(std::size_t bytes) {
        std::array<ddp::const_bytes, outbox::max_buffers> list;
        out_.fill(in_.consumed());
        std::size_t all = 0;
        for (auto const& b : std::span(list).first(out_.gather(list))) all += b.size();
        ddp::completion_list done;
        out_.wrote(std::min(all, bytes), done);
        finish(done);
    }
    void discard_messages() { in_.discard_messages(); }
    void abort() { out_.abort({}); }

    void expect_same(end const& other) const {
        expect(in_.error() == other.in_.error(), "the same is found");
        expect(in_.frames() == other.in_.frames(), "as many frames are seen");
        expect(records_ == other.records_ && in_.said_goodbye() == other.in_.said_goodbye(), "the same is said");
        for (std::size_t i = 0; i < operations_.size(); ++i) {
            operation const &a = *operations_[i], &b = *other.operations_[i];
            expect(a.ended == b.ended && a.node.status == b.node.status, "the same operations end");
            if (a.node.status == ddp::op_status::ok && !a.node.sends)
                expect(std::memcmp(a.memory.get(), b.memory.get(), a.node.size) == 0, "the same bytes arrive");
        }
    }
    std::uint32_t frames() const { return in_.frames(); }

private:
    using inbox = ddp::frame_inbox<additive_checksum>;
    using outbox = ddp::frame_outbox<additive_checksum>;
    struct operation {
        ddp::completion node;
        std::unique_ptr<std::byte[]> memory;  // of exactly the size: a sanitizer sees a byte beyond
        int ended = 0;
    };

    void finish(ddp::completion_list& done) {
        while (ddp::completion* const node = done.pop_front()) {
            auto const at =
                std::find_if(operations_.begin(), operations_.end(), [&](auto const& o) { return &o->node == node; });
            expect(at != operations_.end(), "what ends was posted");
            expect((*at)->ended++ == 0, "nothing ends twice");
            expect(node->status != ddp::op_status::pending, "what ends says how");
            if (node->status == ddp::op_status::ok) expect(node->moved == node->size, "all of it has moved");
            if (node->status == ddp::op_status::length)
                expect(!node->sends && node->length != node->size, "another length was sent");
        }
    }

    outbox out_;
    inbox in_;
    std::size_t piece_;  // bytes a read brings at most
    int records_ = 0;
    std::vector<std::unique_ptr<operation>> operations_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    reader in({data, size});
    std::uint8_t const options = in.byte();
    bool const checked = (options & 1) != 0;
    std::uint32_t const blocks = (options & 2) != 0 ? 8 : 300;
    std::size_t const piece = (options & 4) != 0 ? 1 + in.byte() : 1 + in.number<std::uint16_t>() * std::size_t{8};
    end whole(checked, blocks, std::size_t{1} << 30), torn(checked, blocks, piece);
    std::vector<std::byte> frame;
    ddp::frame_header last;       // of the message that is under way
    std::uint64_t last_sent = 0;  // bytes of it
    std::size_t posted = 0, fed = 0;
    bool aborted = false;

    while (!in.empty() && fed < (std::size_t{1} << 20)) {
        ddp::identity const id{.group = 0, .channel = 0, .index = in.byte() % 3u};
        switch (std::uint8_t const step = in.byte(); step % 8) {
            case 0:
            case 1: {
                std::uint64_t const length = length_from(in);
                if (length > (std::size_t{1} << 20) || ++posted > 64 || aborted) break;
                for (end* const e : {&whole, &torn}) e->post(step % 8 == 1, id, static_cast<std::size_t>(length));
                break;
            }
            case 2: {
                std::size_t const count = in.number<std::uint16_t>() * std::size_t{16};
                for (end* const e : {&whole, &torn}) e->write(count);
                break;
            }
            case 3: {
                auto const bytes = in.bytes(in.byte());
                for (end* const e : {&whole, &torn}) e->feed(std::as_bytes(bytes));
                fed += bytes.size();
                break;
            }
            case 4:
                if (in.byte() % 8 != 0) break;
                aborted = true;  // nothing is posted any more
                for (end* const e : {&whole, &torn}) e->discard_messages();
                for (end* const e : {&whole, &torn}) e->abort();
                break;
            default: {
                ddp::frame_header h;
                h.type = static_cast<ddp::frame_type>(step / 8 < 20 ? 0 : step / 8 % ddp::frame_types);
                h.id = id;
                h.sequence = whole.frames();
                if (h.type == ddp::frame_type::data) {
                    bool const goes_on = last_sent < last.length && step % 8 != 5;
                    if (goes_on) {
                        h.id = last.id;
                        h.flags = last.flags & ddp::frame_header::exempt;
                        h.length = last.length;
                    } else {
                        h.flags = ddp::frame_header::begins | (in.byte() % 4 == 3 ? ddp::frame_header::exempt : 0);
                        h.length = length_from(in);
                        last = h;
                        last_sent = 0;
                    }
                    if (checked) h.flags |= ddp::frame_header::has_sum;
                    h.payload = static_cast<std::uint32_t>(
                        std::min<std::uint64_t>(ddp::frame_payload_bytes, h.length - last_sent));
                    last_sent += h.payload;
                } else if (h.type == ddp::frame_type::request || h.type == ddp::frame_type::clear) {
                    h.length = length_from(in);
                    h.word = in.byte();
                } else if (h.type == ddp::frame_type::heartbeat) {
                    h.payload = ddp::mark::text_bytes;
                } else if (h.type != ddp::frame_type::credit && h.type != ddp::frame_type::goodbye) {
                    h.payload = h.type == ddp::frame_type::abort || in.byte() % 2 == 0 ? sizeof(ddp::failure) : 0;
                }
                frame.assign(sizeof h + h.payload, std::byte{in.byte()});
                std::span<std::byte> const payload = std::span(frame).subspan(sizeof h);
                auto const said = std::as_bytes(in.bytes(h.payload <= sizeof(ddp::failure) ? in.byte() : 0));
                std::copy_n(said.begin(), std::min(said.size(), payload.size()), payload.begin());
                if (h.type == ddp::frame_type::data) {
                    additive_checksum sum;
                    sum.update(payload);
                    h.word = sum.value();
                } else if (h.payload != 0) {
                    h.word = ddp::digest{}.add(ddp::const_bytes(payload)).value();
                }
                if (std::uint8_t const wrong = in.byte(); wrong >= 0xf0) {  // one field of any value
                    std::uint64_t const value = in.number<std::uint64_t>();
                    switch (wrong % 8) {
                        case 0: h.payload = static_cast<std::uint32_t>(value); break;
                        case 1: h.sequence = static_cast<std::uint32_t>(value); break;
                        case 2: h.consumed = static_cast<std::uint32_t>(value); break;
                        case 3: h.flags = static_cast<std::uint8_t>(value); break;
                        case 4: h.length = value; break;
                        case 5: h.word = value; break;
                        case 6: h.type = static_cast<ddp::frame_type>(value); break;
                        default: h.id.index = value; break;
                    }
                } else if (wrong >= 0xe0) {
                    h.consumed = wrong % 16u;
                }
                h.seal(key);
                std::memcpy(frame.data(), &h, sizeof h);
                for (end* const e : {&whole, &torn}) e->feed(frame);
                fed += frame.size();
            }
        }
    }
    whole.expect_same(torn);
    return 0;
}
