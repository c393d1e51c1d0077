#include <ddp/transport/framed/tcp.hpp>

#include <netinet/tcp.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <future>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <ddp/rendezvous/bootstrap.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::op_status;
using ddp::report;
using socket = ddp::tcp_stream::socket;

/// Two connected sockets over loopback.
std::pair<socket, socket> connected() {
    namespace tcp = boost::asio::ip;
    tcp::tcp::acceptor acceptor(ddp::tcp_context(), {tcp::make_address("127.0.0.1"), 0});
    socket a(ddp::tcp_context()), b(ddp::tcp_context());
    a.connect(acceptor.local_endpoint());
    acceptor.accept(b);
    for (socket* s : {&a, &b}) ddp::tune_connected(s->native_handle(), ddp::timing::for_tests());
    return {std::move(a), std::move(b)};
}

template <class S>
auto make(int rank, S stream, bool checked = false) {
    ddp::framed_options options;
    options.times = ddp::timing::for_tests();
    std::vector<ddp::framed_peer<S>> peers;
    peers.push_back({1 - rank, std::move(stream), "the other", checked});
    return std::make_unique<ddp::framed<S, ddp::xxh3_checksum>>(rank, 2, std::move(peers), options);
}

struct op : ddp::completion {
    std::vector<std::byte> bytes;
    int runs = 0;
    explicit op(std::size_t count, unsigned seed = 0) : bytes(count) {
        std::minstd_rand random(seed);
        if (seed != 0)
            for (std::byte& b : bytes) b = static_cast<std::byte>(random() >> 8);
        run = [](completion& c) noexcept { ++static_cast<op&>(c).runs; };
    }
};

ddp::tag tagged(std::uint32_t channel, std::uint64_t index = 0) {
    return {{0, channel, index}, 5};
}

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
bool finished(std::deque<op> const& ops) {
    return std::all_of(ops.begin(), ops.end(), [](op const& o) { return o.runs == 1; });
}

/// One that never has the whole of a record; or finds that what comes was changed.
class endless_record final : public ddp::tcp_channel {
public:
    explicit endless_record(bool altered = false) : altered_(altered) {}
    [[nodiscard]] ddp::mutable_bytes space() noexcept override { return space_; }
    void arrived(std::size_t /*bytes*/) noexcept override { came_ = true; }
    [[nodiscard]] std::size_t read(ddp::mutable_bytes /*to*/) noexcept override { return 0; }
    [[nodiscard]] bool readable() noexcept override { return false; }
    [[nodiscard]] ddp::const_bytes pending() noexcept override { return {}; }
    void sent(std::size_t /*bytes*/) noexcept override {}
    [[nodiscard]] std::size_t write(std::span<ddp::const_bytes const> from) noexcept override {
        std::size_t all = 0;
        for (ddp::const_bytes const each : from) all += each.size();
        return all;
    }
    [[nodiscard]] bool established() const noexcept override { return true; }
    [[nodiscard]] ddp::channel_error error() const noexcept override {
        return altered_ && came_ ? ddp::channel_error::altered : ddp::channel_error::none;
    }

private:
    bool altered_, came_ = false;
    std::array<std::byte, 256> space_{};
};

/// A wire that flips one bit of what it carries, and leaves TCP's own checksum right.
class flipping_stream {
public:
    flipping_stream(socket s, std::size_t bit) : inner_(std::move(s)), bit_(bit) {}
    ddp::stream_result read_some(std::span<ddp::mutable_bytes const> buffers) noexcept {
        ddp::stream_result const r = inner_.read_some(buffers);
        std::size_t left = r.bytes;
        for (ddp::mutable_bytes const b : buffers) {
            std::size_t const n = std::min(left, b.size());
            if (bit_ / 8 >= seen_ && bit_ / 8 < seen_ + n) b[bit_ / 8 - seen_] ^= static_cast<std::byte>(1 << bit_ % 8);
            seen_ += n;
            left -= n;
        }
        return r;
    }
    ddp::stream_result write_some(std::span<ddp::const_bytes const> buffers) noexcept {
        return inner_.write_some(buffers);
    }
    [[nodiscard]] int descriptor() const noexcept { return inner_.descriptor(); }
    void shutdown_send() noexcept { inner_.shutdown_send(); }

private:
    ddp::tcp_stream inner_;
    std::size_t bit_, seen_ = 0;
};

}  // namespace

