#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/nn/conv2d.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

namespace {

struct geometry {
    nn::image_shape in;
    nn::conv2d_options with;
};

std::vector<geometry> geometries() {
    return {
        {{1, 1, 1}, {.filters = 1, .kernel = 1}},
        {{2, 3, 4}, {.filters = 3, .kernel = 1}},
        {{1, 5, 5}, {.filters = 2, .kernel = 3}},
        {{2, 5, 4}, {.filters = 3, .kernel = 3, .padding = 1}},
        {{3, 6, 7}, {.filters = 4, .kernel = 5, .padding = 2}},
        {{2, 7, 6}, {.filters = 2, .kernel = 3, .stride = 2, .padding = 1}},
        {{1, 9, 8}, {.filters = 2, .kernel = 3, .stride = 3}},
        {{2, 4, 5}, {.filters = 2, .kernel = 1, .stride = 2}},
        {{1, 6, 5}, {.filters = 2, .kernel = 4, .padding = 3}},
        {{1, 2, 1}, {.filters = 2, .kernel = 3, .padding = 2}},  // most of a window sees nothing
        {{1, 7, 1}, {.filters = 1, .kernel = 3, .padding = 1}},
        {{1, 5, 6}, {.filters = 2, .kernel = 2, .stride = 4, .padding = 1}},
    };
}

/// The definition, read out: y[f][oy][ox] = b[f] + sum of w[f][c][ky][kx] x[c][oy s + ky - p][ox s + kx - p].
std::vector<double> by_definition(geometry const& g, std::vector<double> const& x, std::size_t rows,
                                  nn::image_shape out, std::span<double const> weight, std::span<double const> bias) {
    std::vector<double> y;
    auto const k = g.with.kernel;
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t f = 0; f < out.channels; ++f)
            for (std::size_t oy = 0; oy < out.height; ++oy)
                for (std::size_t ox = 0; ox < out.width; ++ox) {
                    double sum = bias[f];
                    for (std::size_t c = 0; c < g.in.channels; ++c)
                        for (std::size_t ky = 0; ky < k; ++ky)
                            for (std::size_t kx = 0; kx < k; ++kx) {
                                auto const iy = oy * g.with.stride + ky, ix = ox * g.with.stride + kx;
                                auto const p = g.with.padding;
                                if (iy < p || ix < p || iy - p >= g.in.height || ix - p >= g.in.width) continue;
                                sum += weight[((f * g.in.channels + c) * k + ky) * k + kx] *
                                       x[((r * g.in.channels + c) * g.in.height + iy - p) * g.in.width + ix - p];
                            }
                    y.push_back(sum);
                }
    return y;
}

}  // namespace

TEST_CASE("conv2d is what its definition says, for every window", "[nn]") {
    for (geometry const& g : geometries()) {
        nn::conv2d<double> layer(g.in, g.with);
        layer.initialize(3, 0);
        std::size_t const rows = 3;
        auto const x = test::random_numbers<double>(rows * g.in.size(), 1);
        auto const y = layer.forward(nn::as_matrix(std::span<double const>(x), rows, g.in.size()), {});
        auto const expected = by_definition(g, x, rows, layer.output_shape(), layer.parameters()[0].value(),
                                            layer.parameters()[1].value());
        CAPTURE(nn::to_string(g.in), g.with.kernel, g.with.stride, g.with.padding);
        REQUIRE(nn::columns_of(y) == layer.output_shape().size());
        REQUIRE(expected.size() == static_cast<std::size_t>(y.size()));
        for (std::size_t i = 0; i < expected.size(); ++i)
            REQUIRE(y.data()[i] == Approx(expected[i]).epsilon(1e-12).margin(1e-13));
    }
}

TEST_CASE("conv2d's gradients are the slopes of its result", "[nn][gradient]") {
    for (geometry const& g : geometries()) {
        nn::conv2d<double> layer(g.in, g.with);
        CAPTURE(nn::to_string(g.in), g.with.kernel, g.with.stride, g.with.padding);
        REQUIRE(test::worst_gradient_error(layer, 1, g.in.size()) < 1e-8);
        REQUIRE(test::worst_gradient_error(layer, 3, g.in.size()) < 1e-8);
    }
}

TEST_CASE("conv2d's shapes, names and first values are PyTorch's", "[nn][random]") {
    nn::conv2d<double> layer({.channels = 4, .height = 9, .width = 7},
                             {.filters = 5, .kernel = 3, .stride = 2, .padding = 1});
    REQUIRE(layer.output_shape() == nn::image_shape{5, 5, 4});
    REQUIRE(layer.inputs() == 4 * 9 * 7);
    REQUIRE(layer.outputs() == 5 * 5 * 4);
    REQUIRE(layer.parameters()[0].name() == "weight");
    REQUIRE(layer.parameters()[0].shape() == std::vector<std::size_t>{5, 4, 3, 3});
    REQUIRE(layer.parameters()[1].name() == "bias");
    REQUIRE(layer.parameters()[1].shape() == std::vector<std::size_t>{5});

    layer.initialize(5, 2);
    for (std::size_t p = 0; p < 2; ++p) {
        random_stream const draws{5, random_use::initial_values, 2 + p};
        auto const value = layer.parameters()[p].value();
        for (std::size_t i = 0; i < value.size(); ++i) REQUIRE(value[i] == 1.0 / 6.0 * draws.at(i).symmetric<double>());
    }
}

