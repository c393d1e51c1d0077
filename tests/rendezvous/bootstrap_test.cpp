#include <ddp/comm/cores.hpp>
#include <ddp/core/version.hpp>
#include <ddp/rendezvous/bootstrap.hpp>
#include <ddp/rendezvous/job_secret.hpp>
#include <ddp/rendezvous/rank_settings.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/rendezvous/run_tcp.hpp>
#include <ddp/rendezvous/tcp_memory_paths.hpp>
#include <ddp/rendezvous/tcp_mesh.hpp>
#include <ddp/rendezvous/tcp_store.hpp>
#include <ddp/rendezvous/tcp_store_protocol.hpp>
#include <ddp/rendezvous/tcp_store_server.hpp>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/descriptors_left.hpp"
#include "support/listener.hpp"
#include "support/no_room_for_stacks.hpp"
#include "support/sanitizers.hpp"
#include "support/secret.hpp"
#include "support/thrown_by.hpp"
#include "train/patience.hpp"

namespace {

using namespace std::chrono_literals;

using ddp::test::listener;
using ddp::test::secret_in_a_file;

int dial(std::uint16_t port) {
    int const fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ::sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(port);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(fd, reinterpret_cast<::sockaddr*>(&at), sizeof at) != 0) throw std::runtime_error("no connection");
    return fd;
}

ddp::tcp_options quick(ddp::timing times = ddp::timing::for_tests()) {
    ddp::tcp_options options;
    options.times = times;
    return options;
}

ddp::job job_of(int rank, int size, std::uint16_t port) {
    ddp::job j;
    j.rank = rank;
    j.size = size;
    j.master_port = port;
    return j;
}

/// What connect_tcp says on this rank: "" if it connected; the transport is gone again when this returns.
std::string outcome(ddp::job const& j, ddp::tcp_options const& options) {
    try {
        auto const t = ddp::connect_tcp(j, options);
        return t->rank() == j.rank && t->size() == j.size ? "" : "another rank";
    } catch (std::exception const& e) {
        return e.what();
    }
}

std::vector<std::string> outcomes(std::vector<ddp::job> const& jobs, listener const& at, ddp::tcp_options options) {
    std::vector<std::future<std::string>> futures;
    for (ddp::job const& j : jobs) {
        options.listen_descriptor = j.rank == 0 ? at.inherit() : -1;
        futures.push_back(std::async(std::launch::async, outcome, j, options));
    }
    std::vector<std::string> all;
    for (auto& f : futures) all.push_back(f.get());
    return all;
}

bool has(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

/// Rank 1 of 2 by hand: it comes to the store as a rank does, and says at rank 0's own port what it is told to.
class rank_by_hand {
public:
    explicit rank_by_hand(std::uint16_t port)
        : store_({{boost::asio::ip::make_address("127.0.0.1"), port}}, 1, 2, 0, soon()) {
        boost::asio::ip::tcp::endpoint const nowhere(boost::asio::ip::make_address("127.0.0.1"), 1);  // nobody dials us
        store_.put("rank/1", ddp::detail::peer_address{nowhere, "by hand"}.text(), soon());
        for (auto const& [key, value] : store_.all("rank/", 2, soon()))
            if (key == "rank/0") zero_ = ddp::detail::peer_address::parse(value).at.port();
    }
    ~rank_by_hand() {
        if (fd_ >= 0) ::close(fd_);
    }
    [[nodiscard]] ddp::detail::peer_hello hello() const {
        ddp::detail::peer_hello mine;
        mine.from = 1;
        mine.size = 2;
        mine.nonce = store_.nonce();
        mine.host = 12345;  // not rank 0's
        return mine;
    }
    /// What rank 0 answers to that; nothing if it hangs up.
    std::optional<ddp::detail::peer_hello> knock(ddp::detail::peer_hello const& with) {
        if (fd_ >= 0) ::close(fd_);
        fd_ = dial(zero_);
        ::timeval const patience{5, 0};
        ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        if (::write(fd_, &with, sizeof with) != static_cast<ssize_t>(sizeof with)) return std::nullopt;
        ddp::detail::peer_hello answer;
        if (!read(&answer, sizeof answer)) return std::nullopt;
        return answer;
    }
    [[nodiscard]] int port_of_rank_0() const { return zero_; }
    void done() {
        store_.stop_beating();
        store_.put("done/1", {}, soon());
    }
    void hear_all() { CHECK(store_.all("done/", 2, soon()).size() == 2); }
    bool read(void* to, std::size_t bytes) const {
        return ::recv(fd_, to, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
    }

private:
    static ddp::time_point soon() { return ddp::monotonic_clock::now() + 5s; }
    ddp::tcp_store store_;
    std::uint16_t zero_ = 0;
    int fd_ = -1;
};

/// Of this process's TCP connections, but for those of the store at that port.
std::vector<std::string> congestion_controls(std::uint16_t store) {
    std::vector<std::string> all;
    for (int fd = 0; fd < 1024; ++fd) {
        std::array<::sockaddr_in, 2> at{};
        ::socklen_t here = sizeof at[0], there = sizeof at[1];
        char name[16] = {};
        ::socklen_t size = sizeof name;
        if (::getsockname(fd, reinterpret_cast<::sockaddr*>(&at[0]), &here) != 0 || at[0].sin_family != AF_INET ||
            ::getpeername(fd, reinterpret_cast<::sockaddr*>(&at[1]), &there) != 0 || at[0].sin_port == htons(store) ||
            at[1].sin_port == htons(store) || ::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) != 0)
            continue;
        all.emplace_back(name);
    }
    return all;
}

/// DDP_INSECURE for a while; nothing else here reads it.
struct insecure_says {
    explicit insecure_says(char const* value) { ::setenv("DDP_INSECURE", value, 1); }
    ~insecure_says() { ::unsetenv("DDP_INSECURE"); }
};

}  // namespace

TEST_CASE("ranks find each other, rank 0 being first or last", "[rendezvous][tcp]") {
    auto const size = GENERATE(1, 2, 3, 8);
    listener const at;
    std::vector<ddp::job> jobs;
    for (int r = 0; r < size; ++r) jobs.push_back(job_of(size - 1 - r, size, at.port));
    for (std::string const& text : outcomes(jobs, at, quick())) CHECK(text == "");
}

TEST_CASE("rank 0 may open its port after the others began to look for it", "[rendezvous][tcp]") {
    std::uint16_t const port = listener(false).port;
    auto early = std::async(std::launch::async, outcome, job_of(1, 2, port), quick());
    std::this_thread::sleep_for(100ms);
    CHECK(outcome(job_of(0, 2, port), quick()) == "");
    CHECK(early.get() == "");
}

TEST_CASE("where the launcher has the port, ranks meet at the next that is free, and only those of their job",
          "[rendezvous][tcp]") {
    // Listeners of others at the first two ports: one that never answers, and rank 0 of another job.
    ddp::job j = job_of(0, 2, 0);
    j.port_is_launchers = true;
    j.id = "ours/0";
    std::optional<listener> launcher, silent;
    ddp::job other = j;
    other.id = "theirs/0";
    std::future<std::string> neighbour;
    for (int tries = 0; !silent && tries < 20; ++tries) {
        launcher.emplace();
        j.master_port = other.master_port = launcher->port;
        try {
            silent.emplace(true, ddp::detail::master_ports(j).front());
        } catch (std::runtime_error const&) {  // somebody else's port
        }
    }
    REQUIRE(silent);
    ddp::timing times = ddp::timing::for_tests();
    times.join = std::chrono::seconds(20);
    neighbour = std::async(std::launch::async, outcome, other, quick(times));
    std::this_thread::sleep_for(50ms);
    std::vector<std::future<std::string>> ours;
    for (int const rank : {1, 0}) {
        j.rank = rank;
        ours.push_back(std::async(std::launch::async, outcome, j, quick(times)));
    }
    for (auto& text : ours) CHECK(text.get() == "");
    other.rank = 1;
    CHECK(outcome(other, quick(times)) == "");
    CHECK(neighbour.get() == "");
}

TEST_CASE("TCP congestion control is cubic within a host, and what the user says otherwise", "[rendezvous][tcp]") {
    auto const control = [](std::string const& wanted, bool same_host) {
        int const fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        std::string said;
        try {
            ddp::detail::choose_congestion_control(fd, wanted, same_host);
            char name[16] = {};
            ::socklen_t size = sizeof name;
            ::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size);
            said = name;
        } catch (std::exception const& e) {
            said = e.what();
        }
        ::close(fd);
        return said;
    };
    int const fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    char systems[16] = {};
    ::socklen_t size = sizeof systems;
    ::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, systems, &size);
    ::close(fd);
    CHECK(control("", false) == systems);
    CHECK(control("reno", true) == "reno");
    CHECK(control("reno", false) == "reno");
    std::string const cubic = control("cubic", false);
    CHECK((control("", true) == "cubic" || has(cubic, "DDP-E201")));
    CHECK(has(control("nonesuch", true), "refuses TCP congestion control \"nonesuch\""));
    listener const at;
    ddp::tcp_options options = quick();
    auto const between = [&](std::string const& a, std::string const& b) {
        std::vector<std::future<std::unique_ptr<ddp::tcp_transport>>> coming;
        for (int const rank : {0, 1}) {
            ddp::tcp_options mine = options;
            mine.host = rank == 0 ? a : b;
            mine.listen_descriptor = rank == 0 ? at.inherit() : -1;
            coming.push_back(std::async(std::launch::async, ddp::connect_tcp, job_of(rank, 2, at.port), mine));
        }
        std::vector<std::unique_ptr<ddp::tcp_transport>> ranks;
        for (auto& one : coming) ranks.push_back(one.get());
        std::vector<std::string> all = congestion_controls(at.port);
        auto leaving = std::async(std::launch::async, [&] { ranks[1].reset(); });  // each waits for the other
        ranks[0].reset();
        leaving.get();
        return all;
    };
    std::string const near = has(cubic, "DDP-E201") ? systems : "cubic";
    CHECK(between("", "") == std::vector<std::string>{near, near});
    CHECK(between("a", "a") == std::vector<std::string>{near, near});
    CHECK(between("a", "b") == std::vector<std::string>{systems, systems});
    if (near == systems) WARN("not tried: a system whose own TCP congestion control is not cubic");
    options.congestion = "reno";
    CHECK(between("", "") == std::vector<std::string>{"reno", "reno"});
    CHECK(between("a", "b") == std::vector<std::string>{"reno", "reno"});
    options.congestion = "nonesuch";
    for (std::string const& text : outcomes({job_of(0, 2, at.port), job_of(1, 2, at.port)}, at, options))
        CHECK(has(text, "nonesuch"));
    ::setenv("DDP_TCP_CONGESTION", "nowhere", 1);  // the program's own choice comes first
    std::vector<std::string> const own = outcomes({job_of(0, 2, at.port), job_of(1, 2, at.port)}, at, options);
    std::vector<std::string> const from = outcomes({job_of(0, 2, at.port), job_of(1, 2, at.port)}, at, quick());
    ::unsetenv("DDP_TCP_CONGESTION");
    for (std::string const& text : own) CHECK(has(text, "nonesuch"));
    for (std::string const& text : from) CHECK(has(text, "nowhere"));
}

