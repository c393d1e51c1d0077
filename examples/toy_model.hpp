// A stand-in for a model, for examples about everything else: parameters of any sizes, all drawn to the samples' mean.
#pragma once

#include <cstddef>
#include <ddp/ddp.hpp>
#include <string>
#include <vector>

using toy_batch = std::vector<float>;  // samples are numbers; anything with size() is a batch

class toy_model {
public:
    using element = float;

    explicit toy_model(std::vector<std::size_t> const& sizes) {
        for (std::size_t const size : sizes) values_.emplace_back(size), gradients_.emplace_back(size);
    }
    std::vector<ddp::parameter<float>> parameters() {
        std::vector<ddp::parameter<float>> all;
        for (std::size_t i = 0; i < values_.size(); ++i)
            all.push_back({"p" + std::to_string(i), {values_[i].size()}, values_[i], gradients_[i]});
        return all;
    }
    double forward(toy_batch const& batch) {  // half the squared distance of the first value to the mean
        mean_ = 0;
        for (float const x : batch) mean_ += x / static_cast<float>(batch.size());
        double const distance = values_[0][0] - mean_;
        return distance * distance / 2;
    }
    template <class Ready>
    void backward(ddp::pass<float> how, Ready const& ready) {
        for (std::size_t i = values_.size(); i-- > 0; ready(i))
            for (std::size_t k = 0; k < values_[i].size(); ++k) {
                float const slope = how.scale * (values_[i][k] - mean_);
                gradients_[i][k] = how.accumulate ? gradients_[i][k] + slope : slope;
            }
    }

private:
    std::vector<std::vector<float>> values_, gradients_;
    float mean_ = 0;
};
