/// \file
/// The optimizer's step over any range of the arena, group by group, with the optimizer's state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/optimizer.hpp>

namespace ddp::detail {

/// The group of each parameter, where the optimizer has groups; empty where it has none.
template <class Opt, Element E>
[[nodiscard]] std::vector<std::size_t> groups_of(Opt const& optimizer, std::span<parameter<E> const> parameters) {
    if constexpr (requires { optimizer.groups_of(parameters); }) {
        std::vector<std::size_t> groups = optimizer.groups_of(parameters);
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

/// Owns slot_count() arrays of state, for the elements that this rank steps: with update::sharded its slices only.
/// Allocates in the constructor and in hold().
template <Element E, OptimizerFor<E> Opt>
class stepper {
public:
    /// `groups` has the group of each parameter; empty: there is one.
    stepper(Opt const& optimizer, layout const& where, std::vector<std::size_t> const& groups)
        : optimizer_(optimizer), slots_(optimizer.slot_count()) {
        for (std::size_t const i : where.order()) {
            std::size_t const group = groups.empty() ? 0 : groups[i];
            if (where.count(i) == 0 || (!runs_.empty() && runs_.back().group == group)) continue;
            if (!runs_.empty()) runs_.back().end = where.begin(i);
            runs_.push_back({where.size(), group});
        }
    }

    /// State for this many elements, zero.
    void hold(std::size_t elements) {
        elements_ = elements;
        state_.assign(elements * slots_.size(), E(0));
    }

    /// Steps values[from, to) of the arena; its state begins at element `state`. `factor` is the schedule's.
    void step(std::uint64_t update, double factor, double gradient_scale, std::span<E const> gradients,
              std::span<E> values, std::size_t from, std::size_t to, std::size_t state) {
        auto run = std::upper_bound(runs_.begin(), runs_.end(), from,
                                    [](std::size_t at, group_run const& r) { return at < r.end; });
        for (std::size_t count = 0; from != to; from += count, state += count, ++run) {
            count = std::min(to, run->end) - from;
            for (std::size_t k = 0; k < slots_.size(); ++k)
                slots_[k] = std::span<E>(state_).subspan(k * elements_ + state, count);
            step_info const info{.step = update,
                                 .learning_rate = base_rate(run->group) * factor,
                                 .gradient_scale = gradient_scale,
                                 .group = run->group};
            optimizer_.step(info, gradients.subspan(from, count), values.subspan(from, count), slot_spans<E>(slots_));
        }
    }

private:
    /// Neighbours of one group in the arena, with the gaps behind them, which are stepped in one call.
    struct group_run {
        std::size_t end;
        std::size_t group;
    };
    [[nodiscard]] double base_rate(std::size_t group) const {
        if constexpr (requires { optimizer_.learning_rate(group); })
            return optimizer_.learning_rate(group);
        else
            return optimizer_.learning_rate();
    }

    Opt optimizer_;
    std::size_t elements_ = 0;
    std::vector<E> state_;
    std::vector<std::span<E>> slots_;
    std::vector<group_run> runs_;  // they cover the arena
};

}  // namespace ddp::detail
