#include <ddp/optim/rmsprop.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "optim/textbook.hpp"
#include "support/catch.hpp"

namespace {

/// Graves' equations 38 to 45 with torch's places of eps, rate and decay.
struct textbook_rmsprop {
    ddp::rmsprop with;
    std::vector<double> value;
    std::vector<double> mean_square = std::vector<double>(value.size());
    std::vector<double> mean = std::vector<double>(value.size());
    std::vector<double> velocity = std::vector<double>(value.size());

    void step(double lr, double scale, std::vector<double> const& gradient) {
        for (std::size_t i = 0; i < value.size(); ++i) {
            double const g = scale * gradient[i] + with.weight_decay * value[i];
            mean_square[i] += (1 - with.alpha) * (g * g - mean_square[i]);
            mean[i] += (1 - with.alpha) * (g - mean[i]);
            double const variance = with.centered ? mean_square[i] - mean[i] * mean[i] : mean_square[i];
            velocity[i] = with.momentum * velocity[i] + g / (std::sqrt(variance) + with.eps);
            value[i] -= lr * velocity[i];
        }
    }
};

std::vector<std::string> names_of(ddp::rmsprop const& optimizer) {
    auto const names = optimizer.slot_names();
    return {names.begin(), names.end()};
}

}  // namespace

TEMPLATE_TEST_CASE("rmsprop follows the textbook", "[optim][rmsprop]", float, double) {
    auto const weight_decay = GENERATE(0.0, 0.1);
    auto const momentum = GENERATE(0.0, 0.8);
    auto const centered = GENERATE(false, true);
    auto const scale = GENERATE(1.0, 0.3);
    ddp::rmsprop const optimizer{.lr = 0.002,
                                 .alpha = 0.9,
                                 .eps = 1e-3,
                                 .weight_decay = weight_decay,
                                 .momentum = momentum,
                                 .centered = centered};
    CAPTURE(weight_decay, momentum, centered, scale);

    constexpr std::size_t elements = 1100;  // three blocks
    test::mixed_values random(14);
    auto const start = random.vector<TestType>(elements);
    test::stepped_range<TestType> range(start, optimizer.slot_count());
    textbook_rmsprop expected{optimizer, {start.begin(), start.end()}};
    for (std::uint64_t step = 1; step <= 20; ++step) {
        auto const gradient = random.vector<TestType>(elements);
        double const rate = optimizer.learning_rate() * (1 + 0.1 * static_cast<double>(step));
        range.step(optimizer, {.step = step, .learning_rate = rate, .gradient_scale = scale}, gradient);
        expected.step(rate, scale, {gradient.begin(), gradient.end()});
    }
    double const bound = sizeof(TestType) == 4 ? 2e-5 : 1e-12;
    REQUIRE(test::distance(range.value, expected.value) < bound);
    REQUIRE(test::distance(range.slots[0], expected.mean_square) < bound);
    if (momentum != 0) REQUIRE(test::distance(range.slots[1], expected.velocity) < bound / optimizer.lr);
    if (centered) REQUIRE(test::distance(range.slots.back(), expected.mean) < bound);
}

TEST_CASE("rmsprop by hand: two steps with momentum", "[optim][rmsprop]") {
    ddp::rmsprop const optimizer{.lr = 0.5, .alpha = 0.75, .eps = 1.0, .momentum = 0.5};
    test::stepped_range<double> range({1.0}, 2);
    range.step(optimizer, {.step = 1, .learning_rate = 0.5}, {2.0});
    REQUIRE(range.slots[0][0] == 1.0);  // 0.25 * 4
    REQUIRE(range.slots[1][0] == 1.0);  // 2 / (1 + 1)
    REQUIRE(range.value[0] == 0.5);
    range.step(optimizer, {.step = 2, .learning_rate = 0.25}, {0.0});
    REQUIRE(range.slots[0][0] == 0.75);
    REQUIRE(range.slots[1][0] == 0.5);
    REQUIRE(range.value[0] == 0.375);
}

TEST_CASE("rmsprop keeps the state that it needs, by torch's names", "[optim][rmsprop]") {
    using words = std::vector<std::string>;
    REQUIRE(names_of({}) == words{"square_avg"});
    REQUIRE(names_of({.momentum = 0.9}) == words{"square_avg", "momentum_buffer"});
    REQUIRE(names_of({.centered = true}) == words{"square_avg", "grad_avg"});
    REQUIRE(names_of({.momentum = 0.9, .centered = true}) == words{"square_avg", "momentum_buffer", "grad_avg"});
}

TEMPLATE_TEST_CASE("centered rmsprop stays finite where the gradient does not change", "[optim][rmsprop]", float,
                   double) {
    constexpr std::size_t elements = 64;
    test::mixed_values random(15);
    auto const gradient = random.vector<TestType>(elements);
    ddp::rmsprop const optimizer{.alpha = 0.5, .centered = true};
    test::stepped_range<TestType> range(std::vector<TestType>(elements), 2);
    for (std::uint64_t step = 1; step <= 200; ++step) range.step(optimizer, {.step = step}, gradient);
    for (TestType const value : range.value) REQUIRE(std::isfinite(value));
}

TEST_CASE("rmsprop refuses hyper-parameters that make no sense", "[optim][rmsprop]") {
    REQUIRE_THROWS_WITH(ddp::rmsprop{.lr = -1.0}.validate(),
                        "DDP-E100 usage: rmsprop: lr is -1, but must be a finite number >= 0; 0.01 is usual");
    REQUIRE_THROWS_WITH(ddp::rmsprop{.alpha = 1.0}.validate(),
                        "DDP-E100 usage: rmsprop: alpha must lie in [0, 1); 0.99 is usual");
    REQUIRE_THROWS_WITH(ddp::rmsprop{.eps = 0.0}.validate(),
                        "DDP-E100 usage: rmsprop: eps must be a finite number > 0; 1e-8 is usual");
    REQUIRE_THROWS_WITH(
        ddp::rmsprop{.weight_decay = -1.0}.validate(),
        "DDP-E100 usage: rmsprop: weight_decay must be a finite number >= 0; 1e-4 is usual, 0 means none");
    REQUIRE_THROWS_WITH(ddp::rmsprop{.momentum = 1.0}.validate(),
                        "DDP-E100 usage: rmsprop: momentum must lie in [0, 1); 0.9 is usual, 0 means none");
}
