#include <ddp/transport/framed/framed.hpp>

#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ddp/transport/framed/frame_descriptor.hpp>

#include "support/catch.hpp"
#include "support/on_threads.hpp"
#include "support/printed_by.hpp"
#include "support/sanitizers.hpp"
#include "support/thrown_by.hpp"
#include "train/patience.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::completion;
using ddp::framed_options;
using ddp::framed_peer;
using ddp::op_status;
using ddp::report;
using transport = ddp::framed<ddp::descriptor_stream>;
static_assert(ddp::TimedTransport<transport>);

std::pair<int, int> connected() {
    int fds[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) throw std::runtime_error("socketpair");
    return {fds[0], fds[1]};
}

framed_options quick(std::size_t early_bytes = 0) {
    framed_options options;
    options.times = ddp::timing::for_tests();
    options.job = 77;
    options.early_bytes = early_bytes;
    return options;
}

/// Transports over socket pairs, all to all. `wrap` makes a stream of a descriptor.
template <class T, class Wrap>
std::vector<std::unique_ptr<T>> all_to_all(int ranks, framed_options const& options, Wrap wrap) {
    using stream = decltype(wrap(0));
    std::vector<std::vector<framed_peer<stream>>> peers(static_cast<std::size_t>(ranks));
    for (int a = 0; a < ranks; ++a)
        for (int b = 0; b < a; ++b) {
            auto const [x, y] = connected();
            peers[static_cast<std::size_t>(a)].push_back({b, wrap(x)});
            peers[static_cast<std::size_t>(b)].push_back({a, wrap(y)});
        }
    std::vector<std::unique_ptr<T>> all;
    for (int r = 0; r < ranks; ++r)
        all.push_back(std::make_unique<T>(r, ranks, std::move(peers[static_cast<std::size_t>(r)]), options));
    return all;
}
std::vector<std::unique_ptr<transport>> all_to_all(int ranks, framed_options const& options = quick()) {
    return all_to_all<transport>(ranks, options, [](int fd) { return ddp::descriptor_stream(fd); });
}

/// A completion that counts, and remembers where it stood in the order of completions.
struct op : completion {
    std::vector<std::byte> bytes;
    int runs = 0;
    int place = -1;
    int* counter = nullptr;
    explicit op(std::size_t count = 0, int* order = nullptr) : bytes(count), counter(order) {
        run = [](completion& c) noexcept {
            op& self = static_cast<op&>(c);
            ++self.runs;
            if (self.counter != nullptr) self.place = (*self.counter)++;
        };
    }
    void fill(std::uint64_t seed) {
        for (std::size_t i = 0; i < bytes.size(); ++i)
            bytes[i] = static_cast<std::byte>((i * 2654435761u + seed * 40503u) >> 7);
    }
    [[nodiscard]] bool done() const { return runs != 0; }
};

ddp::tag tagged(std::uint32_t channel, std::uint64_t index = 0, std::uint64_t fingerprint = 0) {
    return {{0, channel, index}, fingerprint};
}

template <class T>
void send(T& t, int peer, ddp::tag what, op& o) {
    t.post_send(peer, what, o.bytes, o);
}
template <class T>
void receive(T& t, int peer, ddp::tag what, op& o) {
    t.post_receive(peer, what, o.bytes, o);
}

/// Drives until `ready`, or for `limit`. Returns whether it became ready.
template <class T, class Ready>
bool drive(T& t, Ready ready, std::chrono::milliseconds limit = 10s) {
    auto const until = ddp::monotonic_clock::now() + limit;
    while (!ready())
        if (ddp::monotonic_clock::now() >= until)
            return false;
        else
            t.progress(std::min(until, ddp::monotonic_clock::now() + 20ms));
    return true;
}

/// On failure the operations end before their nodes are destroyed.
template <class T, class Ready>
bool drive_or_leave(T& t, Ready ready, std::chrono::milliseconds limit = 10s) {
    bool const ok = drive(t, ready, limit);
    if (!ok) t.leave();
    return ok;
}

/// Runs one function a rank in threads; exceptions and transports come back to the caller's thread. Each thread
/// destroys its transport, so that all leave together.
template <class T, class Body>
auto run_ranks(std::vector<std::unique_ptr<T>> all, Body body) {
    return ddp::test::on_threads(static_cast<int>(all.size()), [&](int rank) {
        auto const mine = std::move(all[static_cast<std::size_t>(rank)]);
        return body(*mine);
    });
}

/// Both ends in one thread, turn by turn.
struct pair_of {
    std::vector<std::unique_ptr<transport>> all;
    explicit pair_of(framed_options const& options = quick()) : all(all_to_all(2, options)) {}
    transport& operator[](std::size_t i) { return *all[i]; }
    bool drive(std::function<bool()> const& ready, std::chrono::milliseconds limit = 10s) {
        auto const until = ddp::monotonic_clock::now() + limit;
        while (!ready()) {
            if (ddp::monotonic_clock::now() >= until) return false;
            for (auto& t : all)
                if (t) t->progress(ddp::monotonic_clock::now());
            std::this_thread::yield();
        }
        return true;
    }
    void settle(std::chrono::milliseconds time = 20ms) {
        drive([] { return false; }, time);
    }
    ~pair_of() {  // together: a leaver waits until the other has read its goodbye
        std::vector<std::thread> threads;
        for (auto& t : all) threads.emplace_back([own = std::move(t)]() mutable { own.reset(); });
        for (auto& t : threads) t.join();
    }
};

/// Whatever the other stream does, in pieces of at most `most` bytes, refusing at random.
class stuttering_stream {
public:
    stuttering_stream(int fd, std::size_t most) : inner_(fd), most_(most), random_(static_cast<unsigned>(fd)) {}
    ddp::stream_result read_some(std::span<ddp::mutable_bytes const> buffers) noexcept {
        if (random_() % 4 == 0) return {0, ddp::stream_status::would_block, {}};
        ddp::mutable_bytes const some = buffers.front().first(std::min(most_, buffers.front().size()));
        return inner_.read_some(std::span(&some, 1));
    }
    ddp::stream_result write_some(std::span<ddp::const_bytes const> buffers) noexcept {
        if (random_() % 4 == 0) return {0, ddp::stream_status::would_block, {}};
        ddp::const_bytes const some = buffers.front().first(std::min(most_, buffers.front().size()));
        return inner_.write_some(std::span(&some, 1));
    }
    [[nodiscard]] int descriptor() const noexcept { return inner_.descriptor(); }
    void shutdown_send() noexcept { inner_.shutdown_send(); }

private:
    ddp::descriptor_stream inner_;
    std::size_t most_;
    std::minstd_rand random_;
};
static_assert(ddp::Stream<stuttering_stream>);

/// Reads these bytes as a connection does, or until the inbox finds fault with them.
template <class Inbox>
void feed(Inbox& in, std::vector<std::byte> const& bytes, ddp::mutable_bytes staging, ddp::mutable_bytes spill,
          ddp::completion_list& done) {
    std::array<ddp::mutable_bytes, Inbox::max_segments> list;
    for (std::size_t at = 0; at < bytes.size() && in.error().empty();) {
        std::size_t const count = in.plan(list, staging);
        std::size_t took = 0;
        for (std::size_t i = 0; i < count && at < bytes.size(); ++i) {
            std::size_t const n = std::min(list[i].size(), bytes.size() - at);
            std::memcpy(list[i].data(), bytes.data() + at, n);
            at += n;
            took += n;
        }
        in.took(took, spill, done);
    }
}

/// One end of a connection without a transport, whose bytes are carried by hand.
class bare_end {
public:
    bare_end(int own, std::uint32_t blocks, std::uint32_t blocks_of_peer)
        : out(ddp::frame_key(77, own, 1 - own), false, blocks_of_peer),
          in(ddp::frame_key(77, 1 - own, own), false, blocks, out) {}

