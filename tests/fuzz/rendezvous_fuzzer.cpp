// Throws arbitrary bytes, hellos and requests at the server that ranks meet at. It answers or closes, keeps no more than
// it may, and does the same whether bytes come all at once or a few at a time. Anything else, and whatever a sanitizer sees,
// ends the program.
//
// The input is a program: each step is a new visitor, or one that says something or asks for its answer. Nothing goes over
// sockets, so that thousands of programs run in a second: the server's thread has ended, and its parser is called here.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ddp/rendezvous/rendezvous_error.hpp>
#include <ddp/rendezvous/tcp_store_protocol.hpp>
#include <ddp/rendezvous/tcp_visitors.hpp>
#include <ddp/transport/framed/frame_doorbell.hpp>
#include <ddp/transport/framed/tcp.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>
#include <exception>
#include <list>
#include <map>
#include <span>
#include <string>
#include <thread>
#include <vector>
#define private public  // parse and answer
#include <ddp/rendezvous/tcp_store_server.hpp>
#undef private
#include <ddp/rendezvous/tcp_mesh.hpp>

#include "input.hpp"

namespace {

using fuzz::expect;
using fuzz::reader;

constexpr std::uint64_t job = 77, nonce = 0x0123456789abcdef;

// A server without its thread; its visitors have no sockets.
class server {
public:
    server(int size, std::size_t piece)
        : piece_(piece), size_(size), held_(ddp::detail::tcp_acceptor(ddp::tcp_context()), size, job, nonce, {}) {
        held_.stopping_ = true;
        held_.bell_.ring();
        held_.thread_.join();
        held_.thread_ = std::thread([] {});  // for the destructor
    }

    void visit() { visitors_.push_back({.as = {ddp::tcp_stream(ddp::detail::tcp_socket(ddp::tcp_context()))}}); }
    std::size_t visitors() const { return visitors_.size(); }
    void say(std::size_t who, std::string const& bytes) {
        one& v = visitors_[who];
        for (std::size_t at = 0; at < bytes.size() && v.open; at += piece_) {
            v.as.in.append(bytes, at, piece_);
            for (bool more = true; more && v.open;) {  // what was behind a request that waited is parsed as well
                std::size_t const before = v.as.in.size();
                bool const waited = v.as.waits;
                v.open = held_.parse(v.as);
                held_.answer(v.as);
                more = v.as.in.size() != before || waited != v.as.waits;
            }
            expect(!v.open || v.as.in.size() <= most_kept, "no more is kept than one request");
            expect(v.as.rank >= -1 && v.as.rank < size_, "a visitor is a rank of the job, or none");
            take_answers(v);
        }
        expect(held_.data_.size() <= 4 * static_cast<std::size_t>(size_) + 1024, "the store is bounded");
    }
    void time_is_up() {
        if (held_.failure_.empty()) held_.name_missing();
        expect(held_.failure_.size() < 65536, "what is said of a failure has bounds");
        for (one& v : visitors_) {
            held_.answer(v.as);
            take_answers(v);
        }
    }
    void expect_same(server const& other) const {
        expect(held_.failure_ == other.held_.failure_, "the same failure is found");
        expect(held_.data_ == other.held_.data_, "the same is kept");
        for (std::size_t i = 0; i < visitors_.size(); ++i) {
            expect(visitors_[i].open == other.visitors_[i].open, "the same visitors are closed");
            expect(visitors_[i].answers == other.visitors_[i].answers, "the same is answered");
        }
    }

private:
    static constexpr std::size_t most_kept =
        sizeof(ddp::detail::store_head) + ddp::detail::store_head::max_key + ddp::detail::store_head::max_value;
    struct one {
        ddp::tcp_store_server::visitor as;
        std::string answers = {};
        bool open = true;
    };