TEST_CASE("a new checksum has seen no bytes, and its value does not depend on how they are cut", "[tcp]") {
    std::array<std::byte, 1000> bytes;
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7);
    ddp::xxh3_checksum whole;
    whole.update(bytes);
    REQUIRE(whole.value() == XXH3_64bits(bytes.data(), bytes.size()));
    std::size_t const cut = GENERATE(as<std::size_t>{}, 0, 1, 240, 241, 999);
    ddp::xxh3_checksum pieces;
    pieces.update(std::span(bytes).first(7));
    pieces.reset();
    pieces.update(std::span(bytes).first(cut));
    pieces.update(std::span(bytes).subspan(cut));
    REQUIRE(pieces.value() == whole.value());
}

TEST_CASE("the kernel ends no connection before heartbeats would, and none of a job that is stopped as a whole",
          "[tcp]") {
    auto [a, b] = connected();
    auto const limit = [](auto& of) {
        unsigned milliseconds = 7;
        ::socklen_t size = sizeof milliseconds;
        ::getsockopt(of.native_handle(), IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, &size);
        return milliseconds;
    };
    CHECK(limit(a) == 0);
    ddp::timing patient;
    patient.dead = std::chrono::hours{1};
    ddp::tune_connected(b.native_handle(), patient);
    CHECK(limit(b) == 3'720'000);
}

TEST_CASE("every rank exchanges with every other over tcp, with and without early messages", "[tcp]") {
    auto const size = GENERATE(2, 3, 5);
    auto const spin = GENERATE(0us, 50us);
    ddp::tcp_options options;
    options.share_memory = GENERATE(false, true);
    options.times = ddp::timing::for_tests();
    options.spin = spin;
    options.early_bytes = 1 << 20;
    options.times.heartbeat = 20s;  // nothing travels on heartbeats
    options.times.dead = 60s;
    boost::asio::ip::tcp::acceptor acceptor(ddp::tcp_context(), {boost::asio::ip::make_address("127.0.0.1"), 0});
    ddp::job job;
    job.size = size;
    job.master_port = acceptor.local_endpoint().port();
    std::vector<std::future<int>> ranks;
    for (int r = 0; r < size; ++r)
        ranks.push_back(std::async(std::launch::async, [&, r, mine = job, own = options]() mutable {
            mine.rank = r;
            if (r == 0) own.listen_descriptor = ::dup(acceptor.native_handle());
            auto const t = ddp::connect_tcp(mine, own);
            int wrong = 0;
            for (int p = 0; p < size; ++p) wrong += p != r && t->in_memory(p) != own.share_memory ? 1 : 0;
            for (unsigned round = 0; round < 30; ++round) {
                std::deque<op> in, out;
                std::size_t const count = round % 10 == 9 ? 700'000 : round * 1000;
                for (int p = 0; p < size; ++p) {
                    if (p == r) continue;
                    op& i = in.emplace_back(count);
                    if (round % 2 == 0) t->post_receive(p, tagged(1, round), i.bytes, i);
                    op& o = out.emplace_back(count, round + 100 * static_cast<unsigned>(r) + 1);
                    t->post_send(p, tagged(1, round), o.bytes, o);
                }
                t->progress(ddp::monotonic_clock::now());
                for (std::size_t k = 0; k < in.size() && round % 2 != 0; ++k) {
                    int const p = static_cast<int>(k) + (static_cast<int>(k) >= r ? 1 : 0);
                    t->post_receive(p, tagged(1, round), in[k].bytes, in[k]);
                }
                if (!drive(*t, [&] { return finished(in) && finished(out); })) return 1000;
                std::size_t k = 0;
                for (int p = 0; p < size; ++p)
                    if (p != r) wrong += in[k++].bytes != op(count, round + 100 * static_cast<unsigned>(p) + 1).bytes;
            }
            // One way only, beyond what may come early: permission has to go back where nothing else does.
            op alone(3 << 20, r == 0 ? 7 : 0);
            auto const asked = ddp::monotonic_clock::now();
            if (r == 0)
                t->post_send(1, tagged(2), alone.bytes, alone);
            else
                drive(*t, [&] { return ddp::monotonic_clock::now() - asked > 10ms; });
            if (r == 1) t->post_receive(0, tagged(2), alone.bytes, alone);
            if (r < 2 && !drive(*t, [&] { return alone.runs == 1; })) return 2000;
            return wrong + (r == 1 && alone.bytes != op(3 << 20, 7).bytes);
        }));
    for (auto& r : ranks) CHECK(r.get() == 0);
}