    op& send(ddp::tag what, std::size_t size) {
        op& o = add(what, size);
        o.fill(what.id.index);
        out.post(o);
        return o;
    }
    op& receive(ddp::tag what, std::size_t size) {
        op& o = add(what, size);
        in.post(o, ended_);
        run_ended();
        return o;
    }
    /// As a stream that takes `most` bytes and then no more.
    std::vector<std::byte> write(std::size_t most) {
        out.fill(in.consumed());
        std::array<ddp::const_bytes, ddp::frame_outbox<ddp::no_checksum>::max_buffers> list;
        std::vector<std::byte> bytes;
        std::size_t const count = out.gather(list);
        for (std::size_t i = 0; i < count && bytes.size() < most; ++i) {
            std::size_t const n = std::min(most - bytes.size(), list[i].size());
            bytes.insert(bytes.end(), list[i].begin(), list[i].begin() + static_cast<std::ptrdiff_t>(n));
        }
        out.wrote(bytes.size(), ended_);
        run_ended();
        said_.insert(said_.end(), bytes.begin(), bytes.end());
        return bytes;
    }
    void read(std::vector<std::byte> const& bytes) {
        feed(in, bytes, staging_, spill_, ended_);
        run_ended();
    }
    /// Frames of this type among all that was written.
    [[nodiscard]] int frames(ddp::frame_type type) const {
        int count = 0;
        ddp::frame_header header;
        for (std::size_t at = 0; at + sizeof header <= said_.size(); at += sizeof header + header.payload) {
            std::memcpy(&header, said_.data() + at, sizeof header);
            count += header.type == type;
        }
        return count;
    }
    [[nodiscard]] bool all_done() const {
        return std::all_of(ops_.begin(), ops_.end(), [](op const& o) { return o.done(); });
    }

    ddp::frame_outbox<ddp::no_checksum> out;
    ddp::frame_inbox<ddp::no_checksum> in;

private:
    op& add(ddp::tag what, std::size_t size) {
        op& o = ops_.emplace_back(size);
        o.tag = what;
        o.data = o.bytes.data();
        o.size = size;
        return o;
    }
    void run_ended() {
        while (completion* const node = ended_.pop_front()) node->run(*node);
    }
    std::deque<op> ops_;
    ddp::completion_list ended_;
    std::vector<std::byte> said_, staging_ = std::vector<std::byte>(65536),
                                  spill_ = std::vector<std::byte>(ddp::frame_inbox<ddp::no_checksum>::max_read);
};

/// All that one end has to say, ten bytes a write.
void carry(bare_end& from, bare_end& to) {
    for (std::vector<std::byte> bytes = from.write(10); !bytes.empty(); bytes = from.write(10)) to.read(bytes);
}

ddp::failure threw(int rank, std::string_view text) {
    ddp::failure f;
    f.kind = ddp::failure_kind::threw;
    f.code = ddp::errc::remote_exception;
    f.rank = f.peer = rank;
    f.text = text;
    return f;
}

}  // namespace

TEST_CASE("framed delivers messages of every size in order, both ways at once", "[comm][framed]") {
    auto const sizes = std::vector<std::size_t>{0, 1, 63, 64, 65, 4096, 262143, 262144, 262145, 3 << 20, 0, 7};
    auto const ranks = GENERATE(2, 3, 5);
    auto const bad = run_ranks(all_to_all(ranks), [&](transport& t) {
        int wrong = 0;
        std::deque<op> in, out;
        for (int p = 0; p < t.size(); ++p) {
            if (p == t.rank()) continue;
            for (std::size_t i = 0; i < sizes.size(); ++i) {
                receive(t, p, tagged(3), in.emplace_back(sizes[i]));
                out.emplace_back(sizes[i]).fill(i + static_cast<std::size_t>(t.rank()) * 100);
                send(t, p, tagged(3, 0, i), out.back());
            }
        }
        auto const all_done = [&] {
            return std::all_of(in.begin(), in.end(), [](op const& o) { return o.done(); }) &&
                   std::all_of(out.begin(), out.end(), [](op const& o) { return o.done(); });
        };
        if (!drive_or_leave(t, all_done)) return 1000;
        std::size_t at = 0;
        for (int p = 0; p < t.size(); ++p) {
            if (p == t.rank()) continue;
            for (std::size_t i = 0; i < sizes.size(); ++i, ++at) {
                op expected(sizes[i]);
                expected.fill(i + static_cast<std::size_t>(p) * 100);
                wrong += in[at].status != op_status::ok || in[at].bytes != expected.bytes || in[at].fingerprint != i ||
                         in[at].length != sizes[i] || in[at].runs != 1 || out[at].runs != 1;
            }
        }
        return wrong;
    });
    for (int const wrong : bad) CHECK(wrong == 0);
}

TEST_CASE("framed matches by identity whatever the order of receives", "[comm][framed]") {
    auto const posted_first = GENERATE(false, true);
    constexpr std::size_t count = 3000;
    auto const wrong = run_ranks(all_to_all(2), [&](transport& t) {
        std::deque<op> ops;
        if (t.rank() == 0) {
            for (std::size_t i = 0; i < count; ++i) {
                ops.emplace_back(8 + i % 5 * 100).fill(i);
                send(t, 1, tagged(static_cast<std::uint32_t>(i % 7), i), ops.back());
            }
        } else {
            if (!posted_first) drive(t, [] { return false; }, 50ms);
            for (std::size_t k = 0; k < count; ++k) {
                std::size_t const i = count - 1 - k;
                receive(t, 0, tagged(static_cast<std::uint32_t>(i % 7), i), ops.emplace_back(8 + i % 5 * 100));
            }
        }
        if (!drive_or_leave(t,
                            [&] { return std::all_of(ops.begin(), ops.end(), [](op const& o) { return o.done(); }); }))
            return std::size_t{99999};
        std::size_t bad = 0;
        for (std::size_t k = 0; k < count && t.rank() == 1; ++k) {
            std::size_t const i = count - 1 - k;
            op expected(8 + i % 5 * 100);
            expected.fill(i);
            bad += ops[k].bytes != expected.bytes || ops[k].status != op_status::ok;
        }
        return bad;
    });
    CHECK(wrong == std::vector<std::size_t>{0, 0});
}

TEST_CASE("messages far beyond the credit wait at the sender and delay no other identity", "[comm][framed]") {
    // 64 KiB of early memory; many times that in messages that nobody has posted for, then one that somebody waits for.
    auto const size = GENERATE(std::size_t{100}, std::size_t{9000}, std::size_t{300000});
    std::size_t const count = std::min<std::size_t>((std::size_t{4} << 20) / size, 3000);
    auto const wrong = run_ranks(all_to_all(2, quick(64 << 10)), [&](transport& t) {
        std::deque<op> ops;
        op urgent(8);
        int const peer = 1 - t.rank();
        if (t.rank() == 0) {
            for (std::size_t i = 0; i < count; ++i) {
                ops.emplace_back(size).fill(i);
                send(t, peer, tagged(5, i / 2), ops.back());
            }
            urgent.fill(1);
            send(t, peer, tagged(1), urgent);
        } else {
            receive(t, peer, tagged(1), urgent);
        }
        if (!drive_or_leave(t, [&] { return urgent.done(); })) return std::size_t{77777};
        if (t.rank() == 1) {
            for (std::size_t k = 0; k < count; ++k)
                receive(t, peer, tagged(5, (count - 1 - k) / 2), ops.emplace_back(size));
        }
        if (!drive_or_leave(t,
                            [&] { return std::all_of(ops.begin(), ops.end(), [](op const& o) { return o.done(); }); }))
            return std::size_t{88888};
        std::size_t bad = 0;
        for (std::size_t k = 0; k < count && t.rank() == 1; ++k) {
            // Of the two messages of one identity the first posted receive gets the first sent.
            std::size_t const pair = (count - 1 - k) / 2;
            bool const lone = pair * 2 + 1 == count;
            bool const second = !lone && k != 0 && (count - k) / 2 == pair;
            op expected(size);
            expected.fill(pair * 2 + (second ? 1 : 0));
            bad += ops[k].bytes != expected.bytes || ops[k].status != op_status::ok;
        }
        return bad;
    });
    CHECK(wrong == std::vector<std::size_t>{0, 0});
}

