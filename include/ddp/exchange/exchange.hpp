/// \file
/// Exchange: makes the mean gradient of a bucket from the gradients of all ranks. A policy with its own state.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collective/concepts.hpp>
#include <ddp/comm/lane.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/interface.hpp>
#include <ddp/core/task.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/state_slice.hpp>

namespace ddp {

/// One parameter of the model, as it is declared.
struct exchange_parameter {
    std::string name;                ///< its name in the model
    std::vector<std::size_t> shape;  ///< outermost dimension first
};

/// The elements of one parameter that lie in a bucket.
struct exchange_piece {
    std::size_t parameter = 0;  ///< its number in exchange_plan::parameters
    std::size_t offset = 0;     ///< the position of the first of these elements in the parameter
    std::size_t begin = 0;      ///< the position of that element in the bucket
    std::size_t count = 0;      ///< how many there are
};

/// One bucket: elements [begin, begin + count) of the arena. Elements between its pieces are zero on every rank.
struct exchange_bucket {
    std::size_t begin = 0;                    ///< the position of its first element in the arena
    std::size_t count = 0;                    ///< its elements
    std::vector<exchange_piece> pieces = {};  ///< in ascending order of `begin`
    std::vector<std::size_t> cuts = {};       ///< P + 1 positions in the bucket; slice r is [cuts[r], cuts[r+1])
};

/// What a policy receives once, when a trainer is made. The same on every rank, except `rank`.
template <Element E>
struct exchange_plan {
    int rank = 0;                                ///< this rank, in the trainer's communicator
    int ranks = 1;                               ///< their number, P
    bool sharded = false;                        ///< each rank steps its own slice, and needs the mean of no other
    std::vector<exchange_parameter> parameters;  ///< in the model's order
    std::vector<exchange_bucket> buckets;        ///< in the order of the arena
};

/// One bucket in one step. What it points to outlives the task.
template <Element E>
struct bucket_exchange {
    std::size_t bucket = 0;                  ///< its number in the plan
    std::span<E> data = {};                  ///< this rank's addend: a sum over its samples; becomes the mean
    std::span<std::size_t const> cuts = {};  ///< slice r is [cuts[r], cuts[r+1]) of data
    event* go = nullptr;                     ///< data may be read once this is set
    E const* factor = nullptr;               ///< read after go: 1 / (samples of all ranks), or 0 if there were none
    std::uint64_t updates = 0;  ///< the trainer's steps that have changed values: identical on all ranks, saved
};

/// The state of a policy that keeps nothing from step to step. While parameters at an end of a bucket are frozen, such a
/// policy receives the rest of that bucket only: in `what`, and in the plan that everywhere() is asked with.
struct no_exchange_state {
    void for_each_state(state_visitor /*visit*/) const noexcept {}
};

/// What an exchange that sends less than the gradients themselves has done since the trainer was made, on this rank.
struct exchange_statistics {
    /// Bytes that a reduce-scatter would have sent, and an all-gather as well unless the update is sharded.
    std::uint64_t dense_bytes = 0;
    std::uint64_t sent_bytes = 0;  ///< bytes sent instead
    /// |left out| / |contribution| (2-norms) in the last step measured, one in 16. With feedback the contribution
    /// includes what earlier steps have left out, so values near 1 are normal if little is sent.
    double error = 0;
    std::chrono::nanoseconds time{};  ///< processing time: converting, selecting and restoring

