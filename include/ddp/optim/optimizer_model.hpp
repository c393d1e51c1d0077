/// \file
/// optimizer_model: an optimizer behind a virtual call a range, so that what steps is compiled once for all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/interface.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/optim/slot_names.hpp>

namespace ddp::detail {

/// OptimizerFor<E> with what is optional there filled in.
template <Element E>
class optimizer_model : public detail::interface {
public:
    virtual void validate() const = 0;
    [[nodiscard]] virtual std::uint64_t hash() const = 0;
    [[nodiscard]] virtual std::string hash_words() const = 0;
    [[nodiscard]] virtual std::size_t slot_count() const = 0;
    [[nodiscard]] virtual std::vector<std::string> slot_names(std::size_t group) const = 0;
    [[nodiscard]] virtual double learning_rate(std::size_t group) const = 0;
    /// Of the algorithm; empty where the optimizer does not say.
    [[nodiscard]] virtual std::string name(std::size_t group) const = 0;
    /// The group of each parameter; empty where the optimizer has none.
    [[nodiscard]] virtual std::vector<std::size_t> groups_of(std::span<parameter<E> const> parameters) const = 0;
    /// Whether prepare() comes before step(), and the norms of parameters between them.
    [[nodiscard]] virtual bool needs_norms() const = 0;
    virtual void prepare(step_info const& at, std::span<E> gradient, std::span<E const> value,
                         slot_spans<E> slots) const = 0;
    virtual void step(step_info const& at, std::span<E const> gradient, std::span<E> value,
                      slot_spans<E> slots) const = 0;

    /// What every group's learning rate is multiplied with besides the schedule.
    [[nodiscard]] double rate_factor() const noexcept { return rate_factor_; }
    void set_rate_factor(double factor) noexcept { rate_factor_ = factor; }

private:
    double rate_factor_ = 1;
};

template <class Opt, class E>
concept HasPrepare =
    requires(Opt const& optimizer, step_info const& at, std::span<E> gradient, std::span<E const> value,
             slot_spans<E> slots) { optimizer.prepare(at, gradient, value, slots); };
/// Whether this optimizer steps by norms of whole parameters.
template <class E, class Opt>
[[nodiscard]] bool needs_norms(Opt const& optimizer) {
    if constexpr (!HasPrepare<Opt, E>) {
        static_assert(
            !requires { &Opt::prepare; },
            "prepare of an optimizer is const and takes step_info, std::span<E>, std::span<E const>, slot_spans<E>");
        return false;
    } else if constexpr (requires { optimizer.needs_norms(); }) {
        return optimizer.needs_norms();
    } else {
        return true;
    }
}

template <Element E, OptimizerFor<E> Opt>
class optimizer_model_of final : public optimizer_model<E> {
public:
    explicit optimizer_model_of(Opt held) : held_(std::move(held)) {}

    void validate() const override {
        if constexpr (requires { held_.validate(); }) held_.validate();
    }
    std::uint64_t hash() const override { return static_cast<std::uint64_t>(held_.hash()); }
    std::string hash_words() const override {
        if constexpr (requires { held_.hash_words(); })
            return held_.hash_words();
        else
            return concat({name(0), name(0).empty() ? "" : ", ", "learning rate ", decimal(learning_rate(0))});
    }
    std::size_t slot_count() const override { return static_cast<std::size_t>(held_.slot_count()); }
    std::vector<std::string> slot_names(std::size_t group) const override { return slot_names_of(held_, group); }
    std::string name(std::size_t group) const override { return name_of_optimizer(held_, group); }
    double learning_rate(std::size_t group) const override {
        if constexpr (requires { held_.learning_rate(group); })
            return held_.learning_rate(group);
        else
            return held_.learning_rate();
    }
    std::vector<std::size_t> groups_of(std::span<parameter<E> const> parameters) const override {
        if constexpr (requires { held_.groups_of(parameters); }) {
            std::vector<std::size_t> groups = held_.groups_of(parameters);
            DDP_EXPECTS(groups.size() == parameters.size(),
                        "the optimizer's groups_of() must return one group a parameter");
            return groups;
        } else {
            static_assert(
                !requires { &Opt::groups_of; },
                "groups_of of an optimizer is const and takes a std::span<ddp::parameter<E> const>");
            return {};
        }
    }
    bool needs_norms() const override { return detail::needs_norms<E>(held_); }
    void prepare([[maybe_unused]] step_info const& at, [[maybe_unused]] std::span<E> gradient,
                 [[maybe_unused]] std::span<E const> value, [[maybe_unused]] slot_spans<E> slots) const override {
        if constexpr (HasPrepare<Opt, E>) held_.prepare(at, gradient, value, slots);
    }
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value,
              slot_spans<E> slots) const override {
        held_.step(at, gradient, value, slots);
    }

private:
    Opt held_;
};

/// By parameter: the name of the algorithm that steps it; empty where the optimizer does not say.
template <Element E>
[[nodiscard]] std::vector<std::string> names_by_parameter(optimizer_model<E> const& optimizer,
                                                          std::span<parameter<E> const> parameters) {
    std::vector<std::size_t> const groups = optimizer.groups_of(parameters);
    std::vector<std::string> names;
    for (std::size_t i = 0; i < parameters.size(); ++i) names.push_back(optimizer.name(groups.empty() ? 0 : groups[i]));
    return names;
}

template <Element E, OptimizerFor<E> Opt>
[[nodiscard]] std::unique_ptr<optimizer_model<E>> make_optimizer_model(Opt optimizer) {
    return std::make_unique<optimizer_model_of<E, Opt>>(std::move(optimizer));
}

}  // namespace ddp::detail