TEST_CASE("a small message does not overtake a waiting one of its identity", "[comm][framed]") {
    pair_of both(quick(16 << 10));
    op big(100000), small(10), big_in(100000), small_in(10);
    big.fill(1);
    small.fill(2);
    send(both[0], 1, tagged(1), big);  // beyond the credit
    send(both[0], 1, tagged(1), small);
    both.settle();
    receive(both[1], 0, tagged(1), big_in);
    receive(both[1], 0, tagged(1), small_in);
    REQUIRE(both.drive([&] { return big_in.done() && small_in.done(); }));
    CHECK(big_in.bytes == big.bytes);
    CHECK(small_in.bytes == small.bytes);
}

TEST_CASE("both sides flood each other before anyone receives, and nothing deadlocks", "[comm][framed]") {
    auto const wrong = run_ranks(all_to_all(3, quick(16 << 10)), [&](transport& t) {
        std::deque<op> out, in;
        for (int p = 0; p < 3; ++p)
            for (std::uint64_t i = 0; p != t.rank() && i < 40; ++i) {
                out.emplace_back(100000).fill(i);
                send(t, p, tagged(2, i), out.back());
            }
        drive(t, [] { return false; }, 30ms);
        for (int p = 0; p < 3; ++p)
            for (std::uint64_t i = 40; p != t.rank() && i-- > 0;) receive(t, p, tagged(2, i), in.emplace_back(100000));
        auto const finished = [](std::deque<op> const& ops) {
            return std::all_of(ops.begin(), ops.end(), [](op const& o) { return o.done(); });
        };
        if (!drive_or_leave(t, [&] { return finished(in) && finished(out); })) return 1000;
        int bad = 0;
        for (std::size_t k = 0; k < in.size(); ++k) {
            op expected(100000);
            expected.fill(39 - k % 40);
            bad += in[k].bytes != expected.bytes;
        }
        return bad;
    });
    CHECK(wrong == std::vector<int>{0, 0, 0});
}

TEST_CASE("framed over a stream that moves a byte at a time loses nothing", "[comm][framed]") {
    using stuttering = ddp::framed<stuttering_stream>;
    auto const most = GENERATE(std::size_t{1}, std::size_t{63}, std::size_t{5000});
    std::size_t const big = most == 1 ? 3000 : 600000;
    auto const wrong = run_ranks(
        all_to_all<stuttering>(2, quick(32 << 10), [&](int fd) { return stuttering_stream(fd, most); }), [&](auto& t) {
            int const peer = 1 - t.rank();
            std::deque<op> in, out;
            for (std::uint64_t i = 0; i < 20; ++i) {
                std::size_t const size = i % 5 == 4 ? big : i * 10;
                out.emplace_back(size).fill(i);
                send(t, peer, tagged(1, i), out.back());
                if (i % 2 == 0) receive(t, peer, tagged(1, i), in.emplace_back(size));
            }
            drive(t, [] { return false; }, 30ms);
            for (std::uint64_t i = 1; i < 20; i += 2)
                receive(t, peer, tagged(1, i), in.emplace_back(i % 5 == 4 ? big : i * 10));
            auto const finished = [](std::deque<op> const& ops) {
                return std::all_of(ops.begin(), ops.end(), [](op const& o) { return o.done(); });
            };
            if (!drive_or_leave(t, [&] { return finished(in) && finished(out); }, 30s)) return 1000;
            int bad = 0;
            for (std::size_t k = 0; k < in.size(); ++k) {
                op expected(in[k].bytes.size());
                expected.fill(k < 10 ? 2 * k : 2 * (k - 10) + 1);
                bad += in[k].bytes != expected.bytes || in[k].status != op_status::ok;
            }
            return bad;
        });
    CHECK(wrong == std::vector<int>{0, 0});
}

namespace {

/// Reads more than it is asked for and keeps the rest; takes whatever is written and sends it in small pieces.
class hoarding_stream {
public:
    explicit hoarding_stream(int fd) : inner_(fd) {}
    ddp::stream_result read_some(std::span<ddp::mutable_bytes const> buffers) noexcept {
        if (!buffered()) {
            std::array<std::byte, 65536> more;
            ddp::mutable_bytes const all = more;
            ddp::stream_result const r = inner_.read_some({&all, 1});
            if (r.status != ddp::stream_status::ok) return r;
            in_.assign(more.begin(), more.begin() + static_cast<std::ptrdiff_t>(r.bytes));
            taken_ = 0;
        }
        std::size_t const n = std::min({in_.size() - taken_, buffers.front().size(), std::size_t{100}});
        std::memcpy(buffers.front().data(), in_.data() + taken_, n);
        taken_ += n;
        return {n};
    }
    ddp::stream_result write_some(std::span<ddp::const_bytes const> buffers) noexcept {
        if (ddp::stream_result const r = flush(); r.status != ddp::stream_status::ok) return r;
        for (ddp::const_bytes const piece : buffers) out_.insert(out_.end(), piece.begin(), piece.end());
        return {out_.size()};
    }
    ddp::stream_result flush() noexcept {
        if (out_.empty()) return {};
        ddp::const_bytes const piece = std::span(out_).first(std::min<std::size_t>(out_.size(), 1000));
        ddp::stream_result const r = inner_.write_some({&piece, 1});
        if (r.status == ddp::stream_status::error) return r;
        out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(r.bytes));
        return {0, out_.empty() ? ddp::stream_status::ok : ddp::stream_status::would_block};
    }
    [[nodiscard]] bool buffered() const noexcept { return taken_ < in_.size(); }
    [[nodiscard]] int descriptor() const noexcept { return inner_.descriptor(); }
    void shutdown_send() noexcept { inner_.shutdown_send(); }

private:
    ddp::descriptor_stream inner_;
    std::vector<std::byte> in_, out_;
    std::size_t taken_ = 0;
};
static_assert(ddp::Stream<hoarding_stream>);

}  // namespace

TEST_CASE("what a stream keeps in its own buffers is not forgotten, at either end", "[comm][framed]") {
    framed_options options = quick();
    options.times.heartbeat = 5s;  // nothing else wakes anybody
    options.times.dead = 30s;
    using hoarding = ddp::framed<hoarding_stream>;
    auto const done =
        run_ranks(all_to_all<hoarding>(5, options, [](int fd) { return hoarding_stream(fd); }), [](hoarding& t) {
            std::deque<op> sent, received;
            for (std::uint64_t i = 0; i < 400; ++i)
                for (int peer = 0; peer < t.size(); ++peer) {
                    if (peer == t.rank()) continue;
                    receive(t, peer, tagged(1, i), received.emplace_back(8));
                    send(t, peer, tagged(1, i), sent.emplace_back(8));
                }
            auto const all = [&] {
                return std::all_of(received.begin(), received.end(), [](op const& o) { return o.done(); }) &&
                       std::all_of(sent.begin(), sent.end(), [](op const& o) { return o.done(); });
            };
            return drive_or_leave(t, all, 4s);
        });
    CHECK(done == std::vector<bool>(5, true));
}

TEST_CASE("a message of another length ends its receive with the sender's length, and the next is whole",
          "[comm][framed]") {
    auto const early = GENERATE(false, true);
    auto const sent = GENERATE(std::size_t{0}, std::size_t{500000}, std::size_t{99});
    pair_of both;
    op out(sent), in(100), out2(300), in2(300);
    out.fill(1);
    out2.fill(2);
    if (!early) receive(both[1], 0, tagged(1), in);
    send(both[0], 1, tagged(1, 0, 9), out);
    send(both[0], 1, tagged(1), out2);
    if (early) {
        both.settle();
        receive(both[1], 0, tagged(1), in);
    }
    CHECK(in.runs == 0);  // nothing completes inside post
    receive(both[1], 0, tagged(1), in2);
    REQUIRE(both.drive([&] { return in.done() && in2.done() && out.done(); }));
    CHECK(in.status == op_status::length);
    CHECK(in.length == sent);
    CHECK(in.fingerprint == 9);
    CHECK(in2.status == op_status::ok);
    CHECK(in2.bytes == out2.bytes);
}