TEST_CASE("a rank that never sleeps sends heartbeats, and finds who has gone", "[tcp]") {
    ddp::tcp_options options;
    options.share_memory = GENERATE(false, true);
    options.times = ddp::timing::for_tests();
    boost::asio::ip::tcp::acceptor acceptor(ddp::tcp_context(), {boost::asio::ip::make_address("127.0.0.1"), 0});
    ddp::job job;
    job.size = 2;
    job.master_port = acceptor.local_endpoint().port();
    auto other = std::async(std::launch::async, [&, mine = job, own = options]() mutable {
        mine.rank = 1;
        return ddp::connect_tcp(mine, own);
    });
    options.spin = 60s;
    options.listen_descriptor = ::dup(acceptor.native_handle());
    auto const zero = ddp::connect_tcp(job, options);
    auto one = other.get();
    REQUIRE(zero->in_memory(1) == options.share_memory);
    auto const until = ddp::monotonic_clock::now() + options.times.dead + 500ms;
    auto watching = std::async(std::launch::async, [&] {
        while (ddp::monotonic_clock::now() < until && !one->overdue_peer()) one->progress(until);
        return one->overdue_peer().has_value();
    });
    while (ddp::monotonic_clock::now() < until) zero->progress(until);
    CHECK_FALSE(watching.get());
    CHECK_FALSE(zero->overdue_peer());

    auto gone = std::async(std::launch::async, [&] { one.reset(); });
    auto const at_most = ddp::monotonic_clock::now() + 20s;
    while (zero->reports()[1].is == report::state::silent && ddp::monotonic_clock::now() < at_most)
        zero->progress(at_most);
    CHECK(zero->reports()[1].is == report::state::left);
    zero->leave();
    gone.get();
}

TEST_CASE("a rank that only polls now and then hears at once that another was killed", "[tcp]") {
    ddp::tcp_options options;
    // Of a connection through memory the socket is looked at in one of 64 polls, and when it is time to.
    auto const [memory, first] =
        GENERATE(table<bool, int>({{false, 0}, {true, 0}, {true, 16}, {true, 32}, {true, 48}}));
    CAPTURE(memory, first);
    options.share_memory = memory;
    boost::asio::ip::tcp::acceptor acceptor(ddp::tcp_context(), {boost::asio::ip::make_address("127.0.0.1"), 0});
    ddp::job job;
    job.size = 2;
    job.master_port = acceptor.local_endpoint().port();
    ::pid_t const other = ::fork();
    REQUIRE(other >= 0);
    if (other == 0) {
        job.rank = 1;
        try {
            auto const one = ddp::connect_tcp(job, options);
            for (;;) one->progress(ddp::never);
        } catch (...) {
        }
        ::_exit(1);
    }
    options.listen_descriptor = ::dup(acceptor.native_handle());
    auto const zero = ddp::connect_tcp(job, options);
    CHECK(zero->in_memory(1) == options.share_memory);
    auto const poll = [&] {
        std::this_thread::sleep_for(40ms);
        zero->progress({});
    };
    for (int turn = 0; turn < first; ++turn) zero->progress({});
    for (int turn = 0; turn < 2; ++turn) poll();
    ::kill(other, SIGKILL);
    ::waitpid(other, nullptr, 0);
    int polls = 0;
    for (; polls < 50 && zero->reports()[1].is == report::state::silent; ++polls) poll();
    CHECK(zero->reports()[1].is == report::state::closed);
    CHECK(polls < 10);
}

TEST_CASE("bytes of a record that is not whole yet are a sign of life, if they are more than heartbeats", "[tcp]") {
    // Fewer than the channel has room for, or as many; or what comes of a peer that waits, into a record without an end.
    auto const [at_once, alive] = GENERATE(table<std::size_t, bool>({{200, true}, {256, true}, {164, false}}));
    CAPTURE(at_once);
    auto [a, b] = connected();
    auto const t = make(0, ddp::tcp_stream(std::move(a), std::make_unique<endless_record>()));
    auto const overdue = [&] { return t->overdue_peer().has_value(); };
    std::array<std::byte, 256> const some{};
    auto const until = ddp::monotonic_clock::now() + 2 * ddp::timing::for_tests().dead;
    auto const pause = alive ? 10ms : ddp::timing::for_tests().heartbeat;
    for (auto next = ddp::monotonic_clock::now(); !overdue() && ddp::monotonic_clock::now() < until;) {
        if (ddp::monotonic_clock::now() >= next) {
            b.send(boost::asio::buffer(some.data(), at_once));
            next += pause;
        }
        t->progress(std::min(next, ddp::monotonic_clock::now() + 20ms));
    }
    CHECK(overdue() == !alive);
    CHECK(drive(*t, overdue));  // and so they are only while they come
}

