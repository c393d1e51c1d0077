/// \file
/// meetings: when the ranks of a local_parallel meet, what they exchange then, and how a strategy changes their values.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collective/until_all_know.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/small_gather.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/model/state_slice.hpp>
#include <ddp/strategy/strategy.hpp>
#include <ddp/train/agreement.hpp>
#include <ddp/train/user_code.hpp>
#include <ddp/transport/any.hpp>

namespace ddp::detail {

/// The part of a local_parallel's meetings that does not depend on the model's type, so that it is compiled once.
/// `values` are the current values of all that is trained; the caller informs the model if they have `moved`.
template <Transport T, Element E>
class meetings {
public:
    struct outcome {
        bool all_ranks = false;       // have met
        bool everybody_done = false;  // all were out of data, and none has trained since the meeting before
        bool moved = false;           // values have changed
        bool alike = false;           // some rank has trained, and all hold the same values now
    };

    meetings(communicator<T> const& comm, std::unique_ptr<strategy_model<T, E>> strategy)
        : comm_(comm), strategy_(std::move(strategy)) {}
    meetings(meetings const&) = delete;
    meetings& operator=(meetings const&) = delete;
    ~meetings() {
        strategy_.reset();  // waits for exchanges under way, which may fail the job
        comm_.keep_if_failed(std::move(plan_.arrays));
    }

    [[nodiscard]] strategy_model<T, E>& strategy() noexcept { return *strategy_; }
    [[nodiscard]] strategy_model<T, E> const& strategy() const noexcept { return *strategy_; }
    /// `hash`: what all ranks have agreed on.
    void start(std::uint64_t hash, strategy_plan<E> const& plan) {
        hash_ = hash;
        plan_ = plan;
        strategy_->prepare(plan);
    }
    /// The plan's values have been replaced, by the same ones on all ranks: the strategy starts over, from these. Collective:
    /// throws errc::mismatch on all ranks if they have made different numbers of steps.
    void values_replaced() {
        (void)exchange_tickets(comm_, {.step = steps_, .call = 2});
        auto before = std::exchange(plan_.arrays, strategy_plan<E>{}.arrays);
        strategy_->prepare(plan_);  // first waits for exchanges under way
        comm_.keep_if_failed(std::move(before));
        set_steps(steps_);
    }
    /// By parameter: not 0 if neither its values nor its strategy state are to change.
    void freeze(std::span<std::uint8_t const> marks) {
        frozen_.clear();
        names_.clear();
        for (std::size_t i = 0; i < marks.size(); ++i)
            if (marks[i] != 0 && plan_.where->count(i) != 0) {
                frozen_.push_back(i);
                names_.push_back(plan_.parameters[i].name);
            }
        std::sort(names_.begin(), names_.end());
    }

    [[nodiscard]] std::uint64_t steps() const noexcept { return steps_; }
    void set_steps(std::uint64_t count) noexcept {
        steps_ = count;
        since_all_ = since_group_ = since_pass_ = 0;
        together_ = true;
    }
    /// A local step on `weight` samples, which may be none, has ended. Returns whether ranks meet now.
    [[nodiscard]] bool after_step(std::uint64_t weight) {
        since_all_ += weight;
        since_group_ += weight;
        since_pass_ += weight;
        together_ = false;
        return strategy_->due(++steps_);
    }
    /// Counts steps without samples up to the next meeting: a strategy has one after every step (see StrategyOver).
    void skip_steps() {
        while (!after_step(0)) {
        }
    }
    outcome meet(bool done, std::span<E> values, double rate_factor);
    outcome synchronise(std::span<E> values, double rate_factor);

    /// Whether all ranks hold the same values. The same answer on all ranks.
    [[nodiscard]] bool together() const noexcept { return together_; }
    [[nodiscard]] bool torn() const noexcept { return torn_; }
    void expect_together(char const* what) const {
        DDP_EXPECTS(together_, std::string(what) + ": under " + strategy_->name() +
                                   (strategy_->agrees() ? " ranks hold the same values right after a meeting only "
                                                          "(local_result::met); wait for that, or"
                                                        : " ranks never hold the same values;") +
                                   " call synchronise() on all ranks first");
    }
    [[nodiscard]] bool all_alike(std::uint64_t mine, char const* what = "replicas_identical") {
        return detail::all_alike(comm_, what, digest{}.add(what).add(hash_).value(), mine);
    }

