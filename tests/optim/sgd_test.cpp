#include <ddp/optim/sgd.hpp>

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "optim/textbook.hpp"
#include "support/catch.hpp"

namespace {

/// torch.optim.SGD as its manual writes it: no buffer before the first step, and dampening 0.
struct textbook_sgd {
    ddp::sgd with;
    std::vector<double> value;
    std::vector<double> buffer = {};

    void step(double lr, double scale, std::vector<double> const& gradient) {
        bool const first = buffer.empty();
        buffer.resize(value.size());
        for (std::size_t i = 0; i < value.size(); ++i) {
            double g = scale * gradient[i];
            if (with.weight_decay != 0) g += with.weight_decay * value[i];
            if (with.momentum != 0) {
                buffer[i] = first ? g : with.momentum * buffer[i] + g;
                g = with.nesterov ? g + with.momentum * buffer[i] : buffer[i];
            }
            value[i] -= lr * g;
        }
    }
};

}  // namespace

TEMPLATE_TEST_CASE("sgd follows the textbook", "[optim][sgd]", float, double) {
    auto const optimizer =
        GENERATE(ddp::sgd{.lr = 0.1}, ddp::sgd{.lr = 0.1, .weight_decay = 0.01}, ddp::sgd{.lr = 0.05, .momentum = 0.9},
                 ddp::sgd{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01},
                 ddp::sgd{.lr = 0.05, .momentum = 0.9, .nesterov = true},
                 ddp::sgd{.lr = 0.05, .momentum = 0.8, .weight_decay = 0.1, .nesterov = true});
    auto const scale = GENERATE(1.0, 0.25, 0.3);
    CAPTURE(optimizer.momentum, optimizer.weight_decay, optimizer.nesterov, scale);

    test::mixed_values random(11);
    auto const start = random.vector<TestType>(37);
    test::stepped_range<TestType> range(start, optimizer.slot_count());
    textbook_sgd expected{optimizer, {start.begin(), start.end()}};
    for (std::uint64_t step = 1; step <= 20; ++step) {
        auto const gradient = random.vector<TestType>(37);
        double const rate = optimizer.learning_rate() / static_cast<double>(step);
        range.step(optimizer, {.step = step, .learning_rate = rate, .gradient_scale = scale}, gradient);
        expected.step(rate, scale, {gradient.begin(), gradient.end()});
    }
    REQUIRE(test::distance(range.value, expected.value) < (sizeof(TestType) == 4 ? 2e-5 : 1e-13));
}

TEST_CASE("sgd by hand: two steps with momentum", "[optim][sgd]") {
    ddp::sgd const optimizer{.lr = 0.5, .momentum = 0.5};
    test::stepped_range<double> range({1.0}, 1);
    range.step(optimizer, {.step = 1, .learning_rate = 0.5}, {2.0});
    REQUIRE(range.slots[0][0] == 2.0);
    REQUIRE(range.value[0] == 0.0);
    range.step(optimizer, {.step = 2, .learning_rate = 0.5}, {4.0});
    REQUIRE(range.slots[0][0] == 5.0);
    REQUIRE(range.value[0] == -2.5);
}

TEST_CASE("sgd keeps state only for momentum", "[optim][sgd]") {
    REQUIRE(ddp::sgd{}.slot_count() == 0);
    REQUIRE(ddp::sgd{.momentum = 0.9}.slot_count() == 1);
}

TEST_CASE("sgd without weight decay makes no NaN of an infinite value", "[optim][sgd]") {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    test::stepped_range<float> range(std::vector<float>(9, infinity), 0);
    range.step(ddp::sgd{}, {.step = 1, .learning_rate = 0.1}, std::vector<float>(9, 1.0F));
    for (float const value : range.value) REQUIRE(value == infinity);
}
