/// \file
/// Gradient clipping, by the norm of all gradients together or element by element.
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
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp {

/// The factor that scales a gradient of this norm to at most `max_norm`: max_norm / (norm + 1e-6), but at most 1. Exactly
/// 1 means that nothing is clipped. An infinite norm gives 0 and NaN gives NaN: either is visible in the values after one
/// step, as it would be without clipping. Source: torch.nn.utils.clip_grad_norm_.
[[nodiscard]] inline double clip_factor(double norm, double max_norm) noexcept {
    double const factor = max_norm / (norm + 1e-6);
    return factor > 1.0 ? 1.0 : factor;
}

/// Clips by the global norm: scales the mean gradient so that the Euclidean norm over all parameters together is at most
/// `max_norm`. The trainer computes the norm of the mean gradient and passes clip_factor to the optimizer as
/// step_info::gradient_scale; the gradient in memory is not changed. No value is stepped before every bucket has been
/// reduced.
///
/// Cost  one more pass over the gradient.
/// Sums  squares in double, over blocks of 4,096 elements from the start of each parameter, then in a tree over blocks
///       and parameters: the same bits on every rank, for any buckets.
struct clip_by_global_norm {
    double max_norm = 1.0;  ///< largest norm of the gradient after clipping; finite, > 0

    /// The factor for a gradient of this norm: see clip_factor.
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

/// Clips by value: limits each element of the mean gradient to [-limit, limit]. Elements are independent of each other,
/// so buckets are stepped as early as without clipping, and bits do not depend on buckets or slices.
///
/// Memory   the trainer clips in place just before the update: after the step, the gradient in memory is the clipped one
///          (with a sharded update, in this rank's slices). A model without bind() keeps its own gradient as it was.
/// Cost     one more pass over the gradient.
/// Numbers  limit is rounded once to the element type. Infinity becomes the limit; NaN stays NaN and is visible in the
///          values.
/// Source   torch.nn.utils.clip_grad_value_.
struct clip_by_value {
    double limit = 1.0;  ///< largest magnitude of an element after clipping; finite, > 0 in the element type

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

/// How a trainer clips gradients: by norm or by value.
using clipping = std::variant<clip_by_global_norm, clip_by_value>;

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