TEST_CASE("after changed bytes nothing of a connection is handed out, and it can be read to its end", "[tcp]") {
    auto [a, b] = connected();
    ddp::tcp_stream stream(std::move(a), std::make_unique<endless_record>(true));
    std::array<std::byte, 64> const some{};
    std::array<std::byte, 256> to{};
    ddp::mutable_bytes const all = to;
    auto const read = [&] {
        b.send(boost::asio::buffer(some));
        std::this_thread::sleep_for(20ms);
        return stream.read_some({&all, 1});
    };
    for (int turn = 0; turn < 3; ++turn) {
        ddp::stream_result const r = read();
        CHECK(r.status == ddp::stream_status::error);
        CHECK(r.why == std::errc::bad_message);
    }
    CHECK(stream.buffered());
    stream.discard_input();
    CHECK_FALSE(stream.buffered());
    for (int turn = 0; turn < 3; ++turn) CHECK(read().status == ddp::stream_status::would_block);
    b.close();
    std::this_thread::sleep_for(20ms);
    CHECK(stream.read_some({&all, 1}).status == ddp::stream_status::end);
}

TEST_CASE("a reset connection is a death that is noticed at once", "[tcp]") {
    auto [a, b] = connected();
    auto const t = make(0, ddp::tcp_stream(std::move(a)));
    op in(10), out(20 << 20, 1);
    t->post_receive(1, tagged(1), in.bytes, in);
    t->post_send(1, tagged(2), out.bytes, out);
    t->progress(ddp::monotonic_clock::now());
    b.set_option(boost::asio::socket_base::linger(true, 0));
    b.close();
    REQUIRE(drive(*t, [&] { return in.runs == 1 && out.runs == 1; }, 2s));
    CHECK(in.status == op_status::closed);
    CHECK(out.status == op_status::closed);
    CHECK(t->reports()[1].is == report::state::closed);
    CHECK(t->reports()[1].record.code == ddp::errc::peer_closed);
}

TEST_CASE("a record that was sent before the connection was reset still arrives", "[tcp]") {
    auto [a, b] = connected();
    auto const t = make(0, ddp::tcp_stream(std::move(a)));
    auto other = make(1, ddp::tcp_stream(std::move(b)));
    op out(1 << 20, 1), in(5);
    t->post_send(1, tagged(1), out.bytes,
                 out);  // lies unread in the other's socket: closing that resets the connection
    t->post_receive(1, tagged(3), in.bytes, in);
    t->progress(ddp::monotonic_clock::now());
    ddp::failure record;
    record.kind = ddp::failure_kind::threw;
    record.rank = record.peer = 1;
    record.text = std::string_view("the disk is full");
    other->abort(record);
    auto gone = std::async(std::launch::async, [&] { other.reset(); });
    REQUIRE(drive(*t, [&] { return t->reports()[1].is == report::state::spoke; }, 2s));
    CHECK(t->reports()[1].record.text.view() == "the disk is full");
    t->abort(record);
    CHECK(in.status == op_status::aborted);
    t->leave();
    gone.get();
}

TEST_CASE("a flipped bit anywhere in a payload is found where checksums are on", "[tcp][fuzz]") {
    std::minstd_rand random(7);
    for (int round = 0; round < 40; ++round) {
        std::size_t const bit = random() % (8 * (2 * 64 + 300'000 + 64));
        CAPTURE(bit);
        auto [a, b] = connected();
        auto const receiver = make(0, flipping_stream(std::move(a), bit), true);
        auto sender = make(1, ddp::tcp_stream(std::move(b)), true);
        op in(300'000), out(300'000, 9);
        receiver->post_receive(1, tagged(1), in.bytes, in);
        sender->post_send(0, tagged(1), out.bytes, out);
        std::atomic<bool> stop = false;
        auto sending = std::async(std::launch::async, [&] {
            while (!stop) sender->progress(ddp::monotonic_clock::now() + 1ms);
            sender.reset();
        });
        bool const over = drive(*receiver, [&] { return receiver->reports()[1].is == report::state::closed; }, 2s);
        bool const used = in.status == op_status::ok;
        stop = true;
        receiver->leave();
        sending.get();
        CHECK(over);
        // A bit of the message itself: then it was never delivered. Later ones hit a heartbeat.
        if (bit < 8 * (2 * 64 + 300'000)) CHECK_FALSE(used);
        CHECK(receiver->reports()[1].record.code == ddp::errc::frame);
    }
}

TEST_CASE("all ranks name each rank's process in the same words, their own too", "[tcp]") {
    for (bool const memory : {false, true}) {
        auto const named = ddp::test::on_ranks(
            3,
            [](auto& comm) {
                std::vector<std::string> names;
                for (int rank = 0; rank < comm.size(); ++rank)
                    names.emplace_back(ddp::process_of(comm.transport(), rank));
                return names;
            },
            memory);
        for (auto const& names : named) CHECK(names == named[0]);
        for (std::string const& name : named[0])
            CHECK_THAT(name, Catch::StartsWith("pid " + std::to_string(::getpid()) + " on ") &&
                                 Catch::Contains(", 127.0.0.1:"));
        CHECK(std::set<std::string>(named[0].begin(), named[0].end()).size() == 3);  // addresses differ
    }
}
