#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/nn/linear.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

namespace {

std::vector<double> copy(std::span<double const> values) {
    return {values.begin(), values.end()};
}

/// Gradients of both parameters, one behind the other.
std::vector<double> gradients(nn::linear<double>& layer) {
    std::vector<double> all;
    for (auto const& p : layer.parameters()) all.insert(all.end(), p.gradient().begin(), p.gradient().end());
    return all;
}

}  // namespace

TEST_CASE("linear's gradients are the slopes of its result", "[nn][gradient]") {
    auto const [rows, inputs, outputs] = GENERATE(
        table<std::size_t, std::size_t, std::size_t>({{1, 1, 1}, {1, 5, 3}, {4, 3, 1}, {5, 3, 4}, {19, 33, 17}}));
    CAPTURE(rows, inputs, outputs);
    nn::linear<double> layer(inputs, outputs);
    REQUIRE(test::worst_gradient_error(layer, rows, inputs) < 1e-8);
}

TEST_CASE("linear multiplies by the weight, stored output by output, and adds the bias", "[nn]") {
    nn::linear<float> layer(3, 2);
    std::span<float> const w = layer.parameters()[0].value(), b = layer.parameters()[1].value();
    std::vector<float> const weight{1, 2, 3, 4, 5, 6}, bias{10, 20}, x{1, 1, 1, 1, 0, -1};
    std::copy(weight.begin(), weight.end(), w.begin());
    std::copy(bias.begin(), bias.end(), b.begin());
    auto const y = layer.forward(nn::as_matrix(std::span<float const>(x), 2, 3), {});
    REQUIRE(std::vector<float>(y.data(), y.data() + y.size()) == std::vector<float>{16, 35, 8, 18});
}

TEST_CASE("linear assigns its gradients over whatever was there, or adds to it", "[nn]") {
    auto const outputs = GENERATE(std::size_t{2}, std::size_t{40});  // below and above where Eigen's GEMM begins
    std::size_t const rows = 6, inputs = 30;
    nn::linear<double> layer(inputs, outputs);
    auto const x = test::random_numbers<double>(rows * inputs, 3);
    auto dy = test::random_numbers<double>(rows * outputs, 4);
    auto const back = [&](nn::backward_mode mode) {
        layer.forward(nn::as_matrix(std::span<double const>(x), rows, inputs), {});
        layer.backward(nn::as_matrix(std::span<double>(dy), rows, outputs), mode);
        return gradients(layer);
    };
    for (auto& p : layer.parameters()) std::fill(p.gradient().begin(), p.gradient().end(), std::nan(""));
    auto const once = back({});
    for (double const g : once) REQUIRE(std::isfinite(g));
    REQUIRE(back({}) == once);
    auto const twice = back({.accumulate = true});
    for (std::size_t i = 0; i < once.size(); ++i) REQUIRE(twice[i] == Approx(2 * once[i]).epsilon(1e-13));
}

TEST_CASE("linear on no rows has no result, gradients of zero, and adds nothing", "[nn]") {
    nn::linear<double> layer(4, 3);
    for (auto& p : layer.parameters()) std::fill(p.gradient().begin(), p.gradient().end(), 7.0);
    auto const none = nn::as_matrix(std::span<double>(), 0, 3);
    REQUIRE(layer.forward(nn::as_matrix(std::span<double const>(), 0, 4), {}).size() == 0);
    layer.backward(none, {.accumulate = true});
    REQUIRE(gradients(layer) == std::vector<double>(15, 7.0));
    layer.backward(none, {});
    REQUIRE(gradients(layer) == std::vector<double>(15, 0.0));
}

TEST_CASE("linear's initial values depend on seed, parameter and element alone", "[nn][random]") {
    nn::linear<double> a(16, 8), b(16, 8), wider(16, 9);
    a.initialize(5, 2);
    b.initialize(6, 2);
    REQUIRE(copy(a.parameters()[0].value()) != copy(b.parameters()[0].value()));
    b.initialize(5, 4);
    REQUIRE(copy(a.parameters()[0].value()) != copy(b.parameters()[0].value()));
    b.initialize(5, 2);
    REQUIRE(copy(a.parameters()[0].value()) == copy(b.parameters()[0].value()));
    REQUIRE(copy(a.parameters()[1].value()) == copy(b.parameters()[1].value()));
    wider.initialize(5, 2);  // more elements leave the first ones what they were
    REQUIRE(copy(a.parameters()[0].value()) == copy(wider.parameters()[0].value().first(16 * 8)));

    random_stream const draws{5, random_use::initial_values, 3};
    for (std::size_t i = 0; i < 8; ++i) REQUIRE(a.parameters()[1].value()[i] == 0.25 * draws.at(i).symmetric<double>());
}

TEST_CASE("linear starts with values of the deviation that keeps signals in range", "[nn][random]") {
    nn::linear<float> layer(100, 100);
    double squares = 0;
    float largest = 0;
    for (float const v : layer.parameters()[0].value()) {
        squares += double(v) * double(v);
        largest = std::max(largest, std::abs(v));
    }
    REQUIRE(largest <= 0.1f);
    REQUIRE(std::sqrt(squares / 10000) == Approx(0.1 / std::sqrt(3.0)).epsilon(0.03));
}

TEST_CASE("linear refuses samples of another width, and widths of zero", "[nn][bad-input]") {
    nn::linear<float> layer(4, 3);
    std::vector<float> const x(10);
    REQUIRE_THROWS_WITH(
        layer.forward(nn::as_matrix(std::span<float const>(x), 2, 5), {}),
        Catch::Contains("linear(4, 3) was given samples of 5 features: make its first argument that number"));
    REQUIRE_THROWS_WITH(
        nn::linear<float>(0, 3),
        Catch::Contains(
            "linear: a layer of width 0 has nothing to learn; pass positive numbers of inputs and outputs"));
    REQUIRE_THROWS_WITH(
        nn::linear<float>(3, 0),
        Catch::Contains(
            "linear: a layer of width 0 has nothing to learn; pass positive numbers of inputs and outputs"));
}

TEST_CASE("a layer for which there is no memory says how large it is", "[nn]") {
    std::size_t const huge = std::size_t{1} << 62;  // the product of two is 0 in 64 bits
    for (auto const& [inputs, outputs, size] :
         {std::tuple{std::size_t{784}, std::size_t{1'000'000'000'000}, "takes 3.14e+06 GB"},
          std::tuple{huge, huge, "takes 8.51e+28 GB"}, std::tuple{huge, std::size_t{1}, "takes 1.84e+10 GB"}}) {
        std::string text;
        try {
            nn::linear<float> const layer(inputs, outputs);
        } catch (usage_error const& e) {
            text = e.what();
        }
        CAPTURE(text);
        REQUIRE(text.find("a layer's 'weight' of " + std::to_string(outputs) + " x " + std::to_string(inputs)) !=
                std::string::npos);
        REQUIRE(text.find(size) != std::string::npos);
    }
}