TEST_CASE("another thread's wake ends a sleep, and is remembered", "[comm][framed]") {
    pair_of both;
    both.settle();
    both[0].wake();
    both[0].wake();
    auto const before = ddp::monotonic_clock::now();
    both[0].progress(before + 10s);
    CHECK(ddp::monotonic_clock::now() - before < 5s);

    std::atomic<bool> stop = false;
    std::thread ringer([&] {
        while (!stop) {
            both[0].wake();
            std::this_thread::sleep_for(1ms);
        }
    });
    int woken = 0;
    auto const start = ddp::monotonic_clock::now();
    for (; woken < 100 && ddp::monotonic_clock::now() - start < 10s; ++woken)
        both[0].progress(ddp::monotonic_clock::now() + 10s);
    stop = true;
    ringer.join();
    CHECK(woken == 100);
}

TEST_CASE("abort completes everything at once, and its record passes full buffers and a half-sent frame",
          "[comm][framed]") {
    std::atomic<bool> aborted = false;
    auto const ranks = run_ranks(all_to_all(2), [&](transport& t) -> std::string {
        op big(4 << 20), second(100), in(50), in2(4 << 20);  // within the credit: it goes at once
        big.fill(3);
        if (t.rank() == 1) {
            // Does not read, so that the peer's buffers fill; then finds the record behind half a message.
            receive(t, 0, tagged(1), in2);
            for (int i = 0; i < 5000 && !aborted; ++i) std::this_thread::sleep_for(1ms);
            bool const heard = drive(t, [&] { return t.reports()[0].is == report::state::spoke; });
            if (!heard) return "never heard";
            if (t.reports()[0].record.text.view() != "out of luck") return "another text";
            t.abort(threw(1, "me too"));
            if (in2.status != op_status::aborted || in2.runs != 1) return "receive not ended";
            // The frame that was half sent was finished with what it held when abort() was called.
            if (!std::equal(in2.bytes.begin(), in2.bytes.begin() + 262144, big.bytes.begin())) return "torn frame";
            return "ok";
        }
        send(t, 1, tagged(1), big);
        send(t, 1, tagged(2), second);
        receive(t, 1, tagged(3), in);
        for (int i = 0; i < 5; ++i) t.progress(ddp::monotonic_clock::now() + 5ms);
        if (big.done()) return "too small to get stuck";
        t.abort(threw(0, "out of luck"));
        aborted = true;
        if (!big.done() || !second.done() || !in.done()) return "abort left something";
        big.bytes.assign(big.bytes.size(), std::byte{0xee});  // ours again
        op late(10);
        send(t, 1, tagged(4), late);
        if (late.done()) return "completed inside post";
        drive(t, [&] { return late.done(); });
        if (late.status != op_status::aborted) return "late send";
        drive(t, [&] { return t.reports()[1].is == report::state::spoke; });
        if (t.reports()[1].record.text.view() != "me too") return "no answer";
        return big.status == op_status::aborted && in.status == op_status::aborted ? "ok" : "status";
    });
    CHECK(ranks == std::vector<std::string>{"ok", "ok"});
}

TEST_CASE("a second abort replaces the record", "[comm][framed]") {
    pair_of both;
    both[0].abort(threw(0, "first"));
    REQUIRE(both.drive([&] { return both[1].reports()[0].is == report::state::spoke; }));
    auto verdict = threw(0, "second");
    verdict.is_verdict = true;
    both[0].abort(verdict);
    REQUIRE(both.drive([&] { return both[1].reports()[0].record.is_verdict; }));
    CHECK(both[1].reports()[0].record.text.view() == "second");
    CHECK(both[0].reports()[0].record.text.view() == "second");
}

TEST_CASE("goodbye comes after everything that was sent; what is posted for the leaver then is closed",
          "[comm][framed]") {
    auto const got = run_ranks(all_to_all(2), [&](transport& t) -> std::string {
        if (t.rank() == 0) {
            op a(3 << 20), b(100);
            a.fill(1);
            b.fill(2);
            send(t, 1, tagged(1), a);
            send(t, 1, tagged(2), b);
            t.leave();
            return a.status == op_status::ok && b.status == op_status::ok ? "ok" : "not flushed";
        }
        op a(3 << 20), b(100), never_sent(5), late(5), out(5), expected(100);
        receive(t, 0, tagged(1), a);
        receive(t, 0, tagged(9), never_sent);
        if (!drive_or_leave(t, [&] { return t.reports()[0].is == report::state::left; })) return "no goodbye";
        expected.fill(2);
        receive(t, 0, tagged(2), b);  // came early, is still here
        receive(t, 0, tagged(9), late);
        send(t, 0, tagged(9), out);
        drive(t, [&] { return late.done() && out.done(); });
        if (a.status != op_status::ok) return "a";
        if (b.status != op_status::ok || b.bytes != expected.bytes) return "b";
        if (never_sent.status != op_status::closed || late.status != op_status::closed) return "not closed";
        return out.status == op_status::closed ? "ok" : "send to the leaver";
    });
    CHECK(got == std::vector<std::string>{"ok", "ok"});
}

TEST_CASE("a stream that ends without goodbye is a death, after what it carried has been received", "[comm][framed]") {
    auto const options = quick();
    auto const [x, y] = connected();
    std::vector<framed_peer<ddp::descriptor_stream>> peers;
    peers.push_back({1, ddp::descriptor_stream(x), "node7"});
    transport t(0, 2, std::move(peers), options);
    {
        // The peer: sends a whole message by hand, half of another, and dies.
        ddp::frame_outbox<ddp::no_checksum> out(ddp::frame_key(options.job, 1, 0), false, 1024);
        op whole(200), half(1000);
        whole.fill(4);
        for (op* o : {&whole, &half}) {
            o->tag = tagged(o == &whole ? 1 : 2);
            o->data = o->bytes.data();
            o->size = o->bytes.size();
            out.post(*o);
        }
        out.fill(0);
        std::array<ddp::const_bytes, 64> list;
        std::size_t const count = out.gather(list);
        std::vector<std::byte> all;
        for (std::size_t i = 0; i < count; ++i) all.insert(all.end(), list[i].begin(), list[i].end());
        REQUIRE(::write(y, all.data(), all.size() - 300) == static_cast<ssize_t>(all.size() - 300));
        ::close(y);
    }
    op in(200), in2(1000), out2(10);
    auto const start = ddp::monotonic_clock::now();
    receive(t, 1, tagged(2), in2);
    send(t, 1, tagged(1), out2);
    REQUIRE(drive(t, [&] { return t.reports()[1].is == report::state::closed; }));
    CHECK(ddp::monotonic_clock::now() - start >= options.times.end_of_file);
    receive(t, 1, tagged(1), in);
    REQUIRE(drive(t, [&] { return in.done() && in2.done() && out2.done(); }));
    CHECK(in.status == op_status::ok);
    CHECK(in2.status == op_status::closed);
    ddp::failure const& record = t.reports()[1].record;
    CHECK(record.kind == ddp::failure_kind::closed);
    CHECK(record.code == ddp::errc::peer_closed);
    CHECK(record.peer == 1);
    CHECK(std::string(record.text.view()).find("node7") != std::string::npos);
    CHECK(std::string(record.text.view()).find("without goodbye") != std::string::npos);
}

