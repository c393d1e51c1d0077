// MASTER_ADDR as a name: of a host that the name service learns of late, and of a host with an address that answers nothing.
#include <ddp/rendezvous/bootstrap.hpp>
#include <ddp/rendezvous/run_tcp.hpp>

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/listener.hpp"

namespace {

using namespace std::chrono_literals;

std::atomic<int> unknown_for{0};  // so many questions for "late.test" find nothing
std::atomic<int> questions{0};

using resolver = int (*)(char const*, char const*, ::addrinfo const*, ::addrinfo**);

}  // namespace

/// The system's, but for two names.
extern "C" int getaddrinfo(char const* name, char const* service, ::addrinfo const* wanted, ::addrinfo** found) {
    static auto const systems = reinterpret_cast<resolver>(::dlsym(RTLD_NEXT, "getaddrinfo"));
    if (name != nullptr && std::strcmp(name, "late.test") == 0) {
        ++questions;
        // A cluster's name service answers either way, by whether the name is there already without an address.
        if (int const left = unknown_for--; left > 0) return left % 2 == 0 ? EAI_NODATA : EAI_NONAME;
        return systems("127.0.0.1", service, wanted, found);
    }
    if (name != nullptr && std::strcmp(name, "two.test") == 0) {
        ::addrinfo* second = nullptr;
        if (int const problem = systems("127.0.0.2", service, wanted, found)) return problem;
        if (int const problem = systems("127.0.0.1", service, wanted, &second)) return problem;
        ::addrinfo* last = *found;
        while (last->ai_next != nullptr) last = last->ai_next;
        last->ai_next = second;
        return 0;
    }
    return systems(name, service, wanted, found);
}

namespace {

/// What connect_tcp says on this rank of two; "" if it connected.
std::string outcome(int rank, std::string const& master, ddp::test::listener const& at, ddp::timing const& times) {
    ddp::job j;
    j.rank = rank;
    j.size = 2;
    j.master_addr = master;
    j.master_port = at.port;
    ddp::tcp_options options;
    options.times = times;
    if (rank == 0) options.listen_descriptor = at.inherit();
    try {
        auto const transport = ddp::connect_tcp(j, options);
        return transport->size() == 2 ? "" : "another size";
    } catch (std::exception const& e) {
        return e.what();
    }
}
std::string outcome_of_rank_1(std::string const& master, ddp::test::listener const& at, ddp::timing const& times) {
    auto zero = std::async(std::launch::async, [&] { return outcome(0, "127.0.0.1", at, times); });
    std::string const one = outcome(1, master, at, times);
    std::string const said = zero.get();
    return one.empty() ? said : one;
}

/// 127.0.0.2 at a port, where packets that ask for a connection are dropped.
class black_hole {
public:
    explicit black_hole(std::uint16_t port) {
        ::sockaddr_in at{};
        at.sin_family = AF_INET;
        at.sin_port = htons(port);
        at.sin_addr.s_addr = ::inet_addr("127.0.0.2");
        int const fd = add();
        if (::bind(fd, reinterpret_cast<::sockaddr*>(&at), sizeof at) != 0 || ::listen(fd, 0) != 0)
            throw std::runtime_error("127.0.0.2 cannot be listened at");
        for (int filler = 0; filler < 4; ++filler)  // more than its queue has room for
            (void)::connect(add(), reinterpret_cast<::sockaddr*>(&at), sizeof at);
    }
    black_hole(black_hole const&) = delete;
    black_hole& operator=(black_hole const&) = delete;
    ~black_hole() {
        for (int const fd : all_) ::close(fd);
    }

private:
    int add() {
        all_.push_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | (all_.empty() ? 0 : SOCK_NONBLOCK), 0));
        return all_.back();
    }
    std::vector<int> all_;
};

}  // namespace

TEST_CASE("a name that has no address yet is asked for again until the time to join is over", "[rendezvous][tcp]") {
    ddp::timing times = ddp::timing::for_tests();
    times.join = 20s;
    ddp::test::listener const at;
    unknown_for = 3, questions = 0;
    CHECK(outcome_of_rank_1("late.test", at, times) == "");
    CHECK(questions == 4);

    times.join = 300ms;
    unknown_for = 1000, questions = 0;
    std::string const text = outcome(1, "late.test", at, times);
    CAPTURE(text);
    CHECK(text.find("DDP-E201 rendezvous: MASTER_ADDR \"late.test\" has no address: ") == 0);
    CHECK(questions > 1);
}

TEST_CASE("the time to join is one, however much of it a name takes", "[rendezvous][tcp]") {
    ddp::timing times = ddp::timing::for_tests();
    times.join = 6s;
    std::uint16_t const closed = ddp::test::listener(false).port;
    ddp::job j;
    j.rank = 1;
    j.size = 2;
    j.master_addr = "late.test";
    j.master_port = closed;
    unknown_for = 8;  // about 4.5 s
    auto const since = ddp::monotonic_clock::now();
    CHECK_THROWS_WITH(ddp::connect_tcp(j, {.times = times}), Catch::Contains("rank 1 cannot reach rank 0"));
    CHECK(ddp::monotonic_clock::now() - since < 9s);  // not as much again
}

TEST_CASE("an address of rank 0 that answers nothing does not take the time of the next one", "[rendezvous][tcp]") {
    ddp::timing times = ddp::timing::for_tests();
    times.join = 30s;
    ddp::test::listener const at;
    black_hole const dark(at.port);
    auto const since = ddp::monotonic_clock::now();
    CHECK(outcome_of_rank_1("two.test", at, times) == "");
    CHECK(ddp::monotonic_clock::now() - since >= times.handshake);  // it did try the first
    CHECK(ddp::monotonic_clock::now() - since < 15s);
}

TEST_CASE("where MASTER_ADDR is a name of a loopback address, rank 0 says so if nobody comes", "[rendezvous][tcp]") {
    ddp::test::listener const at;
    unknown_for = 0;
    auto const said = [&](char const* master) -> std::string {
        ::setenv("RANK", "0", 1);
        ::setenv("WORLD_SIZE", "2", 1);
        ::setenv("MASTER_ADDR", master, 1);
        ::setenv("MASTER_PORT", std::to_string(at.port).c_str(), 1);
        ::setenv("DDP_LISTEN_FD", std::to_string(at.inherit()).c_str(), 1);
        ddp::timing times = ddp::timing::for_tests();
        times.join = 300ms;
        try {
            ddp::run<ddp::tcp>({.times = times}, [](auto&) {});
        } catch (ddp::rendezvous_error const& e) {
            return e.what();
        }
        return "no error";
    };
    using Catch::Contains;
    CHECK_THAT(said("late.test"), Contains("ranks {1} never joined") &&
                                      Contains("MASTER_ADDR \"late.test\" is 127.0.0.1") &&
                                      Contains("which other hosts cannot reach: if ranks are on several"));
    CHECK_THAT(said("127.0.0.1"), Contains("ranks {1} never joined") && !Contains("other hosts"));
    for (char const* const name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DDP_LISTEN_FD"})
        ::unsetenv(name);
}
