// The networks that fashion_mnist trains and predict uses, by name.
#pragma once

#include <cstddef>
#include <ddp/nn/nn.hpp>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using fashion_model = ddp::nn::sequential<>;

inline fashion_model mlp(std::size_t features, std::size_t hidden) {
    return ddp::nn::sequential{ddp::nn::linear(features, hidden), ddp::nn::relu(),
                               ddp::nn::linear(hidden, 128),      ddp::nn::relu(),
                               ddp::nn::linear(128, 10),          ddp::nn::softmax_cross_entropy()};
}

// Two convolutions, each halved before its relu: the same numbers as after it, from a quarter of the work.
inline fashion_model cnn(ddp::nn::image_shape image) {
    ddp::nn::conv2d first(image, {.filters = 32, .kernel = 3, .padding = 1});
    ddp::nn::max_pool2d half(first.output_shape());
    ddp::nn::conv2d second(half.output_shape(), {.filters = 64, .kernel = 3, .padding = 1});
    ddp::nn::max_pool2d quarter(second.output_shape());
    std::size_t const features = quarter.outputs();
    return ddp::nn::sequential{std::move(first),
                               std::move(half),
                               ddp::nn::relu(),
                               std::move(second),
                               std::move(quarter),
                               ddp::nn::relu(),
                               ddp::nn::flatten(),
                               ddp::nn::dropout(0.25),
                               ddp::nn::linear(features, 128),
                               ddp::nn::relu(),
                               ddp::nn::dropout(0.25),
                               ddp::nn::linear(128, 10),
                               ddp::nn::softmax_cross_entropy()};
}

// `sample_shape`: of one image, height x width; `hidden`: units of the mlp's first hidden layer.
inline fashion_model make_model(std::string const& name, std::vector<std::size_t> const& sample_shape,
                                std::size_t hidden) {
    if (name == "mlp")
        return mlp(std::accumulate(sample_shape.begin(), sample_shape.end(), std::size_t{1}, std::multiplies<>()),
                   hidden);
    if (name == "cnn" && sample_shape.size() == 2)
        return cnn({.channels = 1, .height = sample_shape[0], .width = sample_shape[1]});
    throw std::invalid_argument("there is no model '" + name + "' for such data: the models are mlp and cnn");
}