TEST_CASE("a silent peer becomes overdue; one that is only idle sends heartbeats that carry its mark",
          "[comm][framed]") {
    pair_of both;
    both[1].entered({.group = 3,
                     .leader = 1,
                     .number = 42,
                     .fingerprint = 7,
                     .occupied = 1,
                     .name = std::string_view("allreduce"),
                     .phase = std::string_view("backward of step 4294967296")});
    // Long enough for the peer to be late, if heartbeats did not come.
    auto const until = ddp::monotonic_clock::now() + 2 * quick().times.dead;
    CHECK_FALSE(both.drive([&] { return both[0].overdue_peer().has_value(); }, 2 * quick().times.dead));
    CHECK(ddp::monotonic_clock::now() >= until);
    CHECK(both[0].mark_of(1).group == 3);
    CHECK(both[0].mark_of(1).leader == 1);
    CHECK(both[0].mark_of(1).number == 42);
    CHECK(both[0].mark_of(1).fingerprint == 7);
    CHECK(both[0].mark_of(1).occupied == 1);
    CHECK(both[0].mark_of(1).name.view() == "allreduce");
    CHECK(both[0].mark_of(1).phase.view() == "backward of step 4294967296");

    // Rank 1 freezes: rank 0 names it, in time.
    auto const start = ddp::monotonic_clock::now();
    bool named = false;
    std::string const printed =
        ddp::test::printed_by([&] { named = drive(both[0], [&] { return both[0].overdue_peer().has_value(); }); });
    REQUIRE(named);
    CHECK(both[0].overdue_peer() == 1);
    CHECK(printed.find("ddp: rank 0 has heard nothing from rank 1 for ") != std::string::npos);
    CHECK(printed.find(" s (silence number 1 of at least ") != std::string::npos);
    CHECK(ddp::monotonic_clock::now() - start >= quick().times.dead - 2 * quick().times.heartbeat);
    CHECK(ddp::monotonic_clock::now() - start < 4 * quick().times.dead);

    // It thaws, and accuses nobody though it heard nothing for as long; the other hears it again.
    both[1].progress(ddp::monotonic_clock::now());
    CHECK_FALSE(both[1].overdue_peer().has_value());
    REQUIRE(both.drive([&] { return !both[0].overdue_peer().has_value(); }));
}

/// How many bytes the far end has acknowledged is what the test says.
struct acknowledging_stream : ddp::descriptor_stream {
    acknowledging_stream(int fd, std::uint64_t const* count) : descriptor_stream(fd), acknowledged(count) {}
    std::uint64_t const* acknowledged;
    [[nodiscard]] std::uint64_t delivered() const noexcept { return *acknowledged; }
};

TEST_CASE("while the way to a silent peer is full, acknowledged bytes are a sign of its life", "[comm][framed]") {
    framed_options options = quick();
    options.times.heartbeat = 50ms;
    options.times.dead = 400ms;
    bool const full = GENERATE(true, false);
    CAPTURE(full);
    std::uint64_t acknowledged = 1000;
    auto const [here, there] = connected();  // nobody reads or writes there
    std::vector<framed_peer<acknowledging_stream>> peers;
    peers.push_back({1, acknowledging_stream(here, &acknowledged)});
    op large(full ? std::size_t{4} << 20 : 8);
    ddp::framed<acknowledging_stream> slow(0, 2, std::move(peers), options);
    send(slow, 1, tagged(1), large);

    auto const moves = ddp::monotonic_clock::now() + 3 * options.times.dead;
    bool overdue = false;
    while (!overdue && ddp::monotonic_clock::now() < moves) {
        ++acknowledged;
        slow.progress(ddp::monotonic_clock::now() + 20ms);
        overdue = slow.overdue_peer().has_value();
    }
    CHECK(overdue == !full);  // the kernel of a stopped process acknowledges as well, until its buffer is full
    auto const stops = ddp::monotonic_clock::now();
    REQUIRE(drive(slow, [&] { return slow.overdue_peer().has_value(); }));
    CHECK(ddp::monotonic_clock::now() - stops < 3 * options.times.dead);
    ::close(there);
}

TEST_CASE("a rank that was stopped reports itself if its last connection has ended meanwhile, and only then",
          "[comm][framed]") {
    bool const stopped = GENERATE(true, false), meanwhile = GENERATE(true, false), another = GENERATE(true, false);
    if (!stopped && (meanwhile || another)) return;
    CAPTURE(stopped, meanwhile, another);
    framed_options const options = quick();
    auto const [here, there] = connected();
    auto const [beside, far] = connected();
    std::vector<framed_peer<ddp::descriptor_stream>> peers;
    peers.push_back({1, ddp::descriptor_stream(here)});
    if (another) peers.push_back({2, ddp::descriptor_stream(beside)});
    ddp::framed<ddp::descriptor_stream> mine(0, another ? 3 : 2, std::move(peers), options);
    mine.progress(ddp::monotonic_clock::now());
    if (meanwhile) ::close(there);
    if (stopped) std::this_thread::sleep_for(options.times.dead * 5 / 4);
    mine.progress(ddp::monotonic_clock::now());
    if (!meanwhile) {
        auto const later = ddp::monotonic_clock::now() + 1200ms;
        drive(mine, [&] { return ddp::monotonic_clock::now() > later; });
        ::close(there);
    }
    REQUIRE(drive(mine, [&] { return mine.reports()[1].is == ddp::report::state::closed; }));
    ddp::failure closed;
    closed.kind = ddp::failure_kind::closed;
    closed.rank = 0;
    closed.peer = 1;
    mine.abort(closed);
    ddp::failure const said = mine.reports()[0].record;
    bool const itself = stopped && meanwhile && !another;
    CHECK(said.kind == (itself ? ddp::failure_kind::silent : ddp::failure_kind::closed));
    CHECK(said.peer == (itself ? 0 : 1));
    CHECK((said.waited_ns >= static_cast<std::uint64_t>(options.times.dead.count())) == itself);
    if (itself) CHECK(said.text.view().find("the connection to rank 1") == 0);
    closed.is_verdict = true;  // a verdict stays as it is
    mine.abort(closed);
    CHECK(mine.reports()[0].record.peer == 1);
    if (!another) ::close(beside);
    ::close(far);
}

TEST_CASE("ranks that slept together accuse nobody", "[comm][framed]") {
    pair_of both;
    both.settle();
    std::this_thread::sleep_for(quick().times.dead * 3 / 2);  // a closed laptop: neither was driven, neither has sent
    for (std::size_t i : {0u, 1u}) {
        both[i].progress(ddp::monotonic_clock::now());
        CHECK_FALSE(both[i].overdue_peer().has_value());
    }
}

TEST_CASE("while much moves over sockets, a paced wait leaves them alone; the bell and memory end it",
          "[comm][framed]") {
    struct fake_stream {
        int fd;
        [[nodiscard]] int descriptor() const { return fd; }
    };
    struct fake_link {
        fake_stream stream;
        bool memory;
        bool in_open = true, out_open = true, blocked = false, readable = false;
        [[nodiscard]] bool in_memory() const { return memory; }
        [[nodiscard]] static bool buffered() { return false; }
    };
    using wait = ddp::frame_wait<fake_link>;
    auto const [near, far] = connected();
    wait::link_list sockets, memory;
    sockets.push_back(std::make_unique<fake_link>(fake_link{{near}, false}));
    memory.push_back(std::make_unique<fake_link>(fake_link{{near}, true}));
    REQUIRE(::write(far, "x", 1) == 1);  // there is always something to read
    struct outcome {
        bool polled = false;
        std::chrono::nanoseconds took{};
    };
    // Sleeps twice, the pace apart, after so many bytes each; what comes of the second.
    auto const second = [](wait::link_list const& links, std::chrono::nanoseconds pace, std::size_t bytes,
                           bool rings = false) {
        wait w;
        w.make_room(1);
        w.pace(pace);
        auto const start = ddp::monotonic_clock::now();
        w.moved(bytes);
        if (!w.sleep(links, start, start + 10s)) throw std::runtime_error("paced before anything was counted");
        w.moved(bytes);
        std::jthread bell;
        if (rings)
            bell = std::jthread([&] {
                std::this_thread::sleep_for(20ms);
                w.wake();
            });
        auto const since = ddp::monotonic_clock::now();
        bool const polled = w.sleep(links, start + pace, start + 20s);
        return outcome{polled, ddp::monotonic_clock::now() - since};
    };
    outcome const batched = second(sockets, 50ms, wait::bulk_bytes);
    CHECK_FALSE(batched.polled);
    CHECK(batched.took >= 45ms);
    outcome const few = second(sockets, 5s, wait::bulk_bytes - 1);
    CHECK(few.polled);
    CHECK(few.took < 4s);
    outcome const unpaced = second(sockets, 0s, wait::bulk_bytes);
    CHECK(unpaced.polled);
    CHECK(unpaced.took < 4s);
    outcome const through_memory = second(memory, 5s, wait::bulk_bytes);
    CHECK_FALSE(through_memory.polled);
    CHECK(through_memory.took < 4s);
    outcome const rung = second(sockets, 5s, wait::bulk_bytes, true);
    CHECK_FALSE(rung.polled);
    CHECK(rung.took < 4s);
    ::close(near);
    ::close(far);
}

