/// \file
/// local_step: a rank's own step, on its own mean gradient.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <ddp/core/separate.hpp>
#include <ddp/kernel/combine.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/clip.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/train/gradient_norm.hpp>
#include <ddp/train/stepper.hpp>

namespace ddp::detail {

/// Clipping, norms, and the optimizer's pass over all that is trained. Depends on neither model nor communicator, so
/// that it is compiled once for all of them.
template <Element E>
class local_step {
public:
    /// `trained`: the layout of what is stepped; parameters that are frozen have no elements in it.
    template <OptimizerFor<E> Opt>
    local_step(Opt const& optimizer, layout const& trained, std::span<parameter<E> const> parameters,
               std::optional<clipping> const& clip)
        : where_(trained),
          parameters_(parameters),
          clip_(clip),
          stepper_(optimizer, trained, parameters),
          norm_(trained),
          value_norms_(trained) {}

    [[nodiscard]] layout const& where() const noexcept { return where_; }
    [[nodiscard]] std::uint64_t hash() const { return stepper_.hash(); }
    [[nodiscard]] std::string words() const { return stepper_.words(); }
    [[nodiscard]] std::vector<std::string> optimizer_names() const { return stepper_.optimizer_names(parameters_); }
    [[nodiscard]] std::uint64_t updates() const noexcept { return updates_; }

    /// Gradients are sums over `weight` samples, and are changed. `used`: by parameter, 0 if it stays as it is; empty:
    /// none does.
    void run(std::uint64_t weight, double rate_factor, std::span<E> gradients, std::span<E> values,
             std::span<std::uint8_t const> used);

    /// The optimizer's slots, and how many updates they have seen: each rank has its own.
    void for_each_state(state_visitor visit) {
        stepper_.for_each_state(where_, parameters_, [&](state_slice slice) {
            slice.per_rank = true;
            visit(slice);
        });
        visit({.of = "local",
               .name = "updates",
               .type = element_type::u64,
               .bytes = as_mutable_bytes(std::span<std::uint64_t>(&updates_, 1)),
               .per_rank = true});
    }

private:
    layout where_;
    std::span<parameter<E> const> parameters_;
    std::optional<clipping> clip_;
    stepper<E> stepper_;
    gradient_norm norm_, value_norms_;
    std::uint64_t updates_ = 0;
};

template <Element E>
void local_step<E>::run(std::uint64_t weight, double rate_factor, std::span<E> gradients, std::span<E> values,
                        std::span<std::uint8_t const> used) {
    std::size_t const n = where_.size();
    gradients = gradients.first(n);
    values = values.first(n);
    scale(gradients, static_cast<E>(1.0 / static_cast<double>(weight)));
    update_info how{.update = updates_ + 1, .rate_factor = rate_factor};
    if (clip_) {
        if (auto const* const by_norm = std::get_if<clip_by_global_norm>(&*clip_)) {
            norm_.add(std::span<E const>(gradients), 0, n);
            how.gradient_scale = by_norm->factor(norm_.value());
        } else if (auto const* const by_value = std::get_if<clip_by_value>(&*clip_)) {
            by_value->apply(gradients);
        }
    }
    auto const for_each_used = [&](auto const& f) {
        if (used.empty()) return f(std::size_t{0}, n);
        for (std::size_t i = 0; i < used.size(); ++i)
            if (used[i] != 0) f(where_.begin(i), where_.end(i));
    };
    if (stepper_.needs_norms()) {
        for_each_used([&](std::size_t from, std::size_t to) { stepper_.prepare(how, gradients, values, from, to); });
        value_norms_.add(std::span<E const>(values), 0, n);
        norm_.add(std::span<E const>(gradients), 0, n);
        how.value_norms = value_norms_.of_parameters();
        how.gradient_norms = norm_.of_parameters();
    }
    for_each_used([&](std::size_t from, std::size_t to) { stepper_.step(how, gradients, values, from, to); });
    ++updates_;
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class local_step<float>;
DDP_INSTANTIATE class local_step<double>;
#endif

}  // namespace ddp::detail
