/// \file
/// scripted_model: a model whose gradients are known beforehand, and whose passes do what a test tells them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/any_allreduce.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/thrown_by.hpp"

namespace ddp::test {

/// Samples that are numbers: the loss is their mean, the gradient of parameter i's elements i + 1 times their mean.
struct numbers {
    std::vector<double> of;
    [[nodiscard]] std::size_t size() const noexcept { return of.size(); }
};

template <bool Bound = true, bool Releases = false>
class scripted_model {
public:
    using element = double;
    static constexpr bool ready_releases = Releases;
    using reporter = std::function<void(std::size_t)>;

    struct part {
        std::string name;
        std::vector<std::size_t> shape;
        std::vector<std::size_t> strides = {};
    };

    /// Every value is `initial`.
    explicit scripted_model(std::vector<part> parts, double initial = 0) : parts_(std::move(parts)) {
        for (part const& p : parts_) {
            std::size_t count = 1;
            for (std::size_t const extent : p.shape) count *= extent;
            own_.emplace_back(2 * count, initial);
            value_.push_back(std::span(own_.back()).first(count));
            gradient_.push_back(std::span(own_.back()).last(count));
        }
    }
    scripted_model(scripted_model const&) = delete;
    scripted_model& operator=(scripted_model const&) = delete;

    // What a test may put in.
    std::function<void()> in_forward = [] {};
    std::function<void()> in_weight = [] {};
    std::function<void()> in_stepped = [] {};
    std::function<bool(std::size_t)> leaves_out = [](std::size_t) { return false; };  // neither written nor reported
    std::function<void(reporter const&)> at_end = [](reporter const&) {};             // of backward, with its ready
    bool whole = true;                                                                // what intact() says

    // What it can look at.
    std::vector<int> steps_seen;     // calls of stepped(i)
    int steps_begun = 0;             // calls of begin_step
    std::uint64_t step_number = 77;  // what the last one said
    std::span<double> value(std::size_t i) { return value_[i]; }

    std::vector<parameter<double>> parameters() {
        std::vector<parameter<double>> all;
        for (std::size_t i = 0; i < parts_.size(); ++i)
            all.push_back({parts_[i].name, parts_[i].shape, value_[i], gradient_[i], parts_[i].strides});
        return all;
    }
    void bind(storage<double> memory)
        requires Bound
    {
        value_ = std::move(memory.values);
        gradient_ = std::move(memory.gradients);
        owner_ = std::move(memory.owner);
        own_.clear();
    }
    bool intact() const { return whole; }
    void stepped(std::size_t i) {
        in_stepped();
        steps_seen.resize(parts_.size());
        ++steps_seen[i];
    }
    void begin_step(std::uint64_t number) {
        ++steps_begun;
        step_number = number;
    }
    std::uint64_t weight(numbers const& batch) const {
        in_weight();
        return batch.of.size();
    }

    double forward(numbers const& batch) {
        in_forward();
        batch_ = batch.of;
        double sum = 0;
        for (double const x : batch_) sum += x;
        return sum / static_cast<double>(batch_.size());
    }
    template <class Ready>
    void backward(pass<double> how, Ready const& ready) {
        double const factor = how.scale / static_cast<double>(batch_.size());
        for (std::size_t i = parts_.size(); i-- > 0;) {
            if (leaves_out(i)) continue;
            for (double& g : gradient_[i]) {
                if (!how.accumulate) g = 0;
                for (double const x : batch_) g += factor * static_cast<double>(i + 1) * x;
            }
            ready(i);
        }
        at_end(ready);
    }

private:
    std::vector<part> parts_;
    std::vector<std::vector<double>> own_;
    std::vector<std::span<double>> value_, gradient_;
    std::shared_ptr<void> owner_;
    std::vector<double> batch_;
};

/// One type of trainer for many tests.
template <class M, Transport T, BucketPolicy B = per_parameter_buckets>
auto make_trainer(M& model, communicator<T>& comm, training_options const& options = {},
                  any_optimizer const& optimizer = sgd{.lr = 1}, any_allreduce const& algorithm = {},
                  B const& buckets = {}) {
    return data_parallel<M, T>(model, optimizer, comm, options, algorithm, buckets);
}

}  // namespace ddp::test
