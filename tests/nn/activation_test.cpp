#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include <ddp/nn/activation.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

TEST_CASE("relu's and tanh's gradients are the slopes of their results", "[nn][gradient]") {
    auto const rows = GENERATE(std::size_t{1}, std::size_t{7});
    auto const columns = GENERATE(std::size_t{1}, std::size_t{19});
    CAPTURE(rows, columns);
    nn::relu<double> relu;
    nn::tanh<double> tanh;
    REQUIRE(test::worst_gradient_error(relu, rows, columns) < 1e-8);
    REQUIRE(test::worst_gradient_error(tanh, rows, columns) < 1e-8);
}

TEST_CASE("relu keeps what is positive, stops what is not, and lets NaN through", "[nn]") {
    nn::relu<float> relu;
    std::vector<float> const x{-1, 0, 2, std::numeric_limits<float>::quiet_NaN(), -0.5f, 3};
    auto const y = relu.forward(nn::as_matrix(std::span<float const>(x), 2, 3), {});
    REQUIRE(y(0, 0) == 0.0f);
    REQUIRE(y(0, 1) == 0.0f);
    REQUIRE(y(0, 2) == 2.0f);
    REQUIRE(std::isnan(y(1, 0)));
    REQUIRE(y(1, 1) == 0.0f);
    REQUIRE(y(1, 2) == 3.0f);

    std::vector<float> dy{5, 5, 5, 5, 5, 5};
    auto const dx = relu.backward(nn::as_matrix(std::span<float>(dy), 2, 3), {});
    REQUIRE(std::vector<float>(dx.data(), dx.data() + 6) == std::vector<float>{0, 0, 5, 5, 0, 5});
}

TEST_CASE("tanh is the function of that name in float too", "[nn]") {
    nn::tanh<float> tanh;
    auto x = test::random_numbers<float>(100, 1);
    for (float& v : x) v *= 10;
    auto const y = tanh.forward(nn::as_matrix(std::span<float const>(x), 10, 10), {});
    for (std::size_t i = 0; i < x.size(); ++i) REQUIRE(y.data()[i] == Approx(std::tanh(x[i])).epsilon(1e-5));
}

TEST_CASE("an activation in place gives the same bits as into its own buffer", "[nn]") {
    nn::tanh<float> tanh;
    nn::relu<float> relu;
    auto const x = test::random_numbers<float>(37 * 3, 1);
    auto const same = [&](auto& layer) {
        auto const apart = layer.forward(nn::as_matrix(std::span<float const>(x), 37, 3), {});
        nn::buffer<float> memory;
        auto mine = memory.take(37, 3);
        std::copy(x.begin(), x.end(), mine.data());
        std::vector<float> const expected(apart.data(), apart.data() + apart.size());
        auto const placed = layer.forward_in_place(mine, {});
        return placed.data() == mine.data() &&
               std::vector<float>(placed.data(), placed.data() + placed.size()) == expected;
    };
    REQUIRE(same(tanh));
    REQUIRE(same(relu));
}
