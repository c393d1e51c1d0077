/// \file
/// lion: steps of one size in the direction of a momentum's sign, with decoupled weight decay.
#pragma once

#include <array>
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

/// Constants of one lion step, computed in double and rounded once each.
template <std::floating_point E>
struct lion_constants {
    E gradient_scale;
    E keep;          // 1 - learning_rate * weight_decay, times value before the step
    E beta1, rest1;  // rest = 1 - beta
    E beta2, rest2;
    E learning_rate;
};

/// One step over `count` elements. The sign of 0 is 0, of NaN is NaN.
template <std::floating_point E, bool Keeps>
DDP_KERNEL void lion_step(E const* gradient, E* value, E* momentum, std::size_t count, lion_constants<E> const* with) {
    DDP_NO_CONTRACTION
    lion_constants<E> const by = *with;
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E const g = gradient[i] * by.gradient_scale;
        E const c = by.beta1 * momentum[i] + by.rest1 * g;
        momentum[i] = by.beta2 * momentum[i] + by.rest2 * g;
        E const sign = (c > 0 ? E(1) : E(0)) - (c < 0 ? E(1) : E(0));  // not nested: GCC vectorises this
        E const direction = c == c ? sign : c;                         // NaN stays
        E const kept = Keeps ? value[i] * by.keep : value[i];
        value[i] = kept - by.learning_rate * direction;
    }
}

}  // namespace detail::kernels

/// Lion (evolved sign momentum): moves every element by the learning rate. Usual learning rates are 3 to 10 times smaller
/// than with adamw, and the weight decay is larger by the same factor.
///
///     g = gradient_scale * gradient
///     c = beta1 * m + (1 - beta1) * g
///     m = beta2 * m + (1 - beta2) * g
///     value = value * (1 - learning_rate * weight_decay) - learning_rate * sign(c)
///
/// State    one array (m, named "exp_avg").
/// Cost     one pass: reads gradient, value and m, writes value and m.
/// Numbers  sign(0) is 0; NaN stays NaN.
/// Source   Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2; the decay is applied
///          as in adamw.
struct lion {
    double lr = 1e-4;           ///< learning rate; finite, >= 0
    double beta1 = 0.9;         ///< weight of m in c, whose sign is taken; in [0, 1)
    double beta2 = 0.99;        ///< the fraction of m that each step keeps; in [0, 1)
    double weight_decay = 0.0;  ///< decoupled: each step subtracts learning rate * weight_decay * value; finite, >= 0
    static constexpr char const* name = "lion";  ///< of the algorithm; checkpoints keep it

    [[nodiscard]] std::size_t slot_count() const noexcept { return 1; }
    [[nodiscard]] slot_words slot_names() const noexcept {
        static constexpr char const* names[] = {"exp_avg"};
        return names;
    }
    [[nodiscard]] double learning_rate() const noexcept { return lr; }

    /// Covers the algorithm's name and every hyper-parameter: ranks compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash("lion", lr, beta1, beta2, weight_decay); }
    [[nodiscard]] std::string hash_words() const {
        return policy_words("lion", {{"lr", lr}, {"beta1", beta1}, {"beta2", beta2}, {"weight_decay", weight_decay}});
    }

    /// Throws usage_error for hyper-parameters out of their ranges.
    void validate() const {
        DDP_EXPECTS(detail::is_finite(lr) && lr >= 0,
                    "lion: lr is " + detail::decimal(lr) + ", but must be a finite number >= 0; 1e-4 is usual");
        DDP_EXPECTS(beta1 >= 0 && beta1 < 1, "lion: beta1 must lie in [0, 1); 0.9 is usual");
        DDP_EXPECTS(beta2 >= 0 && beta2 < 1, "lion: beta2 must lie in [0, 1); 0.99 is usual");
        DDP_EXPECTS(detail::is_finite(weight_decay) && weight_decay >= 0,
                    "lion: weight_decay must be a finite number >= 0; 0.1 is usual, 0 means none");
    }

    /// Steps a range; the same bits in one piece or in many. Throws usage_error if the lengths differ.
    template <std::floating_point E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> slots) const {
        DDP_EXPECTS(gradient.size() == value.size() && !slots.empty() && slots[0].size() == value.size(),
                    "lion: step needs as many gradients as values, and one slot of that length");
        namespace kernels = detail::kernels;
        double const keep = kernels::minus_product(1, at.learning_rate, weight_decay);
        kernels::lion_constants<E> const with{.gradient_scale = static_cast<E>(at.gradient_scale),
                                              .keep = static_cast<E>(keep),
                                              .beta1 = static_cast<E>(beta1),
                                              .rest1 = static_cast<E>(1 - beta1),
                                              .beta2 = static_cast<E>(beta2),
                                              .rest2 = static_cast<E>(1 - beta2),
                                              .learning_rate = static_cast<E>(at.learning_rate)};
        auto* const kernel = weight_decay != 0.0 ? &kernels::lion_step<E, true> : &kernels::lion_step<E, false>;
        kernel(gradient.data(), value.data(), slots[0].data(), value.size(), &with);
    }
};
static_assert(OptimizerFor<lion, float> && OptimizerFor<lion, double>);

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