TEST_CASE("ranks that never came are named on every rank that came", "[rendezvous][tcp]") {
    auto times = ddp::timing::for_tests();
    times.join = 300ms;
    listener const at;
    auto const start = ddp::monotonic_clock::now();
    for (std::string const& text : outcomes({job_of(0, 4, at.port), job_of(2, 4, at.port)}, at, quick(times))) {
        CAPTURE(text);
        CHECK(has(text, "DDP-E201"));
        CHECK(has(text, "ranks {1, 3} never joined (2 of 4 present"));
        CHECK(!has(text, "connections"));
    }
    CHECK(ddp::monotonic_clock::now() - start < 5s);
}

TEST_CASE("the time to join is one, however late the last rank comes", "[rendezvous][tcp]") {
    auto const times = ddp::timing::for_tests();
    listener const at;
    ddp::tcp_options rank0 = quick(times);
    rank0.listen_descriptor = at.inherit();
    auto const start = ddp::monotonic_clock::now();
    auto zero = std::async(std::launch::async, outcome, job_of(0, 2, at.port), rank0);
    std::this_thread::sleep_for(3500ms);
    rank_by_hand const one(at.port);  // reaches rank 0's store, and never the rank itself
    std::string const text = zero.get();
    CAPTURE(text);
    CHECK(has(text, "rank 0 was not reached by rank 1"));
    // times.join, two handshakes, and times.dead until the store has given up on the rank that hears nothing.
    CHECK(ddp::monotonic_clock::now() - start < 8300ms);
}

TEST_CASE("without rank 0 the others say where they looked", "[rendezvous][tcp]") {
    auto times = ddp::timing::for_tests();
    times.join = 200ms;
    std::uint16_t const port = listener(false).port;
    std::string const text = outcome(job_of(1, 2, port), quick(times));
    CAPTURE(text);
    CHECK(has(text, "127.0.0.1:" + std::to_string(port)));
    CHECK(has(text, "attempts"));
}

TEST_CASE("a port that is in use is named, with what to do", "[rendezvous][tcp]") {
    listener const taken;
    std::string const text = outcome(job_of(0, 2, taken.port), quick());
    CAPTURE(text);
    CHECK(has(text, "port " + std::to_string(taken.port) + " is in use by another program on 127.0.0.1:"));
    CHECK(has(text, " (pid " + std::to_string(::getpid()) + ", "));
    CHECK(has(text, "MASTER_PORT"));
}

TEST_CASE("a second process of one rank is refused and the job goes on", "[rendezvous][tcp]") {
    listener const at;
    auto first = std::async(std::launch::async, outcome, job_of(1, 3, at.port), quick());
    ddp::tcp_options rank0 = quick();
    rank0.listen_descriptor = at.inherit();
    auto zero = std::async(std::launch::async, outcome, job_of(0, 3, at.port), rank0);
    std::this_thread::sleep_for(200ms);
    std::string const second = outcome(job_of(1, 3, at.port), quick());
    CAPTURE(second);
    CHECK(has(second, "rank 1"));
    CHECK(has(second, "a second time"));
    CHECK(has(second, "pid " + std::to_string(::getpid())));
    CHECK(outcome(job_of(2, 3, at.port), quick()) == "");
    CHECK(first.get() == "");
    CHECK(zero.get() == "");
}

TEST_CASE("everybody learns who has another world size", "[rendezvous][tcp]") {
    listener const at;
    auto const start = ddp::monotonic_clock::now();
    for (std::string const& text :
         outcomes({job_of(0, 3, at.port), job_of(1, 3, at.port), job_of(2, 4, at.port)}, at, quick())) {
        CAPTURE(text);
        CHECK(has(text, "rank 2"));
        CHECK(has(text, "WORLD_SIZE 4, rank 0 has 3"));
    }
    CHECK(ddp::monotonic_clock::now() - start < 3s);
}

TEST_CASE("rank 0 tells its own error although some ranks never come", "[rendezvous][tcp]") {
    listener const at;
    auto times = ddp::timing::for_tests();
    times.dead = times.handshake = times.join = 20s;
    auto const start = ddp::monotonic_clock::now();
    for (std::string const& text : outcomes({job_of(0, 4, at.port), job_of(1, 2, at.port)}, at, quick(times)))
        CHECK(has(text, "has WORLD_SIZE 2, rank 0 has 4"));
    CHECK(ddp::monotonic_clock::now() - start < times.dead / 2);  // ddprun's patience is 2 s, and this takes 1.5
}

TEST_CASE("a rank that asks while it is refused is told again when it reports that", "[rendezvous][tcp]") {
    listener const at;
    auto times = ddp::timing::for_tests();
    times.dead = 20s;
    ddp::detail::tcp_acceptor acceptor(ddp::tcp_context());
    acceptor.assign(boost::asio::ip::tcp::v4(), at.inherit());
    ddp::tcp_store_server server(std::move(acceptor), 2, 0, 7, times);
    auto const soon = [] { return ddp::monotonic_clock::now() + 10s; };
    ddp::detail::tcp_endpoint const zero(boost::asio::ip::make_address("127.0.0.1"), at.port);
    ddp::tcp_store store({zero}, 1, 2, 0, soon(), false, {}, times);
    store.put("rank/1", "here", soon());
    server.fail("rank 0 has no sockets left");
    std::this_thread::sleep_for(200ms);  // until the refusal is on its way; the request crosses it
    CHECK_THROWS_WITH(store.all("rank/", 2, soon()), "DDP-E201 rendezvous: rank 0 has no sockets left");
    auto const start = ddp::monotonic_clock::now();
    CHECK(store.fail("rank 1 cannot go on", soon()) == "rank 0 has no sockets left");
    CHECK(ddp::monotonic_clock::now() - start < 5s);
}

TEST_CASE("a rank that comes after rank 0 has failed hears why", "[rendezvous][tcp]") {
    listener const at;
    auto const times = ddp::timing::for_tests();
    ddp::detail::tcp_acceptor acceptor(ddp::tcp_context());
    acceptor.assign(boost::asio::ip::tcp::v4(), at.inherit());
    std::optional<ddp::tcp_store_server> server(std::in_place, std::move(acceptor), 2, 0, 7, times);
    server->fail("rank 0 has no sockets left");
    auto late = std::async(std::launch::async, [&] {
        ddp::detail::tcp_endpoint const zero(boost::asio::ip::make_address("127.0.0.1"), at.port);
        try {
            ddp::tcp_store const store({zero}, 1, 2, 0, ddp::monotonic_clock::now() + 5s);
            return std::string("let in");
        } catch (std::exception const& e) {
            return std::string(e.what());
        }
    });
    server.reset();
    CHECK(late.get() == "DDP-E201 rendezvous: rank 0 has no sockets left");
}

TEST_CASE("another version is refused, with both versions", "[rendezvous][tcp]") {
    auto times = ddp::timing::for_tests();
    times.join = 500ms;
    listener const at;
    ddp::tcp_options rank0 = quick(times);
    rank0.listen_descriptor = at.inherit();
    auto zero = std::async(std::launch::async, outcome, job_of(0, 2, at.port), rank0);
    int const fd = dial(at.port);
    ddp::detail::store_hello hello;
    hello.version = 99;
    hello.rank = 1;
    hello.size = 2;
    REQUIRE(::write(fd, &hello, sizeof hello) == static_cast<ssize_t>(sizeof hello));
    char answer[1000] = {};
    REQUIRE(::read(fd, answer, sizeof answer - 1) > 16);
    std::string const text(answer + 16);
    CHECK(has(text, "version of ddp: 99, rank 0 has " + std::to_string(ddp::version_number)));
    ::close(fd);
    CHECK(has(zero.get(), "version of ddp: 99"));
}

TEST_CASE("however many ranks of another version come, the error stays short", "[rendezvous][tcp]") {
    auto times = ddp::timing::for_tests();
    times.join = 1500ms;
    listener const at;
    ddp::tcp_options rank0 = quick(times);
    rank0.listen_descriptor = at.inherit();
    auto zero = std::async(std::launch::async, outcome, job_of(0, 2, at.port), rank0);
    ddp::detail::store_hello hello;
    hello.version = 99;
    hello.rank = 1;
    hello.size = 2;
    hello.who = std::string_view("\x1b[31mpid 1 on elsewhere");
    // Whoever does not hang up at once takes one of the places that strangers share, so they come in at a certain rate.
    int came = 0;
    for (auto const end = ddp::monotonic_clock::now() + 1s; came < 400 && ddp::monotonic_clock::now() < end; ++came) {
        int const fd = dial(at.port);
        REQUIRE(::send(fd, &hello, sizeof hello, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof hello));
        ::close(fd);
    }
    CHECK(came > 50);  // without a limit more than 5,000 bytes
    std::string const text = zero.get();
    CAPTURE(text);
    CHECK(has(text, "version of ddp: 99"));
    CHECK(text.size() < 3000);
    CHECK(text.find('\x1b') == std::string::npos);
}