TEST_CASE("conv2d assigns its gradients over whatever was there, or adds to it", "[nn]") {
    nn::conv2d<double> layer({2, 6, 5}, {.filters = 3, .kernel = 3, .padding = 1});
    auto const x = test::random_numbers<double>(4 * 60, 1);
    auto const spoil = [&](double with) {
        for (auto& p : layer.parameters()) std::fill(p.gradient().begin(), p.gradient().end(), with);
    };
    spoil(std::nan(""));
    auto const once = test::pass_through(layer, x, 4);
    for (double const g : once) REQUIRE(std::isfinite(g));
    auto const twice = test::pass_through(layer, x, 4, {.accumulate = true});
    std::size_t const first = 4 * 3 * 30;  // behind y
    for (std::size_t i = first; i < first + 3 * 18 + 3; ++i)
        REQUIRE(twice[i] == Approx(2 * once[i]).epsilon(1e-12).margin(1e-13));
    auto const without = test::pass_through(layer, x, 4, {.input_gradient = false});
    REQUIRE(without == std::vector<double>(once.begin(), once.begin() + first + 57));
}

TEST_CASE("conv2d on no rows has no result, gradients of zero, and adds nothing", "[nn]") {
    nn::conv2d<double> layer({1, 3, 3}, {.filters = 2, .kernel = 3});
    auto const seven = [&] {
        for (auto& p : layer.parameters()) std::fill(p.gradient().begin(), p.gradient().end(), 7.0);
    };
    auto const all = [&](double is) {
        for (auto& p : layer.parameters())
            for (double const g : p.gradient())
                if (g != is) return false;
        return true;
    };
    seven();
    REQUIRE(layer.forward(nn::as_matrix(std::span<double const>(), 0, 9), {}).size() == 0);
    layer.backward(nn::as_matrix(std::span<double>(), 0, 2), {.accumulate = true});
    REQUIRE(all(7));
    layer.backward(nn::as_matrix(std::span<double>(), 0, 2), {});
    REQUIRE(all(0));
}

TEST_CASE("where an image stands in memory and in the batch changes no bit of its result, beyond tiny ones", "[nn]") {
    auto const filters = GENERATE(std::size_t{1}, std::size_t{2}, std::size_t{20});
    auto const kernel = GENERATE(std::size_t{1}, std::size_t{3});
    CAPTURE(filters, kernel);
    nn::conv2d<float> layer({3, 9, 9}, {.filters = filters, .kernel = kernel});
    std::size_t const size = 3 * 81, rows = 5, outputs = layer.outputs();
    auto const one = test::random_numbers<float>(size, 1);
    nn::buffer<float> memory;
    auto const alone = layer.forward(nn::as_matrix(std::span<float const>(one), 1, size), {});
    std::vector<float> const expected(alone.data(), alone.data() + alone.size());
    for (std::size_t shift = 0; shift < 8; ++shift) {
        auto const x = memory.take(rows * size + 16).subspan(shift, rows * size);
        for (std::size_t r = 0; r < rows; ++r) std::copy(one.begin(), one.end(), x.begin() + std::ptrdiff_t(r * size));
        auto const y = layer.forward(nn::as_matrix(std::span<float const>(x), rows, size), {});
        for (std::size_t r = 0; r < rows; ++r)
            REQUIRE(std::equal(expected.begin(), expected.end(), y.data() + r * outputs));
    }
}

TEST_CASE("conv2d says what does not fit", "[nn][bad-input]") {
    nn::conv2d<float> layer({3, 8, 8}, {.filters = 2, .kernel = 3});
    std::vector<float> const x(64);
    auto const said =
        test::usage_complaint([&] { layer.forward(nn::as_matrix(std::span<float const>(x), 1, 64), {}); });
    REQUIRE(said.find("conv2d over images of 3 x 8 x 8 was given samples of 64 features: they must be 192, plane after "
                      "plane") != std::string::npos);
    auto const made = [](nn::image_shape in, nn::conv2d_options with) {
        return test::usage_complaint([&] { nn::conv2d<float>(in, with); });
    };
    REQUIRE(made({1, 4, 4}, {.kernel = 5}).find("a window of 5 with a padding of 0 does not fit; make the kernel") !=
            std::string::npos);
    REQUIRE(made({1, 4, 4}, {.kernel = 5, .padding = 1}).empty());
    REQUIRE(made({1, 4, 4}, {.kernel = 3, .padding = 3}).find("smaller than the kernel") != std::string::npos);
    REQUIRE(made({1, 4, 4}, {.kernel = 3, .stride = 0}).find("kernel and stride are positive numbers") !=
            std::string::npos);
    REQUIRE(made({1, 4, 4}, {.kernel = 0}).find("kernel and stride are positive numbers") != std::string::npos);
    REQUIRE(made({0, 4, 4}, {}).find("channels, height and width") != std::string::npos);
    REQUIRE(made({1, 4, 4}, {.filters = 0}).find("conv2d: filters is 0; set .filters to at least 1") !=
            std::string::npos);
}