    void request_stop() noexcept { stop_requested_.store(true); }
    [[nodiscard]] bool stop() const noexcept { return stop_; }

    /// The same on all ranks.
    void for_each_state(state_visitor visit) {
        visit({.of = "local",
               .name = "meetings",
               .type = element_type::u64,
               .bytes = as_mutable_bytes(std::span<std::uint64_t>(&meetings_, 1))});
        strategy_->for_each_state(visit);
    }

private:
    struct ticket {
        std::uint64_t weight = 0, step = 0, done = 0, stop = 0,
                      call = 0;  // call: 0 meet, 1 synchronise, 2 values_replaced
    };
    static_assert(std::has_unique_object_representations_v<ticket>);  // it travels: no padding

    ticket exchange_tickets(communicator<T> const& over, ticket mine);
    outcome pass(bool done, std::span<E> values);
    void meet_by(communicator<T> const& over, ticket const& all, std::uint64_t mine, std::span<E> values,
                 double rate_factor);
    /// The strategy may be user code: if it throws, values are only partly changed.
    template <class F>
    passed run_strategy(std::span<E> values, F const& f) {
        torn_ = true;
        passed const result = run_beside_frozen(values, f);
        torn_ = false;
        return result;
    }
    template <class F>
    passed run_beside_frozen(std::span<E> values, F const& f) {
        keep_frozen(values);
        passed const result = run_user_code(f, [this](std::exception_ptr thrown) { comm_.fail(thrown); });
        put_back_frozen(values);
        return result;
    }
    /// Calls f(bytes) for everything that belongs to a frozen parameter, in one order.
    template <class F>
    void for_each_frozen(std::span<E> values, F const& f) {
        if (frozen_.empty()) return;
        for (std::size_t const i : frozen_)
            f(as_mutable_bytes(values.subspan(plan_.where->begin(i), plan_.where->count(i))));
        strategy_->for_each_state([&](state_slice const& slice) {
            if (std::binary_search(names_.begin(), names_.end(), slice.of)) f(slice.bytes);
        });
    }
    /// A rounded mean of equal values is not always that value, and a momentum also changes values. So everything
    /// frozen is saved before a strategy runs, which knows nothing about frozen parameters, and restored afterwards.
    void keep_frozen(std::span<E> values) {
        kept_.clear();
        for_each_frozen(values, [&](mutable_bytes all) { kept_.insert(kept_.end(), all.begin(), all.end()); });
    }
    void put_back_frozen(std::span<E> values) {
        std::size_t at = 0;
        for_each_frozen(values, [&](mutable_bytes all) {
            DDP_EXPECTS(all.size() <= kept_.size() - at,
                        std::string(strategy_->name()) +
                            ": its state shows more after a meeting than before it; make all "
                            "of it in prepare()");
            std::copy_n(kept_.begin() + static_cast<std::ptrdiff_t>(at), all.size(), all.begin());
            at += all.size();
        });
    }