TEST_CASE("a name that is loopback on this machine does not bring several hosts together", "[rendezvous][tcp]") {
    using boost::asio::ip::make_address;
    auto const said = [](std::string const& name, bool several, std::vector<std::string> const& addresses) {
        ddp::job j = job_of(0, 4, 29500);
        j.master_addr = name;
        j.several_hosts = several;
        j.source = "Slurm (SLURM_PROCID=0)";
        std::vector<boost::asio::ip::address> at;
        for (std::string const& one : addresses) at.push_back(make_address(one));
        try {
            ddp::detail::expect_reachable(j, at);
        } catch (ddp::rendezvous_error const& e) {
            return std::string(e.what());
        }
        return std::string();
    };
    for (std::string const name : {"node7", "node7.cluster"}) {
        std::string const text = said(name, true, {"127.0.1.1", "::1"});
        CAPTURE(text);
        CHECK(has(text, "MASTER_ADDR \"" + name + "\" is 127.0.1.1 on host "));
        CHECK(has(text, "/etc/hosts"));
        CHECK(has(text, "Slurm (SLURM_PROCID=0)"));
        CHECK(has(text, "Set MASTER_ADDR to a numeric address"));
        CHECK(has(text, "or to 127.0.0.1 if all ranks are on this machine"));
    }
    CHECK(said("node7", false, {"127.0.1.1"}) == "");
    CHECK(said("node7", true, {"127.0.1.1", "192.0.2.7"}) == "");
    CHECK(said("localhost", true, {"127.0.0.1"}) == "");  // advice says so, should they not meet
    CHECK(said("127.0.1.1", true, {"127.0.1.1"}) == "");

    // What the system makes of a name: no text of an address, but the same in the table of hosts.
    ddp::job j = job_of(1, 4, 29500);
    j.master_addr = "LocalHost";
    j.several_hosts = true;
    CHECK(has(outcome(j, quick()), "MASTER_ADDR \"LocalHost\" is "));
}

TEST_CASE("the ranks whose memory a rank sees fit into a value of the store", "[rendezvous][tcp]") {
    std::size_t const room = ddp::detail::store_head::max_value - 17 * ddp::detail::core_set::most / 64 -
                             3 * sizeof ";" - 16 - sizeof(ddp::memory_offer::text);
    auto const again = [&](int first, int count, int apart) {
        std::vector<int> ranks;
        for (int i = 0; i < count; ++i) ranks.push_back(first + i * apart);
        std::string const text = ddp::detail::ranks_text(ranks);
        CAPTURE(text);
        CHECK(text.size() <= room);
        CHECK(ddp::detail::ranks_in(text) == ranks);
    };
    for (int const first : {0, 1, 63, 64, 64000})
        for (int const count : {0, 1, 2, 3, 63, 64, 65, 127, 1023}) again(first, count, 1);
    again(0, 1500, 1);
    again(2, 1000, 7);  // seven hosts in turn
    for (std::string const text : {"", ";", "x", "-1:1", "65537:1", "3", "3:", "3:g", "3,", "99999999999:1"})
        CHECK(ddp::detail::ranks_in(text).empty());
    CHECK(ddp::detail::ranks_in("3:5,x") == std::vector<int>{3, 5});
}

TEST_CASE("a job that a program makes itself does not ask the environment", "[rendezvous][tcp]") {
    std::vector<std::pair<char const*, char const*>> const others = {
        {"RANK", "7"}, {"WORLD_SIZE", "9"}, {"MASTER_ADDR", "192.0.2.1"}, {"MASTER_PORT", "1"}};
    for (auto const& [name, value] : others) ::setenv(name, value, 1);
    listener const at;
    for (std::string const& text : outcomes({job_of(0, 2, at.port), job_of(1, 2, at.port)}, at, quick()))
        CHECK(text == "");
    for (auto const& [name, value] : others) ::unsetenv(name);
}

TEST_CASE("options that must agree are compared", "[rendezvous][tcp]") {
    listener const at;
    ddp::tcp_options one = quick();
    one.early_bytes = 1 << 20;
    ddp::tcp_options zero = quick();
    zero.listen_descriptor = at.inherit();
    auto a = std::async(std::launch::async, outcome, job_of(0, 2, at.port), zero);
    std::string const b = outcome(job_of(1, 2, at.port), one);
    CHECK(has(a.get(), "tcp_options.early_bytes differs"));
    CHECK(has(b, "tcp_options.early_bytes differs"));
}

TEST_CASE("silent and talking strangers are displaced before their time is over, and are not answered",
          "[rendezvous][tcp]") {
    listener const at;
    auto times = ddp::timing::for_tests();
    times.handshake = 12s;  // what it would take to wait for a silent one
    times.join = 30s;
    std::vector<int> strangers;
    for (int i = 0; i <= 500; ++i) {  // more silent ones than there are places
        strangers.push_back(dial(at.port));
        if (i % 3 == 0) CHECK(::write(strangers.back(), "GET / HTTP/1.0\r\n\r\n", 18) == 18);
    }
    auto const begin = ddp::monotonic_clock::now();
    auto all = std::async(std::launch::async, [&] {
        return outcomes({job_of(0, 3, at.port), job_of(1, 3, at.port), job_of(2, 3, at.port)}, at, quick(times));
    });
    for (int i = 0; i < 100; ++i) strangers.push_back(dial(at.port));  // while the job comes together, and after
    for (std::string const& text : all.get()) CHECK(text == "");
    CHECK(ddp::monotonic_clock::now() - begin < times.handshake / 2);
    char byte;
    for (int const fd : strangers) {
        CHECK(::recv(fd, &byte, 1, MSG_DONTWAIT) <= 0);
        ::close(fd);
    }
}

TEST_CASE("who is of another job or meant for another rank is not answered; what goes to another host has checksums",
          "[rendezvous][tcp]") {
    listener const at;
    ddp::tcp_options options = quick();
    options.listen_descriptor = at.inherit();
    auto zero = std::async(std::launch::async, [&] { return ddp::connect_tcp(job_of(0, 2, at.port), options); });
    rank_by_hand one(at.port);
    auto another_job = one.hello(), astray = one.hello();
    ++another_job.nonce;
    astray.to = 1;
    CHECK_FALSE(one.knock(another_job).has_value());
    CHECK_FALSE(one.knock(astray).has_value());
    auto const answer = one.knock(one.hello());
    REQUIRE(answer.has_value());
    CHECK((answer->from == 0 && answer->to == 1 && answer->nonce == one.hello().nonce));
    one.done();
    auto const transport = zero.get();  // although this rank has not asked for its last answer
    one.hear_all();
    std::array<std::byte, 100> const bytes{};
    ddp::completion sent;
    sent.run = [](ddp::completion&) noexcept {};
    transport->post_send(1, {}, bytes, sent);
    transport->progress(ddp::monotonic_clock::now() + 20ms);
    ddp::frame_header header;
    std::vector<std::byte> payload(ddp::frame_payload_bytes);
    do {
        REQUIRE(one.read(&header, sizeof header));
        REQUIRE(one.read(payload.data(), header.payload));
    } while (header.type != ddp::frame_type::data);
    CHECK(header.payload == bytes.size());
    CHECK((header.flags & ddp::frame_header::has_sum) != 0);
}

TEST_CASE("rank 0 hears last that all ranks are together, so that the others need it no more", "[rendezvous][tcp]") {
    auto times = ddp::timing::for_tests();
    times.handshake = times.dead = 10s;
    ddp::detail::tcp_acceptor acceptor(ddp::tcp_context());
    REQUIRE_FALSE(ddp::detail::listen_at(acceptor, {boost::asio::ip::make_address("127.0.0.1"), 0}));
    ddp::detail::tcp_endpoint const zero = acceptor.local_endpoint();
    ddp::tcp_store_server server(std::move(acceptor), 2, 0, 7, times);
    auto const until = ddp::monotonic_clock::now() + 5s;
    ddp::tcp_store first({zero}, 0, 2, 0, until), last({zero}, 1, 2, 0, until);
    for (ddp::tcp_store* const store : {&first, &last}) {
        store->stop_beating();
        store->put(store == &first ? "done/0" : "done/1", "", until);
    }
    auto heard = std::async(std::launch::async, [&] { return first.all("done/", 2, until).size(); });
    CHECK(heard.wait_for(300ms) == std::future_status::timeout);  // rank 1 has not asked yet
    CHECK(last.all("done/", 2, until).size() == 2);
    CHECK(heard.get() == 2);
    server.finish();
}

TEST_CASE("rank 0 goes on while a rank that lost packets still asks for its last answer", "[rendezvous][tcp]") {
    auto times = ddp::timing::for_tests();
    times.dead = 10s;
    ddp::detail::tcp_acceptor acceptor(ddp::tcp_context());
    REQUIRE_FALSE(ddp::detail::listen_at(acceptor, {boost::asio::ip::make_address("127.0.0.1"), 0}));
    ddp::detail::tcp_endpoint const zero = acceptor.local_endpoint();
    std::optional<ddp::tcp_store_server> server(std::in_place, std::move(acceptor), 2, 0, 7, times);
    auto const until = ddp::monotonic_clock::now() + 5s;
    ddp::tcp_store first({zero}, 0, 2, 0, until), last({zero}, 1, 2, 0, until);
    for (ddp::tcp_store* const store : {&first, &last}) store->stop_beating();
    first.put("done/0", "", until);
    last.put("done/1", "", until);
    CHECK(first.all("done/", 2, until).size() == 2);
    auto const asked = ddp::monotonic_clock::now();
    server->finish();
    CHECK_THROWS_WITH(dial(zero.port()), "no connection");  // nobody is let in any more
    std::this_thread::sleep_for(2 * times.handshake);
    CHECK(last.all("done/", 2, until).size() == 2);
    server.reset();
    CHECK(ddp::monotonic_clock::now() - asked < times.dead / 2);  // nobody is waited for any more
}