    // Each is a head, and as much as it says.
    static void take_answers(one& v) {
        std::string& out = v.as.out;
        expect(out.empty() || v.as.rank >= 0 || v.as.done, "nobody is answered who has not said who he is");
        v.answers += out;
        for (std::size_t at = 0; at < out.size();) {
            ddp::detail::store_head head;
            expect(out.size() - at >= sizeof head, "an answer begins with a head");
            std::memcpy(&head, out.data() + at, sizeof head);
            at += sizeof head;
            expect(head.op != ddp::detail::store_op::put && head.op != ddp::detail::store_op::all, "it is an answer");
            expect(head.key + std::size_t{head.value} <= out.size() - at, "an answer is whole");
            at += head.key + std::size_t{head.value};
        }
        out.clear();
    }

    std::size_t piece_;
    int size_;
    ddp::tcp_store_server held_;
    std::vector<one> visitors_;
};

template <class T>
std::string bytes_of(T const& value) {
    std::string text(sizeof value, '\0');
    std::memcpy(text.data(), &value, sizeof value);
    return text;
}

std::string hello_from(reader& in, int size) {
    ddp::detail::store_hello hello;
    hello.rank = in.byte() % 8 - 1;
    hello.size = size;
    hello.job = job;
    std::string const who = in.text(in.byte() % 80);
    hello.who = std::string_view(who);
    if (std::uint8_t const wrong = in.byte(); wrong >= 0xe0) switch (wrong % 8) {
            case 0: hello.magic ^= in.number<std::uint32_t>(); break;
            case 1: hello.version = in.number<std::uint32_t>(); break;
            case 2: hello.record_bytes = in.number<std::uint32_t>(); break;
            case 3: hello.rank = static_cast<std::int32_t>(in.number<std::uint32_t>()); break;
            case 4: hello.size = static_cast<std::int32_t>(in.number<std::uint32_t>()); break;
            default: hello.job ^= in.number<std::uint32_t>(); break;
        }
    return bytes_of(hello);
}

std::string request_from(reader& in) {
    ddp::detail::store_head head;
    head.op = static_cast<ddp::detail::store_op>(in.byte() % 8);
    head.count = in.byte() % 4;
    std::string const key = in.text(in.byte() % 68), value = in.text(in.byte());
    head.key = static_cast<std::uint32_t>(key.size());
    head.value = static_cast<std::uint32_t>(value.size());
    if (std::uint8_t const wrong = in.byte(); wrong >= 0xf0) {
        (wrong % 4 == 0 ? head.key : wrong % 4 == 1 ? head.value : head.count) = in.number<std::uint32_t>();
    }
    return bytes_of(head) + key + value;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    reader in({data, size});
    int const ranks = 1 + in.byte() % 4;
    server whole(ranks, std::size_t{1} << 20), torn(ranks, 1 + in.byte());
    auto const both = [&](auto const& call) {
        call(whole);
        call(torn);
    };
    both([](server& s) { s.visit(); });
    for (int steps = 0; !in.empty() && steps < 200; ++steps) {
        std::uint8_t const step = in.byte();
        std::size_t const who = step / 8 % whole.visitors();
        std::string said;
        switch (step % 8) {
            case 0:
                if (whole.visitors() < 16) both([](server& s) { s.visit(); });
                break;
            case 1:
            case 2: said = hello_from(in, ranks); break;
            case 3: said = in.text(in.byte()); break;
            case 4:
                if (step / 8 == 31) both([](server& s) { s.time_is_up(); });
                break;
            default: said = request_from(in); break;
        }
        both([&](server& s) { s.say(who, said); });
    }
    both([](server& s) { s.time_is_up(); });
    whole.expect_same(torn);

    // The same bytes as what a rank publishes of itself: where it listens.
    try {
        auto const address = ddp::detail::peer_address::parse({reinterpret_cast<char const*>(data), size});
        expect(ddp::detail::peer_address::parse(address.text()).at == address.at,
               "an address is read as it is written");
    } catch (ddp::rendezvous_error const&) {
    }
    return 0;
}
