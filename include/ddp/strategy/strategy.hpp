/// \file
/// Strategy: when ranks that train independently meet, and with which values they continue.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/core/interface.hpp>
#include <ddp/kernel/combine.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/state_slice.hpp>

namespace ddp {

/// What a strategy is given when a trainer is made, and again when its values are replaced (load_weights). All of it outlives
/// the strategy's state.
template <Element E>
struct strategy_plan {
    int rank = 0;   ///< this rank, in the trainer's communicator
    int ranks = 1;  ///< their number
    /// Of the values. Parameters in local_options::frozen have no elements there. A parameter may be followed by unused
    /// elements, up to the next multiple of 64 bytes, which must stay zero.
    layout const* where = nullptr;
    std::span<parameter<E> const> parameters = {};  ///< names and shapes, by parameter, frozen ones included
    std::span<E const> values = {};                 ///< as all ranks have them when prepare() is called
    /// What array() has made.
    std::shared_ptr<std::vector<std::vector<E>>> arrays = std::make_shared<std::vector<std::vector<E>>>();

    /// `count` zeros, for the parts of the state that messages are received into or sent from: after a failure the
    /// transport may still use that memory when the state has been destroyed (MPI).
    [[nodiscard]] std::span<E> array(std::size_t count) const { return arrays->emplace_back(count); }
};

/// One meeting: between two local steps, on the thread that trains.
template <Transport T, Element E>
struct meeting {
    communicator<T> const& comm;  ///< the ranks that meet: the trainer's, or the group that the strategy has named
    std::span<E> values;          ///< this rank's, of all that is trained; on return, those it continues with
    /// Counts this trainer's meetings of all ranks, from 1. In a meeting of a group: the last one's number; 0 before the first.
    std::uint64_t number = 1;
    std::uint64_t step = 0;  ///< local steps so far, the same on all ranks
    double share = 1;        ///< this rank's part of the samples since these ranks last met; all shares add up to 1
    double rate_factor = 1;  ///< the schedule's, of the last step
};

/// What a rank contributes after a step, under a strategy whose exchanges end later.
template <Transport T, Element E>
struct passing {
    communicator<T> const& comm;  ///< all of the trainer's ranks
    std::span<E> values;          ///< this rank's, of all that is trained; on return, those it continues with
    std::uint64_t number = 1;     ///< of this trainer's exchanges, from 1: the same on all ranks
    std::uint64_t step = 0;       ///< local steps so far, the same on all ranks
    std::uint64_t weight = 0;     ///< its samples since the previous exchange
    bool done = false;            ///< it is out of data
    bool stop = false;            ///< it wants training to stop
};
/// What all ranks reported in `passing` after an earlier step; the same on all of them.
struct passed {
    bool done = false;  ///< all were out of data
    bool stop = false;  ///< some rank wanted to stop
    bool met = false;   ///< in this call: it has changed values as a meeting does (local_result::met)
};

namespace detail {
template <class S, class T, class E>
concept Meets = requires(S const& policy, std::remove_cvref_t<decltype(policy.prepare(strategy_plan<E>{}))>& state,
                         meeting<T, E> const& with) { policy.meet(state, with); };
template <class S, class T, class E>
concept Passes = requires(S const& policy, std::remove_cvref_t<decltype(policy.prepare(strategy_plan<E>{}))>& state,
                          passing<T, E> const& with, meeting<T, E> const& last) {
    { policy.pass(state, with) } -> std::same_as<passed>;
    policy.drain(state, last);
};
}  // namespace detail

/// Combines the values of ranks. The policy is an aggregate of settings; its state is an object of its own.
///
///  name, hash()             for messages; ranks compare both, so hash() covers every setting
///  hash_words()             optional: std::string, the settings in words (policy_words), for the error of ranks that differ
///  validate()               throws usage_error for invalid settings, before anything is sent
///  validate(ranks)          optional: likewise for settings that are invalid for this number of ranks
///  validate(comm)           optional, collective over the trainer's ranks, once these have compared their settings: throws
///                           usage_error on all of them for groups that do not fit
///  agrees                   a static constant: after each meeting of all ranks their values have the same bits
///  due(step)                whether ranks meet after local step number `step`, from 1: the same on all ranks. After
///                           any step it must become true again later, because join() runs to the next meeting
///  group(step)              optional: the communicator of the ranks that meet then, all of them ranks of the trainer;
///                           null: all of these
///  prepare(plan)            returns the state, as it is before the first step; memory for messages comes from plan.array(). Called
///                           again with the new values when all ranks' values have been replaced (load_weights)
///  meet(state, meeting)     collective over meeting.comm: leaves in meeting.values what this rank continues with
///  state.for_each_state(visit)   shows all that must be kept so that training can continue from there: the same slices
///                           each time. Those under a parameter's name stay as they are while that parameter is frozen
///
/// Instead of meet, if no rank should wait for what the others do in the same step:
///
///  pass(state, passing)     after each step that is due: starts an exchange, ends an older one, and returns what the
///                           `passing`s of that exchange reported. passing.values may stay as they are. Once it has
///                           returned passed::done, join() returns false; the next call is drain, or pass after more
///                           training, which must not report the same `done` again
///  drain(state, meeting)    collective, in synchronise(): ends all exchanges; leaves in meeting.values what all ranks then
///                           hold, the same bits. There is none before prepare is called again or the state is destroyed
///
/// What the compiler cannot check: meet calls the same collectives on all ranks, whatever the values; if `agrees`, the
/// values that it leaves come from the same arithmetic on the same bits.
template <class S, class T, class E>
concept StrategyOver =
    Transport<T> && Element<E> &&
    requires(S const& policy, strategy_plan<E> const& plan, std::uint64_t step) {
        { policy.name } -> std::convertible_to<char const*>;
        { policy.hash() } -> std::convertible_to<std::uint64_t>;
        policy.validate();
        { S::agrees } -> std::convertible_to<bool>;
        { policy.due(step) } -> std::convertible_to<bool>;
        policy.prepare(plan);
    } &&
    requires(S const& policy, std::remove_cvref_t<decltype(policy.prepare(strategy_plan<E>{}))>& state,
             state_visitor visit) { state.for_each_state(visit); } &&
    (detail::Meets<S, T, E> || detail::Passes<S, T, E>);

/// The state of a strategy that keeps nothing.
struct no_strategy_state {
    void for_each_state(state_visitor /*visit*/) const noexcept {}
};

namespace detail {

/// values = the mean over the meeting's ranks, weighted by their shares. Each share is rounded to E, and so is each product;
/// the sum is the allreduce's, in the canonical order: the same bits on all ranks.
template <Transport T, Element E>
void average(meeting<T, E> const& with, std::span<E> values) {
    if (with.comm.size() == 1) return;
    scale(values, static_cast<E>(with.share));
    allreduce(with.comm, values);
}

/// An array like the arena, kept by a strategy, under the parameters' names.
template <Element E>
class kept_array {
public:
    kept_array(strategy_plan<E> const& plan, std::string_view name, bool from_values)
        : where_(*plan.where), parameters_(plan.parameters), name_(name), all_(plan.where->size()) {
        if (from_values) std::copy(plan.values.begin(), plan.values.end(), all_.begin());
    }
    [[nodiscard]] std::span<E> all() noexcept { return all_; }
    void show(state_visitor visit) {
        where_.for_each_in(0, where_.size(), [&](std::size_t i, std::size_t from, std::size_t to) {
            visit({.of = parameters_[i].name,
                   .name = name_,
                   .shape = parameters_[i].shape,
                   .type = element_type_of<E>(),
                   .begin = from - where_.begin(i),
                   .bytes = as_mutable_bytes(std::span<E>(all_).subspan(from, to - from))});
        });
    }

private:
    layout where_;
    std::span<parameter<E> const> parameters_;
    std::string_view name_;
    std::vector<E> all_;
};

/// A strategy behind virtual calls, so that a trainer's type does not depend on it.
template <Transport T, Element E>
class strategy_model : public detail::interface {
public:
    [[nodiscard]] virtual char const* name() const = 0;
    [[nodiscard]] virtual std::uint64_t hash() const = 0;
    [[nodiscard]] virtual std::string hash_words() const = 0;
    virtual void validate(int ranks) const = 0;
    virtual void validate(communicator<T> const& comm) const = 0;
    [[nodiscard]] virtual bool agrees() const = 0;
    [[nodiscard]] virtual bool due(std::uint64_t step) const = 0;
    [[nodiscard]] virtual communicator<T> const* group(std::uint64_t step) const = 0;
    virtual void prepare(strategy_plan<E> const& plan) = 0;
    [[nodiscard]] virtual bool passes() const = 0;  // then pass and drain, else meet
    virtual void meet(meeting<T, E> const& with) = 0;
    virtual passed pass(passing<T, E> const& with) = 0;
    virtual void drain(meeting<T, E> const& last) = 0;
    virtual void for_each_state(state_visitor visit) = 0;
};
template <Transport T, Element E, class S>
    requires StrategyOver<S, T, E>
class strategy_model_of final : public strategy_model<T, E> {
public:
    explicit strategy_model_of(S policy) : policy_(std::move(policy)) {}
    char const* name() const override { return policy_.name; }
    std::uint64_t hash() const override { return static_cast<std::uint64_t>(policy_.hash()); }
    std::string hash_words() const override {
        std::string const words = detail::hash_words_of(policy_);
        return words.empty() ? policy_.name : words;
    }
    void validate([[maybe_unused]] int ranks) const override {
        policy_.validate();
        if constexpr (requires { policy_.validate(ranks); }) policy_.validate(ranks);
    }
    void validate([[maybe_unused]] communicator<T> const& comm) const override {
        if constexpr (requires { policy_.validate(comm); }) policy_.validate(comm);
    }
    bool agrees() const override { return S::agrees; }
    bool due(std::uint64_t step) const override { return policy_.due(step); }
    communicator<T> const* group([[maybe_unused]] std::uint64_t step) const override {
        if constexpr (requires { policy_.group(step); }) return policy_.group(step);
        return nullptr;
    }
    void prepare(strategy_plan<E> const& plan) override {
        state_.reset();
        state_.emplace(policy_.prepare(plan));
    }
    bool passes() const override { return Passes<S, T, E>; }
    void meet([[maybe_unused]] meeting<T, E> const& with) override {
        if constexpr (Meets<S, T, E>) policy_.meet(state_.value(), with);
    }
    passed pass([[maybe_unused]] passing<T, E> const& with) override {
        if constexpr (Passes<S, T, E>) return policy_.pass(state_.value(), with);
        return {};
    }
    void drain([[maybe_unused]] meeting<T, E> const& last) override {
        if constexpr (Passes<S, T, E>) policy_.drain(state_.value(), last);
    }
    void for_each_state(state_visitor visit) override { state_.value().for_each_state(visit); }

private:
    S policy_;
    std::optional<std::remove_cvref_t<decltype(std::declval<S const&>().prepare(strategy_plan<E>{}))>> state_;
};

}  // namespace detail
}  // namespace ddp
