/// \file
/// rmsprop: steps divided by the root of a running mean of the gradient's square, with momentum or centering if wanted.
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

/// Constants of one rmsprop step, each rounded once from double.
template <std::floating_point E>
struct rmsprop_constants {
    E gradient_scale;
    E weight_decay;
    E alpha, rest;  // rest = 1 - alpha
    E momentum;
    E learning_rate;
    E eps;
};

/// The running means after this gradient, and in `roots` what the root is taken of next. `mean` is not touched unless
/// Centers. A difference that rounding made negative counts as 0; NaN stays.
template <std::floating_point E, bool Decays, bool Centers>
DDP_KERNEL void rmsprop_moments(E const* gradient, E const* value, E* square, E* mean, E* roots, std::size_t count,
                                rmsprop_constants<E> const* with) {
    DDP_NO_CONTRACTION
    rmsprop_constants<E> const by = *with;
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E g = gradient[i] * by.gradient_scale;
        if constexpr (Decays) g = g + by.weight_decay * value[i];
        E const v = by.alpha * square[i] + by.rest * g * g;
        square[i] = v;
        if constexpr (Centers) {
            E const a = by.alpha * mean[i] + by.rest * g;
            mean[i] = a;
            E const variance = v - a * a;
            roots[i] = variance < 0 ? E(0) : variance;
        } else {
            roots[i] = v;
        }
    }
}

/// The gradient is decayed once more, by the values that rmsprop_moments saw: the same bits. `buffer` is not touched
/// without momentum.
template <std::floating_point E, bool Decays, bool Moves>
DDP_KERNEL void rmsprop_values(E const* gradient, E* value, E* buffer, E const* roots, std::size_t count,
                               rmsprop_constants<E> const* with) {
    DDP_NO_CONTRACTION
    rmsprop_constants<E> const by = *with;
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E g = gradient[i] * by.gradient_scale;
        if constexpr (Decays) g = g + by.weight_decay * value[i];
        E change = g / (roots[i] + by.eps);
        if constexpr (Moves) {
            change = by.momentum * buffer[i] + change;
            buffer[i] = change;
        }
        value[i] = value[i] - by.learning_rate * change;
    }
}

inline constexpr std::size_t rmsprop_block = 512;  // elements whose roots wait in L1 between the passes

}  // namespace detail::kernels

/// RMSprop:
///
///     g = gradient_scale * gradient + weight_decay * value
///     v = alpha * v + (1 - alpha) * g * g
///     a = alpha * a + (1 - alpha) * g                        (if centered)
///     d = sqrt(centered ? max(v - a * a, 0) : v) + eps
///     b = momentum * b + g / d                               (without momentum: b = g / d)
///     value = value - learning_rate * b
///
/// State    one to three arrays: v ("square_avg"); b ("momentum_buffer") if momentum > 0; a ("grad_avg") if centered.
/// Cost     one pass: reads gradient, value and state, writes value and state.
/// Numbers  all state starts at zero. If rounding makes v - a * a negative, as with a gradient that stays the same, it
///          counts as 0; torch.optim.RMSprop gives NaN in this case.
/// Source   Tieleman and Hinton, "Lecture 6.5: RMSprop", COURSERA, 2012; centered: Graves, "Generating sequences with
///          recurrent neural networks", 2013; in the form of torch.optim.RMSprop, with eps outside the root.
struct rmsprop {
    double lr = 0.01;           ///< learning rate; finite, >= 0
    double alpha = 0.99;        ///< the fraction of v and a that each step keeps; in [0, 1)
    double eps = 1e-8;          ///< added to the divisor, which keeps it above 0; finite, > 0
    double weight_decay = 0.0;  ///< multiple of value that is added to the gradient (L2 regularisation); finite, >= 0
    double momentum = 0.0;      ///< the fraction of b that each step keeps; in [0, 1)
    bool centered = false;      ///< divides by the root of the variance of the gradient, not of its mean square
    static constexpr char const* name = "rmsprop";  ///< of the algorithm; checkpoints keep it

