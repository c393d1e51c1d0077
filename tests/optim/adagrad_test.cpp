#include <ddp/optim/adagrad.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "optim/textbook.hpp"
#include "support/catch.hpp"

namespace {

/// The diagonal form of Duchi et al., with torch's decays.
struct textbook_adagrad {
    ddp::adagrad with;
    std::vector<double> value;
    std::vector<double> sum = std::vector<double>(value.size());

    void step(int t, double lr, double scale, std::vector<double> const& gradient) {
        for (std::size_t i = 0; i < value.size(); ++i) {
            double const g = scale * gradient[i] + with.weight_decay * value[i];
            sum[i] += std::pow(g, 2);
            value[i] -= lr / (1 + (t - 1) * with.lr_decay) * (g / (std::sqrt(sum[i]) + with.eps));
        }
    }
};

}  // namespace

TEMPLATE_TEST_CASE("adagrad follows the textbook", "[optim][adagrad]", float, double) {
    auto const optimizer =
        GENERATE(ddp::adagrad{}, ddp::adagrad{.lr = 0.1, .lr_decay = 0.2}, ddp::adagrad{.lr = 0.1, .eps = 0.5},
                 ddp::adagrad{.lr = 0.05, .lr_decay = 0.01, .weight_decay = 0.1});
    auto const scale = GENERATE(1.0, 0.3);
    CAPTURE(optimizer.lr_decay, optimizer.eps, optimizer.weight_decay, scale);

    constexpr std::size_t elements = 1100;  // three blocks
    test::mixed_values random(16);
    auto const start = random.vector<TestType>(elements);
    test::stepped_range<TestType> range(start, optimizer.slot_count());
    textbook_adagrad expected{optimizer, {start.begin(), start.end()}};
    for (int step = 1; step <= 20; ++step) {
        auto const gradient = random.vector<TestType>(elements);
        double const rate = optimizer.learning_rate() * (1 + 0.1 * step);
        range.step(optimizer,
                   {.step = static_cast<std::uint64_t>(step), .learning_rate = rate, .gradient_scale = scale},
                   gradient);
        expected.step(step, rate, scale, {gradient.begin(), gradient.end()});
    }
    double const bound = sizeof(TestType) == 4 ? 2e-5 : 1e-12;
    REQUIRE(test::distance(range.value, expected.value) < bound);
    REQUIRE(test::distance(range.slots[0], expected.sum) < bound);
}

TEST_CASE("adagrad by hand: two steps with a decaying rate", "[optim][adagrad]") {
    ddp::adagrad const optimizer{.lr = 1.0, .lr_decay = 1.0, .eps = 1.0};
    test::stepped_range<double> range({1.0, 7.0}, 1);
    range.step(optimizer, {.step = 1, .learning_rate = 1.0}, {3.0, 0.0});
    REQUIRE(range.slots[0][0] == 9.0);
    REQUIRE(range.value[0] == 0.25);  // 1 - 3 / (3 + 1)
    range.step(optimizer, {.step = 2, .learning_rate = 1.0}, {4.0, 0.0});
    REQUIRE(range.slots[0][0] == 25.0);
    REQUIRE(range.value[0] == Approx(0.25 - 0.5 * 4 / 6).epsilon(1e-15));
    REQUIRE(range.value[1] == 7.0);
}

TEST_CASE("adagrad calls its state as torch does", "[optim][adagrad]") {
    auto const names = ddp::adagrad{}.slot_names();
    REQUIRE(std::vector<std::string>(names.begin(), names.end()) == std::vector<std::string>{"sum"});
}

TEST_CASE("adagrad refuses step 0", "[optim][adagrad]") {
    test::stepped_range<float> range({1.0F}, 1);
    REQUIRE_THROWS_WITH(range.step(ddp::adagrad{}, {.step = 0, .learning_rate = 0.1}, {1.0F}),
                        Catch::Contains("adagrad: step_info::step counts from 1; the decay of the rate begins there"));
}

TEST_CASE("adagrad refuses hyper-parameters that make no sense", "[optim][adagrad]") {
    REQUIRE_THROWS_WITH(ddp::adagrad{.lr = -1.0}.validate(),
                        "DDP-E100 usage: adagrad: lr is -1, but must be a finite number >= 0; 0.01 is usual");
    REQUIRE_THROWS_WITH(ddp::adagrad{.lr_decay = -1.0}.validate(),
                        "DDP-E100 usage: adagrad: lr_decay must be a finite number >= 0; 0 means none");
    REQUIRE_THROWS_WITH(ddp::adagrad{.eps = 0.0}.validate(),
                        "DDP-E100 usage: adagrad: eps must be a finite number > 0; 1e-10 is usual");
    REQUIRE_THROWS_WITH(
        ddp::adagrad{.weight_decay = -1.0}.validate(),
        "DDP-E100 usage: adagrad: weight_decay must be a finite number >= 0; 1e-4 is usual, 0 means none");
}
