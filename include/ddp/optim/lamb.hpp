/// \file
/// lamb: Adam's direction, with a rate for each parameter that follows from the norms of its values and of that direction.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/math.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/kernel/roots.hpp>
#include <ddp/optim/adam.hpp>
#include <ddp/optim/optimizer.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp {

namespace detail::kernels {

/// direction = first / (1 - beta1^t) / (roots / sqrt(1 - beta2^t) + eps) + weight_decay value
template <std::floating_point E>
DDP_KERNEL void lamb_direction(E* direction, E const* value, E const* first, E const* roots, std::size_t count,
                               adam_constants<E> const* with) {
    DDP_NO_CONTRACTION
    adam_constants<E> const by = *with;
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i)
        direction[i] = by.step_size * first[i] / (roots[i] * by.root_correction + by.eps) + by.weight_decay * value[i];
}

/// value = value - rate direction
template <std::floating_point E>
DDP_KERNEL void lamb_step(E* value, E const* direction, std::size_t count, E rate) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) value[i] = value[i] - rate * direction[i];
}

}  // namespace detail::kernels

/// LAMB, a form of Adam for large batches: the step of each parameter has the length of the learning rate times the norm
/// of the parameter.
///
///     g = gradient_scale * gradient
///     m = beta1 * m + (1 - beta1) * g
///     v = beta2 * v + (1 - beta2) * g * g
///     u = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + weight_decay * value
///     value = value - lr * |value| / |u| * u      (norms of the whole parameter, or lr * u if one of them is 0)
///
/// Biases and the scales of normalisation layers are usually given to adamw instead, with parameter_groups. After the
/// step, this rank's part of the gradient holds u.
///
/// State    two arrays (m and v, named as in adam).
/// Cost     two passes over memory; values are stepped after the last gradient has been reduced.
/// Numbers  norms are summed in double by blocks of a parameter, so their bits do not depend on buckets or ranks; powers,
///          quotients and products of constants are computed in double and rounded once.
/// Source   You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020, algorithm
///          2, with the identity for phi.
struct lamb {
    double lr = 1e-3;                            ///< learning rate; finite, >= 0
    double beta1 = 0.9;                          ///< the fraction of m that each step keeps; in [0, 1)
    double beta2 = 0.999;                        ///< the fraction of v that each step keeps; in [0, 1)
    double eps = 1e-6;                           ///< added to the divisor, which keeps it above 0; finite, > 0
    double weight_decay = 0.01;                  ///< multiple of value that is added to the direction; finite, >= 0
    static constexpr char const* name = "lamb";  ///< of the algorithm; checkpoints keep it

    [[nodiscard]] std::size_t slot_count() const noexcept { return 2; }
    [[nodiscard]] slot_words slot_names() const noexcept { return detail::kernels::adam_slots; }
    [[nodiscard]] double learning_rate() const noexcept { return lr; }
    [[nodiscard]] std::uint64_t hash() const noexcept { return numbers().hash("lamb"); }
    [[nodiscard]] std::string hash_words() const { return numbers().words("lamb"); }

    /// Throws usage_error for hyper-parameters out of their ranges.
    void validate() const { numbers().validate("lamb"); }

    /// Moments after this gradient; leaves the direction in `gradient`. The same bits in one piece or in many.
    template <std::floating_point E>
    void prepare(step_info const& at, std::span<E> gradient, std::span<E const> value, slot_spans<E> slots) const {
        namespace kernels = detail::kernels;
        kernels::expect_adam_spans("lamb", at, gradient.size(), value.size(), slots);
        auto with = numbers().constants<E>(at);
        with.step_size = static_cast<E>(1 / (1 - kernels::power(beta1, at.step)));
        E roots[kernels::adam_block];
        for (std::size_t from = 0; from < value.size(); from += kernels::adam_block) {
            std::size_t const count = std::min(kernels::adam_block, value.size() - from);
            E* const first = slots[0].data() + from;
            kernels::adam_moments<E, false>(gradient.data() + from, value.data() + from, first, slots[1].data() + from,
                                            roots, count, &with);
            kernels::square_roots(roots, count);
            kernels::lamb_direction(gradient.data() + from, value.data() + from, first, roots, count, &with);
        }
    }

    /// Steps a range of one parameter along what prepare() has left; the same bits in one piece or in many.
    template <std::floating_point E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> slots) const {
        detail::kernels::expect_adam_spans("lamb", at, gradient.size(), value.size(), slots);
        double const ratio = at.value_norm == 0 || at.gradient_norm == 0 ? 1 : at.value_norm / at.gradient_norm;
        detail::kernels::lamb_step(value.data(), gradient.data(), value.size(),
                                   static_cast<E>(at.learning_rate * ratio));
    }

private:
    [[nodiscard]] detail::kernels::adam_numbers numbers() const noexcept {
        return {lr, beta1, beta2, eps, weight_decay};
    }
};
static_assert(OptimizerFor<lamb, float> && OptimizerFor<lamb, double>);

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