    /// dense_bytes / sent_bytes; 1 if nothing has been sent.
    [[nodiscard]] double ratio() const noexcept {
        return sent_bytes == 0 ? 1 : static_cast<double>(dense_bytes) / static_cast<double>(sent_bytes);
    }
};

/// Called with each piece of the state that is the same on all ranks.
using shared_state_visitor = function_ref<void(const_bytes)>;

/// What prepare() of an exchange returns.
template <class X, class E>
using exchange_state =
    std::remove_cvref_t<decltype(std::declval<X const&>().prepare(std::declval<exchange_plan<E> const&>()))>;

/// Computes the mean of gradients over ranks. The policy is an aggregate of settings; its state is an object of its own,
/// which the library holds for as long as the trainer lives, and never moves.
///
///  name, hash()                     for messages; ranks compare both, so hash() covers every setting
///  hash_words()                     optional: std::string, the settings in words (policy_words), for the error of ranks that differ
///  validate(parameters)             optional: throws usage_error if settings make no sense (for this model). Called before
///                                   ranks exchange anything about the trainer, so each rank reports it for itself
///  check_group(group)               optional: throws usage_error, at the same time, if the policy was made for other ranks
///  prepare(plan)                    returns the state for all buckets, as it is before the first step
///  state.refusal()                  optional, const: std::string, why it makes no sense for this plan; empty if it does. Asked
///                                   once all ranks are known to have the same plan, and thrown on each as usage_error
///  everywhere(plan, bucket)         whether exchange leaves the mean of this bucket on every rank, or slice r on rank r only
///  exchange(self, lane, state, what)  a coroutine for each bucket and step; those of several buckets run at once.
///                                   Posts receives, into memory of its own, for the messages that peers can send
///                                   without this rank's data; awaits what.go; then reads, sends and adds. Leaves in
///                                   what.data the sum over ranks times the factor
///  gather(self, lane, state, what)  a coroutine that brings every rank's slice of the mean to all: called after exchange if a
///                                   rank needs more than exchange has left it
///  state.for_each_state(visit)      shows everything that must be kept, besides the number of updates, so that training can
///                                   continue later as if it had not been interrupted. Called between steps, and with
///                                   nonfinite::stop and skip before and after the exchanges of a step, by the thread that
///                                   drives; what is shown may be written, and is written to undo such a step
///  state.for_each_shared(visit)     optional, const: shows, as bytes and in one order, the parts of the state that are the
///                                   same on all ranks. Ranks compare some of them in each step, as they do with values
///                                   (training_options::agreement_steps). Called between steps; allocates and throws nothing
///  state.statistics()               optional: exchange_statistics, called between steps
///
/// What the compiler cannot check, and every policy promises:
///  1. Bits     every rank ends with the same bits. If sharded and replicated updates are to give the same bits, rounding of
///              the means that are sent back belongs in exchange, because gather is not called if no rank needs it.
///  2. Wire     elements on the wire may be of any type. Messages go through the lane only (its phases 0 to 2), their sizes
///              are known from the plan, and arithmetic is in plain DDP_KERNEL functions.
///  3. Zero     if the factor is 0, the same messages are sent and nothing else happens: the result is not used, and the state
///              stays as it was.
///  4. Ends     when the coroutines of a step have ended, nothing is posted and nothing is in flight.
///  5. Gaps     elements between the pieces of a bucket are zero afterwards, as they were before.
///  6. Early    scratch and state are made in prepare or come from the pool (ddp::scratch): steps allocate nothing.
template <class X, class T, class E>
concept ExchangeOver =
    Transport<T> && Element<E> && requires(X const& policy, exchange_plan<E> const& plan, std::size_t bucket) {
        { policy.name } -> std::convertible_to<char const*>;
        { policy.hash() } -> std::convertible_to<std::uint64_t>;
        policy.prepare(plan);
        { policy.everywhere(plan, bucket) } -> std::convertible_to<bool>;
    } && requires(X self, lane<T> over, exchange_state<X, E>& state, bucket_exchange<E> what, state_visitor visit) {
        { X::exchange(self, over, state, what) } -> std::same_as<task<>>;
        { X::gather(self, over, state, what) } -> std::same_as<task<>>;
        state.for_each_state(visit);
    };

/// Refinement: exchanges on the calling thread. Nothing else in the library makes progress meanwhile, and it waits
/// without a deadline for ranks that do not take part. A trainer therefore calls it only in finish(), after every rank
/// has reported that it is there; nothing overlaps.
///
///  exchange_blocking(self, lane, state, what)   exchanges on the thread that drives; exchange() is then called only to await
///                                               what.go
template <class X, class T, class E>
concept BlockingExchangeOver =
    ExchangeOver<X, T, E> && requires(X self, lane<T> over, exchange_state<X, E>& state, bucket_exchange<E> what) {
        X::exchange_blocking(self, over, state, what);
    };

namespace detail {

/// An exchange of the buckets of one trainer behind one virtual call for each bucket and stage, so that the step is compiled
/// once for all exchanges.
template <Transport T, Element E>
class exchange_model : public detail::interface {
public:
    [[nodiscard]] virtual char const* name() const = 0;
    [[nodiscard]] virtual std::uint64_t hash() const = 0;
    [[nodiscard]] virtual std::string hash_words() const = 0;
    virtual void check_group(group const& ranks) const = 0;
    virtual void validate(std::span<exchange_parameter const> parameters) const = 0;
    /// Whether it needs no plan: a bucket may then be another part of the arena in the next step.
    [[nodiscard]] virtual bool keeps_nothing() const = 0;
    /// Called before everything below.
    virtual void prepare(exchange_plan<E> const& plan) = 0;
    /// Why it makes no sense for this plan; empty if it does.
    [[nodiscard]] virtual std::string refusal() const = 0;
    [[nodiscard]] virtual bool everywhere(exchange_plan<E> const& plan, std::size_t bucket) const = 0;
    [[nodiscard]] virtual task<> exchange(lane<T> over, bucket_exchange<E> what) = 0;
    [[nodiscard]] virtual task<> gather(lane<T> over, bucket_exchange<E> what) = 0;
    [[nodiscard]] virtual bool blocking() const = 0;
    virtual void exchange_blocking(lane<T> over, bucket_exchange<E> what) = 0;
    virtual void for_each_state(state_visitor visit) = 0;
    /// Copies what for_each_state shows, and restores it: for a step that may be undone.
    void save_state() {
        saved_.clear();
        for_each_state([&](state_slice const& s) { saved_.insert(saved_.end(), s.bytes.begin(), s.bytes.end()); });
    }
    void restore_state() {
        std::size_t at = 0;
        auto const expect = [&](bool same) {
            DDP_EXPECTS(
                same,
                std::string(name()) +
                    ": its state shows another size after an exchange than before it; make all of it in prepare()");
        };
        for_each_state([&](state_slice const& s) {
            expect(s.bytes.size() <= saved_.size() - at);
            std::copy_n(saved_.begin() + static_cast<std::ptrdiff_t>(at), s.bytes.size(), s.bytes.begin());
            at += s.bytes.size();
        });
        expect(at == saved_.size());
    }
    /// The parts of the state that are the same on all ranks.
    virtual void for_each_shared(shared_state_visitor visit) const noexcept = 0;
    [[nodiscard]] virtual exchange_statistics statistics() const = 0;
    /// Whether ranks that see each other's memory may instead compute the canonical sum times the factor in that
    /// memory.
    [[nodiscard]] virtual bool in_memory() const = 0;

private:
    std::vector<std::byte> saved_;
};

template <Transport T, Element E, class X>
class exchange_model_of final : public exchange_model<T, E> {
public:
    explicit exchange_model_of(X policy) : policy_(std::move(policy)) {}