    communicator<T> comm_;
    std::unique_ptr<strategy_model<T, E>> strategy_;
    strategy_plan<E> plan_;
    std::vector<std::size_t> frozen_;
    std::vector<std::string_view> names_;  // theirs, sorted
    std::vector<std::byte> kept_;
    std::uint64_t hash_ = 1;
    std::uint64_t steps_ = 0, meetings_ = 0;         // meetings: of all ranks, where some rank had trained; passes
    std::uint64_t since_all_ = 0, since_group_ = 0;  // samples since the last meeting of all; of the group
    std::uint64_t since_pass_ = 0;                   // samples since the last pass
    bool together_ = true, torn_ = false, stop_ = false;
    std::atomic<bool> stop_requested_{false};
};

template <Transport T, Element E>
typename meetings<T, E>::outcome meetings<T, E>::meet(bool done, std::span<E> values, double rate_factor) {
    if (strategy_->passes()) return pass(done, values);
    communicator<T> const* const group = strategy_->group(steps_);
    communicator<T> const& over = group == nullptr ? comm_ : *group;
    std::uint64_t const mine = group == nullptr ? since_all_ : since_group_;
    ticket const all = exchange_tickets(over, {.weight = mine, .step = steps_, .done = done && mine == 0 ? 1u : 0u});
    if (all.weight != 0) meet_by(over, all, mine, values, rate_factor);
    since_group_ = 0;
    bool const moved = all.weight != 0;
    if (group != nullptr) return {.moved = moved};
    since_all_ = 0;
    together_ = strategy_->agrees();
    stop_ = all.stop != 0;
    return {.all_ranks = true, .everybody_done = all.done != 0, .moved = moved, .alike = moved && together_};
}

template <Transport T, Element E>
typename meetings<T, E>::outcome meetings<T, E>::synchronise(std::span<E> values, double rate_factor) {
    comm_.check();
    ticket const all = exchange_tickets(comm_, {.weight = since_all_, .step = steps_, .call = 1});
    stop_ = stop_ || all.stop != 0;  // exchanges under way may say so too, but are not used
    outcome result{.all_ranks = true, .moved = true, .alike = true};
    meeting<T, E> const last{comm_,      values, meetings_ + 1, steps_, 1.0 / static_cast<double>(comm_.size()),
                             rate_factor};
    if (strategy_->passes()) {
        run_strategy(values, [&] {
            strategy_->drain(last);
            return passed{};
        });
    } else if (strategy_->agrees()) {
        result.moved = all.weight != 0;
        if (result.moved) meet_by(comm_, all, since_all_, values, rate_factor);
    } else {
        run_strategy(values, [&] {
            average(last, values);
            return passed{};
        });
    }
    since_all_ = since_group_ = since_pass_ = 0;
    together_ = true;
    return result;
}

/// The sum over the ranks of `over`, if they meet after the same step.
template <Transport T, Element E>
typename meetings<T, E>::ticket meetings<T, E>::exchange_tickets(communicator<T> const& over, ticket mine) {
    mine.stop = stop_requested_.load() ? 1 : 0;
    std::vector<ticket> all(static_cast<std::size_t>(over.size()));
    all[static_cast<std::size_t>(over.rank())] = mine;
    operation_info what;
    what.name = "meeting";
    what.fingerprint = hash_;
    if (over.size() > 1) over.run([&] { return all_gather_small(over.enter(what), std::span<ticket>(all)); });
    auto const same_step = [&](ticket const& one) { return one.step == mine.step; };
    auto const same_call = [&](ticket const& one) { return one.call == mine.call; };
    bool const in_step = std::ranges::all_of(all, same_step);
    if (!in_step || !std::ranges::all_of(all, same_call)) {
        constexpr char const* calls[] = {"", " in synchronise()", " in load_weights()"};
        std::string text = in_step ? "ranks meet in different calls, after these numbers of local steps:"
                                   : "ranks meet after different numbers of local steps:";
        for (std::size_t r = 0; r < all.size(); ++r)
            text += (r == 0 ? " " : ", ") + std::to_string(all[r].step) +
                    calls[std::min<std::uint64_t>(all[r].call, 2)] + " on rank " +
                    std::to_string(over.members().members()[r]);
        until_all_know(over, "meeting");
        throw error(errc::mismatch, text +
                                        ". A rank that has fewer batches calls join() until it returns false, and "
                                        "then all call synchronise() together");
    }
    ticket sum{.done = 1};
    for (ticket const& one : all) {
        sum.weight += one.weight;
        sum.done = sum.done != 0 && one.done != 0 ? 1 : 0;
        sum.stop += one.stop;
    }
    return sum;
}

/// After a step under a strategy whose exchanges end later: no rank waits for what the others do in this step.
template <Transport T, Element E>
typename meetings<T, E>::outcome meetings<T, E>::pass(bool done, std::span<E> values) {
    std::uint64_t const mine = std::exchange(since_pass_, 0);
    ++meetings_;
    passed const late = run_strategy(values, [&] {
        return strategy_->pass({comm_, values, meetings_, steps_, mine, done && mine == 0, stop_requested_.load()});
    });
    stop_ = stop_ || late.stop;
    return {.all_ranks = late.met, .everybody_done = late.done, .moved = true};
}

template <Transport T, Element E>
void meetings<T, E>::meet_by(communicator<T> const& over, ticket const& all, std::uint64_t mine, std::span<E> values,
                             double rate_factor) {
    if (&over == &comm_) ++meetings_;
    run_strategy(values, [&] {
        strategy_->meet({over, values, meetings_, steps_, static_cast<double>(mine) / static_cast<double>(all.weight),
                         rate_factor});
        return passed{};
    });
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class meetings<any_transport, float>;
DDP_INSTANTIATE class meetings<any_transport, double>;
#endif

}  // namespace ddp::detail
