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
