/// \file
/// lars: SGD with momentum, whose rate for each parameter follows from the norms of its values and of its gradient.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/math.hpp>
#include <ddp/core/text.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/optim/optimizer.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp {

namespace detail::kernels {

/// Constants of one lars step over one parameter, computed in double and rounded once each.
template <std::floating_point E>
struct lars_constants {
    E gradient_scale;
    E weight_decay;
    E momentum;
    E rate;  // learning_rate * ratio
};

template <std::floating_point E>
DDP_KERNEL void lars_step(E const* gradient, E* value, E* momentum, std::size_t count, lars_constants<E> const* with) {
    DDP_NO_CONTRACTION
    lars_constants<E> const by = *with;
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E const g = gradient[i] * by.gradient_scale + by.weight_decay * value[i];
        E const m = by.momentum * momentum[i] + by.rate * g;
        momentum[i] = m;
        value[i] = value[i] - m;
    }
}

DDP_KERNEL inline double lars_ratio(double trust, double value_norm, double gradient_norm, double weight_decay,
                                    double eps) {
    DDP_NO_CONTRACTION
    if (value_norm == 0 || gradient_norm == 0) return 1;
    return trust * value_norm / (gradient_norm + weight_decay * value_norm + eps);
}

}  // namespace detail::kernels

/// LARS (layer-wise adaptive rate scaling), a form of SGD with momentum for large batches: the learning rate of each
/// parameter is scaled by the ratio of the norm of its values to that of its gradient.
///
///     g = gradient_scale * gradient
///     ratio = trust * |value| / (|g| + weight_decay * |value| + eps)   (norms of the whole parameter, or 1 if one of them is 0)
///     m = momentum * m + lr * ratio * (g + weight_decay * value)
///     value = value - m
///
/// Biases and the scales of normalisation layers are usually given to sgd instead, with parameter_groups.
///
/// State    one array (m, named "momentum_buffer").
/// Cost     two passes over memory; values are stepped after the last gradient has been reduced.
/// Numbers  norms are summed in double by blocks of a parameter, so their bits do not depend on buckets or ranks; the
///          ratio and its product with lr are computed in double and rounded once.
/// Source   You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1; eps as in
///          NVIDIA's LARC.
struct lars {
    double lr = 0.1;            ///< learning rate; finite, >= 0
    double momentum = 0.9;      ///< the fraction of m that each step keeps; in [0, 1)
    double weight_decay = 0.0;  ///< multiple of value that is added to the gradient; finite, >= 0
    double trust = 1e-3;        ///< length of a step relative to the parameter's norm, at lr = 1; finite, > 0
    double eps = 1e-8;          ///< added to the divisor of the ratio; finite, >= 0
    static constexpr char const* name = "lars";  ///< of the algorithm; checkpoints keep it

    [[nodiscard]] std::size_t slot_count() const noexcept { return 1; }
    [[nodiscard]] slot_words slot_names() const noexcept {
        static constexpr char const* names[] = {"momentum_buffer"};
        return names;
    }
    [[nodiscard]] double learning_rate() const noexcept { return lr; }
    [[nodiscard]] std::uint64_t hash() const noexcept {
        return policy_hash("lars", lr, momentum, weight_decay, trust, eps);
    }
    [[nodiscard]] std::string hash_words() const {
        return policy_words(
            "lars",
            {{"lr", lr}, {"momentum", momentum}, {"weight_decay", weight_decay}, {"trust", trust}, {"eps", eps}});
    }

    /// Throws usage_error for hyper-parameters out of their ranges.
    void validate() const {
        DDP_EXPECTS(detail::is_finite(lr) && lr >= 0,
                    "lars: lr is " + detail::decimal(lr) + ", but must be a finite number >= 0; 0.1 to 10 are usual");
        DDP_EXPECTS(momentum >= 0 && momentum < 1, "lars: momentum must lie in [0, 1); 0.9 is usual");
        DDP_EXPECTS(detail::is_finite(weight_decay) && weight_decay >= 0,
                    "lars: weight_decay must be a finite number >= 0; 5e-4 is usual, 0 means none");
        DDP_EXPECTS(detail::is_finite(trust) && trust > 0, "lars: trust must be a finite number > 0; 1e-3 is usual");
        DDP_EXPECTS(detail::is_finite(eps) && eps >= 0, "lars: eps must be a finite number >= 0; 1e-8 is usual");
    }

    /// Nothing: the norms are those of value and gradient as they are.
    template <std::floating_point E>
    void prepare(step_info const& /*at*/, std::span<E> /*gradient*/, std::span<E const> /*value*/,
                 slot_spans<E> /*slots*/) const noexcept {}

    /// Steps a range of one parameter; the same bits in one piece or in many. Throws usage_error if the lengths differ.
    template <std::floating_point E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> slots) const {
        DDP_EXPECTS(gradient.size() == value.size() && !slots.empty() && slots[0].size() == value.size(),
                    "lars: step needs as many gradients as values, and one slot of that length");
        double const ratio =
            detail::kernels::lars_ratio(trust, at.value_norm, at.gradient_norm * at.gradient_scale, weight_decay, eps);
        detail::kernels::lars_constants<E> const with{.gradient_scale = static_cast<E>(at.gradient_scale),
                                                      .weight_decay = static_cast<E>(weight_decay),
                                                      .momentum = static_cast<E>(momentum),
                                                      .rate = static_cast<E>(at.learning_rate * ratio)};
        detail::kernels::lars_step(gradient.data(), value.data(), slots[0].data(), value.size(), &with);
    }
};
static_assert(OptimizerFor<lars, float> && OptimizerFor<lars, double>);

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
