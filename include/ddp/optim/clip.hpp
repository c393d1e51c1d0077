/// \file
/// Clipping by the global norm: how much all gradients shrink when together they are too long.
#pragma once

#include <cmath>

#include <ddp/core/contract.hpp>

namespace ddp {

/// max_norm / (norm + 1e-6), at most 1: exactly 1 says that nothing is clipped. An infinite norm gives 0, NaN gives
/// NaN: both show in the values after one step, as they would without clipping. Source: torch.nn.utils.clip_grad_norm_.
[[nodiscard]] inline double clip_factor(double norm, double max_norm) noexcept {
    double const factor = max_norm / (norm + 1e-6);
    return factor > 1.0 ? 1.0 : factor;
}

/// The policy: gradients of all parameters together have at most this Euclidean norm. Plain data; the trainer computes
/// the norm (kernel/norm.hpp) of the mean gradient and hands clip_factor to the optimizer as step_info::gradient_scale.
struct clip_by_global_norm {
    double max_norm = 1.0;

    [[nodiscard]] double factor(double norm) const noexcept { return clip_factor(norm, max_norm); }

    void validate() const {
        DDP_EXPECTS(std::isfinite(max_norm) && max_norm > 0,
                    "clip_by_global_norm: max_norm must be a finite number > 0; leave clipping out to have none");
    }
};

}  // namespace ddp
