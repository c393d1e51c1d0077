#include <ddp/optim/schedule.hpp>

#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "support/catch.hpp"

TEST_CASE("the default schedule changes nothing", "[optim][schedule]") {
    ddp::schedule const plain;
    for (std::uint64_t const step : {0u, 1u, 1000u}) REQUIRE(plain.factor(step) == 1.0);
    REQUIRE(ddp::schedule{ddp::constant_rate{}}.factor(7) == 1.0);
}

TEST_CASE("a warm-up grows in equal increments and reaches the full rate at its end", "[optim][schedule]") {
    ddp::schedule const warm{ddp::linear_warmup{.steps = 4, .from = 0.5}};
    std::vector<double> const expected{0.5, 0.625, 0.75, 0.875, 1.0, 1.0};
    for (std::size_t step = 0; step < expected.size(); ++step) REQUIRE(warm.factor(step) == expected[step]);
}

TEST_CASE("step decay multiplies after every so many steps", "[optim][schedule]") {
    ddp::schedule const decay{ddp::step_decay{.every = 3, .factor = 0.5}};
    std::vector<double> const expected{1, 1, 1, 0.5, 0.5, 0.5, 0.25};
    for (std::size_t step = 0; step < expected.size(); ++step) REQUIRE(decay.factor(step) == expected[step]);
}

TEST_CASE("cosine decay follows half a cosine to its floor and stays there", "[optim][schedule]") {
    ddp::schedule const cosine{ddp::cosine_decay{.steps = 100, .floor = 0.1}};
    for (int step = 0; step < 100; ++step) {
        double const expected = 0.1 + 0.9 * 0.5 * (1 + std::cos(3.141592653589793238 * step / 100));
        REQUIRE(cosine.factor(static_cast<std::uint64_t>(step)) == Approx(expected).epsilon(1e-14));
    }
    REQUIRE(cosine.factor(0) == 1.0);
    REQUIRE(cosine.factor(50) == Approx(0.55).epsilon(1e-15));
    REQUIRE(cosine.factor(100) == 0.1);
    REQUIRE(cosine.factor(1'000'000) == 0.1);
}

TEST_CASE("what follows a warm-up counts from its end", "[optim][schedule]") {
    ddp::linear_warmup const warmup{.steps = 10, .from = 0.25};
    ddp::schedule const both{warmup, ddp::cosine_decay{.steps = 20}};
    ddp::schedule const alone{ddp::cosine_decay{.steps = 20}};
    REQUIRE(both.factor(0) == 0.25);
    REQUIRE(both.factor(9) < 1.0);
    for (std::uint64_t step = 0; step < 30; ++step) REQUIRE(both.factor(10 + step) == alone.factor(step));
    REQUIRE(ddp::schedule{warmup, ddp::step_decay{.every = 2, .factor = 0.5}}.factor(12) == 0.5);
}

TEST_CASE("the linear scaling rule", "[optim][schedule]") {
    REQUIRE(ddp::linear_scaling(0.1, 256, 256) == 0.1);
    REQUIRE(ddp::linear_scaling(0.1, 256, 8192) == Approx(3.2));
    REQUIRE(ddp::linear_scaling(0.1, 256, 128) == Approx(0.05));
    REQUIRE_THROWS_AS(ddp::linear_scaling(0.1, 0, 128), ddp::usage_error);
}

TEST_CASE("the schedule's hash tells every number apart", "[optim][schedule]") {
    std::vector<ddp::schedule> const schedules{
        ddp::schedule{},
        ddp::schedule{ddp::linear_warmup{.steps = 5}},
        ddp::schedule{ddp::linear_warmup{.steps = 5, .from = 0.2}},
        ddp::schedule{ddp::step_decay{}},
        ddp::schedule{ddp::step_decay{.every = 7}},
        ddp::schedule{ddp::step_decay{.factor = 0.7}},
        ddp::schedule{ddp::cosine_decay{}},
        ddp::schedule{ddp::cosine_decay{.steps = 7}},
        ddp::schedule{ddp::cosine_decay{.floor = 0.7}},
        ddp::schedule{ddp::linear_warmup{.steps = 5}, ddp::cosine_decay{}},
    };
    std::set<std::uint64_t> hashes;
    for (auto const& schedule : schedules) hashes.insert(schedule.hash());
    REQUIRE(hashes.size() == schedules.size());
    REQUIRE(ddp::schedule{}.hash() == ddp::schedule{ddp::constant_rate{}}.hash());
}

TEST_CASE("numbers that make no schedule are refused", "[optim][schedule]") {
    REQUIRE_THROWS_AS(ddp::schedule(ddp::step_decay{.every = 0}), ddp::usage_error);
    REQUIRE_THROWS_AS(ddp::schedule(ddp::step_decay{.factor = -1.0}), ddp::usage_error);
    REQUIRE_THROWS_AS(ddp::schedule(ddp::cosine_decay{.steps = 0}), ddp::usage_error);
    REQUIRE_THROWS_AS(ddp::schedule(ddp::cosine_decay{.floor = -0.1}), ddp::usage_error);
    REQUIRE_THROWS_AS(ddp::schedule(ddp::linear_warmup{.steps = 1, .from = -1.0}), ddp::usage_error);
}