TEST_CASE("a rank that is hung up on before it has its answer tries again", "[rendezvous][tcp]") {
    listener const at, zero;
    ddp::detail::tcp_acceptor store_acceptor(ddp::tcp_context()), mine(ddp::tcp_context());
    store_acceptor.assign(boost::asio::ip::tcp::v4(), at.inherit());
    listener const one;
    mine.assign(boost::asio::ip::tcp::v4(), one.inherit());
    auto const times = ddp::timing::for_tests();
    ddp::tcp_store_server server(std::move(store_acceptor), 2, 0, 7, times);
    auto const until = ddp::monotonic_clock::now() + 5s;
    ddp::detail::tcp_endpoint const store_at(boost::asio::ip::make_address("127.0.0.1"), at.port);
    ddp::tcp_store first({store_at}, 0, 2, 0, until), second({store_at}, 1, 2, 0, until);
    int greetings = 0;
    auto rank_0 = std::async(std::launch::async, [&] {
        ddp::detail::peer_hello hello;
        for (;;) {
            if (!ddp::detail::poll_until(zero.fd, POLLIN, until)) return -1;
            int const fd = ::accept(zero.fd, nullptr, nullptr);
            ++greetings;
            if (::recv(fd, &hello, sizeof hello, MSG_WAITALL) != sizeof hello) return -1;
            if (greetings == 3) {
                std::swap(hello.from, hello.to);
                return ::send(fd, &hello, sizeof hello, 0) == sizeof hello ? fd : -1;
            }
            ::close(fd);  // as if its hello had come too late
        }
    });
    std::vector<ddp::detail::peer_address> const addresses = {
        {{boost::asio::ip::make_address("127.0.0.1"), zero.port}, "by hand"},
        {{boost::asio::ip::make_address("127.0.0.1"), one.port}, "second"}};
    ddp::detail::peer_hello hello;
    hello.from = 1;
    hello.size = 2;
    hello.nonce = second.nonce();
    hello.host = 12345;
    std::vector<ddp::detail::tcp_mesh::connection> met;
    ddp::detail::tcp_mesh(hello, addresses, mine, second, times).connect(met);
    int const fd = rank_0.get();
    CHECK(fd >= 0);
    ::close(fd);
    CHECK(greetings == 3);
    REQUIRE(met.size() == 1);
    CHECK(met[0].rank == 0);
    CHECK(met[0].same_host);
}

TEST_CASE("a rank that dies while the job comes together is named at once", "[rendezvous][tcp]") {
    listener const at;
    auto times = ddp::timing::for_tests();
    times.handshake = 10s;  // nobody waits for it
    auto all = std::async(std::launch::async,
                          [&] { return outcomes({job_of(0, 3, at.port), job_of(1, 3, at.port)}, at, quick(times)); });
    auto const start = ddp::monotonic_clock::now();
    {
        ddp::tcp_store mortal({{boost::asio::ip::make_address("127.0.0.1"), at.port}}, 2, 3, 0, start + 2s);
        std::this_thread::sleep_for(50ms);
    }
    for (std::string const& text : all.get()) {
        CAPTURE(text);
        CHECK(has(text, "rank 2 (pid "));
        CHECK(has(text, "ended during start-up"));
    }
    CHECK(ddp::monotonic_clock::now() - start < 3s);
}

TEST_CASE("the store keeps no value that is too long, and no more than it needs", "[rendezvous][tcp]") {
    using ddp::detail::store_head, ddp::detail::store_op;
    bool const many = GENERATE(false, true);
    CAPTURE(many);
    listener const at;
    auto zero = std::async(std::launch::async, [&] { return outcomes({job_of(0, 2, at.port)}, at, quick()); });
    ddp::detail::store_hello hello;
    hello.rank = 1;
    hello.size = 2;
    int const fd = dial(at.port);
    REQUIRE(::write(fd, &hello, sizeof hello) == static_cast<ssize_t>(sizeof hello));
    auto const send = [fd](store_head const& head, std::string const& rest) {
        std::string request;
        ddp::detail::append(request, ddp::bytes_of(head));
        request += rest;
        return ::send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size());
    };
    std::size_t puts = 0;
    if (many) {
        std::array<char, 4096> answers;
        for (; puts < 2000; ++puts) {
            std::string const key = "k" + std::to_string(puts), value(16, 'v');
            if (!send({store_op::put, static_cast<std::uint32_t>(key.size()), 16, 0}, key + value)) break;
            if (puts % 64 == 0) static_cast<void>(::recv(fd, answers.data(), answers.size(), MSG_DONTWAIT));
        }
    } else {
        REQUIRE(send({store_op::put, 3, store_head::max_value + 1, 0}, "key"));
    }
    std::string const said = zero.get().front();
    CAPTURE(said, puts);
    CHECK(has(said, "rank 1 ("));
    CHECK(has(said, ") sent bytes during start-up that ddp did not write"));
    ::close(fd);
}

TEST_CASE("a rank that ends or stops while others connect to it is named at once, not who waits for it",
          "[rendezvous][tcp]") {
    bool const stops = GENERATE(false, true);
    CAPTURE(stops);
    listener const at, mortal;
    auto times = ddp::timing::for_tests();
    times.dead = 500ms;
    times.heartbeat = 50ms;
    times.handshake = 2s;
    auto all = std::async(std::launch::async, [&] {
        return outcomes({job_of(0, 4, at.port), job_of(2, 4, at.port), job_of(3, 4, at.port)}, at, quick(times));
    });
    auto const start = ddp::monotonic_clock::now();
    ddp::detail::store_hello hello;
    hello.rank = 1;
    hello.size = 4;
    hello.who = ddp::bounded_text<72>("pid 4711 on \x1b[31mnode7");
    int const fd = dial(at.port);
    REQUIRE(::write(fd, &hello, sizeof hello) == static_cast<ssize_t>(sizeof hello));
    std::string const address =
        ddp::detail::peer_address{{boost::asio::ip::make_address("127.0.0.1"), mortal.port}, "pid 4711"}
            .text();  // accepts, and says nothing
    std::string request;
    ddp::detail::append(request, ddp::bytes_of(ddp::detail::store_head{ddp::detail::store_op::put, 6,
                                                                       static_cast<std::uint32_t>(address.size()), 0}));
    request += "rank/1" + address;
    REQUIRE(::write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size()));
    if (!stops) {
        std::this_thread::sleep_for(200ms);
        ::close(fd);
    }
    for (std::string const& text : all.get()) {
        CAPTURE(text);
        CHECK(has(text, "rank 1 (pid 4711 on \\x1b[31mnode7) "));
        CHECK(has(text, stops ? "has sent nothing for 500 ms during start-up. Its process is stopped"
                              : "ended during start-up"));
    }
    CHECK(ddp::monotonic_clock::now() - start < 3s);
    if (stops) ::close(fd);
}

TEST_CASE("a rank 0 that stops while the job comes together is named by all others", "[rendezvous][tcp]") {
    bool const at_the_end = GENERATE(false, true);  // when this rank has nothing more to do, and waits for the others
    CAPTURE(at_the_end);
    listener const at;
    auto times = ddp::timing::for_tests();
    times.dead = 500ms;
    auto const start = ddp::monotonic_clock::now();
    auto one = std::async(std::launch::async, [&]() -> std::string {
        if (!at_the_end) return outcome(job_of(1, 2, at.port), quick(times));
        try {
            ddp::tcp_store store({{boost::asio::ip::make_address("127.0.0.1"), at.port}}, 1, 2, 0, start + 5s, false,
                                 {}, times);
            store.stop_beating();
            static_cast<void>(store.all("done/", 2, start + 10s));
            return "";
        } catch (ddp::rendezvous_error const& e) {
            return e.what();
        }
    });
    int const fd = ::accept(at.fd, nullptr, nullptr);
    std::string greeting;
    ddp::detail::append(greeting, ddp::bytes_of(ddp::detail::store_head{ddp::detail::store_op::ok, 0, 8, 0}));
    greeting += "nonce123";
    CHECK(::write(fd, greeting.data(), greeting.size()) == static_cast<ssize_t>(greeting.size()));
    std::string const text = one.get();
    CAPTURE(text);
    CHECK(has(text, "rank 0 at 127.0.0.1:"));
    CHECK(has(text, "has sent nothing for 500 ms during start-up"));
    CHECK(ddp::monotonic_clock::now() - start < 3s);
    ::close(fd);
}

TEST_CASE("a rank publishes no address that other hosts reach", "[rendezvous][tcp]") {
    listener const at;
    auto zero = std::async(std::launch::async, [&] {
        ddp::tcp_options options = quick();
        options.listen_descriptor = at.inherit();
        return outcome(job_of(0, 2, at.port), options);
    });
    auto const soon = ddp::monotonic_clock::now() + 5s;
    ddp::tcp_store store({{boost::asio::ip::make_address("127.0.0.1"), at.port}}, 1, 2, 0, soon);
    store.put("rank/1", "9 192.0.2.1 pid 12 on node9", soon);
    std::string const text = zero.get();
    CAPTURE(text);
    CHECK(has(text, "pid 12 on node9 published the address 192.0.2.1:9, which is not on this machine"));
}

TEST_CASE("with a secret nobody without it can take a rank's place, end the job or hear anything",
          "[rendezvous][tcp]") {
    listener const at;
    secret_in_a_file const secret("0123456789abcdef");
    ddp::tcp_options rank0 = quick();
    rank0.listen_descriptor = at.inherit();
    auto zero = std::async(std::launch::async, outcome, job_of(0, 2, at.port), rank0);
    std::vector<int> strangers;
    for (int kind = 0; kind < 40; ++kind) {
        ddp::detail::store_hello hello;
        hello.rank = 1;
        hello.size = kind % 4 == 1 ? 3 : 2;
        if (kind % 4 == 2) hello.version = 99;
        if (kind % 4 == 3) hello.secret.bytes[0] = std::byte{'0'};
        strangers.push_back(dial(at.port));
        CHECK(::write(strangers.back(), &hello, sizeof hello) == static_cast<ssize_t>(sizeof hello));
    }
    std::this_thread::sleep_for(200ms);
    CHECK(outcome(job_of(1, 2, at.port), quick()) == "");
    CHECK(zero.get() == "");
    for (int const fd : strangers) {
        char byte;
        CHECK(::recv(fd, &byte, 1, MSG_DONTWAIT) <= 0);
        ::close(fd);
    }
}

