/// \file
/// step_cycle: takes a step from begin() to its end, on one rank: two sides, and a coroutine a bucket.
///
/// Two sides that never share a thread's time: the compute side calls begin, ready, backward_done and await_from, which
/// only count down and leave mail; the communication side collects the mail and runs the coroutines. Nothing here owns
/// a thread: a thousand cycles run in one. step_engine, which derives from this, processes the buckets.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <ddp/comm/lane.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/bucket_gates.hpp>
#include <ddp/train/frozen_buckets.hpp>
#include <ddp/train/late_gather.hpp>
#include <ddp/train/nonfinite.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/step_agreements.hpp>
#include <ddp/train/step_mail.hpp>
#include <ddp/train/step_roots.hpp>
#include <ddp/train/step_subject.hpp>
#include <ddp/train/step_ticket.hpp>
#include <ddp/train/training_progress.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {

template <Transport T, Element E>
class step_cycle : public mailbox_client,
                   private detail::step_roots::roots_owner,
                   protected detail::late_gather::gather_source {
public:
    virtual ~step_cycle() { on_.remove(*this); }
    step_cycle(step_cycle const&) = delete;
    step_cycle& operator=(step_cycle const&) = delete;

    // The compute side: one call at a time, none of them throws, blocks or allocates.

    void begin(step_ticket mine) noexcept;
    /// Elements [first, first + count) of gradient i are final, as are those behind them. Reaches element 0 once a
    /// step. Returns whether there is mail now.
    bool ready(std::size_t i, std::size_t first, std::size_t count) noexcept;
    /// Which parameters this rank's backward has reported, by parameter: before backward_done(). Asked for with unused::allowed.
    void use(std::span<std::uint8_t const> parameters) noexcept { agreements_.use(parameters); }
    void backward_done() noexcept { mail_.release(); }
    /// The step is over for the compute side, or was left by an exception.
    void end() noexcept { under_way_ = false; }
    /// From `since` on the compute side only waits for the end of the step.
    void await_from(time_point since) noexcept { awaited_.store(since, std::memory_order_relaxed); }

    // The communication side: for the thread that drives the scheduler.

    void collect() override;
    [[nodiscard]] bool has_mail() const noexcept override { return !mail_.empty(); }
    [[nodiscard]] bool under_way(group const& ranks) const noexcept override { return under_way_ && &ranks == &of_; }
    /// Ends when all values (if gathered late: those that this rank steps) are new. Call collect() before.
    task<> finished() {
        finishing_.set();
        co_await stepped_;
    }
    [[nodiscard]] bool idle() const noexcept { return unfinished_.left == 0 && (!late_ || late_->left().left == 0); }

    /// If values are gathered after finished(): which have arrived, after a step that changed values. Otherwise null.
    [[nodiscard]] detail::late_gather* late() noexcept { return late_ ? &*late_ : nullptr; }
    /// Ends when the last step is over completely. The next one begins after that.
    task<> settled() { co_await done_; }

    /// Of the last finished step.
    [[nodiscard]] std::uint64_t weight() const noexcept { return totals().weight; }
    [[nodiscard]] detail::step_totals const& totals() const noexcept { return agreements_.totals(); }
    [[nodiscard]] bool everybody_done() const noexcept { return agreements_.totals().everybody_done; }
    /// Mean loss over the samples of all ranks in the step before it, the same on all ranks; NaN if there was none.
    [[nodiscard]] double previous_loss() const noexcept { return agreements_.previous_loss(); }
    /// Some rank wanted training to stop when the step began: the same on all ranks.
    [[nodiscard]] bool stop() const noexcept { return agreements_.totals().stop; }
    /// Whether the mean gradient of the last step was not finite; skipped(): whether no value was changed therefore.
    [[nodiscard]] bool found_nonfinite() const noexcept { return nonfinite_; }
    [[nodiscard]] bool skipped() const noexcept { return nonfinite_ && options_.nonfinite != nonfinite::warn; }
    /// In that case, by rank: the first element of its own gradient that is not finite, if there is one.
    [[nodiscard]] std::span<detail::nonfinite_place const> places() const noexcept { return agreements_.places(); }
    [[nodiscard]] std::uint64_t updates() const noexcept { return updates_; }
    /// Continues from `at`, without last_losses. Between steps, while no thread drives; the same on all ranks.
    void set_progress(training_progress const& at) noexcept {
        updates_ = at.completed_steps;
        begun_ = at.begun_steps;
        agreements_.set_progress(at);
    }
    /// From now on parameters i with frozen[i] != 0 are not stepped, nor buckets of such only sent. As set_progress.
    virtual void freeze(std::span<std::uint8_t const> frozen) { frozen_.set(frozen, buckets_); }

    /// The memory of the cycle's messages: it must outlive the transport if the job has failed.
    [[nodiscard]] std::shared_ptr<void> posted_memory() const noexcept { return agreements_.posted_memory(); }

    /// Before the first step: sets the hash of everything that is the same on all ranks, which messages carry, and the
    /// cycle's own message context. The same on all ranks.
    void agree_on(std::uint64_t hash, std::uint32_t context) noexcept { agreements_.agree_on(hash, context); }
    [[nodiscard]] std::uint64_t hash() const noexcept { return agreements_.hash(); }

protected:
    /// Among the ranks of `of`, which outlives the cycle.
    [[gnu::cold]] step_cycle(scheduler<T>& on, group& of, step_subject<E>&& subject,
                             std::shared_ptr<detail::step_messages> messages);

    // For a derived class to implement.

    /// Processes bucket b in a step. Ends when this rank's part is over; some bucket has to launch() the next one.
    virtual task<> bucket(std::size_t b) = 0;
    /// A step begins, before its first bucket().
    virtual void step_begins() = 0;
    /// A step has changed the values.
    virtual void step_ended() = 0;
    /// Adds the shared state of the values [part.begin, part.end), and of other shared state the part of step `step`.
    virtual void add_state(digest& all, arena_range part, std::uint64_t step) const noexcept = 0;
    /// If values are gathered late: sends every rank's new slice of bucket b to all ranks.
    task<> gather(std::size_t b) override = 0;
    /// Whether everything is exchanged at once, in a call that blocks, when all ranks wait for the end of the step.
    [[nodiscard]] virtual bool blocking() const noexcept { return false; }
    virtual void exchange_blocking() {}

    /// See step_agreements.
    void compare_exchange() noexcept { agreements_.compare_exchange(); }

    // What bucket() is made of.

    /// Starts the next bucket, if one is left.
    void launch() {
        while (launched_ != buckets_.count() && silent(buckets_.launch()[launched_])) ++launched_;
        if (launched_ == buckets_.count()) return;
        std::size_t const b = buckets_.launch()[launched_++];
        roots_.start(b, bucket(b), unfinished_);
    }
    /// Awaits that the gradients of bucket b are final, and all weights known.
    [[nodiscard]] event& full(std::size_t b) noexcept { return gates_.of(b); }
    [[nodiscard]] time_point full_since(std::size_t b) const noexcept { return gates_.full_since(b); }
    [[nodiscard]] event& released() noexcept { return released_; }  // the end of backward
    /// With unused::allowed: awaits that it is known which parameters are stepped.
    [[nodiscard]] event& used_known() noexcept { return used_known_; }
    [[nodiscard]] bool tracks_used() const noexcept { return agreements_.tracks_used(); }
    /// Calls f(a, z) for what is stepped of [from, to): all of it, or its stepped parameters one by one.
    template <class F>
    void for_each_stepped(std::size_t from, std::size_t to, F&& f) {
        if (!tracks_used() && !frozen_.any()) return f(from, to);
        where_.for_each_in(from, to, [&](std::size_t i, std::size_t a, std::size_t z) {
            if (steps(i)) f(a, z);
        });
    }
    /// The norm of the mean gradient is known. Gathers that of all ranks, and where their own gradients are not finite.
    task<> agree_on_finite(double norm) {
        nonfinite_ = !detail::is_finite(norm);
        return agreements_.gather_places(norm);
    }

    [[nodiscard]] bool frozen(std::size_t i) const noexcept { return frozen_[i]; }
    [[nodiscard]] bool steps(std::size_t i) const noexcept { return !frozen(i) && agreements_.used(i); }
    [[nodiscard]] bool silent(std::size_t b) const noexcept { return frozen_.silent()[b] != 0; }  // exchanges nothing
    [[nodiscard]] std::size_t active_buckets() const noexcept { return frozen_.active(); }
    [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(of_.size()); }
    [[nodiscard]] std::size_t me() const noexcept { return static_cast<std::size_t>(of_.rank()); }
    [[nodiscard]] lane<T> lane_of_bucket(std::size_t b) noexcept { return agreements_.lane_of_bucket(b); }
    [[nodiscard]] scheduler<T>& on() const noexcept { return on_; }
    [[nodiscard]] layout const& where() const noexcept { return where_; }
    [[nodiscard]] detail::bucket_map const& buckets() const noexcept { return buckets_; }
    [[nodiscard]] arena_range range(std::size_t b) const noexcept { return {buckets_.begin(b), buckets_.end(b)}; }
    [[nodiscard]] std::span<parameter<E> const> parameters() const noexcept { return parameters_; }
    [[nodiscard]] training_options const& options() const noexcept { return options_; }
    /// Values may be stepped as soon as their bucket is reduced.
    [[nodiscard]] bool ready_releases() const noexcept { return ready_releases_; }
    [[nodiscard]] std::span<E> gradients() const noexcept { return gradients_; }
    [[nodiscard]] std::span<E> values() const noexcept { return values_; }
    /// 1 / weight(), or 0.
    [[nodiscard]] E const& inverse() const noexcept { return inverse_; }
    /// The number of the current or failed step, in the training and among the steps of this object; both count from 1.
    [[nodiscard]] std::uint64_t round() const noexcept { return agreements_.round(); }
    [[nodiscard]] std::uint64_t made() const noexcept { return agreements_.made(); }
    [[nodiscard]] bool within_step() const noexcept { return !done_.is_set(); }
    [[nodiscard]] time_point awaited() const noexcept { return awaited_.load(std::memory_order_relaxed); }
    /// Whether enough bytes were processed since the transport was last driven that it should be driven again.
    [[nodiscard]] bool its_turn() const noexcept { return undriven_bytes_ >= options_.step_piece_bytes / 4; }
    void worked_through(std::size_t elements) noexcept { undriven_bytes_ += elements * sizeof(E); }

private:
    void begin_step();
    void fill(std::size_t b) {
        if (options_.nonfinite != nonfinite::unchecked)
            detail::find_nonfinite(where_, std::span<E const>(gradients_), buckets_.begin(b), buckets_.end(b),
                                   agreements_.place());
        gates_.fill(b);
    }
    void over(detail::step_roots::stage const& ended) override { &ended == &unfinished_ ? finish_step() : end_step(); }
    void finish_step() noexcept;
    void end_step() noexcept;
    /// New values are sent after the means of all buckets, so that they do not delay a mean.
    task<> gather_late() {
        co_await stepped_;
        if (weight() != 0 && !skipped()) late_->start();
    }
    task<> weigh();
    task<> agree_on_used();

    scheduler<T>& on_;
    group& of_;
    layout where_;
    detail::bucket_map buckets_;
    std::span<parameter<E> const> parameters_;
    training_options options_;
    bool ready_releases_;
    std::span<E> gradients_;
    std::span<E> values_;
    detail::step_agreements<T, E> agreements_;

    // the compute side's
    std::atomic<bool> under_way_{false};
    std::uint64_t begun_ = 0;  // steps of the training

    // between steps written, within them read by both
    detail::frozen_buckets frozen_;

    // between the sides
    detail::step_mail mail_;
    step_ticket ticket_;
    std::atomic<time_point> awaited_{never};

    // the communication side's
    std::uint64_t updates_ = 0;  // steps that changed values
    E inverse_ = 0;
    bool nonfinite_ = false;
    detail::bucket_gates gates_;
    event released_, finishing_, used_known_, stepped_, done_;
    using stage = detail::step_roots::stage;
    stage unfinished_;
    detail::step_roots roots_;  // one a bucket, the weights, which parameters are used, and what starts the late gather
    std::optional<detail::late_gather> late_;
    std::size_t launched_ = 0;
    std::size_t undriven_bytes_ = 0;  // processed since this was driven last
};

