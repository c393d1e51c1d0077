#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>
#include <span>
#include <vector>

#include <ddp/nn/gelu.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

TEST_CASE("gelu's gradient is the slope of its result", "[nn][gradient]") {
    nn::gelu<double> layer;
    REQUIRE(test::worst_gradient_error(layer, 7, 19) < 1e-8);
}

TEST_CASE("gelu is the function of that name", "[nn]") {
    nn::gelu<float> layer;
    std::vector<float> x{0, 30, -30, 1, -1, 3, -3, 0.1f};
    auto const y = layer.forward(nn::as_matrix(std::span<float const>(x), 2, 4), {});
    for (std::size_t i = 0; i < x.size(); ++i) {
        double const v = double(x[i]);
        double const form = 0.5 * v * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
        REQUIRE(double(y.data()[i]) == Approx(form).epsilon(1e-5).margin(1e-6));
        REQUIRE(double(y.data()[i]) == Approx(0.5 * v * (1 + std::erf(v / std::numbers::sqrt2))).margin(5e-4));
    }
    x[0] = std::numeric_limits<float>::quiet_NaN();
    REQUIRE(std::isnan(layer.forward(nn::as_matrix(std::span<float const>(x), 2, 4), {}).data()[0]));
}

TEST_CASE("gelu in place gives the same bits as into its own buffer", "[nn]") {
    nn::gelu<float> layer;
    REQUIRE(test::same_in_place(layer, 5, 37));
}

TEST_CASE("gelu by erf is PyTorch's default, with its slope", "[nn][gradient]") {
    nn::gelu_erf<double> layer;
    REQUIRE(test::worst_gradient_error(layer, 7, 19) < 1e-8);
    nn::gelu_erf<float> in_float;
    REQUIRE(test::same_in_place(in_float, 5, 37));

    struct row {
        double x, y;  // y: x times the normal distribution's value at x, from a table
    };
    for (row const r : {row{0, 0},
                        {1, 0.8413447460685429},
                        {-1, -0.15865525393145707},
                        {3, 2.9959503059051097},
                        {0.1, 0.0539827837277029}}) {
        auto const y = layer.forward(nn::as_matrix(std::span<double const>(&r.x, 1), 1, 1), {});
        REQUIRE(y.data()[0] == Approx(r.y).epsilon(1e-13).margin(1e-15));
    }

    std::vector<float> x;  // float against the C library's double, with the tails
    for (int i = -4000; i <= 4000; ++i) x.push_back(static_cast<float>(i) / 400);
    std::size_t const count = x.size();
    auto const as_rows = [&](std::vector<float> const& v) {
        return nn::as_matrix(std::span<float const>(v), 1, count);
    };
    auto const y = in_float.forward(as_rows(x), {});
    std::vector<float> dy(count, 1.0f);
    auto const dx = in_float.backward(nn::as_matrix(std::span<float>(dy), 1, count), {});
    double worst = 0, worst_slope = 0;
    for (std::size_t i = 0; i < count; ++i) {
        double const v = double(x[i]), below = 0.5 * std::erfc(-v / std::numbers::sqrt2);
        double const slope = below + v * std::exp(-v * v / 2) / std::sqrt(2 * std::numbers::pi);
        worst = std::max(worst, std::abs(double(y.data()[i]) - v * below) / std::max(1.0, std::abs(v)));
        worst_slope = std::max(worst_slope, std::abs(double(dx.data()[i]) - slope));
    }
    CAPTURE(worst, worst_slope);
    REQUIRE(worst < 3e-7);
    REQUIRE(worst_slope < 4e-7);
    x[0] = std::numeric_limits<float>::quiet_NaN();
    REQUIRE(std::isnan(in_float.forward(as_rows(x), {}).data()[0]));
    x[0] = std::numeric_limits<float>::infinity();
    REQUIRE(in_float.forward(as_rows(x), {}).data()[0] == std::numeric_limits<float>::infinity());
}