TEST_CASE("a doorbell is quiet again once it has been answered", "[comm][framed]") {
    ddp::doorbell bell;
    auto const readable = [&] {
        ::pollfd one{bell.descriptor(), POLLIN, 0};
        return ::poll(&one, 1, 0) == 1;
    };
    bell.ring();  // nobody sleeps: no system call
    CHECK_FALSE(readable());
    CHECK_FALSE(bell.fall_asleep());
    CHECK(bell.answered());
    REQUIRE(bell.fall_asleep());
    bell.ring();
    CHECK(readable());
    bell.wake_up(true);
    CHECK_FALSE(readable());
    CHECK(bell.answered());
    CHECK_FALSE(bell.answered());
}

TEST_CASE("every flipped bit of a header, and any cut or repeated frame, is found", "[comm][framed][fuzz]") {
    auto const options = quick();
    auto const frames = [&] {  // what an honest peer writes: two messages and a heartbeat
        ddp::frame_outbox<ddp::no_checksum> out(ddp::frame_key(options.job, 1, 0), false, 1024);
        op first(100), second(50);
        for (op* o : {&first, &second}) {
            o->tag = tagged(1);
            o->data = o->bytes.data();
            o->size = o->bytes.size();
            out.post(*o);
        }
        out.beat({});
        out.fill(0);
        std::array<ddp::const_bytes, 64> list;
        std::size_t const count = out.gather(list);
        std::vector<std::byte> all;
        for (std::size_t i = 0; i < count; ++i) all.insert(all.end(), list[i].begin(), list[i].end());
        return all;
    }();
    constexpr std::size_t beat = 64 + ddp::mark::text_bytes;  // goes first
    REQUIRE(frames.size() == beat + 2 * 64 + 150);
    // Feeds an inbox; returns its complaint.
    auto const complaint = [&](std::vector<std::byte> const& bytes, std::size_t posts = 2) {
        ddp::frame_outbox<ddp::no_checksum> out(1, false, 1024);
        ddp::frame_inbox<ddp::no_checksum> in(ddp::frame_key(options.job, 1, 0), false, 1024, out);
        op a(100), b(50);
        ddp::completion_list done;
        for (op* o : {&a, &b}) {
            o->tag = tagged(1);
            o->data = o->bytes.data();
            o->size = o->bytes.size();
            if (posts-- > 0) in.post(*o, done);
        }
        std::vector<std::byte> staging(65536), spill(ddp::frame_inbox<ddp::no_checksum>::max_read);
        feed(in, bytes, staging, spill, done);
        return std::string(in.error());
    };
    REQUIRE(complaint(frames).empty());
    REQUIRE(complaint(frames, 0).empty());

    std::size_t undetected = 0;
    for (auto const& [start, bits] : {std::pair(std::size_t{0}, beat * 8), {beat, 512}, {beat + 164, 512}})
        for (std::size_t bit = 0; bit < bits; ++bit) {
            auto flipped = frames;
            flipped[start + bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
            undetected += complaint(flipped).empty();
        }
    CHECK(undetected == 0);

    auto repeated = frames;
    repeated.insert(repeated.end(), frames.begin(), frames.begin() + beat);
    CHECK_FALSE(complaint(repeated).empty());
    CHECK_FALSE(complaint({frames.begin() + beat, frames.end()}).empty());

    std::minstd_rand random(1);
    for (int round = 0; round < 2000; ++round) {
        std::vector<std::byte> noise(random() % 400 + 64);
        for (std::byte& b : noise) b = static_cast<std::byte>(random());
        undetected += complaint(noise).empty();
    }
    CHECK(undetected == 0);
}

TEST_CASE("each kind of frame that no rank can have written is refused for a reason of its own", "[comm][framed]") {
    using ddp::frame_header, ddp::frame_type;
    using frames = std::vector<frame_header>;
    struct always_seven {
        void reset() noexcept {}
        void update(ddp::const_bytes) noexcept {}
        [[nodiscard]] std::uint64_t value() noexcept { return 7; }
    };
    std::vector<std::byte> staging(65536), spill(ddp::frame_inbox<ddp::no_checksum>::max_read);
    ddp::completion_list none;
    // Puts them one after the other: `sequence` counts from the place, `check` is what is wrong with it, payloads are zeros.
    auto const bytes_of = [](frames const& all, std::size_t first = 0) {
        std::vector<std::byte> bytes;
        for (std::size_t i = 0; i < all.size(); ++i) {
            frame_header header = all[i];
            header.sequence += static_cast<std::uint32_t>(first + i);
            header.seal(77);
            header.check ^= all[i].check;
            auto const head = std::as_bytes(std::span(&header, 1));
            bytes.insert(bytes.end(), head.begin(), head.end());
            bytes.resize(bytes.size() + header.payload);
        }
        return bytes;
    };
    auto const said = [&]<class Sum>(Sum, frames const& all) {
        bool const checked = std::is_same_v<Sum, always_seven>;
        ddp::frame_outbox<Sum> out(1, checked, 4096);
        ddp::frame_inbox<Sum> in(77, checked, 4096, out);
        feed(in, bytes_of(all), staging, spill, none);
        return std::string(in.error());
    };
    constexpr std::uint8_t begins = frame_header::begins, has_sum = frame_header::has_sum;
    constexpr std::uint32_t whole = ddp::frame_payload_bytes;
    frame_header const ten{.flags = begins, .payload = 10, .length = 10};
    frame_header const large{.flags = begins, .payload = whole, .length = whole + 10};
    frame_header const rest{.payload = 10, .length = whole + 10};
    std::vector<std::byte> const no_name(ddp::mark::text_bytes);
    std::uint64_t const word = ddp::urgent_checksum(no_name);
    frame_header const beat{.type = frame_type::heartbeat, .payload = ddp::mark::text_bytes, .word = word};
    frame_header const goodbye{.type = frame_type::goodbye};
    struct refusal {
        frames all;
        char const* why;
    };
    for (auto const& [all, why] :
         {refusal{{ten, large, rest, beat, goodbye}, ""}, refusal{{large, beat, rest}, ""},
          refusal{{{.check = 1}}, "a header fails its check"},
          refusal{{ten, {.sequence = 1}}, "a frame is missing, doubled or out of order"},
          refusal{{goodbye, beat}, "a frame after goodbye"},
          refusal{{{.type = frame_type::credit, .consumed = 1}}, "credit is given back that was never used"},
          refusal{{{.type = frame_type::credit, .flags = begins}}, "an urgent frame has flags"},
          refusal{{{.type = frame_type::credit, .payload = 8}}, "an urgent frame has another length than its type"},
          refusal{{{.type = frame_type::heartbeat, .payload = beat.payload, .word = word + 1}},
                  "the payload of an urgent frame fails its checksum"},
          refusal{{large, goodbye}, "goodbye inside a message"},
          refusal{{rest}, "a message is cut short, or continues without a beginning"},
          refusal{{large, ten}, "a message is cut short, or continues without a beginning"},
          refusal{{{.flags = begins | has_sum, .payload = 10, .length = 10}},
                  "a frame with a checksum that was not agreed on"},
          refusal{{large, {.payload = 10, .id = {.index = 1}, .length = large.length}},
                  "a frame of another message inside a message"},
          refusal{{large, {.payload = 10, .length = large.length + 1}}, "a frame of another message inside a message"},
          refusal{{{.flags = begins, .payload = 5, .length = 10}}, "a frame of impossible length"},
          refusal{{{.flags = begins | frame_header::exempt, .payload = 10, .length = 10}},
                  "a message was sent without permission"},
          refusal{{{.flags = begins, .payload = whole, .length = std::uint64_t{1} << 40}},
                  "the peer exceeds its credit for early messages"},
          refusal{{{.type = frame_type::clear, .word = 9}},
                  "permission is given for a message that did not ask for it"}}) {
        CAPTURE(why);
        CHECK(said(ddp::no_checksum(), all) == why);
    }
    frame_header summed = ten;
    summed.flags |= has_sum;
    summed.word = 7;
    CHECK(said(always_seven(), {summed, beat}) == "");
    summed.word = 8;
    CHECK(said(always_seven(), {summed}) == "a payload fails its checksum");
    CHECK(said(always_seven(), {ten}) == "a frame without a checksum");

    if (ddp::test::sanitizers_leave_out("a million frames")) return;
    ddp::frame_outbox<ddp::no_checksum> out(1, false, 8);
    ddp::frame_inbox<ddp::no_checksum> in(77, false, 8, out);
    constexpr std::size_t at_once = 4096;
    for (std::size_t asked = 0; asked < ddp::frame_requests::max_waiting; asked += at_once)
        feed(in, bytes_of(frames(at_once, frame_header{.type = frame_type::request}), asked), staging, spill, none);
    CHECK(in.error() == "");
    feed(in, bytes_of({{.type = frame_type::request}}, in.frames()), staging, spill, none);
    CHECK(in.error() == "too many messages wait for their receives");
}

TEST_CASE("what is half written stays as it was: a heartbeat's mark, and a record that a newer one follows",
          "[comm][framed]") {
    bare_end a(0, 8, 8), b(1, 8, 8);
    ddp::mark const first{
        .group = 3, .leader = 0, .number = 41, .fingerprint = 7, .name = std::string_view("aaaaaaaaaaaaaaaaaaaa")};
    ddp::mark const second{
        .group = 3, .leader = 0, .number = 42, .fingerprint = 8, .name = std::string_view("bbbbbbbbbbbbbbbbbbbb")};
    a.out.beat(first);
    b.read(a.write(70));  // its header, and six bytes of the name
    a.out.beat(second);
    for (auto bytes = a.write(10); !bytes.empty() && b.in.last_mark().number != 41; bytes = a.write(10)) b.read(bytes);
    CHECK(b.in.last_mark().number == 41);
    CHECK(b.in.last_mark().name.view() == first.name.view());

    bare_end c(0, 8, 8), d(1, 8, 8);
    std::string const one(200, '1'), two(200, '2');
    c.out.abort(threw(0, one));
    d.read(c.write(150));
    c.out.abort(threw(0, two));
    std::vector<std::string> records;
    ddp::failure record;
    for (auto bytes = c.write(10); !bytes.empty(); bytes = c.write(10)) {
        d.read(bytes);
        if (d.in.take_record(record)) records.emplace_back(record.text.view());
    }
    CHECK(records == std::vector<std::string>{one, two});
    CHECK(d.in.error().empty());
}

TEST_CASE("credit comes back for what was received, not before, and by a frame of its own where nothing else is said",
          "[comm][framed]") {
    bare_end a(0, 8, 8), b(1, 8, 8);
    std::uint64_t index = 0;
    for (; index < 160; ++index) {  // twenty times the credit, each posted before it comes: nobody ever has to ask
        op const& in = b.receive(tagged(1, index), 900);
        op const& out = a.send(tagged(1, index), 900);
        carry(a, b);
        carry(b, a);
        REQUIRE((in.status == op_status::ok && in.bytes == out.bytes));
    }
    CHECK(a.frames(ddp::frame_type::request) == 0);
    CHECK(b.frames(ddp::frame_type::credit) > 0);
    // Left unread they hold it: with what has come back by frames eight more may go, or a few fewer; the rest ask.
    std::uint64_t const first = index;
    std::uint32_t const before = b.in.consumed();
    for (; index < first + 24; ++index) a.send(tagged(1, index), 900);
    carry(a, b);
    carry(b, a);
    CHECK(b.in.consumed() == before);
    CHECK(a.frames(ddp::frame_type::request) >= 16);
    for (std::uint64_t i = first; i < index; ++i) b.receive(tagged(1, i), 900);
    CHECK(b.in.consumed() > before);  // taking what had come early gives back what that held
    for (int turn = 0; turn < 3; ++turn) {
        carry(b, a);
        carry(a, b);
    }
    CHECK((a.all_done() && b.all_done()));
    CHECK((a.in.error().empty() && b.in.error().empty()));

    bare_end greedy(0, 8, 64), strict(1, 8, 8);
    for (std::uint64_t i = 0; i < 12; ++i) greedy.send(tagged(1, i), 900);
    carry(greedy, strict);
    CHECK(strict.in.error() == "the peer exceeds its credit for early messages");
}

TEST_CASE("nothing comes after goodbye", "[comm][framed]") {
    bare_end a(0, 8, 8), b(1, 8, 8);
    a.out.say_goodbye();
    carry(a, b);
    REQUIRE(b.in.said_goodbye());
    a.send(tagged(1), 10);
    carry(a, b);
    CHECK(b.in.error() == "a frame after goodbye");
}

TEST_CASE("who is declared dead reads the end of our stream", "[comm][framed]") {
    auto const [x, y] = connected();
    std::vector<framed_peer<ddp::descriptor_stream>> peers;
    peers.push_back({1, ddp::descriptor_stream(x), "node7"});
    transport t(0, 2, std::move(peers), quick());
    ::shutdown(y, SHUT_WR);  // it will say no more, and has not said goodbye
    REQUIRE(drive(t, [&] { return t.reports()[1].is == report::state::closed; }));
    CHECK(drive(
        t,
        [&, &fd = y] {
            std::array<char, 512> bytes;
            ssize_t n = 0;
            while ((n = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT)) > 0) {
            }
            return n == 0;
        },
        3s));
    ::close(y);
}

