/// \file
/// adagrad: steps divided by the root of the sum of all squares of the gradient so far.
#pragma once

#include <algorithm>
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
#include <ddp/kernel/roots.hpp>
#include <ddp/optim/optimizer.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp {

namespace detail::kernels {

/// Constants of one adagrad step, computed in double and rounded once each.
template <std::floating_point E>
struct adagrad_constants {
    E gradient_scale;
    E weight_decay;
    E step_size;  // learning_rate / (1 + (step - 1) * lr_decay)
    E eps;
};

/// The sum after this gradient; it goes to `roots` too, whose root is taken next.
template <std::floating_point E, bool Decays>
DDP_KERNEL void adagrad_sums(E const* gradient, E const* value, E* sum, E* roots, std::size_t count,
                             adagrad_constants<E> const* with) {
    DDP_NO_CONTRACTION
    adagrad_constants<E> const by = *with;
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E g = gradient[i] * by.gradient_scale;
        if constexpr (Decays) g = g + by.weight_decay * value[i];
        E const v = sum[i] + g * g;
        sum[i] = v;
        roots[i] = v;
    }
}

/// The gradient is decayed once more, by the values that adagrad_sums saw: the same bits.
template <std::floating_point E, bool Decays>
DDP_KERNEL void adagrad_values(E const* gradient, E* value, E const* roots, std::size_t count,
                               adagrad_constants<E> const* with) {
    DDP_NO_CONTRACTION
    adagrad_constants<E> const by = *with;
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E g = gradient[i] * by.gradient_scale;
        if constexpr (Decays) g = g + by.weight_decay * value[i];
        value[i] = value[i] - by.step_size * g / (roots[i] + by.eps);
    }
}

inline constexpr std::size_t adagrad_block = 512;  // elements whose roots wait in L1 between the passes

}  // namespace detail::kernels

/// Adagrad; t is the number of the update:
///
///     g = gradient_scale * gradient + weight_decay * value
///     v = v + g * g
///     value = value - learning_rate / (1 + (t - 1) * lr_decay) * g / (sqrt(v) + eps)
///
/// State    one array (v, named "sum").
/// Cost     one pass: reads gradient, value and v, writes value and v.
/// Numbers  v starts at zero, like all state: there is no initial_accumulator_value. The rate is computed in double once
///          in each step, and rounded once.
/// Source   Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", JMLR
///          12, 2011, in the form of torch.optim.Adagrad.
struct adagrad {
    double lr = 0.01;           ///< learning rate; finite, >= 0
    double lr_decay = 0.0;      ///< the rate is divided by 1 + (t - 1) * lr_decay in update t; finite, >= 0
    double eps = 1e-10;         ///< added to the divisor, which keeps it above 0; finite, > 0
    double weight_decay = 0.0;  ///< multiple of value that is added to the gradient (L2 regularisation); finite, >= 0
    static constexpr char const* name = "adagrad";  ///< of the algorithm; checkpoints keep it

    [[nodiscard]] std::size_t slot_count() const noexcept { return 1; }
    [[nodiscard]] slot_words slot_names() const noexcept {
        static constexpr char const* names[] = {"sum"};
        return names;
    }
    [[nodiscard]] double learning_rate() const noexcept { return lr; }

    /// Covers the algorithm's name and every hyper-parameter: ranks compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept {
        return policy_hash("adagrad", lr, lr_decay, eps, weight_decay);
    }
    [[nodiscard]] std::string hash_words() const {
        return policy_words("adagrad",
                            {{"lr", lr}, {"lr_decay", lr_decay}, {"eps", eps}, {"weight_decay", weight_decay}});
    }

    /// Throws usage_error for hyper-parameters out of their ranges.
    void validate() const {
        DDP_EXPECTS(detail::is_finite(lr) && lr >= 0,
                    "adagrad: lr is " + detail::decimal(lr) + ", but must be a finite number >= 0; 0.01 is usual");
        DDP_EXPECTS(detail::is_finite(lr_decay) && lr_decay >= 0,
                    "adagrad: lr_decay must be a finite number >= 0; 0 means none");
        DDP_EXPECTS(detail::is_finite(eps) && eps > 0, "adagrad: eps must be a finite number > 0; 1e-10 is usual");
        DDP_EXPECTS(detail::is_finite(weight_decay) && weight_decay >= 0,
                    "adagrad: weight_decay must be a finite number >= 0; 1e-4 is usual, 0 means none");
    }

    /// Steps a range; the same bits in one piece or in many. Throws usage_error if lengths differ or at.step is 0.
    template <std::floating_point E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> slots) const {
        DDP_EXPECTS(at.step >= 1, "adagrad: step_info::step counts from 1; the decay of the rate begins there");
        DDP_EXPECTS(gradient.size() == value.size() && !slots.empty() && slots[0].size() == value.size(),
                    "adagrad: step needs as many gradients as values, and one slot of that length");
        namespace kernels = detail::kernels;
        double const divisor = kernels::minus_product(1, -lr_decay, static_cast<double>(at.step - 1));
        kernels::adagrad_constants<E> const with{.gradient_scale = static_cast<E>(at.gradient_scale),
                                                 .weight_decay = static_cast<E>(weight_decay),
                                                 .step_size = static_cast<E>(at.learning_rate / divisor),
                                                 .eps = static_cast<E>(eps)};
        bool const decays = weight_decay != 0.0;
        auto* const sums = decays ? &kernels::adagrad_sums<E, true> : &kernels::adagrad_sums<E, false>;
        auto* const values = decays ? &kernels::adagrad_values<E, true> : &kernels::adagrad_values<E, false>;
        E roots[kernels::adagrad_block];
        for (std::size_t begin = 0; begin < value.size(); begin += kernels::adagrad_block) {
            std::size_t const count = std::min(kernels::adagrad_block, value.size() - begin);
            sums(gradient.data() + begin, value.data() + begin, slots[0].data() + begin, roots, count, &with);
            kernels::square_roots(roots, count);
            values(gradient.data() + begin, value.data() + begin, roots, count, &with);
        }
    }
};
static_assert(OptimizerFor<adagrad, float> && OptimizerFor<adagrad, double>);

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