// Made of

template <Transport T, Element E>
step_cycle<T, E>::step_cycle(scheduler<T>& on, group& of, step_subject<E>&& subject,
                             std::shared_ptr<detail::step_messages> messages)
    : on_(on),
      of_(of),
      where_(std::move(subject.where)),
      buckets_(std::move(subject.buckets)),
      parameters_(subject.parameters),
      options_(subject.options),
      ready_releases_(subject.ready_releases && options_.unused == unused::error),  // else some may not be stepped
      gradients_(subject.gradients),
      values_(subject.values),
      agreements_(on, of, where_, parameters_, std::move(messages), options_.unused == unused::allowed,
                  options_.agreement_steps),
      frozen_(parameters_.size(), buckets_.count()),
      mail_(buckets_),
      gates_(on, buckets_.count()),
      released_(on),
      finishing_(on),
      used_known_(on),
      stepped_(on),
      done_(on),
      roots_(on, buckets_.count() + 3, *this) {
    detail::late_gather::gather_source& values_to_gather = *this;  // a protected base
    if (subject.gathers_late) late_.emplace(on, buckets_, frozen_, roots_, values_to_gather);
    if (ranks() == 1) options_.buckets_in_flight = buckets_.count();  // nothing to wait for, nothing to bound
    options_.buckets_in_flight = std::max<std::size_t>(1, options_.buckets_in_flight);
    done_.set();
    on_.add(*this);
}

