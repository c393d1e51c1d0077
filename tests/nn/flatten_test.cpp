#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/nn/nn.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

TEST_CASE("flatten is a view of its argument, there and back", "[nn]") {
    nn::flatten<float> layer;
    std::vector<float> x{1, 2, 3, 4};
    REQUIRE(layer.forward(nn::as_matrix(std::span<float const>(x), 2, 2), {}).data() == x.data());
    REQUIRE(layer.forward_in_place(nn::as_matrix(std::span<float>(x), 2, 2), {}).data() == x.data());
    REQUIRE(layer.backward(nn::as_matrix(std::span<float>(x), 2, 2), {}).data() == x.data());
}

TEST_CASE("a convolutional network's gradients are the slopes of its loss, and its names PyTorch's", "[nn][gradient]") {
    nn::conv2d<double> first({1, 8, 8}, {.filters = 3, .kernel = 3, .padding = 1});
    nn::max_pool2d<double> half(first.output_shape());
    nn::conv2d<double> second(half.output_shape(), {.filters = 4, .kernel = 3});
    nn::average_pool2d<double> quarter(second.output_shape());
    std::size_t const features = quarter.outputs();
    nn::sequential net{std::move(first),
                       std::move(half),
                       nn::tanh<double>(),
                       std::move(second),
                       nn::gelu<double>(),
                       std::move(quarter),
                       nn::flatten<double>(),
                       nn::tanh<double>(),
                       nn::dropout<double>(0.3),
                       nn::linear<double>(features, 5),
                       nn::softmax_cross_entropy<double>()};
    net.initialize(4);
    std::vector<std::string> names;
    for (auto const& p : net.parameters()) names.push_back(p.name);
    REQUIRE(names == std::vector<std::string>{"0.weight", "0.bias", "3.weight", "3.bias", "9.weight", "9.bias"});

    std::size_t const rows = 4;
    auto const inputs = test::random_numbers<double>(rows * 64, 1);
    std::vector<std::uint32_t> const labels{0, 4, 2, 1}, samples{8, 6, 7, 5};
    classification_batch<double> const batch{inputs, labels, rows, 64, samples};
    net.begin_step(3);
    net.forward(batch);
    net.backward({.scale = 4}, [](std::size_t) {});
    for (auto const& p : net.parameters())
        for (std::size_t i = 0; i < p.value.size(); ++i)
            REQUIRE(std::abs(4 * test::slope(p.value[i], [&] { return net.forward(batch); }) - p.gradient[i]) < 1e-7);
    REQUIRE(inputs == test::random_numbers<double>(rows * 64, 1));
}
