/// \file
/// The halves of every algorithm: reduce over arbitrary cuts, and all_gather; and the public reduce_scatter.
#include <ddp/collective/reduce_scatter.hpp>

#include <chrono>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/ranks.hpp"

TEST_CASE("reduce leaves each rank its slice, and all_gather brings all slices to all",
          "[collective][reduce_scatter]") {
    int const ranks = GENERATE(1, 2, 3, 4, 5, 6, 7, 8, 9);
    CAPTURE(ranks);
    ddp::timing patient = ddp::timing::for_tests();
    patient.collective = std::chrono::seconds(60);
    auto const failed = ddp::test::run_ranks(
        ranks,
        [](auto& comm) {
            auto all = ddp::test::check_all_halves<float>(comm);
            for (auto const& f : ddp::test::check_all_halves<double>(comm)) all.push_back(f);
            return all;
        },
        patient);
    for (auto const& of_rank : failed) CHECK(of_rank == ddp::test::failures{});
}

TEST_CASE("reduce_scatter refuses cuts that do not fit", "[collective][reduce_scatter]") {
    auto const error_with = [](std::vector<std::size_t> const& cuts) {
        return ddp::test::errors_of_ranks(1, [&](auto& comm) {
            std::vector<float> data(4);
            ddp::reduce_scatter(comm, std::span<float>(data), std::span<std::size_t const>(cuts));
        })[0];
    };
    CHECK(error_with({0, 4}) == "");
    for (std::vector<std::size_t> const& cuts : {std::vector<std::size_t>{0, 4, 4}, {0, 3}, {1, 4}, {}})
        CHECK(error_with(cuts).find("ascending positions") != std::string::npos);
}
