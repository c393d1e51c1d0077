#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <ddp/nn/pool2d.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

namespace {

struct geometry {
    nn::image_shape in;
    nn::pool2d_options with;
};

std::vector<geometry> geometries() {
    return {{{1, 2, 2}, {}},
            {{2, 4, 6}, {}},
            {{1, 5, 7}, {}},  // a line and a column are left over
            {{1, 1, 9}, {.kernel = 1}},
            {{2, 9, 7}, {.kernel = 3}},
            {{1, 7, 8}, {.kernel = 3, .stride = 2, .padding = 1}},
            {{2, 6, 5}, {.kernel = 2, .stride = 1}},
            {{1, 6, 5}, {.kernel = 2, .stride = 3, .padding = 1}},
            {{1, 40, 38}, {}}};
}

template <class E>
std::vector<E> forward(auto& layer, std::vector<E> const& x, std::size_t rows) {
    auto const y = layer.forward(nn::as_matrix(std::span<E const>(x), rows, x.size() / rows), {});
    return {y.data(), y.data() + y.size()};
}

}  // namespace

TEST_CASE("pooling's gradients are the slopes of its result", "[nn][gradient]") {
    for (geometry const& g : geometries()) {
        CAPTURE(nn::to_string(g.in), g.with.kernel, g.with.stride, g.with.padding);
        nn::max_pool2d<double> largest(g.in, g.with);
        nn::average_pool2d<double> mean(g.in, g.with);
        REQUIRE(test::worst_gradient_error(largest, 2, g.in.size()) < 1e-8);
        REQUIRE(test::worst_gradient_error(mean, 2, g.in.size()) < 1e-8);
    }
}

TEST_CASE("pooling takes the largest, or the mean, of each window", "[nn]") {
    std::vector<float> const x{1, 2, 5, 3, 9,  //
                               4, 0, 7, 8, 9,  //
                               9, 9, 9, 9, 9};
    nn::max_pool2d<float> largest({1, 3, 5});
    nn::average_pool2d<float> mean({1, 3, 5});
    REQUIRE(largest.output_shape() == nn::image_shape{1, 1, 2});
    REQUIRE(forward(largest, x, 1) == std::vector<float>{4, 8});
    REQUIRE(forward(mean, x, 1) == std::vector<float>{1.75f, 5.75f});

    // Outside the image: not there for the largest, 0 for the mean.
    nn::max_pool2d<float> wide({1, 2, 2}, {.kernel = 3, .stride = 2, .padding = 1});
    nn::average_pool2d<float> wide_mean({1, 2, 2}, {.kernel = 3, .stride = 2, .padding = 1});
    std::vector<float> const negative{-9, -18, -27, -36};
    REQUIRE(forward(wide, negative, 1) == std::vector<float>{-9});
    REQUIRE(forward(wide_mean, negative, 1)[0] == Approx(-10));
}

TEST_CASE("halving by the vectorised way and by the general one give the same bits", "[nn]") {
    nn::image_shape const in{3, 11, 23};
    std::size_t const rows = 4;
    auto x = test::random_numbers<float>(rows * in.size(), 1);
    for (float& v : x) v = std::round(4 * v) / 4;  // many equals
    x[5] = x[100] = x[101] = std::numeric_limits<float>::quiet_NaN();
    nn::max_pool2d<float> layer(in);
    auto const got = test::pass_through(layer, x, rows);

    nn::detail::window const w("", in, 2, 2, 0);
    std::size_t const planes = rows * in.channels;
    std::vector<float> expected(planes * w.out_plane());
    std::vector<float> const dy = test::random_numbers<float>(expected.size(), 2);
    std::vector<float> dx(planes * in.plane());
    for (std::size_t p = 0; p < planes; ++p) {
        nn::window_largest::value(expected.data() + p * w.out_plane(), x.data() + p * in.plane(), w);
        nn::window_largest::gradient(dx.data() + p * in.plane(), dy.data() + p * w.out_plane(),
                                     x.data() + p * in.plane(), w);
    }
    expected.insert(expected.end(), dx.begin(), dx.end());
    REQUIRE(std::any_of(got.begin(), got.end(), [](float v) { return std::isnan(v); }));
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i)
        REQUIRE((got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]))));
}

TEST_CASE("among equal pixels the first one has the gradient", "[nn]") {
    auto const kernel = GENERATE(std::size_t{2}, std::size_t{3});
    nn::max_pool2d<float> layer({1, kernel, kernel}, {.kernel = kernel});
    std::vector<float> x(kernel * kernel, 1.0f);
    x[0] = 0;
    forward(layer, x, 1);
    std::vector<float> dy{5}, expected(kernel * kernel);
    expected[1] = 5;
    auto const dx = layer.backward(nn::as_matrix(std::span<float>(dy), 1, 1), {});
    REQUIRE(std::vector<float>(dx.data(), dx.data() + dx.size()) == expected);
}

TEST_CASE("pooling says what does not fit", "[nn][bad-input]") {
    nn::max_pool2d<float> layer({1, 4, 4});
    std::vector<float> const x(15);
    REQUIRE(test::usage_complaint([&] { forward(layer, x, 1); }).find("max_pool2d over images of 1 x 4 x 4") !=
            std::string::npos);
    REQUIRE(test::usage_complaint([] { nn::average_pool2d<float>({1, 1, 4}); }).find("does not fit") !=
            std::string::npos);
}
