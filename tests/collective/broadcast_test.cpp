/// \file
/// The collectives that only move values: broadcast, all_gather, gather; roots and sizes they refuse.
#include <ddp/collective/broadcast.hpp>

#include <chrono>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/ranks.hpp"

namespace {

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("broadcast, all_gather and gather bring what was sent where it belongs", "[collective][broadcast]") {
    int const ranks = GENERATE(1, 2, 3, 4, 5, 7, 8, 9);
    CAPTURE(ranks);
    ddp::timing patient = ddp::timing::for_tests();
    patient.collective = std::chrono::seconds(60);
    auto const failed =
        ddp::test::run_ranks(ranks, [](auto& comm) { return ddp::test::check_all_moves(comm); }, patient);
    for (auto const& of_rank : failed) CHECK(of_rank == ddp::test::failures{});
}

TEST_CASE("a root that is no rank is refused with advice", "[collective][broadcast]") {
    for (int const root : {-1, 2}) {
        auto const broadcast = ddp::test::errors_of_ranks(2, [&](auto& comm) {
            int value = 0;
            ddp::broadcast(comm, std::span<int>(&value, 1), root);
        });
        auto const gather = ddp::test::errors_of_ranks(2, [&](auto& comm) {
            std::vector<int> all(2);
            ddp::gather(comm, std::vector<int>{1}, std::span<int>(all), root);
        });
        CHECK(contains(broadcast[0], "is not a rank: they are numbered from 0 to "));
        CHECK(contains(gather[1], "is not a rank: they are numbered from 0 to "));
    }
}

TEST_CASE("gathers refuse memory of another size than what comes", "[collective][all_gather]") {
    auto const error = [](auto call) {
        return ddp::test::errors_of_ranks(1, [&](auto& comm) {
            std::vector<int> const mine(2);
            std::vector<int> all(3);
            call(comm, mine, std::span<int>(all));
        })[0];
    };
    CHECK(contains(error([](auto& comm, auto const& mine, auto all) { ddp::all_gather(comm, mine, all); }),
                   "`all` needs size() times as many"));
    CHECK(contains(error([](auto& comm, auto const& mine, auto all) { ddp::gather(comm, mine, all); }),
                   "`all` needs size() times as many"));
    CHECK(contains(error([](auto& comm, auto const& mine, auto all) {
                       ddp::all_gather(comm, mine, std::vector<std::size_t>{2}, all);
                   }),
                   "`counts` adds up to"));
    CHECK(contains(error([](auto& comm, auto const& mine, auto all) {
                       ddp::all_gather(comm, mine, std::vector<std::size_t>{3}, all);
                   }),
                   "for this rank"));
    CHECK(contains(error([](auto& comm, auto const& mine, auto all) {
                       ddp::all_gather(comm, mine, std::vector<std::size_t>{2, 1}, all);
                   }),
                   "one number per rank"));
}