TEST_CASE("frames of another job, and records that no rank can have published, close the link", "[comm][framed]") {
    auto const closed_by = [](framed_options const& theirs, std::function<void(transport&)> const& say) {
        auto const [x, y] = connected();
        std::vector<framed_peer<ddp::descriptor_stream>> to_one, to_zero;
        to_one.push_back({1, ddp::descriptor_stream(x)});
        to_zero.push_back({0, ddp::descriptor_stream(y)});
        auto options = quick();
        options.times.shutdown = theirs.times.shutdown;
        transport zero(0, 2, std::move(to_one), options), one(1, 2, std::move(to_zero), theirs);
        say(one);
        bool const closed = drive(zero, [&] {
            one.progress(ddp::monotonic_clock::now());
            return zero.reports()[1].is != report::state::silent;
        });
        return closed && zero.reports()[1].is == report::state::closed &&
               zero.reports()[1].record.code == ddp::errc::frame;
    };
    auto mine = quick();
    mine.times.shutdown = 50ms;
    auto other = mine;
    ++other.job;
    CHECK(closed_by(other, [](transport&) {}));  // its heartbeat is enough
    CHECK(closed_by(mine, [](transport& t) { t.abort(threw(7, "of no rank")); }));
    CHECK(closed_by(mine, [](transport& t) { t.abort(threw(0, "of another rank")); }));
    CHECK(closed_by(mine, [](transport& t) {
        ddp::failure odd = threw(1, "of no kind");
        odd.kind = static_cast<ddp::failure_kind>(200);
        t.abort(odd);
    }));
}

