/// \file
/// adam and adamw: steps scaled by running moments of the gradient, with weight decay inside or beside the gradient.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/math.hpp>
#include <ddp/core/text.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/kernel/roots.hpp>
#include <ddp/optim/optimizer.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp {

namespace detail::kernels {

/// Constants of one Adam step, computed in double and rounded once each.
template <std::floating_point E>
struct adam_constants {
    E gradient_scale;
    E weight_decay;  // adam: times value, added to the gradient
    E keep;          // adamw: 1 - learning_rate * weight_decay, times value before the step
    E beta1, rest1;  // rest = 1 - beta
    E beta2, rest2;
    E step_size;        // learning_rate / (1 - beta1^step)
    E root_correction;  // 1 / sqrt(1 - beta2^step)
    E eps;
};

/// The moments after this gradient; `second` goes to `roots` too, whose root is taken next.
template <std::floating_point E, bool Decays>
DDP_KERNEL void adam_moments(E const* gradient, E const* value, E* first, E* second, E* roots, std::size_t count,
                             adam_constants<E> const* with) {
    DDP_NO_CONTRACTION
    adam_constants<E> const by = *with;
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E g = gradient[i] * by.gradient_scale;
        if constexpr (Decays) g = g + by.weight_decay * value[i];
        first[i] = by.beta1 * first[i] + by.rest1 * g;
        E const v = by.beta2 * second[i] + by.rest2 * g * g;
        second[i] = v;
        roots[i] = v;
    }
}

template <std::floating_point E, bool Keeps>
DDP_KERNEL void adam_values(E* value, E const* first, E const* roots, std::size_t count,
                            adam_constants<E> const* with) {
    DDP_NO_CONTRACTION
    adam_constants<E> const by = *with;
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E const kept = Keeps ? value[i] * by.keep : value[i];
        value[i] = kept - by.step_size * first[i] / (roots[i] * by.root_correction + by.eps);
    }
}

inline constexpr std::size_t adam_block = 512;  // elements whose roots wait in L1 between the passes

template <std::floating_point E, bool Decays, bool Keeps>
void adam_step(adam_constants<E> const& with, std::span<E const> gradient, std::span<E> value, slot_spans<E> slots) {
    E roots[adam_block];
    for (std::size_t at = 0; at < value.size(); at += adam_block) {
        std::size_t const count = std::min(adam_block, value.size() - at);
        E* const first = slots[0].data() + at;
        adam_moments<E, Decays>(gradient.data() + at, value.data() + at, first, slots[1].data() + at, roots, count,
                                &with);
        square_roots(roots, count);
        adam_values<E, Keeps>(value.data() + at, first, roots, count, &with);
    }
}

inline constexpr char const* adam_slots[] = {"exp_avg", "exp_avg_sq"};  // m and v, as torch.optim calls them

/// What adam and adamw share: they differ in where the weight decay goes.
struct adam_numbers {
    double lr, beta1, beta2, eps, weight_decay;

    [[nodiscard]] std::uint64_t hash(std::string_view name) const noexcept {
        return policy_hash(name, lr, beta1, beta2, eps, weight_decay);
    }
    [[nodiscard]] std::string words(std::string_view name) const {
        return policy_words(
            name, {{"lr", lr}, {"beta1", beta1}, {"beta2", beta2}, {"eps", eps}, {"weight_decay", weight_decay}});
    }
    void validate(std::string const& name) const {
        DDP_EXPECTS(detail::is_finite(lr) && lr >= 0,
                    name + ": lr is " + detail::decimal(lr) + ", but must be a finite number >= 0; 1e-3 is usual");
        DDP_EXPECTS(beta1 >= 0 && beta1 < 1, name + ": beta1 must lie in [0, 1); 0.9 is usual");
        DDP_EXPECTS(beta2 >= 0 && beta2 < 1, name + ": beta2 must lie in [0, 1); 0.999 is usual");
        DDP_EXPECTS(detail::is_finite(eps) && eps > 0, name + ": eps must be a finite number > 0; 1e-8 is usual");
        DDP_EXPECTS(detail::is_finite(weight_decay) && weight_decay >= 0,
                    name + ": weight_decay must be a finite number >= 0; 0.01 is usual, 0 means none");
    }
    template <std::floating_point E>
    [[nodiscard]] adam_constants<E> constants(step_info const& at) const {
        double const correction1 = 1 - power(beta1, at.step);
        double const correction2 = 1 - power(beta2, at.step);
        return {.gradient_scale = static_cast<E>(at.gradient_scale),
                .weight_decay = static_cast<E>(weight_decay),
                .keep = static_cast<E>(minus_product(1, at.learning_rate, weight_decay)),
                .beta1 = static_cast<E>(beta1),
                .rest1 = static_cast<E>(1 - beta1),
                .beta2 = static_cast<E>(beta2),
                .rest2 = static_cast<E>(1 - beta2),
                .step_size = static_cast<E>(at.learning_rate / correction1),
                .root_correction = static_cast<E>(1 / detail::square_root(correction2)),
                .eps = static_cast<E>(eps)};
    }
};

template <std::floating_point E>
void expect_adam_spans(std::string const& name, step_info const& at, std::size_t gradients, std::size_t values,
                       slot_spans<E> slots) {
    DDP_EXPECTS(at.step >= 1, name + ": step_info::step counts from 1; at 0 the bias correction divides by zero");
    DDP_EXPECTS(gradients == values && slots.size() >= 2 && slots[0].size() == values && slots[1].size() == values,
                name + ": step needs as many gradients as values, and two slots of that length");
}

