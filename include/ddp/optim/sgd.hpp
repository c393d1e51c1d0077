/// \file
/// sgd: stochastic gradient descent with momentum (classical or Nesterov's) and weight decay.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

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

enum class momentum_form { none, classical, nesterov };

/// Hyper-parameters of one sgd step, each rounded once from double.
template <std::floating_point E>
struct sgd_constants {
    E gradient_scale;
    E weight_decay;
    E momentum;
    E learning_rate;
};

/// One step over `count` elements; `velocity` is not touched without momentum. Decays is a parameter so that without it
/// 0 * infinity makes no NaN.
template <std::floating_point E, momentum_form Form, bool Decays>
DDP_KERNEL void sgd_step(E const* gradient, E* value, E* velocity, std::size_t count, sgd_constants<E> const* with) {
    DDP_NO_CONTRACTION
    sgd_constants<E> const by = *with;
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E g = gradient[i] * by.gradient_scale;
        if constexpr (Decays) g = g + by.weight_decay * value[i];
        if constexpr (Form != momentum_form::none) {
            E const v = by.momentum * velocity[i] + g;
            velocity[i] = v;
            g = Form == momentum_form::nesterov ? g + by.momentum * v : v;
        }
        value[i] = value[i] - by.learning_rate * g;
    }
}

}  // namespace detail::kernels

/// Stochastic gradient descent:
///
///     g = gradient_scale * gradient + weight_decay * value
///     v = momentum * v + g                  (v starts at zero, so after the first step it is g)
///     g = nesterov ? g + momentum * v : v   (if momentum > 0)
///     value = value - learning_rate * g
///
/// State   one array (v, named "momentum") if momentum > 0, otherwise none.
/// Cost    one pass: reads gradient, value and v, writes value and v.
/// Source  PyTorch's torch.optim.SGD with dampening 0; Sutskever et al., "On the importance of initialization and
///         momentum in deep learning", ICML 2013, but v does not include the learning rate.
struct sgd {
    double lr = 0.01;           ///< learning rate; finite, >= 0
    double momentum = 0.0;      ///< the fraction of v that each step keeps; in [0, 1)
    double weight_decay = 0.0;  ///< multiple of value that is added to the gradient (L2 regularisation); finite, >= 0
    bool nesterov = false;      ///< uses Nesterov's form, which needs momentum > 0
    static constexpr char const* name = "sgd";  ///< of the algorithm; checkpoints keep it

    [[nodiscard]] std::size_t slot_count() const noexcept { return momentum != 0.0 ? 1 : 0; }
    [[nodiscard]] slot_words slot_names() const noexcept {
        static constexpr char const* names[] = {"momentum"};
        return slot_words(names).first(slot_count());
    }
    [[nodiscard]] double learning_rate() const noexcept { return lr; }

    /// Covers the algorithm's name and every hyper-parameter: ranks compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept {
        return policy_hash("sgd", lr, momentum, weight_decay, nesterov);
    }
    [[nodiscard]] std::string hash_words() const {
        return policy_words(
            "sgd", {{"lr", lr}, {"momentum", momentum}, {"weight_decay", weight_decay}, {"nesterov", nesterov}});
    }

    /// Throws usage_error for hyper-parameters out of their ranges.
    void validate() const {
        DDP_EXPECTS(detail::is_finite(lr) && lr >= 0,
                    "sgd: lr is " + detail::decimal(lr) + ", but must be a finite number >= 0; 0.01 to 0.1 is usual");
        DDP_EXPECTS(momentum >= 0 && momentum < 1, "sgd: momentum must lie in [0, 1); 0.9 is usual");
        DDP_EXPECTS(detail::is_finite(weight_decay) && weight_decay >= 0,
                    "sgd: weight_decay must be a finite number >= 0; 1e-4 is usual, 0 means none");
        DDP_EXPECTS(!nesterov || momentum > 0, "sgd: nesterov needs momentum; set .momentum = 0.9, say");
    }

    /// Steps a range; the same bits in one piece or in many. Throws usage_error if the lengths differ.
    template <std::floating_point E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> slots) const {
        using detail::kernels::momentum_form;
        DDP_EXPECTS(gradient.size() == value.size() && slots.size() >= slot_count(),
                    "sgd: step needs as many gradients as values, and slot_count() slots");
        DDP_EXPECTS(slot_count() == 0 || slots[0].size() == value.size(),
                    "sgd: step needs a slot as long as the values");
        detail::kernels::sgd_constants<E> const with{static_cast<E>(at.gradient_scale), static_cast<E>(weight_decay),
                                                     static_cast<E>(momentum), static_cast<E>(at.learning_rate)};
        auto const run = [&]<momentum_form Form>(std::integral_constant<momentum_form, Form>) {
            E* const velocity = Form == momentum_form::none ? nullptr : slots[0].data();
            auto* const kernel = weight_decay != 0.0 ? &detail::kernels::sgd_step<E, Form, true>
                                                     : &detail::kernels::sgd_step<E, Form, false>;
            kernel(gradient.data(), value.data(), velocity, value.size(), &with);
        };
        if (momentum == 0.0)
            run(std::integral_constant<momentum_form, momentum_form::none>{});
        else if (!nesterov)
            run(std::integral_constant<momentum_form, momentum_form::classical>{});
        else
            run(std::integral_constant<momentum_form, momentum_form::nesterov>{});
    }
};
static_assert(OptimizerFor<sgd, float> && OptimizerFor<sgd, double>);

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
