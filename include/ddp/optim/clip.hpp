/// \file
/// Clipping of gradients that are too long, all together or element by element.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <variant>

#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/math.hpp>
#include <ddp/kernel/kernel.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers' checks keep loops scalar, and nobody minds
#endif

namespace ddp {

/// max_norm / (norm + 1e-6), at most 1: exactly 1 says that nothing is clipped. An infinite norm gives 0, NaN gives
/// NaN: both show in the values after one step, as they would without clipping. Source: torch.nn.utils.clip_grad_norm_.
[[nodiscard]] inline double clip_factor(double norm, double max_norm) noexcept {
    double const factor = max_norm / (norm + 1e-6);
    return factor > 1.0 ? 1.0 : factor;
}

/// The policy: gradients of all parameters together have at most this Euclidean norm. Plain data; the trainer computes
/// the norm (kernel/norm.hpp) of the mean gradient and hands clip_factor to the optimizer as step_info::gradient_scale:
/// the gradient in memory stays as it is. No value is stepped before every bucket is reduced.
struct clip_by_global_norm {
    double max_norm = 1.0;  ///< the largest norm that is left as it is; > 0

    [[nodiscard]] double factor(double norm) const noexcept { return clip_factor(norm, max_norm); }
    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash("clip_by_global_norm", max_norm); }

    void validate() const {
        DDP_EXPECTS(detail::is_finite(max_norm) && max_norm > 0,
                    "clip_by_global_norm: max_norm must be a finite number > 0; leave clipping out to have none");
    }
};

namespace detail::kernels {

/// What is below -limit becomes -limit, what is above limit becomes limit. Both comparisons are false for NaN.
template <std::floating_point E>
DDP_KERNEL void clamp_elements(E* data, std::size_t count, E limit) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E const raised = data[i] < -limit ? -limit : data[i];
        data[i] = raised > limit ? limit : raised;
    }
}

}  // namespace detail::kernels

/// The policy: each element of the mean gradient lies in [-limit, limit]. Elements know nothing of each other: buckets
/// are stepped as early as without it, and the bits depend on no bucket or slice.
///
/// Memory  the trainer clips in place, just before the update: the gradient is the clipped one after the step (of a
///         sharded update: this rank's slices).
/// Cost    one more pass over the gradient.
/// Numbers limit is rounded once to the element type. Infinity becomes the limit; NaN stays, and shows in the values.
/// Source  torch.nn.utils.clip_grad_value_.
struct clip_by_value {
    double limit = 1.0;  ///< the largest magnitude of an element; > 0

    template <std::floating_point E>
    void apply(std::span<E> gradient) const {
        detail::kernels::clamp_elements(gradient.data(), gradient.size(), static_cast<E>(limit));
    }
    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash("clip_by_value", limit); }

    /// In the element type as well: a limit that rounds to 0 would keep every gradient from arriving.
    template <std::floating_point E>
    void validate_for() const {
        DDP_EXPECTS(limit >= static_cast<double>(std::numeric_limits<E>::min()) &&
                        limit <= static_cast<double>(std::numeric_limits<E>::max()),
                    "clip_by_value: the model's element type does not hold this limit");
    }
    void validate() const {
        DDP_EXPECTS(detail::is_finite(limit) && limit > 0,
                    "clip_by_value: limit must be a finite number > 0; leave clipping out to have none");
    }
};

/// One of them.
using clipping = std::variant<clip_by_global_norm, clip_by_value>;

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
