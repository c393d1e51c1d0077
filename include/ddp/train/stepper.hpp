/// \file
/// stepper: an optimizer's step over ranges of the arena, group by group, and the optimizer's state for them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/text.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/state_slice.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/optim/optimizer_model.hpp>

namespace ddp {

/// The parameters of one update, besides the elements.
struct update_info {
    std::uint64_t update = 1;     ///< counts from 1
    double rate_factor = 1;       ///< the schedule's factor, by which each group's learning rate is multiplied
    double gradient_scale = 1.0;  ///< multiplies each gradient first
    std::span<double const> value_norms = {};     ///< by parameter, where needs_norms(): of its values
    std::span<double const> gradient_norms = {};  ///< likewise, of its gradient as prepare() has left it
};

/// Owns slot_count() arrays of state for the elements that are stepped here: all of the arena's, or some ranges. Needs no
/// communicator:
///
///     ddp::stepper<float> local(ddp::sgd{.lr = 0.1}, net.where(), net.parameters());
///     local.step({.update = ++n, .gradient_scale = 1.0 / samples}, net.gradients(), net.values());
///
/// Allocates in the constructor and in hold(). The constructor throws usage_error for settings that the optimizer's
/// validate() refuses, and for a group of parameter_groups that no parameter belongs to.
template <Element E>
class stepper {
public:
    /// With state for the whole arena, zero.
    template <OptimizerFor<E> Opt>
    stepper(Opt const& optimizer, layout const& where, std::span<parameter<E> const> parameters)
        : stepper(detail::make_optimizer_model<E>(optimizer), where, parameters) {
        arena_range const all{0, where.size()};
        hold(std::span(&all, 1));
    }
    /// Without state: hold() comes next.
    stepper(std::unique_ptr<detail::optimizer_model<E>> optimizer, layout const& where,
            std::span<parameter<E> const> parameters)
        : optimizer_(std::move(optimizer)) {
        optimizer_->validate();
        slots_.resize(optimizer_->slot_count());
        groups_ = optimizer_->groups_of(parameters);
        needs_norms_ = optimizer_->needs_norms();
        for (std::size_t i = 0; i < parameters.size(); ++i) (void)optimizer_->slot_names(group_of(i));  // as promised?
        for (std::size_t const i : where.order()) {
            std::size_t const group = group_of(i);
            if (where.count(i) == 0 || (!needs_norms_ && !runs_.empty() && runs_.back().group == group)) continue;
            if (!runs_.empty()) runs_.back().end = where.begin(i);
            runs_.push_back({where.size(), group, i});
        }
    }

    /// State for these ranges, zero. They ascend and do not overlap.
    void hold(std::span<arena_range const> ranges) {
        held_.clear();
        std::size_t total = 0;
        for (arena_range const& range : ranges) {
            if (range.size() == 0) continue;
            DDP_EXPECTS(held_.empty() || held_.back().in_arena.end <= range.begin,
                        "stepper: the ranges that are held must ascend and not overlap");
            held_.push_back({range, total});
            total += range.size();
        }
        elements_ = total;
        state_.assign(total * slots_.size(), E(0));
    }

    /// Whether this optimizer steps by norms of whole parameters. If so, first call prepare() for all elements, then
    /// compute the norms.
    [[nodiscard]] bool needs_norms() const noexcept { return needs_norms_; }
    /// The optimizer's prepare() over [from, to), which lies in one of the ranges held: once for each element and update.
    void prepare(update_info const& how, std::span<E> gradients, std::span<E const> values, std::size_t from,
                 std::size_t to) {
        for_each_run(how, from, to, [&](step_info const& info, std::size_t at, std::size_t count) {
            optimizer_->prepare(info, gradients.subspan(at, count), values.subspan(at, count), slot_spans<E>(slots_));
        });
    }
    /// Steps values[from, to) of the arena, which lies in one of the ranges held. The same bits in one piece or in many.
    void step(update_info const& how, std::span<E const> gradients, std::span<E> values, std::size_t from,
              std::size_t to) {
        DDP_EXPECTS(!needs_norms_ || (!how.value_norms.empty() && !how.gradient_norms.empty()),
                    "stepper: this optimizer steps by norms of parameters; prepare() all, and pass their norms");
        for_each_run(how, from, to, [&](step_info const& info, std::size_t at, std::size_t count) {
            optimizer_->step(info, gradients.subspan(at, count), values.subspan(at, count), slot_spans<E>(slots_));
        });
    }
    /// Steps everything that is held.
    void step(update_info const& how, std::span<E const> gradients, std::span<E> values) {
        for (held_range const& range : held_) step(how, gradients, values, range.in_arena.begin, range.in_arena.end);
    }

