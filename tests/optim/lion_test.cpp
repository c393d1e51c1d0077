#include <ddp/optim/lion.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "optim/textbook.hpp"
#include "support/catch.hpp"

namespace {

/// Algorithm 2 of Chen et al., line by line.
struct textbook_lion {
    ddp::lion with;
    std::vector<double> value;
    std::vector<double> m = std::vector<double>(value.size());

    void step(double lr, double scale, std::vector<double> const& gradient) {
        for (std::size_t i = 0; i < value.size(); ++i) {
            double const g = scale * gradient[i];
            double const update = with.beta1 * m[i] + (1 - with.beta1) * g;
            double const sign = update == 0 ? 0 : std::copysign(1.0, update);
            value[i] = value[i] - lr * (sign + with.weight_decay * value[i]);
            m[i] = with.beta2 * m[i] + (1 - with.beta2) * g;
        }
    }
};

}  // namespace

TEMPLATE_TEST_CASE("lion follows the textbook", "[optim][lion]", float, double) {
    auto const optimizer = GENERATE(ddp::lion{.lr = 0.01}, ddp::lion{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95},
                                    ddp::lion{.lr = 0.01, .weight_decay = 0.5});
    auto const scale = GENERATE(1.0, 0.3);
    CAPTURE(optimizer.beta1, optimizer.beta2, optimizer.weight_decay, scale);

    constexpr std::size_t elements = 1100;
    test::mixed_values random(17);
    auto const start = random.vector<TestType>(elements);
    test::stepped_range<TestType> range(start, optimizer.slot_count());
    textbook_lion expected{optimizer, {start.begin(), start.end()}};
    for (std::uint64_t step = 1; step <= 20; ++step) {
        auto const gradient = random.vector<TestType>(elements);
        double const rate = optimizer.learning_rate() * (1 + 0.1 * static_cast<double>(step));
        range.step(optimizer, {.step = step, .learning_rate = rate, .gradient_scale = scale}, gradient);
        expected.step(rate, scale, {gradient.begin(), gradient.end()});
    }
    double const bound = sizeof(TestType) == 4 ? 2e-5 : 1e-12;
    REQUIRE(test::distance(range.value, expected.value) < bound);
    REQUIRE(test::distance(range.slots[0], expected.m) < bound);
}

TEST_CASE("lion moves every element by the learning rate, against the sign", "[optim][lion]") {
    test::stepped_range<double> range({1.0, 1.0, 1.0, 1.0}, 1);
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    range.step(ddp::lion{}, {.step = 1, .learning_rate = 0.25}, {1e-9, -1e9, 0.0, nan});
    REQUIRE(range.value[0] == 0.75);
    REQUIRE(range.value[1] == 1.25);
    REQUIRE(range.value[2] == 1.0);
    REQUIRE(std::isnan(range.value[3]));
}

TEST_CASE("lion's decay is beside the momentum, and in proportion to the rate", "[optim][lion]") {
    test::stepped_range<double> range({3.0}, 1);
    range.step(ddp::lion{.weight_decay = 0.5}, {.step = 1, .learning_rate = 0.5}, {0.0});
    REQUIRE(range.value[0] == 2.25);
    REQUIRE(range.slots[0][0] == 0.0);
}

TEST_CASE("lion calls its state exp_avg", "[optim][lion]") {
    auto const names = ddp::lion{}.slot_names();
    REQUIRE(std::vector<std::string>(names.begin(), names.end()) == std::vector<std::string>{"exp_avg"});
}

TEST_CASE("lion refuses hyper-parameters that make no sense", "[optim][lion]") {
    REQUIRE_THROWS_WITH(ddp::lion{.lr = -1.0}.validate(),
                        "DDP-E100 usage: lion: lr is -1, but must be a finite number >= 0; 1e-4 is usual");
    REQUIRE_THROWS_WITH(ddp::lion{.beta1 = 1.0}.validate(),
                        "DDP-E100 usage: lion: beta1 must lie in [0, 1); 0.9 is usual");
    REQUIRE_THROWS_WITH(ddp::lion{.beta2 = -0.1}.validate(),
                        "DDP-E100 usage: lion: beta2 must lie in [0, 1); 0.99 is usual");
    REQUIRE_THROWS_WITH(ddp::lion{.weight_decay = -1.0}.validate(),
                        "DDP-E100 usage: lion: weight_decay must be a finite number >= 0; 0.1 is usual, 0 means none");
}
