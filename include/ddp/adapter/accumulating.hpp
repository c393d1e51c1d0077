/// \file
/// accumulating: makes a model out of passes that always assign, as those of many libraries do.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <ddp/kernel/scale.hpp>
#include <ddp/model/model.hpp>

namespace ddp {

/// Turns a model whose passes always assign the gradient of the mean loss into one that scales and accumulates as
/// data-parallel training requires:
///
///     ddp::accumulating<my_model> model(arguments);
///
/// M is a Model except for its backward: M::backward(ready), or M::backward() for all at once, assigns d(mean loss)/d(parameter
/// i) to each gradient, and calls ready(i) once it is there; it reports whole gradients, not ranges. Everything else that M has
/// (bind, weight, stepped, …) stays as it is.
///
/// Cost    in each backward: one pass over each gradient for the scale, and a call of M::parameters(); if batches are
///         accumulated, one more copy of the gradients, in memory of its own.
template <class M>
class accumulating : public M {
public:
    using element = element_of<M>;
    using M::M;

    template <class Ready>
    void backward(pass<element> how, Ready const& ready) {
        auto const all = this->parameters();
        std::vector<std::vector<element>> before(how.accumulate ? all.size() : 0);
        for (std::size_t i = 0; i < before.size(); ++i)
            before[i].assign(all[i].gradient.begin(), all[i].gradient.end());
        auto const finish = [&](std::size_t i) noexcept {
            std::span<element> const written = all[i].gradient;
            if (how.accumulate)
                detail::kernels::add_times(written.data(), before[i].data(), written.data(), written.size(), how.scale);
            else
                detail::kernels::assign_times(written.data(), written.data(), written.size(), how.scale);
            ready(i);
        };
        if constexpr (requires { M::backward(finish); }) {
            M::backward(finish);
        } else {
            M::backward();
            for (std::size_t i = all.size(); i-- > 0;) finish(i);
        }
    }
};

}  // namespace ddp