TEST_CASE("bytes that ddp did not write close the link with a frame record", "[comm][framed]") {
    auto const [x, y] = connected();
    std::vector<framed_peer<ddp::descriptor_stream>> peers;
    peers.push_back({1, ddp::descriptor_stream(x), "stranger"});
    auto options = quick();
    options.times.shutdown = 50ms;
    transport t(0, 2, std::move(peers), options);
    op in(10);
    receive(t, 1, tagged(1), in);
    std::string const request = "GET / HTTP/1.1\r\nHost: example\r\nAccept: */*\r\nUser-Agent: something\r\n\r\n";
    REQUIRE(::write(y, request.data(), request.size()) == static_cast<ssize_t>(request.size()));
    REQUIRE(drive(t, [&] { return in.done(); }));
    CHECK(in.status == op_status::closed);
    CHECK(t.reports()[1].is == report::state::closed);
    CHECK(t.reports()[1].record.code == ddp::errc::frame);
    CHECK(std::string(t.reports()[1].record.text.view()).find("stranger") != std::string::npos);
    ::close(y);
}

TEST_CASE("destroying a transport with work in flight ends that work and does not hang", "[comm][framed]") {
    auto options = quick(16 << 10);
    options.times.shutdown = 200ms;
    auto all = all_to_all(2, options);
    op in(100), out(50 << 20);
    receive(*all[0], 1, tagged(1), in);
    send(*all[0], 1, tagged(2), out);
    all[0]->progress(ddp::monotonic_clock::now());
    auto const start = ddp::monotonic_clock::now();
    all[0].reset();
    CHECK(ddp::monotonic_clock::now() - start < 5s);
    CHECK(in.status == op_status::aborted);
    CHECK(out.status == op_status::aborted);
    REQUIRE(drive(*all[1], [&] { return all[1]->reports()[0].is != report::state::silent; }));
    CHECK(all[1]->reports()[0].is == report::state::closed);  // it owed us a message
}

TEST_CASE("a group of one needs no streams", "[comm][framed]") {
    transport t(0, 1, {}, quick());
    CHECK_FALSE(t.progress(ddp::monotonic_clock::now() + 5ms));
    CHECK(t.next_timer() == ddp::never);
    t.wake();
    t.progress(ddp::monotonic_clock::now() + 5s);
    CHECK_THROWS_WITH(t.mark_of(0), Catch::Contains("framed: the peer must be another rank of the group"));
    t.abort(threw(0, "alone"));
    CHECK(t.reports()[0].is == report::state::spoke);
}

TEST_CASE("framed wants one stream for each other rank, and options for all", "[comm][framed]") {
    struct given {
        std::vector<int> peers;
        std::vector<int> paths;
        char const* words;
        bool checked = false;
    };
    for (auto const& [peers, paths, words, checked] :
         {given{{0}, {}, "framed: give one stream for every other rank"},
          given{{0, 2}, {1, 1}, "framed_options::paths: give 3 numbers, one for each rank, or none"},
          given{{0, 1}, {}, "framed: each peer must be another rank of the job, not 1"},
          given{{0, 3}, {}, "framed: each peer must be another rank of the job, not 3"},
          given{{0, 0}, {}, "framed: give one stream for each peer"},
          given{{0, 2}, {}, "framed: a checked peer needs a checksum policy, such as xxh3_checksum", true}}) {
        std::vector<framed_peer<ddp::descriptor_stream>> list;
        for (int const peer : peers)
            list.push_back({.rank = peer, .stream = ddp::descriptor_stream(-1), .checked = checked});
        framed_options options = quick();
        options.paths = paths;
        std::string const said = ddp::test::thrown_by([&] { transport(1, 3, std::move(list), options); });
        CAPTURE(words);
        CHECK(said == std::string("DDP-E100 usage: ") + words);
    }
    for (int const rank : {-1, 3})
        CHECK_THROWS_WITH(transport(rank, 3, {}, quick()), Catch::Contains("framed: rank must be in [0, size)"));
}

TEST_CASE("a receive ends with its transport though its message is half here", "[comm][framed]") {
    bool const aborts = GENERATE(true, false);
    CAPTURE(aborts);
    auto all = all_to_all(2);
    op out(std::size_t{8} << 20), in(std::size_t{8} << 20), later(10);
    receive(*all[1], 0, tagged(1), in);
    receive(*all[1], 0, tagged(2), later);
    send(*all[0], 1, tagged(1), out);
    for (int turn = 0; turn < 100 && in.moved == 0; ++turn)  // socket buffers take a part of it at a time
        for (auto const& t : all) t->progress({});
    bool const half = !in.done() && in.moved > 0;
    if (aborts)
        all[1]->abort({});
    else
        all[1]->leave();
    int const ended = in.runs, ended_later = later.runs;
    op_status const status = in.status;
    all.clear();
    REQUIRE(half);
    CHECK(ended == 1);
    CHECK(ended_later == 1);
    CHECK(status == op_status::aborted);
    CHECK(out.runs == 1);
}

TEST_CASE("links go on, without spinning, where the process may open fewer files than it waits for", "[comm][framed]") {
    auto all = all_to_all(3);
    op in(100'000), out(100'000), later(10);
    ::rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    ::rlimit const one{1, before.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &one) == 0);
    receive(*all[1], 0, tagged(1), in);
    send(*all[0], 1, tagged(1), out);
    auto const until = ddp::monotonic_clock::now() + 10s;
    while (!(in.done() && out.done()) && ddp::monotonic_clock::now() < until)
        for (auto const& t : all) t->progress(ddp::monotonic_clock::now() + 1ms);
    receive(*all[1], 0, tagged(2), later);
    std::clock_t const began = std::clock();
    for (auto const end = ddp::monotonic_clock::now() + 300ms; ddp::monotonic_clock::now() < end;)
        all[1]->progress(end);
    double const used = static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK(in.status == op_status::ok);
    CHECK(out.status == op_status::ok);
    CHECK(used < 0.15);
    all.clear();
}

TEST_CASE("a silence is told once it is longer than suspect and two heartbeats, unless dead ends it first",
          "[comm][framed]") {
    auto const [here, there] = connected();
    framed_peer<ddp::descriptor_stream> peer{1, ddp::descriptor_stream(here), "pid 7 on node7"};
    ddp::frame_link<ddp::descriptor_stream, ddp::no_checksum> link(0, peer, 77, 1);
    ddp::time_point const start = ddp::monotonic_clock::now();
    ddp::timing times{.heartbeat = 250ms, .suspect = 1s, .dead = 3s};
    // What is said once that time has passed since the last sign of life, which is at `start`.
    auto const said = [&](std::chrono::milliseconds after, bool anew = true) {
        if (anew) link.heard_at(start);
        static_cast<void>(link.becomes_overdue(start + after, times));
        return link.becomes_suspect(0, start + after, times);
    };
    CHECK(said(999ms).empty());
    CHECK(said(1000ms, false) ==
          "ddp: rank 0 has heard nothing from rank 1 (pid 7 on node7) for 1.0 s (silence number 1 of at least 1.0 s). "
          "After "
          "3.0 s (timing.dead) the job fails\n");
    CHECK(said(2900ms, false).empty());  // the same silence
    CHECK(said(1500ms).find("for 1.5 s (silence number 2 of") != std::string::npos);
    CHECK(said(1500ms).empty());  // the third
    CHECK(said(1500ms).find("(silence number 4 of") != std::string::npos);

    times.heartbeat = 600ms;
    CHECK(said(1199ms).empty());
    for (int fifth_to_seventh = 0; fifth_to_seventh < 3; ++fifth_to_seventh) CHECK(said(1200ms).empty());
    CHECK(said(1200ms).find("(silence number 8 of at least 1.2 s)") != std::string::npos);

    for (auto const suspect : {3000ms, 3500ms}) {
        times.suspect = suspect;
        CHECK(said(2999ms).empty());
        CHECK(said(3600ms).empty());
    }
    CHECK(link.silent.count() == 8);
    ::close(there);
}
