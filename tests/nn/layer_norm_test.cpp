#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/nn/layer_norm.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

namespace {

template <class E>
nn::layer_norm<E> with_parameters(std::size_t width) {
    nn::layer_norm<E> layer(width);
    for (std::size_t p = 0; p < 2; ++p) {
        auto const values = test::random_numbers<E>(width, 5 + p);
        std::copy(values.begin(), values.end(), layer.parameters()[p].value().begin());
    }
    return layer;
}

}  // namespace

TEST_CASE("layer_norm's gradients are the slopes of its result", "[nn][gradient]") {
    auto const width = GENERATE(std::size_t{2}, std::size_t{5}, std::size_t{16}, std::size_t{37});
    CAPTURE(width);
    auto layer = with_parameters<double>(width);
    REQUIRE(test::worst_gradient_error(layer, 1, width) < 2e-7);
    REQUIRE(test::worst_gradient_error(layer, 6, width) < 2e-7);
}

TEST_CASE("layer_norm gives rows of mean 0 and deviation 1", "[nn]") {
    nn::layer_norm<float> layer(100);
    REQUIRE(layer.parameters()[0].name() == "weight");
    REQUIRE(layer.parameters()[1].name() == "bias");
    auto x = test::random_numbers<float>(300, 1);
    for (std::size_t i = 0; i < 100; ++i) x[i] += 1000;  // the variance of a row far from 0
    auto const y = layer.forward(nn::as_matrix(std::span<float const>(x), 3, 100), {});
    for (Eigen::Index r = 0; r < 3; ++r) {
        double sum = 0, squares = 0;
        for (Eigen::Index c = 0; c < 100; ++c) {
            sum += double(y(r, c));
            squares += double(y(r, c)) * double(y(r, c));
        }
        REQUIRE(sum / 100 == Approx(0).margin(1e-3));
        REQUIRE(squares / 100 == Approx(1).epsilon(1e-3));
    }
    std::vector<float> const same(100, 3.0f);
    auto const flat = layer.forward(nn::as_matrix(std::span<float const>(same), 1, 100), {});
    for (Eigen::Index c = 0; c < 100; ++c) REQUIRE(std::abs(flat(0, c)) < 1e-3f);
}

TEST_CASE("layer_norm in place, accumulated and over garbage gives what it should", "[nn]") {
    auto layer = with_parameters<double>(19);
    REQUIRE(test::same_in_place(layer, 4, 19));
    auto const x = test::random_numbers<double>(4 * 19, 1);
    for (auto& p : layer.parameters()) std::fill(p.gradient().begin(), p.gradient().end(), std::nan(""));
    auto const once = test::pass_through(layer, x, 4);
    for (double const v : once) REQUIRE(std::isfinite(v));
    auto const twice = test::pass_through(layer, x, 4, {.accumulate = true});
    for (std::size_t i = 4 * 19; i < 6 * 19; ++i) REQUIRE(twice[i] == Approx(2 * once[i]).epsilon(1e-12));
    REQUIRE(layer.forward(nn::as_matrix(std::span<double const>(), 0, 19), {}).size() == 0);
    layer.backward(nn::as_matrix(std::span<double>(), 0, 19), {});
    for (auto& p : layer.parameters())
        for (double const g : p.gradient()) REQUIRE(g == 0);
}

TEST_CASE("layer_norm refuses samples of another width", "[nn][bad-input]") {
    nn::layer_norm<float> layer(4);
    std::vector<float> const x(10);
    REQUIRE(test::usage_complaint([&] {
                layer.forward(nn::as_matrix(std::span<float const>(x), 2, 5), {});
            }).find("layer_norm(4) was given samples of 5 features: pass that number as its argument") !=
            std::string::npos);
    REQUIRE_THROWS_WITH(nn::layer_norm<float>(0),
                        Catch::Contains("layer_norm: width is 0; pass the number of features"));
    REQUIRE_THROWS_WITH(nn::layer_norm<float>(3, 0.0),
                        Catch::Contains("layer_norm: epsilon keeps rows of equal numbers finite; pass a positive one"));
}
