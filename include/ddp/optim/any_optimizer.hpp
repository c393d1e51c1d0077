/// \file
/// any_optimizer: one of the library's optimizers, chosen at run time.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <variant>

#include <ddp/core/separate.hpp>
#include <ddp/optim/adagrad.hpp>
#include <ddp/optim/adam.hpp>
#include <ddp/optim/lamb.hpp>
#include <ddp/optim/lars.hpp>
#include <ddp/optim/lion.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/optim/optimizer_model.hpp>
#include <ddp/optim/rmsprop.hpp>
#include <ddp/optim/sgd.hpp>

namespace ddp {

/// An optimizer that is chosen at run time: holds one of the library's optimizers and behaves like it, including its
/// hash. It is meant for command lines and for tests over all optimizers: one trainer is compiled instead of eight. Cost:
/// one indirect call for each range.
class any_optimizer {
public:
    any_optimizer(sgd const& held) noexcept : held_(held) {}
    any_optimizer(adam const& held) noexcept : held_(held) {}
    any_optimizer(adamw const& held) noexcept : held_(held) {}
    any_optimizer(rmsprop const& held) noexcept : held_(held) {}
    any_optimizer(adagrad const& held) noexcept : held_(held) {}
    any_optimizer(lion const& held) noexcept : held_(held) {}
    any_optimizer(lamb const& held) noexcept : held_(held) {}
    any_optimizer(lars const& held) noexcept : held_(held) {}

    [[nodiscard]] std::size_t slot_count() const noexcept;
    [[nodiscard]] slot_words slot_names() const noexcept;
    [[nodiscard]] double learning_rate() const noexcept;
    [[nodiscard]] std::uint64_t hash() const noexcept;
    [[nodiscard]] std::string hash_words() const;
    [[nodiscard]] char const* name() const noexcept;
    void validate() const;
    [[nodiscard]] bool needs_norms() const noexcept;
    template <std::floating_point E>
    void prepare(step_info const& at, std::span<E> gradient, std::span<E const> value, slot_spans<E> slots) const {
        std::visit(
            [&](auto const& held) {
                if constexpr (detail::HasPrepare<std::remove_cvref_t<decltype(held)>, E>)
                    held.prepare(at, gradient, value, slots);
            },
            held_);
    }
    template <std::floating_point E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> slots) const {
        std::visit([&](auto const& held) { held.step(at, gradient, value, slots); }, held_);
    }

private:
    std::variant<sgd, adam, adamw, rmsprop, adagrad, lion, lamb, lars> held_;
};
static_assert(OptimizerFor<any_optimizer, float> && OptimizerFor<any_optimizer, double>);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/optim/impl/any_optimizer.ipp>
#endif