TEST_CASE("a rank without the job's secret says why rank 0 may have hung up", "[rendezvous][tcp]") {
    listener const at;
    auto times = ddp::timing::for_tests();
    times.join = 2s;
    ddp::tcp_options rank0 = quick(times);
    rank0.listen_descriptor = at.inherit();
    times.join = 900ms;
    auto const [zero, one] = [&] {
        auto other = [&] {
            secret_in_a_file const secret("0123456789abcdef");
            int const stranger = dial(at.port);
            CHECK(::write(stranger, "????????????????????????????????????????????????????????????????", 64) == 64);
            auto running = std::async(std::launch::async, outcome, job_of(0, 2, at.port), rank0);
            char byte;
            CHECK(::recv(stranger, &byte, 1, 0) <= 0);  // rank 0 has read the secret
            ::close(stranger);
            return running;
        }();
        std::string const mine = outcome(job_of(1, 2, at.port), quick(times));
        return std::pair(other.get(), mine);
    }();
    CHECK(has(zero, "ranks {1} never joined"));
    CHECK(has(zero, "; connections with another secret, DDP_TLS or DDP_JOB_ID: "));
    CHECK(has(one, "closes the connections of ranks whose secret"));
}

TEST_CASE("rank 0 counts strangers whether they speak when it accepts them or later", "[rendezvous][tcp]") {
    listener const at;
    auto times = ddp::timing::for_tests();
    times.join = 1500ms;
    ddp::tcp_options rank0 = quick(times);
    rank0.listen_descriptor = at.inherit();
    int const early = dial(at.port), late = dial(at.port);
    std::string const words(64, '?');
    CHECK(::write(early, words.data(), words.size()) == 64);
    secret_in_a_file const secret("0123456789abcdef");
    auto running = std::async(std::launch::async, outcome, job_of(0, 2, at.port), rank0);
    char byte;
    CHECK(::recv(early, &byte, 1, 0) <= 0);  // both are accepted by now
    CHECK(::write(late, words.data(), words.size()) == 64);
    CHECK(has(running.get(), "DDP_TLS or DDP_JOB_ID: 2"));
    ::close(early);
    ::close(late);
}

TEST_CASE("a secret that cannot be proved is not shown where the launcher has rank 0's port", "[rendezvous][tcp]") {
    // Somebody else listens at one of the ports that rank 0 may take, and waits for the ranks that look there.
    ddp::job j = job_of(1, 2, 0);
    j.port_is_launchers = true;
    std::optional<listener> stranger;
    for (std::uint16_t port = 20000; !stranger && port < 20100; ++port) {
        j.master_port = port;
        try {
            stranger.emplace(true, ddp::detail::master_ports(j).front());
        } catch (std::runtime_error const&) {  // another program's
        }
    }
    REQUIRE(stranger);
    auto times = ddp::timing::for_tests();
    times.join = 300ms;
    secret_in_a_file const secret("0123456789abcdef");
    std::string const text = outcome(j, quick(times));
    CAPTURE(text);
    CHECK(text.find("DDP-E101") == 0);
    CHECK(has(text, "there is a secret, but the launcher itself listens at MASTER_PORT"));
    CHECK(has(text, "use ddp::secure_tcp"));
    ::fcntl(stranger->fd, F_SETFL, O_NONBLOCK);
    CHECK(::accept(stranger->fd, nullptr, nullptr) == -1);  // nobody has come
}