// The compute side

template <Transport T, Element E>
void step_cycle<T, E>::begin(step_ticket mine) noexcept {
    ++begun_;
    if (agreements_.compares()) {
        arena_range const part = agreements_.compared(begun_);
        digest all;
        all.add(std::span<E const>(values_.subspan(part.begin, part.size())));
        add_state(all, part, begun_);
        mine.digest = all.value();
    }
    ticket_ = mine;
    await_from(never);
    under_way_ = true;
    mail_.begin(buckets_, frozen_.silent());
}
template <Transport T, Element E>
bool step_cycle<T, E>::ready(std::size_t i, std::size_t first, std::size_t count) noexcept {
    std::size_t const from = where_.begin(i) + first;
    if (frozen_.any() && frozen(i)) std::ranges::fill(gradients_.subspan(from, count), E(0));
    return mail_.ready(buckets_, frozen_.silent(), i, first == 0 ? 0 : from);
}

// The communication side: how a step begins and ends

template <Transport T, Element E>
void step_cycle<T, E>::collect() {
    undriven_bytes_ = 0;  // called at every turn of the driver's
    mail_.take([&](std::size_t message) {
        if (message == detail::step_mail::begun)
            begin_step();
        else if (message == detail::step_mail::released)
            released_.set();
        else
            fill(message);
    });
}
template <Transport T, Element E>
void step_cycle<T, E>::begin_step() {
    agreements_.begin();
    if (made() == 1) on_.frames().count();
    nonfinite_ = false;
    gates_.reset();
    released_.reset();
    finishing_.reset();
    used_known_.reset();
    stepped_.reset();
    done_.reset();
    unfinished_.left = active_buckets() + (tracks_used() ? 2 : 1);
    launched_ = 0;
    step_begins();
    agreements_.enter();
    // The receives of the first buckets, then this rank's weight: it tells peers that the receives are posted.
    for (std::size_t k = 0; k < std::min(options_.buckets_in_flight, active_buckets()); ++k) launch();
    roots_.start(buckets_.count(), weigh(), unfinished_);
    if (tracks_used()) roots_.start(buckets_.count() + 1, agree_on_used(), unfinished_);
    if (!late_) return;
    late_->begin();
    roots_.start(buckets_.count() + 2, gather_late(), late_->left());
}
/// Every value that this rank steps is new.
template <Transport T, Element E>
void step_cycle<T, E>::finish_step() noexcept {
    bool const changed = weight() != 0 && !skipped();
    if (changed) ++updates_;
    on_.note(flight::mark, round(), 0, 0, changed ? "updated" : "unchanged");
    if (!late_) end_step();
    stepped_.set();
    try {
        if (changed) step_ended();
    } catch (...) {
        on_.fail_and_keep(std::current_exception());
    }
}
template <Transport T, Element E>
void step_cycle<T, E>::end_step() noexcept {
    // From the second step on nothing is allocated, whatever overlaps: buckets that are being reduced are bounded, their later stages
    // hold no scratch, and a slot's next coroutine can have the frame of its last.
    if (made() == 1) on_.frames().reserve_counted(std::size_t{16} << 10, options_.buckets_in_flight + 1);
    done_.set();
}

// What the ranks agree on

/// Gathers the tickets of all ranks; from then on buckets may be sent.
template <Transport T, Element E>
task<> step_cycle<T, E>::weigh() {
    if (blocking()) co_await finishing_;  // once all weights are here, so are all ranks
    co_await agreements_.gather_tickets(ticket_);
    agreements_.total();
    inverse_ = weight() == 0 ? E(0) : static_cast<E>(1.0 / static_cast<double>(weight()));
    if (blocking()) {
        if (on_.failed()) throw collective_aborted();  // some rank has left: the call would wait forever
        exchange_blocking();
    }
    gates_.grant();
}
/// Finds out which parameters some rank has used in this step: no other one is stepped.
template <Transport T, Element E>
task<> step_cycle<T, E>::agree_on_used() {
    co_await released_;
    co_await agreements_.gather_used();
    used_known_.set();
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class step_cycle<any_transport, float>;
DDP_INSTANTIATE class step_cycle<any_transport, double>;
#endif

}  // namespace ddp
