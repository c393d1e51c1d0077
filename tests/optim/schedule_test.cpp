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

TEST_CASE("polynomial decay falls to its floor and stays there", "[optim][schedule]") {
    ddp::schedule const line{ddp::polynomial_decay{.steps = 4}};
    std::vector<double> const expected{1.0, 0.75, 0.5, 0.25, 0.0, 0.0};
    for (std::size_t step = 0; step < expected.size(); ++step) REQUIRE(line.factor(step) == expected[step]);

    ddp::schedule const cubic{ddp::polynomial_decay{.steps = 30, .power = 3, .floor = 0.2}};
    for (int step = 0; step < 30; ++step)
        REQUIRE(cubic.factor(static_cast<std::uint64_t>(step)) ==
                Approx(0.2 + 0.8 * std::pow(1 - step / 30.0, 3)).epsilon(1e-14));
    REQUIRE(cubic.factor(0) == 1.0);
    REQUIRE(cubic.factor(30) == 0.2);
    REQUIRE(cubic.factor(1'000'000) == 0.2);
}

TEST_CASE("exponential decay multiplies after every step", "[optim][schedule]") {
    ddp::schedule const halves{ddp::exponential_decay{.factor = 0.5}};
    double expected = 1;
    for (std::uint64_t step = 0; step < 20; ++step, expected *= 0.5) REQUIRE(halves.factor(step) == expected);
    REQUIRE(ddp::schedule{ddp::exponential_decay{.factor = 0.999}}.factor(700) ==
            Approx(std::pow(0.999, 700)).epsilon(1e-12));
}

TEST_CASE("one cycle rises and falls by half a cosine each", "[optim][schedule]") {
    ddp::schedule const cycle{ddp::one_cycle{.steps = 44, .initial = 0.25, .final = 0.125, .rise = 0.25}};
    constexpr double pi = 3.141592653589793238;
    for (int step = 0; step <= 10; ++step)  // the top is step 0.25 * 44 - 1
        REQUIRE(cycle.factor(static_cast<std::uint64_t>(step)) ==
                Approx(0.25 + 0.75 * 0.5 * (1 - std::cos(pi * step / 10))).epsilon(1e-14));
    for (int step = 10; step <= 43; ++step)
        REQUIRE(cycle.factor(static_cast<std::uint64_t>(step)) ==
                Approx(0.125 + 0.875 * 0.5 * (1 + std::cos(pi * (step - 10) / 33))).epsilon(1e-14));
    REQUIRE(cycle.factor(0) == 0.25);
    REQUIRE(cycle.factor(10) == 1.0);
    REQUIRE(cycle.factor(43) == 0.125);
    REQUIRE(cycle.factor(44) == 0.125);
    REQUIRE(cycle.factor(1'000'000) == 0.125);
}

TEST_CASE("one cycle at the ends of what rise may be", "[optim][schedule]") {
    ddp::schedule const falls{ddp::one_cycle{.steps = 5, .initial = 0.5, .final = 0.0, .rise = 0.0}};
    REQUIRE(falls.factor(0) == 1.0);
    REQUIRE(falls.factor(2) == 0.5);
    REQUIRE(falls.factor(4) == 0.0);
    ddp::schedule const rises{ddp::one_cycle{.steps = 5, .initial = 0.5, .final = 0.0, .rise = 1.0}};
    REQUIRE(rises.factor(0) == 0.5);
    REQUIRE(rises.factor(2) == 0.75);
    REQUIRE(rises.factor(4) == 1.0);
    REQUIRE(rises.factor(5) == 0.0);
    ddp::schedule const shortest{ddp::one_cycle{.steps = 2, .final = 0.0}};
    REQUIRE(shortest.factor(0) == 1.0);
    REQUIRE(shortest.factor(1) == 0.0);
}

TEST_CASE("what follows a warm-up counts from its end", "[optim][schedule]") {
    ddp::linear_warmup const warmup{.steps = 10, .from = 0.25};
    ddp::schedule const both{warmup, ddp::cosine_decay{.steps = 20}};
    ddp::schedule const alone{ddp::cosine_decay{.steps = 20}};
    REQUIRE(both.factor(0) == 0.25);
    REQUIRE(both.factor(9) < 1.0);
    for (std::uint64_t step = 0; step < 30; ++step) REQUIRE(both.factor(10 + step) == alone.factor(step));
    REQUIRE(ddp::schedule{warmup, ddp::step_decay{.every = 2, .factor = 0.5}}.factor(12) == 0.5);
    REQUIRE(ddp::schedule{warmup, ddp::polynomial_decay{.steps = 4}}.factor(12) == 0.5);
    REQUIRE(ddp::schedule{warmup, ddp::exponential_decay{.factor = 0.5}}.factor(12) == 0.25);
    REQUIRE(ddp::schedule{warmup, ddp::one_cycle{.steps = 5, .final = 0.0, .rise = 0.0}}.factor(12) == 0.5);
}