TEST_CASE("a secret is taken only from a regular file that nobody else can read, or an inherited descriptor",
          "[rendezvous][tcp]") {
    auto const refusal = [] {
        try {
            return ddp::job_secret::from_environment().given() ? std::string("given") : std::string("none");
        } catch (ddp::environment_error const& e) {
            return std::string(e.what());
        }
    };
    CHECK(refusal() == "none");
    {
        secret_in_a_file const good("0123456789abcdef");
        CHECK(refusal() == "given");
        REQUIRE(::chmod(good.path.c_str(), 0640) == 0);
        CHECK(has(refusal(), "which other users may read or write (chmod 600)"));
    }
    if (::geteuid() == 0) {  // what root has made for a group, as Kubernetes does; read by somebody else of that group
        secret_in_a_file const roots("0123456789abcdef");
        ::gid_t const own_group = ::getegid();
        for (auto const& [owner, group, mode, expected] :
             {std::tuple<::uid_t, ::gid_t, ::mode_t, char const*>{0, 65534, 0440, "given"},
              {0, 65534, 0444, "which other users may read"},
              {0, 65534, 0460, "which other users may read"},
              {65533, 65534, 0440, "which belongs to another user"},
              {0, 0, 0440, "cannot be opened"}}) {
            CAPTURE(owner, group, mode);
            REQUIRE(::chown(roots.path.c_str(), owner, group) == 0);
            REQUIRE(::chmod(roots.path.c_str(), mode) == 0);
            REQUIRE(::setegid(65534) == 0);
            REQUIRE(::seteuid(65534) == 0);
            std::string const said = refusal();
            REQUIRE(::seteuid(0) == 0);
            REQUIRE(::setegid(own_group) == 0);
            CHECK(has(said, expected));
        }
    } else {
        WARN("not tried: a secret of root's for a group, because root alone can make one");
    }
    {
        secret_in_a_file const brief("0123456789abcde");
        CHECK(has(refusal(), "no secret of 16 to 64 bytes"));
    }
    {
        secret_in_a_file const empty("");
        CHECK(has(refusal(), "no secret of 16 to 64 bytes"));
    }
    {
        secret_in_a_file const zeros(std::string(32, '\0'));
        CHECK(has(refusal(), "which holds nothing but zeros"));
    }
    ::setenv("DDP_SECRET_FILE", "/dev/zero", 1);
    CHECK(has(refusal(), "is not a regular file"));
    ::setenv("DDP_SECRET_FILE", "/no/such/file", 1);
    CHECK(has(refusal(), "cannot be opened"));
    ::unsetenv("DDP_SECRET_FILE");

    int const fd = ::memfd_create("secret", MFD_CLOEXEC);
    REQUIRE(::write(fd, "0123456789abcdefXYZ", 19) == 19);
    ::fcntl(fd, F_SETFD, 0);
    ::setenv("DDP_SECRET_FD", std::to_string(fd).c_str(), 1);
    CHECK(refusal() == "given");
    CHECK(refusal() == "given");  // read by position: the ranks of a host share the descriptor's offset
    CHECK((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    ::close(fd);
    CHECK(has(refusal(), "which is not open"));
    ::unsetenv("DDP_SECRET_FD");

    ddp::job_secret a, b;
    a.bytes[0] = b.bytes[0] = std::byte{1};
    CHECK(a.matches(b));
    b.bytes[63] = std::byte{1};
    CHECK_FALSE(a.matches(b));
}

TEST_CASE("ranks listen for each other at the ports that the user allows", "[rendezvous][tcp]") {
    listener const at;
    auto options = quick();
    int const free = [] { return listener().port; }();
    options.ports = std::to_string(free) + "-" + std::to_string(free);
    options.listen_descriptor = at.inherit();
    auto zero = std::async(std::launch::async, outcome, job_of(0, 3, at.port), options);
    options.listen_descriptor = -1;
    auto one = std::async(std::launch::async, outcome, job_of(1, 3, at.port), options);
    std::string const two = outcome(job_of(2, 3, at.port), options);
    for (std::string const& text : {zero.get(), one.get(), two}) {  // one of them has it
        CHECK(has(text, "cannot listen on 127.0.0.1: ports " + std::to_string(free)));
        CHECK(has(text, "one for each rank of a host"));
    }
    for (bool const by_variable : {false, true}) {
        CAPTURE(by_variable);
        options.ports = by_variable ? "" : std::to_string(free);
        if (by_variable) ::setenv("DDP_PORTS", std::to_string(free).c_str(), 1);
        options.listen_descriptor = at.inherit();
        auto alone = std::async(std::launch::async, outcome, job_of(0, 2, at.port), options);
        rank_by_hand hand(at.port);
        CHECK(hand.port_of_rank_0() == free);
        CHECK(hand.knock(hand.hello()).has_value());
        hand.done();
        hand.hear_all();
        CHECK(alone.get() == "");
        ::unsetenv("DDP_PORTS");
    }
    for (char const* const wrong : {"x", "0", "5-4", "5-", "-5", "1-70000", "20000-20010-3"}) {
        options.ports = wrong;
        CHECK(has(outcome(job_of(1, 2, at.port), options),
                  std::string("DDP_PORTS is \"") + wrong + "\"; expected ports"));
    }
}

TEST_CASE("a switch in the environment is 0 or 1, or an error", "[rendezvous][tcp]") {
    for (char const* const name : {"DDP_TLS", "DDP_INSECURE", "DDP_SHARE_MEMORY"})
        for (char const* const value : {"yes", "no", "off", "2", "01", " 1"}) {
            CAPTURE(name, value);
            ::setenv(name, value, 1);
            std::string const told = outcome(job_of(1, 2, 1), quick());
            CHECK(has(told, "DDP-E101"));
            CHECK(has(told, std::string(name) + " is \"" + value + "\"; expected 0 or 1"));
            ::unsetenv(name);
        }
}

TEST_CASE("a body that returns an int gives run_main its exit code", "[rendezvous]") {
    ddp::run_options const three{.transport = "inproc", .ranks = 3};
    CHECK(ddp::run_main<ddp::threads>(three, [](auto& comm) { return comm.rank() == 1 ? 75 : 0; }) == 75);
    CHECK(ddp::run_main<ddp::threads>(three, [](ddp::communicator<>&) { return 0; }) == EXIT_SUCCESS);
    CHECK(ddp::run_main<ddp::threads>(three, [](ddp::communicator<>&) {}) == EXIT_SUCCESS);
    CHECK(ddp::run_main<ddp::threads>(three, [](ddp::communicator<>& comm) -> int {
              if (comm.rank() == 0) throw std::runtime_error("the run_main test throws this");
              return 75;
          }) == EXIT_FAILURE);
}

TEST_CASE("settings that ranks should have alike are compared, and what differs is said in one line", "[rendezvous]") {
    ddp::timing times;
    auto const drives = ddp::communication_thread::drives;
    std::string const usual = ddp::detail::rank_settings(times, "", true, drives);
    times.dead = 15s;
    std::string const patient = ddp::detail::rank_settings(times, "", true, drives);
    std::string const other = ddp::detail::rank_settings(times, "reno,;", false, ddp::communication_thread::rests);
    CHECK(ddp::detail::different_settings({usual, usual, usual}).empty());
    CHECK(ddp::detail::different_settings({usual}).empty());
    CHECK(ddp::detail::different_settings({usual, patient, usual}) ==
          "timing.dead is 3000 ms on rank 0, 15000 ms on rank 1");
    CHECK(ddp::detail::different_settings({usual, usual, other}) ==
          "timing.dead is 3000 ms on rank 0, 15000 ms on rank 2; TCP congestion control is default on rank 0, "
          "reno?? on rank 2; path of messages within a host is memory on rank 0, TCP on rank 2; "
          "communication thread is drives on rank 0, rests on rank 2");
    CHECK(ddp::detail::different_settings({usual, patient, patient, patient, patient, patient, patient}) ==
          "timing.dead is 3000 ms on rank 0, 15000 ms on rank 1, 15000 ms on rank 2, 15000 ms on rank 3, 15000 ms on "
          "rank 4, and "
          "other values on 2 more ranks");
    std::string const broken = ddp::detail::different_settings(
        {usual, "\x1b[2J\n" + std::string(500, 'x') + ",1000,", "", ",,,,,,,,,,,,,,,,"});
    CHECK(broken.starts_with("timing.heartbeat is 250 ms on rank 0, \\x1b[2J x"));
    CHECK(broken.size() < 200);
    CHECK(usual.size() < 90);
}

TEST_CASE("times come from the environment, in seconds", "[rendezvous][tcp]") {
    ::setenv("DDP_TIMEOUT_DEAD", "0.5", 1);
    ::setenv("DDP_TIMEOUT_COLLECTIVE", "600", 1);
    ::setenv("DDP_TIMEOUT_STRAGGLER", "60", 1);
    ddp::timing const times = ddp::detail::with_environment({});
    CHECK(times.dead == 500ms);
    CHECK(times.heartbeat == 125ms);
    CHECK(times.collective == 600s);
    CHECK(times.straggler == 60s);
    CHECK(times.join == ddp::timing{}.join);
    times.validate();
    using member = std::chrono::milliseconds ddp::timing::*;
    for (auto const& [name, time] : {std::pair<char const*, member>{"DDP_TIMEOUT_JOIN", &ddp::timing::join},
                                     {"DDP_TIMEOUT_HEARTBEAT", &ddp::timing::heartbeat},
                                     {"DDP_TIMEOUT_SUSPECT", &ddp::timing::suspect},
                                     {"DDP_TIMEOUT_HANDSHAKE", &ddp::timing::handshake},
                                     {"DDP_TIMEOUT_SHUTDOWN", &ddp::timing::shutdown}}) {
        ::setenv(name, "7.5", 1);
        CHECK(ddp::detail::with_environment({}).*time == 7500ms);
        ::unsetenv(name);
    }
    ::setenv("DDP_TIMEOUT_HEARTBEAT", "0.4", 1);  // more than half of dead: refused before any rank is waited for
    CHECK_THROWS_WITH(ddp::run<ddp::threads>([](ddp::communicator<>&) {}),
                      Catch::Contains("dead, 500 ms, must be at least twice heartbeat, 400 ms"));
    ::unsetenv("DDP_TIMEOUT_HEARTBEAT");
    for (char const* const wrong : {"0", "-1", "nan", "5s", "1e9", "0x10", "\x1b[2J"}) {
        ::setenv("DDP_TIMEOUT_DEAD", wrong, 1);
        try {
            static_cast<void>(ddp::detail::with_environment({}));
            FAIL(wrong);
        } catch (ddp::environment_error const& e) {
            CHECK(has(e.what(), "DDP_TIMEOUT_DEAD is \""));
            CHECK_FALSE(has(e.what(), "\x1b"));
        }
    }
    ::unsetenv("DDP_TIMEOUT_DEAD");
    ::unsetenv("DDP_TIMEOUT_COLLECTIVE");
    ::unsetenv("DDP_TIMEOUT_STRAGGLER");
}

TEST_CASE("another program on the port is not mistaken for rank 0", "[rendezvous][tcp]") {
    listener const at;
    auto program = std::async(std::launch::async, [&] {
        int const fd = ::accept(at.fd, nullptr, nullptr);
        char greeting[] = "220 mail.example ESMTP ready, what can I do for you\r\n";
        auto const n = ::write(fd, greeting, sizeof greeting);
        std::this_thread::sleep_for(100ms);
        ::close(fd);
        return n > 0;
    });
    std::string const text = outcome(job_of(1, 2, at.port), quick());
    CAPTURE(text);
    CHECK(has(text, "not rank 0 of a ddp job"));
    CHECK(program.get());
}

TEST_CASE("an address that other hosts reach is refused unless somebody says insecure", "[rendezvous][tcp]") {
    ddp::job j = job_of(1, 2, 29500);
    j.master_addr = "192.0.2.1";
    auto times = ddp::timing::for_tests();
    times.join = 50ms;
    for (int const rank : {0, 1}) {  // it is rank 0 that would open a port
        j.rank = rank;
        CAPTURE(rank);
        CHECK(has(outcome(j, quick(times)), "DDP_INSECURE=1"));
        for (char const* const no : {"", "0"}) {
            insecure_says const variable(no);
            CHECK(has(outcome(j, quick(times)), "DDP_INSECURE=1"));
        }
    }
    {
        insecure_says const variable("1");
        CHECK_FALSE(has(outcome(j, quick(times)), "DDP_INSECURE=1"));
    }
    ddp::tcp_options open = quick(times);
    open.insecure = true;
    CHECK_FALSE(has(outcome(j, open), "DDP_INSECURE=1"));
    j.master_addr = "no such host";
    CHECK(has(outcome(j, open), "MASTER_ADDR \"no such host\" has no address"));

    // As run passes it on.
    std::map<char const*, char const*> const job{
        {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "192.0.2.1"}, {"MASTER_PORT", "29500"}};
    for (auto const& [name, value] : job) ::setenv(name, value, 1);
    for (bool const insecure : {false, true}) {
        ddp::run_options const how{.transport = "tcp", .times = times, .insecure = insecure};
        std::string const text = ddp::test::thrown_by([&] { ddp::run<ddp::tcp>(how, [](ddp::communicator<>&) {}); });
        CHECK(has(text, "DDP_INSECURE=1") != insecure);
        CHECK(has(text, "rank 1 cannot reach rank 0 at 192.0.2.1:29500") == insecure);
    }
    ddp::run_options const how{.transport = "tcp", .times = times, .encrypt = true};
    CHECK(has(ddp::test::thrown_by([&] { ddp::run<ddp::tcp>(how, [](ddp::communicator<>&) {}); }),
              "DDP_TLS=1 (run_options.encrypt, tcp_options.encrypt) asks for what this rank cannot do"));
    for (auto const& [name, value] : job) ::unsetenv(name);
}

TEST_CASE("a descriptor that does not listen is refused by rank 0", "[rendezvous][tcp]") {
    listener const not_listening(false);
    ddp::tcp_options options = quick();
    options.listen_descriptor = not_listening.inherit();
    CHECK(has(outcome(job_of(0, 2, not_listening.port), options), "is not a listening socket"));
}

TEST_CASE("a descriptor that other hosts reach is refused by a rank 0 whose address is loopback", "[rendezvous][tcp]") {
    int const open = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ::sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_ANY);
    ::socklen_t size = sizeof at;
    REQUIRE(::bind(open, reinterpret_cast<::sockaddr*>(&at), size) == 0);
    REQUIRE(::listen(open, 1) == 0);
    REQUIRE(::getsockname(open, reinterpret_cast<::sockaddr*>(&at), &size) == 0);
    ddp::tcp_options options = quick();
    options.listen_descriptor = open;
    std::string const port = std::to_string(ntohs(at.sin_port));
    CHECK(has(outcome(job_of(0, 2, ntohs(at.sin_port)), options),
              "the inherited socket listens on 0.0.0.0:" + port +
                  ", which other hosts can reach, but MASTER_ADDR is loopback. Give the address of that interface"));
}

TEST_CASE("ranks look at memory again and again only where each has a core", "[rendezvous][tcp]") {
    ::cpu_set_t before, some;
    REQUIRE(::sched_getaffinity(0, sizeof before, &before) == 0);
    auto const looks = [&](int cores, bool other_host = false) {  // of each of two ranks that have so many cores
        CPU_ZERO(&some);
        for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&some) < cores; ++core)
            if (CPU_ISSET(core, &before)) CPU_SET(core, &some);
        REQUIRE(::sched_setaffinity(0, sizeof some, &some) == 0);  // of threads that start from here on
        listener const at;
        std::vector<std::future<int>> ranks;
        for (int const rank : {0, 1})
            ranks.push_back(std::async(std::launch::async, [&, rank] {
                ddp::tcp_options options = quick();
                if (other_host) options.host = rank == 0 ? "one" : "another";
                if (rank == 0) options.listen_descriptor = at.inherit();
                return ddp::connect_tcp(job_of(rank, 2, at.port), std::move(options))->looks();
            }));
        std::vector<int> all;
        for (auto& one : ranks) all.push_back(one.get());
        REQUIRE(::sched_setaffinity(0, sizeof before, &before) == 0);
        return all;
    };
    CHECK(looks(1) == std::vector{0, 0});
    CHECK(looks(1, true) == std::vector{20, 20});  // each alone on its host
    if (CPU_COUNT(&before) >= 2 &&
        ddp::detail::usable_cores(ddp::detail::cores_of_process(), ddp::detail::core_quota()) >= 2)
        CHECK(looks(2) == std::vector{20, 20});
    else
        WARN("not tried: two ranks with a core each, which this machine does not have");
}