    [[nodiscard]] std::size_t slot_count() const noexcept {
        return std::size_t{1} + (momentum != 0.0 ? 1 : 0) + (centered ? 1 : 0);
    }
    /// "square_avg", "momentum_buffer", "grad_avg", in this order, as torch.optim calls them: those that there are.
    [[nodiscard]] slot_words slot_names() const noexcept {
        static constexpr char const* names[] = {"square_avg", "momentum_buffer", "grad_avg"};
        static constexpr char const* without_momentum[] = {"square_avg", "grad_avg"};
        return (momentum != 0.0 ? slot_words(names) : slot_words(without_momentum)).first(slot_count());
    }
    [[nodiscard]] double learning_rate() const noexcept { return lr; }

    /// Covers the algorithm's name and every hyper-parameter: ranks compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept {
        return policy_hash("rmsprop", lr, alpha, eps, weight_decay, momentum, centered);
    }
    [[nodiscard]] std::string hash_words() const {
        return policy_words("rmsprop", {{"lr", lr},
                                        {"alpha", alpha},
                                        {"eps", eps},
                                        {"weight_decay", weight_decay},
                                        {"momentum", momentum},
                                        {"centered", centered}});
    }

    /// Throws usage_error for hyper-parameters out of their ranges.
    void validate() const {
        DDP_EXPECTS(detail::is_finite(lr) && lr >= 0,
                    "rmsprop: lr is " + detail::decimal(lr) + ", but must be a finite number >= 0; 0.01 is usual");
        DDP_EXPECTS(alpha >= 0 && alpha < 1, "rmsprop: alpha must lie in [0, 1); 0.99 is usual");
        DDP_EXPECTS(detail::is_finite(eps) && eps > 0, "rmsprop: eps must be a finite number > 0; 1e-8 is usual");
        DDP_EXPECTS(detail::is_finite(weight_decay) && weight_decay >= 0,
                    "rmsprop: weight_decay must be a finite number >= 0; 1e-4 is usual, 0 means none");
        DDP_EXPECTS(momentum >= 0 && momentum < 1, "rmsprop: momentum must lie in [0, 1); 0.9 is usual, 0 means none");
    }

    /// Steps a range; the same bits in one piece or in many. Throws usage_error if the lengths differ.
    template <std::floating_point E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> slots) const {
        std::size_t const used = slot_count();
        DDP_EXPECTS(gradient.size() == value.size() && slots.size() >= used,
                    "rmsprop: step needs as many gradients as values, and slot_count() slots");
        for (std::size_t k = 0; k < used; ++k)
            DDP_EXPECTS(slots[k].size() == value.size(), "rmsprop: step needs slots as long as the values");
        namespace kernels = detail::kernels;
        kernels::rmsprop_constants<E> const with{.gradient_scale = static_cast<E>(at.gradient_scale),
                                                 .weight_decay = static_cast<E>(weight_decay),
                                                 .alpha = static_cast<E>(alpha),
                                                 .rest = static_cast<E>(1 - alpha),
                                                 .momentum = static_cast<E>(momentum),
                                                 .learning_rate = static_cast<E>(at.learning_rate),
                                                 .eps = static_cast<E>(eps)};
        bool const decays = weight_decay != 0.0;
        bool const moves = momentum != 0.0;
        auto* const moments =
            decays
                ? (centered ? &kernels::rmsprop_moments<E, true, true> : &kernels::rmsprop_moments<E, true, false>)
                : (centered ? &kernels::rmsprop_moments<E, false, true> : &kernels::rmsprop_moments<E, false, false>);
        auto* const values =
            decays ? (moves ? &kernels::rmsprop_values<E, true, true> : &kernels::rmsprop_values<E, true, false>)
                   : (moves ? &kernels::rmsprop_values<E, false, true> : &kernels::rmsprop_values<E, false, false>);
        E roots[kernels::rmsprop_block];
        for (std::size_t begin = 0; begin < value.size(); begin += kernels::rmsprop_block) {
            std::size_t const count = std::min(kernels::rmsprop_block, value.size() - begin);
            E* const buffer = moves ? slots[1].data() + begin : nullptr;
            E* const mean = centered ? slots[used - 1].data() + begin : nullptr;
            moments(gradient.data() + begin, value.data() + begin, slots[0].data() + begin, mean, roots, count, &with);
            kernels::square_roots(roots, count);
            values(gradient.data() + begin, value.data() + begin, buffer, roots, count, &with);
        }
    }
};
static_assert(OptimizerFor<rmsprop, float> && OptimizerFor<rmsprop, double>);

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
