// What is promised of every transport, over TCP on loopback: the conformance suite, all collectives, trainings with the
// bits of inproc. Ranks are threads here; tests/process repeats what matters with processes.
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <ddp/comm/communicator.hpp>
#include <ddp/rendezvous/bootstrap.hpp>
#include <ddp/testing/conformance.hpp>
#include <ddp/transport/framed/tcp.hpp>

#include "support/catch.hpp"
#include "support/group_checks.hpp"
#include "support/job_checks.hpp"
#include "support/listener.hpp"

namespace {

ddp::timing patient() {
    ddp::timing times = ddp::timing::for_tests();
    times.dead = std::chrono::seconds(20);  // eight ranks, two cores, a sanitizer
    times.collective = std::chrono::seconds(60);
    times.join = std::chrono::seconds(30);
    times.handshake = std::chrono::seconds(20);
    return times;
}

/// Ranks of one job, each connecting on its own thread.
class loopback_world {
public:
    explicit loopback_world(int ranks) : ranks_(ranks) {}

    std::unique_ptr<ddp::tcp_transport> connect(int rank) const {
        ddp::job where;
        where.rank = where.local_rank = rank;
        where.size = where.local_size = ranks_;
        where.master_port = at_.port;
        ddp::tcp_options options{.times = patient()};
        if (rank == 0) options.listen_descriptor = at_.inherit();
        return ddp::connect_tcp(where, options);
    }

private:
    int ranks_;
    ddp::test::listener at_;
};

/// body(comm) on every rank.
template <class Body>
auto on_ranks(int ranks, Body const& body) {
    loopback_world const world(ranks);
    using result = decltype(body(std::declval<ddp::communicator<>&>()));
    std::vector<std::future<result>> running;
    for (int rank = 0; rank < ranks; ++rank)
        running.push_back(std::async(std::launch::async, [&world, &body, rank] {
            ddp::communicator<> comm = ddp::any_communicator(world.connect(rank), patient());
            return body(comm);
        }));
    std::vector<result> all;
    for (auto& r : running) all.push_back(r.get());
    return all;
}

}  // namespace

TEST_CASE("TCP keeps the promises of a transport", "[tcp][conformance]") {
    int const ranks = GENERATE(2, 3, 5);
    auto const world = [](int n) { return std::make_unique<loopback_world>(n); };
    CHECK(ddp::testing::check_transport(ranks, world) == std::vector<std::string>{});
}

TEST_CASE("over TCP every collective equals its oracle", "[tcp][collective]") {
    int const ranks = GENERATE(1, 2, 3, 4, 5, 7, 9);
    CAPTURE(ranks);
    for (auto const& wrong : on_ranks(ranks, [](auto& comm) { return ddp::test::check_all_collectives(comm); }))
        CHECK(wrong == ddp::test::failures{});
}

TEST_CASE("over TCP every collective works in groups of every shape, and in a grid", "[tcp][group]") {
    for (auto const& wrong : on_ranks(6, [](auto& comm) {
             auto all = ddp::test::check_groups(comm);
             for (auto const& each : ddp::test::check_grid(comm, 3)) all.push_back(each);
             return all;
         }))
        CHECK(wrong == ddp::test::failures{});
}

TEST_CASE("over TCP trainings have the bits they have over inproc", "[tcp][train]") {
    int const ranks = GENERATE(2, 3, 5, 7, 9);
    CAPTURE(ranks);
    auto const expected = ddp::test::inproc_bits(ranks);
    for (auto const& [bits, wrong] : on_ranks(ranks, [](auto& comm) { return ddp::test::train_every_way(comm); })) {
        CHECK(wrong == "");
        CHECK(bits == expected);
    }
}

TEST_CASE("over TCP buckets are reduced during backward", "[tcp][train]") {
    int const ranks = GENERATE(2, 3);
    for (auto const& wrong : on_ranks(ranks, [](auto& comm) { return ddp::test::check_overlap(comm); }))
        CHECK(wrong == ddp::test::failures{});
}
