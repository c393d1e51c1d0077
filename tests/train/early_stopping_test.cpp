// When training stops: by the metrics alone, and at the same update on every rank.
#include <ddp/train/early_stopping.hpp>

#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

/// The update, counted from 1, after which training stops; 0: it does not.
std::size_t stops_at(early_stopping stopping, std::vector<double> const& metrics) {
    for (double const metric : metrics)
        if (stopping.update(metric)) return stopping.updates();
    return 0;
}

}  // namespace

static_assert(std::is_trivially_copyable_v<early_stopping>);

TEST_CASE("training stops once the patience is used up, and an improvement starts it anew", "[train]") {
    early_stopping const three{{.patience = 3}};
    CHECK(stops_at(three, {5, 4, 3, 2, 1, 0}) == 0);
    CHECK(stops_at(three, {5, 6, 6, 6}) == 4);
    CHECK(stops_at(three, {5, 6, 6, 4, 6, 6, 3, 9, 9, 9}) == 10);
    CHECK(stops_at(three, {5, 5, 5, 5}) == 4);  // as good is not better
    CHECK(stops_at(early_stopping{{.patience = 1}}, {5, 4, 4, 3}) == 3);

    early_stopping const up{{.patience = 2, .better = better::higher}};
    CHECK(stops_at(up, {0.5, 0.6, 0.7, 0.6, 0.65}) == 5);
    CHECK(stops_at(up, {-3, -2, -1, 0, 1}) == 0);
}

TEST_CASE("an improvement is one by more than min_delta over the best", "[train]") {
    early_stopping const by_half{{.patience = 2, .min_delta = 0.5}};
    CHECK(stops_at(by_half, {5, 4.5, 4.5}) == 3);
    CHECK(stops_at(by_half, {5, 4.75, 4.25, 4.0, 3.75, 3.5}) == 5);  // 4.25 counts: it is measured from 5
    CHECK(stops_at(early_stopping{{.patience = 2, .min_delta = 0.5, .better = better::higher}},
                   {1, 1.5, 1.75, 2, 2.25}) == 5);
}

TEST_CASE("the best metric is told, and when it was seen", "[train]") {
    early_stopping stopping{{.patience = 3}};
    CHECK(stopping.best() == infinity);
    CHECK((stopping.best_update() == 0 && !stopping.improved() && !stopping.stopped()));
    stopping.update(5);
    CHECK((stopping.best() == 5 && stopping.best_update() == 1 && stopping.improved()));
    stopping.update(4);
    stopping.update(6);
    CHECK((stopping.best() == 4 && stopping.best_update() == 2 && !stopping.improved() && stopping.updates() == 3));
    stopping.update(4);
    CHECK(stopping.update(4));
    CHECK((stopping.stopped() && stopping.best_update() == 2));
    CHECK_FALSE(stopping.update(3));  // whoever goes on has a chance
    CHECK((stopping.improved() && !stopping.stopped()));
    CHECK(early_stopping{{.better = better::higher}}.best() == -infinity);
}

TEST_CASE("NaN and the worst infinity are no improvement", "[train]") {
    early_stopping const two{{.patience = 2}};
    CHECK(stops_at(two, {not_a_number, not_a_number}) == 2);
    CHECK(stops_at(two, {5, not_a_number, 4, not_a_number, not_a_number, 3}) == 5);
    CHECK(stops_at(two, {infinity, infinity}) == 2);
    CHECK(stops_at(two, {infinity, 5, 4, 3}) == 0);
    early_stopping best{{.patience = 2, .better = better::higher}};
    best.update(not_a_number);
    CHECK_FALSE(best.improved());
    best.update(-infinity);
    CHECK((best.stopped() && best.best_update() == 0));
    best.update(7);
    CHECK((best.best() == 7 && best.improved()));
}

TEST_CASE("numbers that make no early stopping are refused", "[train]") {
    REQUIRE_THROWS_WITH(
        early_stopping({.patience = 0}),
        Catch::Contains("early_stopping: patience counts updates without an improvement, and is at least 1"));
    for (double const delta : {-1.0, not_a_number, infinity})
        REQUIRE_THROWS_WITH(early_stopping({.min_delta = delta}),
                            Catch::Contains("early_stopping: min_delta must be a finite number >= 0; set `better` to "
                                            "the direction of improvement"));
}

TEST_CASE("ranks that pass different metrics stop together, by rank 0's", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const got = ranks_over(
        tcp, ranks,
        [](auto& comm) {
            std::vector<double> seen;
            // Other ranks would stop at another time, by their metrics and by their patience.
            early_stopping stopping{{.patience = comm.rank() == 0 ? 3u : 1u + static_cast<unsigned>(comm.rank())}};
            std::vector<double> const of_zero = {5, 6, 4, 7, 7, 7, 1};
            for (std::size_t k = 0; k < of_zero.size(); ++k) {
                bool const enough = stopping.update(comm, comm.rank() == 0 ? of_zero[k]
                                                          : k % 2 == 0     ? not_a_number
                                                                           : 10.0 - static_cast<double>(k));
                seen.insert(seen.end(), {stopping.best(), static_cast<double>(stopping.best_update()),
                                         stopping.improved() ? 1.0 : 0.0});
                if (enough) break;
            }
            return seen;
        },
        patient());
    for (auto const& seen : got)
        REQUIRE(seen == std::vector<double>{5, 1, 1, 5, 1, 0, 4, 3, 1, 4, 3, 0, 4, 3, 0, 4, 3, 0});
}

TEST_CASE("a rank that dies instead of deciding is named to those who decide", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    if (ranks == 1) return;
    for (int const dead : {0, ranks - 1}) {
        CAPTURE(ranks, tcp, dead);
        auto const errors = errors_over(
            tcp, ranks,
            [dead](auto& comm) {
                if (comm.rank() == dead) throw std::runtime_error("out of disk");
                early_stopping stopping;
                for (;;) stopping.update(comm, 1.0);  // who only hears from others may be told later
            },
            patient());
        for (int rank = 0; rank < ranks; ++rank) {
            std::string const& said = errors[static_cast<std::size_t>(rank)];
            CAPTURE(rank, said);
            CHECK(said.find(rank == dead ? "out of disk" : "rank " + std::to_string(dead)) != std::string::npos);
        }
    }
}
