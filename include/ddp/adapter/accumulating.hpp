/// \file
/// accumulating: makes a model out of passes that always assign, as those of many libraries do.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <ddp/kernel/scale.hpp>
#include <ddp/model/model.hpp>

namespace ddp {

/// A model whose passes always assign the gradient of the mean loss, made into one that scales and accumulates as
/// data-parallel training asks:
///
///     ddp::accumulating<my_model> model(arguments);
///
/// M is a Model but for backward: M::backward(ready), or M::backward() for all at once, assigns d(mean loss)/d(parameter i)
/// to each gradient, and calls ready(i) once it is there. All else that M has (bind, weight, stepped, …) stays as it is.
///
/// Cost    one pass over each gradient for the scale; where batches are accumulated, memory for a second gradient and one
///         copy more.
template <class M>
class accumulating : public M {
public:
    using element = element_of<M>;
    using M::M;

    void bind(storage<element> memory)
        requires requires(M& model, storage<element> to) { model.bind(to); }
    {
        M::bind(std::move(memory));
        gradients_.clear();
    }
    template <class Ready>
    void backward(pass<element> how, Ready const& ready) {
        if (gradients_.empty()) look();
        if (how.accumulate) {
            before_.resize(begins_.back());
            for (std::size_t i = 0; i < gradients_.size(); ++i)
                std::ranges::copy(gradients_[i], before_.data() + begins_[i]);
        }
        auto const finish = [&](std::size_t i) noexcept {
            std::span<element> const gradient = gradients_[i];
            if (how.accumulate)
                detail::kernels::add_times(gradient.data(), before_.data() + begins_[i], gradient.data(),
                                           gradient.size(), how.scale);
            else
                detail::kernels::assign_times(gradient.data(), gradient.data(), gradient.size(), how.scale);
            ready(i);
        };
        if constexpr (requires { M::backward(finish); }) {
            M::backward(finish);
        } else {
            M::backward();
            for (std::size_t i = gradients_.size(); i-- > 0;) finish(i);
        }
    }

private:
    void look() {
        begins_.assign(1, 0);
        for (auto const& one : this->parameters()) {
            gradients_.push_back(one.gradient);
            begins_.push_back(begins_.back() + one.gradient.size());
        }
    }

    std::vector<std::span<element>> gradients_;  // as parameters() lists them; asked for again after bind
    std::vector<std::size_t> begins_;            // of each in before_
    std::vector<element> before_;                // what earlier passes have added up
};

}  // namespace ddp