TEST_CASE("the linear scaling rule", "[optim][schedule]") {
    REQUIRE(ddp::linear_scaling(0.1, 256, 256) == 0.1);
    REQUIRE(ddp::linear_scaling(0.1, 256, 8192) == Approx(3.2));
    REQUIRE(ddp::linear_scaling(0.1, 256, 128) == Approx(0.05));
    REQUIRE_THROWS_WITH(ddp::linear_scaling(0.1, 0, 128),
                        Catch::Contains("linear_scaling: both batch sizes must be at least 1"));
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
        ddp::schedule{ddp::polynomial_decay{}},
        ddp::schedule{ddp::polynomial_decay{.steps = 7}},
        ddp::schedule{ddp::polynomial_decay{.power = 7}},
        ddp::schedule{ddp::polynomial_decay{.floor = 0.7}},
        ddp::schedule{ddp::exponential_decay{}},
        ddp::schedule{ddp::exponential_decay{.factor = 0.7}},
        ddp::schedule{ddp::one_cycle{}},
        ddp::schedule{ddp::one_cycle{.steps = 7}},
        ddp::schedule{ddp::one_cycle{.initial = 0.7}},
        ddp::schedule{ddp::one_cycle{.final = 0.7}},
        ddp::schedule{ddp::one_cycle{.rise = 0.7}},
    };
    std::set<std::uint64_t> hashes;
    for (auto const& schedule : schedules) hashes.insert(schedule.hash());
    REQUIRE(hashes.size() == schedules.size());
    REQUIRE(ddp::schedule{}.hash() == ddp::schedule{ddp::constant_rate{}}.hash());
}

TEST_CASE("numbers that make no schedule are refused", "[optim][schedule]") {
    REQUIRE_THROWS_WITH(ddp::schedule(ddp::step_decay{.every = 0}),
                        Catch::Contains("step_decay: every must be at least 1 step; use constant_rate for no decay"));
    REQUIRE_THROWS_WITH(ddp::schedule(ddp::step_decay{.factor = -1.0}),
                        Catch::Contains("step_decay: factor must be a finite number >= 0; 0.1 is usual"));
    REQUIRE_THROWS_WITH(ddp::schedule(ddp::cosine_decay{.steps = 0}),
                        Catch::Contains("cosine_decay: steps must be at least 1; give the number of training steps"));
    REQUIRE_THROWS_WITH(ddp::schedule(ddp::cosine_decay{.floor = -0.1}),
                        Catch::Contains("cosine_decay: floor must be a finite number >= 0; 0 is usual"));
    REQUIRE_THROWS_WITH(
        ddp::schedule(ddp::linear_warmup{.steps = 1, .from = -1.0}),
        Catch::Contains("linear_warmup: from must be a finite number >= 0; 1/k when the rate was scaled by k"));
    REQUIRE_THROWS_WITH(
        ddp::schedule(ddp::polynomial_decay{.steps = 0}),
        Catch::Contains("polynomial_decay: steps must be at least 1; give the number of training steps"));
    REQUIRE_THROWS_WITH(ddp::schedule(ddp::polynomial_decay{.power = 0}),
                        Catch::Contains("polynomial_decay: power must be at least 1; use constant_rate for no decay"));
    REQUIRE_THROWS_WITH(ddp::schedule(ddp::polynomial_decay{.floor = -0.1}),
                        Catch::Contains("polynomial_decay: floor must be a finite number >= 0; 0 is usual"));
    REQUIRE_THROWS_WITH(
        ddp::schedule(ddp::exponential_decay{.factor = -0.1}),
        Catch::Contains("exponential_decay: factor must be a finite number >= 0; a little below 1 is usual"));
    REQUIRE_THROWS_WITH(ddp::schedule(ddp::one_cycle{.steps = 1}),
                        Catch::Contains("one_cycle: steps must be at least 2; give the number of training steps"));
    REQUIRE_THROWS_WITH(ddp::schedule(ddp::one_cycle{.initial = -0.1}),
                        Catch::Contains("one_cycle: initial must be a finite number >= 0; 0.04 is usual"));
    REQUIRE_THROWS_WITH(ddp::schedule(ddp::one_cycle{.final = -0.1}),
                        Catch::Contains("one_cycle: final must be a finite number >= 0; 4e-6 is usual"));
    REQUIRE_THROWS_WITH(ddp::schedule(ddp::one_cycle{.rise = 1.1}),
                        "DDP-E100 usage: one_cycle: rise must lie in [0, 1]; 0.3 is usual");
}