TEST_CASE(
    "ranks of one host send through memory, but for one that does not want to or plays another host; only what "
    "leaves the host is checked",
    "[rendezvous][tcp]") {
    struct says {
        bool shares = true;
        char const* host = "";
    };
    auto const paths = [](std::vector<says> const& ranks) {
        listener const at;
        std::vector<std::future<std::string>> futures;
        int const size = static_cast<int>(ranks.size());
        for (int rank = 0; rank < size; ++rank)
            futures.push_back(std::async(std::launch::async, [&, rank] {
                ddp::tcp_options options = quick();
                options.share_memory = ranks[static_cast<std::size_t>(rank)].shares;
                options.host = ranks[static_cast<std::size_t>(rank)].host;
                if (rank == 0) options.listen_descriptor = at.inherit();
                auto const transport = ddp::connect_tcp(job_of(rank, size, at.port), std::move(options));
                std::string in_memory;  // m: through memory, t: over TCP; a capital: checked
                for (int peer = 0; peer < size; ++peer) {
                    char const way = peer == rank ? '-' : transport->in_memory(peer) ? 'm' : 't';
                    bool const checked = peer != rank && transport->checked(peer);
                    in_memory += checked ? static_cast<char>(way - 'a' + 'A') : way;
                }
                return in_memory;
            }));
        std::vector<std::string> all;
        for (auto& one : futures) all.push_back(one.get());
        return all;
    };
    using table = std::vector<std::string>;
    CHECK(paths({{}, {}, {}}) == table{"-mm", "m-m", "mm-"});
    CHECK(paths({{}, {.shares = false}, {}}) == table{"-tm", "t-t", "mt-"});
    CHECK(paths({{.host = "a"}, {.host = "b"}, {.host = "a"}, {}}) == table{"-TmT", "T-TT", "mT-T", "TTT-"});
    ::setenv("DDP_SHARE_MEMORY", "0", 1);
    CHECK(paths({{}, {}}) == table{"-t", "t-"});
    ::unsetenv("DDP_SHARE_MEMORY");
    ::setenv("DDP_HOST", "elsewhere", 1);
    CHECK(paths({{}, {.host = "here"}, {}}) == table{"-Tm", "T-T", "mT-"});
    ::unsetenv("DDP_HOST");
    // A host where a rank cannot make room: TCP, and a line on stderr.
    ::rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    ::rlimit const small{1 << 14, before.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    table const without_room = paths({{}, {}});
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(without_room == table{"-t", "t-"});
}

namespace {

/// Two ranks that the store has welcomed, and the addresses at which both listen; one of them connects to the other.
struct half_a_job {
    explicit half_a_job(int rank, std::shared_ptr<ddp::tcp_security const> security = nullptr)
        : server(std::move(store_door), 2, 0, 7, times, {}, std::move(security)),
          store({at}, rank, 2, 0, soon()),
          other({at}, 1 - rank, 2, 0, soon()) {
        mine.from = rank;
        mine.size = 2;
        mine.nonce = store.nonce();
        for (std::size_t each = 0; each < doors.size(); ++each)
            addresses.push_back({doors[each].local_endpoint(), "pid " + std::to_string(70 + each)});
    }
    /// What the mesh says that connects this rank to the other.
    std::string said() {
        std::vector<ddp::detail::tcp_mesh::connection> all;
        ddp::detail::tcp_mesh mesh(mine, addresses, doors[static_cast<std::size_t>(mine.from)], store, times);
        return ddp::test::thrown_by([&] { mesh.connect(all); });
    }
    /// Takes the next connection to a rank's door; -1: none has come.
    [[nodiscard]] int visitor_of(std::size_t rank) {
        int const door = doors[rank].native_handle();
        return ddp::detail::poll_until(door, POLLIN, soon()) ? ::accept(door, nullptr, nullptr) : -1;
    }
    /// What the store has told all ranks, once it has.
    std::string told() {
        return ddp::test::thrown_by([&] {
            for (auto const until = soon(); ddp::monotonic_clock::now() < until; std::this_thread::sleep_for(1ms))
                store.check();
        });
    }
    static ddp::time_point soon() { return ddp::monotonic_clock::now() + 5s; }
    static ddp::detail::tcp_acceptor listen() {
        ddp::detail::tcp_acceptor door(ddp::tcp_context());
        if (ddp::detail::listen_at(door, {boost::asio::ip::make_address("127.0.0.1"), 0}))
            throw std::runtime_error("no port");
        return door;
    }

    ddp::timing times = ddp::timing::for_tests();
    ddp::detail::tcp_acceptor store_door = listen();
    ddp::detail::tcp_endpoint at = store_door.local_endpoint();
    std::array<ddp::detail::tcp_acceptor, 2> doors{listen(), listen()};
    ddp::tcp_store_server server;
    ddp::tcp_store store, other;
    ddp::detail::peer_hello mine;
    std::vector<ddp::detail::peer_address> addresses;
};

}  // namespace

TEST_CASE("a stranger that does not go on is hung up on when a handshake's time is over", "[rendezvous][tcp]") {
    half_a_job zero(0);
    zero.times.join = 4s;
    auto waits = std::async(std::launch::async, [&] { return zero.said(); });
    ddp::detail::store_hello const hello;
    for (auto const& [port, magic] :
         {std::pair(zero.at.port(), hello.magic), std::pair(zero.addresses[0].at.port(), zero.mine.magic)}) {
        int const fd = dial(port);
        auto const since = ddp::monotonic_clock::now();
        CHECK(::write(fd, &magic, 4) == 4);
        CHECK(ddp::detail::poll_until(fd, POLLIN, since + zero.times.handshake + 1500ms));
        char byte;
        CHECK(::recv(fd, &byte, 1, MSG_DONTWAIT) <= 0);
        CHECK(ddp::monotonic_clock::now() - since >= zero.times.handshake / 2);  // and no earlier: it may yet go on
        ::close(fd);
    }
    CHECK(has(waits.get(), "rank 1"));
}

TEST_CASE("a rank that may open no more descriptors says what each was for", "[rendezvous][tcp]") {
    if (ddp::test::sanitizers_leave_out("no descriptors")) return;  // they need some too
    ddp::detail::tcp_socket const first(ddp::tcp_context());        // Asio has opened its own
    std::string const why = ": Too many open files";
    listener const at;
    auto const said = [](ddp::job const& j, ddp::tcp_options const& options) {
        ddp::test::descriptors_left const few(0);
        return outcome(j, options);
    };
    std::string const free = std::to_string(listener(false).port);
    CHECK(has(said(job_of(0, 2, static_cast<std::uint16_t>(std::stoi(free))), quick()),
              " cannot open a socket that listens at 127.0.0.1:" + free + why));
    CHECK(has(said(job_of(1, 2, at.port), quick()),
              " cannot open a socket to rank 0 at 127.0.0.1:" + std::to_string(at.port) + why));
    CHECK(has(
        ddp::detail::too_many_files(0, 2, "any socket", ENFILE).what(),
        " cannot open any socket: Too many open files in system. Raise the limit of that host (sysctl fs.file-max)"));
    ddp::tcp_options inherits = quick();
    inherits.listen_descriptor = at.inherit();
    CHECK(has(said(job_of(0, 2, at.port), inherits), " cannot open what serves the other ranks" + why));

    half_a_job one(1), zero(0);
    int const visitor = dial(zero.addresses[0].at.port());
    {
        ddp::test::descriptors_left const few(0);
        CHECK(has(one.said(), " cannot open a socket to rank 0 (pid 70) at 127.0.0.1:"));
        CHECK(has(zero.said(), " cannot open the sockets of rank 1 (pid 71) at 127.0.0.1:"));
    }
    ::close(visitor);
}

TEST_CASE("a rank that cannot start the thread of its heartbeats says so, and rank 0 whose output to look at",
          "[rendezvous][tcp]") {
    auto times = ddp::timing::for_tests();
    times.join = 10s;  // nobody waits for it
    ddp::detail::tcp_acceptor acceptor(ddp::tcp_context());
    REQUIRE_FALSE(ddp::detail::listen_at(acceptor, {boost::asio::ip::make_address("127.0.0.1"), 0}));
    ddp::detail::tcp_endpoint const zero = acceptor.local_endpoint();
    ddp::tcp_store_server server(std::move(acceptor), 2, 0, 7, times);
    auto const until = ddp::monotonic_clock::now() + 5s;
    ddp::tcp_store first({zero}, 0, 2, 0, until, false, {}, times);
    std::string said;
    {
        ddp::test::no_room_for_stacks const while_it_joins;
        said = outcome(job_of(1, 2, zero.port()), quick(times));
    }
    CAPTURE(said);
    CHECK(has(said, "DDP-E101 environment: the thread that sends this rank's heartbeats to rank 0 did not start: "));
    CHECK(has(said, ". Raise the limit on threads (ulimit -u) or memory (ulimit -v)"));
    std::string const told = ddp::test::thrown_by([&] { static_cast<void>(first.all("rank/", 2, until)); });
    CAPTURE(told);
    CHECK((has(told, "rank 1 (pid ") && has(told, "; its own output says why")));
    CHECK(ddp::monotonic_clock::now() < until - 3s);
}

TEST_CASE("another program in the place of a rank is no rank, and what it publishes no address", "[rendezvous][tcp]") {
    struct lie {
        std::uint64_t magic = 0, nonce = 0;
        int from = 0;
    };
    for (auto const& [magic, nonce, from] : {lie{.magic = 1}, lie{.nonce = 1}, lie{.from = 1}}) {
        CAPTURE(magic, nonce, from);
        half_a_job one(1);
        ddp::detail::peer_hello answer = one.mine;
        answer.magic += magic;
        answer.nonce += nonce;
        answer.from = from;
        auto other = std::async(std::launch::async, [&] {
            int const fd = one.visitor_of(0);
            return ::write(fd, &answer, sizeof answer) == static_cast<ssize_t>(sizeof answer) ? fd : -1;
        });
        std::string const text = one.said();
        CAPTURE(text);
        CHECK(has(text, "what answers rank 1 at the address of rank 0 (pid 70) at 127.0.0.1:"));
        CHECK(has(text, " is another program. Start the job again"));
        CHECK(::close(other.get()) == 0);
    }

    half_a_job one(1);
    one.times.join = 30s;
    std::atomic<bool> over{false};
    auto other = std::async(std::launch::async, [&] {  // whoever comes is hung up on
        while (!over) {
            ddp::detail::poll_until(one.doors[0].native_handle(), POLLIN, ddp::monotonic_clock::now() + 10ms);
            if (int const fd = ::accept(one.doors[0].native_handle(), nullptr, nullptr); fd >= 0) ::close(fd);
        }
    });
    std::string const text = one.said();
    over = true;
    other.get();
    CAPTURE(text);
    CHECK(has(text, "rank 0 (pid 70) at 127.0.0.1:"));
    CHECK(has(text, " closed 101 connections of rank 1 one after the other"));
    half_a_job zero(0);
    zero.times.join = 100ms;
    CHECK(has(zero.said(), "rank 0 was not reached by rank 1 (pid 71) at 127.0.0.1:"));
    CHECK(has(zero.said(), ", though all reach rank 0. Check firewalls between the hosts"));

    for (std::string const wrong : {"", "x", "9", "9 nowhere pid 1", "70000 127.0.0.1 pid 1"})
        CHECK_THROWS_WITH(ddp::detail::peer_address::parse(wrong),
                          Catch::Contains("a rank published '" + wrong +
                                          "' where its address was expected. All ranks must run the same program"));
}

TEST_CASE("the store refuses a rank that cannot be, and says so when it fails or ends", "[rendezvous][tcp]") {
    half_a_job zero(0);
    for (int const rank : {-1, 2})
        CHECK(has(
            ddp::test::thrown_by([&] { ddp::tcp_store({zero.at}, rank, 2, 0, half_a_job::soon()); }),
            "rank " + std::to_string(rank) + " (" + ddp::detail::this_process() + ") does not exist in a job of 2"));

    struct fails_later : ddp::tcp_security {
        std::atomic<int> mutable made{0};
        [[nodiscard]] std::unique_ptr<ddp::tcp_channel> channel(bool) const override {
            if (++made > 2) throw std::runtime_error("there is no channel left");
            return nullptr;
        }
    };
    half_a_job failing(0, std::make_shared<fails_later const>());
    int const next = dial(failing.at.port());
    CHECK(has(failing.told(), "DDP-E201 rendezvous: the rendezvous failed: there is no channel left"));
    ::close(next);

    listener const at;
    auto one = std::async(std::launch::async, outcome, job_of(1, 2, at.port), quick());
    int const fd = ::accept(at.fd, nullptr, nullptr);
    std::string greeting;
    ddp::detail::append(greeting, ddp::bytes_of(ddp::detail::store_head{ddp::detail::store_op::ok, 0, 8, 0}));
    greeting += "nonce123";
    CHECK(::write(fd, greeting.data(), greeting.size()) == static_cast<ssize_t>(greeting.size()));
    ::close(fd);
    std::string const text = one.get();
    CAPTURE(text);
    CHECK(has(text, "the connection to rank 0 at 127.0.0.1:" + std::to_string(at.port) +
                        " broke during start-up: rank 0 ended (its output says why), or another program"));
}

TEST_CASE("a rank listens at an address and a port that are its own, and is one of the job", "[rendezvous][tcp]") {
    for (auto const& [rank, size] : {std::pair(2, 2), std::pair(-1, 2), std::pair(0, 0)})
        CHECK(has(outcome(job_of(rank, size, 1), quick()), "connect_tcp: job.rank must be in [0, job.size)"));
    ddp::job j = job_of(0, 2, 29500);
    j.master_addr = "192.0.2.1";
    ddp::tcp_options open = quick();
    open.insecure = true;
    std::string const text = outcome(j, open);
    CAPTURE(text);
    CHECK(has(text,
              "rank 0 cannot listen on 192.0.2.1:29500: Cannot assign requested address. MASTER_ADDR must be an "
              "address of the host that runs rank 0"));

    int least = 0;  // of the ports that anybody may have
    std::ifstream("/proc/sys/net/ipv4/ip_unprivileged_port_start") >> least;
    if (least < 2) {
        WARN("not tried: a port that may not be used, because here every user may use all");
        return;
    }
    listener const at;
    ddp::tcp_options zero = quick(), low = quick();
    zero.listen_descriptor = at.inherit();
    low.ports = "1";
    auto other = std::async(std::launch::async, outcome, job_of(0, 2, at.port), zero);
    ::uid_t const own = ::geteuid();
    if (own == 0 && ::seteuid(65534) != 0) {
        WARN("not tried: a port that may not be used, because root cannot become another user here");
        return;
    }
    std::string const refused = outcome(job_of(1, 2, at.port), low);
    REQUIRE(::seteuid(own) == 0);
    for (std::string const& told : {refused, other.get()})
        CHECK(has(told, "rank 1 cannot listen on 127.0.0.1: Permission denied"));
}

TEST_CASE("what cannot be run says why, and what can", "[rendezvous]") {
    auto const said = [](ddp::run_options const& options) {
        return ddp::test::thrown_by([&] { ddp::run<ddp::threads>(options, [](ddp::communicator<>&) {}); });
    };
    std::string const code = "DDP-E101 environment: ";
    CHECK(said({.ranks = -1}) ==
          code + "run_options.ranks is -1; expected how many ranks there are, or 0: as many as the launcher says");
    CHECK(said({.ranks = 1025}) == code +
                                       "run_options.ranks is 1025, but one process can run at most 1024 ranks as "
                                       "threads; ask for fewer, or start processes with ddprun or mpirun");
    CHECK(said({.transport = "pigeons"}) ==
          code +
              "transport 'pigeons' is not one this program was built with: inproc. Add it to ddp::run<...> and link "
              "its target (ddp::tcp, ddp::mpi).");
    std::string_view const only_tcp = "tcp";
    CHECK(ddp::test::thrown_by([&] { ddp::detail::expect_alone({.ranks = 3}, {&only_tcp, 1}); }) ==
          code +
              "3 ranks were asked for, but nothing started them: use ddprun -n 3 or mpirun -n, or add ddp::threads to "
              "ddp::run<...> for ranks that are threads.");
}

TEST_CASE("a secret that is refused says how to make one, or how it was lost", "[rendezvous][tcp]") {
    auto const refusal = [] {
        return ddp::test::thrown_by([] { static_cast<void>(ddp::job_secret::from_environment()); });
    };
    {
        secret_in_a_file const brief("0123456789abcde");
        CHECK(has(refusal(), "DDP_SECRET_FILE is \"" + brief.path +
                                 "\", which holds no secret of 16 to 64 bytes. Make one with: (umask 077; head -c 32 "
                                 "/dev/urandom > FILE)"));
    }
    ::setenv("DDP_SECRET_FILE", "/no/such/file", 1);
    CHECK(has(refusal(),
              "DDP_SECRET_FILE is \"/no/such/file\", which cannot be opened: No such file or directory. Make "));
    ::unsetenv("DDP_SECRET_FILE");
    ::setenv("DDP_SECRET_FD", "1048576", 1);
    CHECK(has(refusal(),
              "DDP_SECRET_FD is 1048576, which is not open. Programs between ddprun and this one must pass "
              "the descriptor on"));
    ::unsetenv("DDP_SECRET_FD");
}

TEST_CASE("a launcher that this program does not understand is named, with what to do", "[rendezvous]") {
    using names = std::vector<std::string_view>;
    struct launched {
        char const* variable;
        names choices;
        char const* remedy;
    };
    for (auto const& [variable, choices, remedy] :
         {launched{"WORLD_SIZE",
                   {"inproc"},
                   "Add ddp::tcp to ddp::run<...> (<ddp/rendezvous/run_tcp.hpp>, target ddp::tcp)."},
          launched{"SLURM_STEP_NUM_TASKS",
                   {"mpi", "tcp"},
                   "This launcher has not started them as an MPI program; with srun, add --mpi=pmix."},
          launched{
              "PMI_SIZE",
              {"inproc", "tcp"},
              "Start it with ddprun -n 4 instead, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or build it "
              "with MPI: add ddp::mpi to ddp::run<...> (<ddp/rendezvous/run_mpi.hpp>, target ddp::mpi)."},
          launched{
              "OMPI_COMM_WORLD_SIZE",
              {"inproc"},
              "Build it with MPI: add ddp::mpi to ddp::run<...> (<ddp/rendezvous/run_mpi.hpp>, target ddp::mpi)."}}) {
        ::setenv(variable, "4", 1);
        std::string const text = ddp::test::thrown_by([&from = choices] { ddp::detail::expect_alone({}, from); });
        ::setenv(variable, "1", 1);
        CHECK_NOTHROW(ddp::detail::expect_alone({}, choices));
        ::unsetenv(variable);
        CHECK(text == std::string("DDP-E101 environment: ") + variable +
                          "=4 says that this program is one of 4, but it knows nothing about the others: each would "
                          "train alone. " +
                          remedy);
    }
}