    char const* name() const override { return policy_.name; }
    std::uint64_t hash() const override { return static_cast<std::uint64_t>(policy_.hash()); }
    std::string hash_words() const override {
        std::string const words = detail::hash_words_of(policy_);
        return words.empty() ? policy_.name : words;
    }
    void check_group([[maybe_unused]] group const& ranks) const override {
        if constexpr (requires { policy_.check_group(ranks); }) policy_.check_group(ranks);
    }
    void validate([[maybe_unused]] std::span<exchange_parameter const> parameters) const override {
        if constexpr (requires { policy_.validate(parameters); }) policy_.validate(parameters);
    }
    bool keeps_nothing() const override { return std::same_as<exchange_state<X, E>, no_exchange_state>; }
    void prepare(exchange_plan<E> const& plan) override { state_.emplace(policy_.prepare(plan)); }
    std::string refusal() const override {
        if constexpr (requires(exchange_state<X, E> const& kept) { kept.refusal(); }) return state_->refusal();
        return {};
    }
    bool everywhere(exchange_plan<E> const& plan, std::size_t bucket) const override {
        return policy_.everywhere(plan, bucket);
    }
    task<> exchange(lane<T> over, bucket_exchange<E> what) override {
        return X::exchange(policy_, over, *state_, what);
    }
    task<> gather(lane<T> over, bucket_exchange<E> what) override { return X::gather(policy_, over, *state_, what); }
    bool blocking() const override { return BlockingExchangeOver<X, T, E>; }
    void exchange_blocking([[maybe_unused]] lane<T> over, [[maybe_unused]] bucket_exchange<E> what) override {
        if constexpr (BlockingExchangeOver<X, T, E>) X::exchange_blocking(policy_, over, *state_, what);
    }
    void for_each_state(state_visitor visit) override { state_->for_each_state(visit); }
    void for_each_shared([[maybe_unused]] shared_state_visitor visit) const noexcept override {
        if constexpr (requires(exchange_state<X, E> const& kept) { kept.for_each_shared(visit); })
            state_->for_each_shared(visit);
    }
    exchange_statistics statistics() const override {
        if constexpr (requires { state_->statistics(); }) return state_->statistics();
        return {};
    }
    bool in_memory() const override { return memory_rule<X>::applies(policy_); }

private:
    X policy_;
    std::optional<exchange_state<X, E>> state_;
};

}  // namespace detail
}  // namespace ddp
