// Lion, written from outside of the library (which has one too, ddp::lion).
// Source: Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <ddp/ddp.hpp>
#include <span>

template <std::floating_point E>
struct lion_constants {  // rounded from double once a step
    E gradient_scale, rate, decay, beta1, rest1, beta2, rest2;
};

template <std::floating_point E>
DDP_KERNEL void lion_kernel(E const* gradient, E* value, E* momentum, std::size_t count,
                            lion_constants<E> const* with) {
    DDP_NO_CONTRACTION
    lion_constants<E> const by = *with;
    for (std::size_t i = 0; i < count; ++i) {
        E const g = by.gradient_scale * gradient[i];
        E const c = by.beta1 * momentum[i] + by.rest1 * g;
        E const sign = static_cast<E>(c > 0) - static_cast<E>(c < 0);
        value[i] = value[i] - by.rate * (sign + by.decay * value[i]);
        momentum[i] = by.beta2 * momentum[i] + by.rest2 * g;
    }
}

struct lion {
    static constexpr char const* name = "lion";  // checkpoints keep it
    double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0;

    std::size_t slot_count() const { return 1; }
    std::array<char const*, 1> slot_names() const { return {"momentum"}; }
    double learning_rate() const { return lr; }
    std::uint64_t hash() const {  // the name and every hyper-parameter: ranks compare it
        return ddp::policy_hash("lion", lr, beta1, beta2, weight_decay);
    }
    template <std::floating_point E>
    void step(ddp::step_info const& at, std::span<E const> gradient, std::span<E> value,
              ddp::slot_spans<E> slots) const {
        lion_constants<E> const with{static_cast<E>(at.gradient_scale), static_cast<E>(at.learning_rate),
                                     static_cast<E>(weight_decay),      static_cast<E>(beta1),
                                     static_cast<E>(1 - beta1),         static_cast<E>(beta2),
                                     static_cast<E>(1 - beta2)};
        lion_kernel(gradient.data(), value.data(), slots[0].data(), value.size(), &with);
    }
};
static_assert(ddp::OptimizerFor<lion, float> && ddp::OptimizerFor<lion, double>);
