#include <ddp/optim/adam.hpp>

#include <cmath>
#include <cstddef>
#include <vector>

#include "optim/textbook.hpp"
#include "support/catch.hpp"

namespace {

/// Algorithm 2 of Loshchilov and Hutter, eps outside of the corrected root; both kinds of decay.
template <class O>
struct textbook_adam {
    O with;
    bool decoupled;
    std::vector<double> value;
    std::vector<double> m = std::vector<double>(value.size());
    std::vector<double> v = std::vector<double>(value.size());

    void step(int t, double lr, double scale, std::vector<double> const& gradient) {
        for (std::size_t i = 0; i < value.size(); ++i) {
            double g = scale * gradient[i];
            if (decoupled)
                value[i] *= 1 - lr * with.weight_decay;
            else
                g += with.weight_decay * value[i];
            m[i] = with.beta1 * m[i] + (1 - with.beta1) * g;
            v[i] = with.beta2 * v[i] + (1 - with.beta2) * g * g;
            double const corrected_m = m[i] / (1 - std::pow(with.beta1, t));
            double const corrected_v = v[i] / (1 - std::pow(with.beta2, t));
            value[i] -= lr * corrected_m / (std::sqrt(corrected_v) + with.eps);
        }
    }
};

template <class E, class O>
double distance_after_steps(O const& optimizer, bool decoupled, double scale) {
    constexpr std::size_t elements = 1100;  // three blocks
    test::mixed_values random(12);
    auto const start = random.vector<E>(elements);
    test::stepped_range<E> range(start, optimizer.slot_count());
    textbook_adam<O> expected{optimizer, decoupled, {start.begin(), start.end()}};
    for (int step = 1; step <= 20; ++step) {
        auto const gradient = random.vector<E>(elements);
        double const rate = optimizer.learning_rate() * (1 + 0.1 * step);
        range.step(optimizer,
                   {.step = static_cast<std::uint64_t>(step), .learning_rate = rate, .gradient_scale = scale},
                   gradient);
        expected.step(step, rate, scale, {gradient.begin(), gradient.end()});
    }
    return test::distance(range.value, expected.value);
}

template <class E>
constexpr double tolerance = sizeof(E) == 4 ? 2e-5 : 1e-12;

}  // namespace

TEMPLATE_TEST_CASE("adam follows the textbook", "[optim][adam]", float, double) {
    auto const optimizer = GENERATE(ddp::adam{}, ddp::adam{.lr = 0.01, .weight_decay = 0.1},
                                    ddp::adam{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.99, .eps = 1e-6});
    auto const scale = GENERATE(1.0, 0.3);
    CAPTURE(optimizer.lr, optimizer.weight_decay, scale);
    REQUIRE(distance_after_steps<TestType>(optimizer, false, scale) < tolerance<TestType>);
}

TEMPLATE_TEST_CASE("adamw follows the textbook", "[optim][adam]", float, double) {
    auto const optimizer = GENERATE(ddp::adamw{}, ddp::adamw{.weight_decay = 0.0},
                                    ddp::adamw{.lr = 0.01, .beta1 = 0.8, .weight_decay = 0.2});
    auto const scale = GENERATE(1.0, 0.3);
    CAPTURE(optimizer.lr, optimizer.weight_decay, scale);
    REQUIRE(distance_after_steps<TestType>(optimizer, true, scale) < tolerance<TestType>);
}

TEST_CASE("the first step of adam is the learning rate in the gradient's direction", "[optim][adam]") {
    test::stepped_range<double> range({1.0, 1.0, 1.0}, 2);
    range.step(ddp::adam{}, {.step = 1, .learning_rate = 0.25}, {1e-3, -1e3, 0.0});
    REQUIRE(range.value[0] == Approx(0.75).epsilon(1e-4));
    REQUIRE(range.value[1] == Approx(1.25).epsilon(1e-9));
    REQUIRE(range.value[2] == 1.0);
}

TEST_CASE("adam and adamw differ by where the decay goes", "[optim][adam]") {
    std::vector<double> const start{1.0, 2.0, 3.0};
    std::vector<double> const gradient{0.5, -0.5, 0.0};
    test::stepped_range<double> inside(start, 2);
    test::stepped_range<double> beside(start, 2);
    inside.step(ddp::adam{.weight_decay = 0.1}, {.step = 1, .learning_rate = 0.1}, gradient);
    beside.step(ddp::adamw{.weight_decay = 0.1}, {.step = 1, .learning_rate = 0.1}, gradient);
    REQUIRE(inside.slots[0][2] != 0.0);
    REQUIRE(beside.slots[0][2] == 0.0);
    REQUIRE(beside.value[2] == Approx(3.0 * 0.99).epsilon(1e-14));
}

TEST_CASE("adam refuses step 0", "[optim][adam]") {
    test::stepped_range<float> range({1.0F}, 2);
    REQUIRE_THROWS_WITH(
        range.step(ddp::adam{}, {.step = 0, .learning_rate = 0.1}, {1.0F}),
        Catch::Contains("adam: step_info::step counts from 1; at 0 the bias correction divides by zero"));
    REQUIRE_THROWS_WITH(
        range.step(ddp::adamw{}, {.step = 0, .learning_rate = 0.1}, {1.0F}),
        Catch::Contains("adamw: step_info::step counts from 1; at 0 the bias correction divides by zero"));
}
