// What is promised of every transport, over TCP on loopback: the conformance suite, all collectives, trainings with the
// bits of inproc. Ranks are threads here; tests/process repeats what matters with processes.
#include <memory>
#include <string>
#include <vector>

#include <ddp/testing/conformance.hpp>

#include "support/catch.hpp"
#include "support/group_checks.hpp"
#include "support/job_checks.hpp"
#include "support/loopback.hpp"

using ddp::test::loopback_world;
using ddp::test::on_ranks;

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