/// A step of adam, or of adamw, whose decay is decoupled.
template <bool Decoupled, std::floating_point E>
void step_adam(adam_numbers const& by, char const* name, step_info const& at, std::span<E const> gradient,
               std::span<E> value, slot_spans<E> slots) {
    expect_adam_spans(name, at, gradient.size(), value.size(), slots);
    auto const with = by.constants<E>(at);
    if (by.weight_decay != 0.0)
        adam_step<E, !Decoupled, Decoupled>(with, gradient, value, slots);
    else
        adam_step<E, false, false>(with, gradient, value, slots);
}

}  // namespace detail::kernels

/// Adam, with weight decay as part of the gradient (L2 regularisation); t is the number of the update:
///
///     g = gradient_scale * gradient + weight_decay * value
///     m = beta1 * m + (1 - beta1) * g
///     v = beta2 * v + (1 - beta2) * g * g
///     value = value - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
///
/// State    two arrays (m and v, named "exp_avg" and "exp_avg_sq").
/// Cost     one pass: reads gradient, value, m and v, writes value, m and v.
/// Numbers  beta^t, the corrections and their quotients are computed in double once in each step, and rounded once.
/// Source   Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015, with eps in the place where
///          torch.optim.Adam has it.
struct adam {
    double lr = 1e-3;                            ///< learning rate; finite, >= 0
    double beta1 = 0.9;                          ///< the fraction of m that each step keeps; in [0, 1)
    double beta2 = 0.999;                        ///< the fraction of v that each step keeps; in [0, 1)
    double eps = 1e-8;                           ///< added to the divisor, which keeps it above 0; finite, > 0
    double weight_decay = 0.0;                   ///< multiple of value that is added to the gradient; finite, >= 0
    static constexpr char const* name = "adam";  ///< of the algorithm; checkpoints keep it

    [[nodiscard]] std::size_t slot_count() const noexcept { return 2; }
    [[nodiscard]] slot_words slot_names() const noexcept { return detail::kernels::adam_slots; }
    [[nodiscard]] double learning_rate() const noexcept { return lr; }
    [[nodiscard]] std::uint64_t hash() const noexcept { return numbers().hash("adam"); }
    [[nodiscard]] std::string hash_words() const { return numbers().words("adam"); }

    /// Throws usage_error for hyper-parameters out of their ranges.
    void validate() const { numbers().validate("adam"); }

    /// Steps a range; the same bits in one piece or in many. Throws usage_error if lengths differ or at.step is 0.
    template <std::floating_point E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> slots) const {
        detail::kernels::step_adam<false>(numbers(), name, at, gradient, value, slots);
    }

private:
    [[nodiscard]] detail::kernels::adam_numbers numbers() const noexcept {
        return {lr, beta1, beta2, eps, weight_decay};
    }
};
static_assert(OptimizerFor<adam, float> && OptimizerFor<adam, double>);

/// AdamW: Adam with decoupled weight decay, which does not enter the moments:
///
///     g = gradient_scale * gradient
///     m = beta1 * m + (1 - beta1) * g
///     v = beta2 * v + (1 - beta2) * g * g
///     value = value * (1 - lr * weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
///
/// State    two arrays (m and v, named "exp_avg" and "exp_avg_sq").
/// Cost     one pass: reads gradient, value, m and v, writes value, m and v.
/// Numbers  beta^t, the corrections and their quotients are computed in double once in each step, and rounded once.
/// Source   Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019, in the form of torch.optim.AdamW.
struct adamw {
    double lr = 1e-3;            ///< learning rate; finite, >= 0
    double beta1 = 0.9;          ///< the fraction of m that each step keeps; in [0, 1)
    double beta2 = 0.999;        ///< the fraction of v that each step keeps; in [0, 1)
    double eps = 1e-8;           ///< added to the divisor, which keeps it above 0; finite, > 0
    double weight_decay = 0.01;  ///< decoupled: each step subtracts learning rate * weight_decay * value; finite, >= 0
    static constexpr char const* name = "adamw";  ///< of the algorithm; checkpoints keep it

    [[nodiscard]] std::size_t slot_count() const noexcept { return 2; }
    [[nodiscard]] slot_words slot_names() const noexcept { return detail::kernels::adam_slots; }
    [[nodiscard]] double learning_rate() const noexcept { return lr; }
    [[nodiscard]] std::uint64_t hash() const noexcept { return numbers().hash("adamw"); }
    [[nodiscard]] std::string hash_words() const { return numbers().words("adamw"); }

    /// Throws usage_error for hyper-parameters out of their ranges.
    void validate() const { numbers().validate("adamw"); }

    /// Steps a range; the same bits in one piece or in many. Throws usage_error if lengths differ or at.step is 0.
    template <std::floating_point E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> slots) const {
        detail::kernels::step_adam<true>(numbers(), name, at, gradient, value, slots);
    }

private:
    [[nodiscard]] detail::kernels::adam_numbers numbers() const noexcept {
        return {lr, beta1, beta2, eps, weight_decay};
    }
};
static_assert(OptimizerFor<adamw, float> && OptimizerFor<adamw, double>);

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