    /// Shows each slot of each parameter that has elements here, in the order of the arena. `where` and `parameters` are
    /// those of the constructor.
    void for_each_state(layout const& where, std::span<parameter<E> const> parameters, state_visitor visit) {
        for (held_range const& range : held_)
            where.for_each_in(
                range.in_arena.begin, range.in_arena.end, [&](std::size_t i, std::size_t a, std::size_t z) {
                    std::vector<std::string> const names = optimizer_->slot_names(group_of(i));
                    std::size_t const state = range.state + (a - range.in_arena.begin);
                    for (std::size_t k = 0; k < names.size(); ++k)
                        visit({.of = parameters[i].name,
                               .name = names[k],
                               .shape = parameters[i].shape,
                               .type = element_type_of<E>(),
                               .begin = a - where.begin(i),
                               .bytes = as_mutable_bytes(std::span<E>(state_).subspan(k * elements_ + state, z - a))});
                });
    }

    /// By parameter: the name of the algorithm that steps it; empty if it has none. `parameters` are those of the
    /// constructor.
    [[nodiscard]] std::vector<std::string> optimizer_names(std::span<parameter<E> const> parameters) const {
        return detail::names_by_parameter(*optimizer_, parameters);
    }
    /// Adds the state held for elements [from, to) of the arena.
    void digest_state(digest& all, std::size_t from, std::size_t to) const noexcept {
        for (held_range const& range : held_) {
            std::size_t const a = std::max(from, range.in_arena.begin), z = std::min(to, range.in_arena.end);
            for (std::size_t k = 0; a < z && k < slots_.size(); ++k)
                all.add(std::span<E const>(state_).subspan(k * elements_ + range.state + (a - range.in_arena.begin),
                                                           z - a));
        }
    }
    /// The optimizer and its settings, for the message about ranks that differ.
    [[nodiscard]] std::string words() const { return optimizer_->hash_words(); }
    /// A hash of the optimizer and of how it groups the parameters: ranks compare it.
    [[nodiscard]] std::uint64_t hash() const {
        return digest{}.add(optimizer_->hash()).add(std::span<std::size_t const>(groups_)).value();
    }

private:
    /// Neighbours of one group in the arena, with the gaps behind them, which are stepped in one call; or one parameter.
    struct group_run {
        std::size_t end;
        std::size_t group;
        std::size_t parameter;  // the first, or with needs_norms the only one
    };
    struct held_range {
        arena_range in_arena;
        std::size_t state;  // where its state begins in each slot
    };

    template <class F>
    void for_each_run(update_info const& how, std::size_t from, std::size_t to, F&& f) {
        if (from == to) return;
        std::size_t state = state_at(from, to);
        auto run = std::upper_bound(runs_.begin(), runs_.end(), from,
                                    [](std::size_t at, group_run const& r) { return at < r.end; });
        for (std::size_t count = 0; from != to; from += count, state += count, ++run) {
            count = std::min(to, run->end) - from;
            for (std::size_t k = 0; k < slots_.size(); ++k)
                slots_[k] = std::span<E>(state_).subspan(k * elements_ + state, count);
            step_info info{
                .step = how.update,
                .learning_rate = optimizer_->learning_rate(run->group) * optimizer_->rate_factor() * how.rate_factor,
                .gradient_scale = how.gradient_scale,
                .group = run->group};
            if (!how.value_norms.empty()) {
                info.value_norm = how.value_norms[run->parameter];
                info.gradient_norm = how.gradient_norms[run->parameter];
            }
            f(info, from, count);
        }
    }
    [[nodiscard]] std::size_t group_of(std::size_t i) const noexcept { return groups_.empty() ? 0 : groups_[i]; }
    [[nodiscard]] std::size_t state_at(std::size_t from, std::size_t to) const {
        auto const range = std::upper_bound(held_.begin(), held_.end(), from,
                                            [](std::size_t at, held_range const& r) { return at < r.in_arena.end; });
        DDP_EXPECTS(range != held_.end() && range->in_arena.begin <= from && to <= range->in_arena.end,
                    "stepper: only what is held can be stepped, one range at a time");
        return range->state + (from - range->in_arena.begin);
    }

    std::unique_ptr<detail::optimizer_model<E>> optimizer_;
    bool needs_norms_ = false;
    std::vector<std::size_t> groups_;  // of each parameter; empty: there is one
    std::vector<group_run> runs_;      // they cover the arena
    std::vector<held_range> held_;     // ascending
    std::size_t elements_ = 0;
    std::vector<E> state_;
    std::vector<std::span<E>> slots_;
};

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class stepper<float>;
DDP_INSTANTIATE class stepper<double>;
#endif

}  // namespace ddp
