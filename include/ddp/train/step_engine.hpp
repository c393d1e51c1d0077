/// \file
/// step_engine: turns "gradient i is final" into exchanged buckets and stepped values, while backward still runs.
///
/// Two sides that never share a thread's time: the compute side calls begin, ready, backward_done and await_from, which
/// only count down and leave mail; the communication side collects the mail and runs one coroutine a bucket. Between them
/// lies a fixed mailbox. Nothing here owns a thread: a thousand engines run in one.
///
/// Depends on the transport's and the element's type only: optimizer, exchange and observer come behind a virtual call a
/// bucket or a range, so an engine is compiled once for all of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/collective/all_gather.hpp>
#include <ddp/comm/lane.hpp>
#include <ddp/core/math.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/kernel/finite.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/optim/clip.hpp>
#include <ddp/optim/optimizer_model.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/events.hpp>
#include <ddp/train/gradient_norm.hpp>
#include <ddp/train/nonfinite.hpp>
#include <ddp/train/odd_ranks.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/step_observer.hpp>
#include <ddp/train/stepper.hpp>
#include <ddp/train/turnstile.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {

/// What one rank says at the start of a step; the sum of weights divides the sum of gradients.
struct step_ticket {
    std::uint64_t weight = 0;  // samples this rank's gradient sums over
    std::uint32_t done = 0;    // 1: this rank is out of data
    std::uint32_t stop = 0;    // 1: this rank wants training to stop
    double loss = 0;           // of the step before: this rank's mean loss times its samples
    std::uint64_t digest = 0;  // of the part of values and state that is compared in this step
};

/// What an engine works on. Both arenas have where.size() elements and outlive it.
template <Element E>
struct step_subject {
    layout where;
    detail::bucket_map buckets;
    std::span<parameter<E> const> parameters;  // names and shapes; outlives the engine
    training_options options;
    bool ready_releases = false;  // values may be stepped as soon as their bucket is reduced
    std::span<E> gradients;
    std::span<E> values;
};

/// Who does what in a step.
template <Transport T, Element E>
struct step_parts {
    std::unique_ptr<detail::optimizer_model<E>> optimizer;
    std::unique_ptr<detail::exchange_model<T, E>> exchange;
    std::unique_ptr<detail::step_observer> observer = nullptr;  // null: nobody observes
};

template <Transport T, Element E>
class step_engine : public mailbox_client {
public:
    /// Among the ranks of `of`, which outlives the engine.
    step_engine(scheduler<T>& on, group& of, step_subject<E> subject, step_parts<T, E> parts);
    virtual ~step_engine() { on_.remove(*this); }
    step_engine(step_engine const&) = delete;
    step_engine& operator=(step_engine const&) = delete;

    /// Cuts inside a parameter fall on multiples of this many elements.
    [[nodiscard]] static constexpr std::size_t slice_grain(bool statistics) noexcept {
        return statistics ? statistics_block : 64 / sizeof(E);
    }

    // The compute side: one call at a time, none of them throws, blocks or allocates.

    void begin(step_ticket mine) noexcept;
    /// Gradient i is final, once a step. Says whether there is mail now.
    bool ready(std::size_t i) noexcept;
    /// Which parameters this rank's backward has reported, by parameter: before backward_done(). Asked for with unused::allowed.
    void use(std::span<std::uint8_t const> parameters) noexcept;
    void backward_done() noexcept { post(mail_released); }
    /// The step is over for the compute side, or was left by an exception.
    void end() noexcept { under_way_ = false; }
    /// From then on the compute side does nothing but wait for the end of the step.
    void await_from(time_point since) noexcept { awaited_.store(since, std::memory_order_relaxed); }

    // The communication side: for whoever drives the scheduler.

    void collect() override;
    [[nodiscard]] bool has_mail() const noexcept override {
        return taken_.load(std::memory_order_acquire) != posted_.load(std::memory_order_relaxed);
    }
    [[nodiscard]] bool under_way(group const& ranks) const noexcept override { return under_way_ && &ranks == &of_; }
    /// Ends when every value is new. Collect first, so that the step has begun.
    task<> finished();
    [[nodiscard]] bool idle() const noexcept { return unfinished_ == 0; }

    /// Of the last finished step.
    [[nodiscard]] std::uint64_t weight() const noexcept { return weight_; }
    [[nodiscard]] bool everybody_done() const noexcept { return everybody_done_; }
    /// Mean loss over the samples of all ranks in the step before it, the same bits on all ranks; NaN where there was none.
    [[nodiscard]] double previous_loss() const noexcept { return previous_loss_; }
    /// Some rank wanted training to stop when the step began: the same on all ranks.
    [[nodiscard]] bool stop() const noexcept { return stop_; }
    [[nodiscard]] double gradient_norm() const noexcept { return norm_; }
    /// The mean gradient of the last step was not finite; skipped: hence no value was changed.
    [[nodiscard]] bool found_nonfinite() const noexcept { return nonfinite_; }
    [[nodiscard]] bool skipped() const noexcept { return nonfinite_ && options_.nonfinite != nonfinite::warn; }
    /// Then, by rank: the first element of its own gradient that is not finite, if it has one.
    [[nodiscard]] std::span<detail::nonfinite_place const> places() const noexcept { return in_use_->places; }
    [[nodiscard]] std::uint64_t updates() const noexcept { return updates_; }
    /// From now on parameters i with frozen[i] != 0 are neither stepped nor, where a whole bucket is frozen, exchanged. Between
    /// steps, while nobody drives; on all ranks alike.
    void freeze(std::span<std::uint8_t const> frozen);
    /// Goes on as if so many steps had changed the values. Between steps, while nobody drives; on all ranks alike.
    void set_updates(std::uint64_t count) noexcept { updates_ = count; }
    /// In the optimizer while the compute side did nothing but wait for the step to end.
    [[nodiscard]] nanoseconds stepped_late() const noexcept { return late_; }
    /// Some values of the current step are new and others are not: after a failure such state must not be kept.
    [[nodiscard]] virtual bool torn() const noexcept { return torn_; }

    /// After a failure: from now on nobody else writes into the values.
    virtual void keep_values() noexcept {}

    /// What messages of the engine's may lie in: has to outlive the transport if that has failed.
    [[nodiscard]] std::shared_ptr<void> posted_memory() const noexcept { return in_use_; }

    /// Before the first step: the hash of what all ranks have alike, which messages carry, and a message context of the
    /// engine's own. The same on all ranks.
    void agree_on(std::uint64_t hash, std::uint32_t context) noexcept {
        hash_ = hash | 1;
        context_ = context;
    }
    [[nodiscard]] std::uint64_t hash() const noexcept { return hash_; }
    [[nodiscard]] std::uint64_t optimizer_hash() const { return stepper_.hash(); }

    /// Shows what is kept from step to step on this rank: the optimizer's slots, parameter by parameter, and what the
    /// exchange keeps. Between steps; what is shown may be written.
    void for_each_state(state_visitor visit) {
        stepper_.for_each_state(where_, parameters_, visit);
        exchange().for_each_state(visit);
    }

    /// What the exchange says of itself. Between steps.
    [[nodiscard]] ddp::exchange_statistics exchange_statistics() const { return exchange().statistics(); }

protected:
    // The stages of a step, one bucket each, for a bucket() of another strategy that leaves one out.

    /// What becomes of bucket b in a step: a mean, the gate, new values, which go to all.
    virtual task<> bucket(std::size_t b);
    /// Gradients of bucket b become their mean over all samples: of all elements, or of this rank's slice if sharded. Starts
    /// the next bucket as soon as this one's own exchange is over.
    task<> exchange_gradients(std::size_t b);
    /// Awaits that the gradients of bucket b are final, and all weights known.
    [[nodiscard]] event& full(std::size_t b) noexcept { return *go_[b]; }
    /// Awaits the end of backward.
    [[nodiscard]] event& released() noexcept { return released_; }
    /// The mean of bucket b is known on this rank, or that of this rank's slice.
    void reduced(std::size_t b);
    /// Where clipping asks for the norm: waits until that of all buckets is known. Then until values may be stepped.
    task<> pass_gate(std::size_t b);
    /// Steps this rank's part of bucket b, after those that came here before it. A large one in pieces: the transport is
    /// driven between them.
    task<> step_values(std::size_t b);
    /// For what is worked through piece by piece, one bucket after the other: awaits the turn of bucket b.
    [[nodiscard]] event& turn_of(std::size_t b) noexcept { return stepping_.enter(b); }
    void end_turn() noexcept { stepping_.leave(); }
    /// Whether so much was worked through since the transport was driven that it is its turn.
    [[nodiscard]] bool its_turn() const noexcept { return undriven_bytes_ >= options_.step_piece_bytes / 4; }
    void worked_through(std::size_t elements) noexcept { undriven_bytes_ += elements * sizeof(E); }
    /// The end of a piece of what is left, of `bytes` at most, or one grain.
    [[nodiscard]] std::size_t piece_end(std::size_t from, std::size_t to, std::size_t grain,
                                        std::size_t bytes) const noexcept;
    void step_piece(std::size_t from, std::size_t to);
    /// Whether something has to be known, or done, between a bucket's mean and its step.
    [[nodiscard]] bool two_passes() const noexcept {
        return options_.needs_norm() || stepper_.needs_norms() || changes_gradients_;
    }
    /// With a sharded update: every rank's new slice goes to all.
    task<> gather_values(std::size_t b);

    [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(of_.size()); }
    [[nodiscard]] std::size_t me() const noexcept { return static_cast<std::size_t>(of_.rank()); }
    [[nodiscard]] bool sharded() const noexcept { return options_.update == update::sharded; }
    /// What this rank steps of bucket b.
    [[nodiscard]] arena_range own(std::size_t b) const noexcept {
        if (!sharded()) return {buckets_.begin(b), buckets_.end(b)};
        return {buckets_.begin(b) + cuts(b)[me()], buckets_.begin(b) + cuts(b)[me() + 1]};
    }
    [[nodiscard]] std::span<std::size_t const> cuts(std::size_t b) const noexcept { return plan_.buckets[b].cuts; }
    [[nodiscard]] arena_range range(std::size_t b) const noexcept { return {buckets_.begin(b), buckets_.end(b)}; }
    [[nodiscard]] lane<T> lane_of_bucket(std::size_t b) noexcept {
        return lane_of(4 + 4 * static_cast<std::uint32_t>(b), hash_);
    }
    [[nodiscard]] scheduler<T>& on() const noexcept { return on_; }
    [[nodiscard]] training_options const& options() const noexcept { return options_; }
    [[nodiscard]] bool ready_releases() const noexcept { return ready_releases_; }
    [[nodiscard]] std::span<E> gradients() const noexcept { return gradients_; }
    [[nodiscard]] std::span<E> values() const noexcept { return values_; }
    [[nodiscard]] E inverse() const noexcept { return inverse_; }
    /// Of the step that is under way, or has failed; it counts from 1.
    [[nodiscard]] std::uint64_t round() const noexcept { return round_; }
    [[nodiscard]] bool within_step() const noexcept { return !done_.is_set(); }

private:
    static constexpr std::size_t mail_begin = std::numeric_limits<std::size_t>::max();
    static constexpr std::size_t mail_released = mail_begin - 1;
    static constexpr std::uint32_t weights_channel = 0, places_channel = 1,
                                   used_channel = 2;  // from 4 on four phases a bucket

    /// All that knows how messages of a step are told apart.
    [[nodiscard]] lane<T> lane_of(std::uint32_t channel, std::uint64_t fingerprint) noexcept {
        return {on_, of_, {.group = context_, .channel = channel, .index = round_}, fingerprint};
    }
    void enter_step() {
        of_.enter({"step", 0, "", "", {.group = context_, .channel = weights_channel, .index = round_}, hash_});
    }

    /// What messages lie in, besides the arenas and the pool.
    struct posted_parts {
        std::unique_ptr<detail::exchange_model<T, E>> exchange;
        detail::gradient_norm statistics;                    // of the mean gradient
        detail::gradient_norm value_norms, direction_norms;  // of each parameter, for the optimizer
        std::vector<step_ticket> tickets;
        std::vector<detail::nonfinite_place> places;
        std::vector<std::uint64_t> used;  // a bit a parameter, rank after rank; empty: all are
    };
    [[nodiscard]] detail::exchange_model<T, E>& exchange() const noexcept { return *in_use_->exchange; }
    [[nodiscard]] detail::gradient_norm& statistics() const noexcept { return in_use_->statistics; }
    /// What this rank has added for its slice of bucket b goes to all.
    task<> gather_squares(std::size_t b, detail::gradient_norm& of);
    /// For an optimizer that steps by norms of parameters: prepares this rank's part of bucket b, and waits until all are known.
    task<> measure_parameters(std::size_t b);
    [[nodiscard]] update_info update_now() const;
    /// f(a, z) for what is stepped of [from, to): all of it, or parameter by parameter those that are.
    template <class F>
    void for_each_stepped(std::size_t from, std::size_t to, F&& f) {
        if (!tracks_used() && !any_frozen_) return f(from, to);
        where_.for_each_in(from, to, [&](std::size_t i, std::size_t a, std::size_t z) {
            if (!frozen_[i] && (!tracks_used() || (used_[i / 64] >> i % 64 & 1) != 0)) f(a, z);
        });
    }

    void make_plan();
    /// The elements of the arena that are compared in a step, which counts from 1.
    [[nodiscard]] arena_range compared_in(std::uint64_t step) const noexcept {
        std::uint64_t const parts = options_.agreement_steps, n = values_.size(), k = (step - 1) % parts;
        return {static_cast<std::size_t>(n / parts * k + n % parts * k / parts),
                static_cast<std::size_t>(n / parts * (k + 1) + n % parts * (k + 1) / parts)};
    }
    void expect_alike();
    void post(std::size_t message) noexcept;
    void begin_step();
    void start(std::size_t slot, task<> body);
    void launch();
    void fill(std::size_t b);
    void look_at(std::size_t b) noexcept;
    task<> root(task<> body);
    void finish_step() noexcept;
    void reserve() noexcept;
    task<> weigh();
    task<> agree_on_used();
    [[nodiscard]] bool tracks_used() const noexcept { return !in_use_->used.empty(); }
    [[nodiscard]] std::size_t words_of_used() const noexcept { return in_use_->used.size() / ranks(); }
    void exchange_blocking();
    [[nodiscard]] bucket_exchange<E> exchange_of(std::size_t b) noexcept {
        return {b, gradients_.subspan(buckets_.begin(b), buckets_.end(b) - buckets_.begin(b)), cuts(b), &*go_[b],
                &inverse_};
    }

    scheduler<T>& on_;
    group& of_;
    std::uint32_t context_ = 0;  // of its messages
    layout where_;
    detail::bucket_map buckets_;
    std::span<parameter<E> const> parameters_;
    training_options options_;
    bool ready_releases_;
    std::span<E> gradients_;
    std::span<E> values_;
    stepper<E> stepper_;
    std::shared_ptr<posted_parts> in_use_;
    std::unique_ptr<detail::step_observer> observer_;
    exchange_plan<E> plan_;
    std::uint64_t hash_ = 1;

    // the compute side's
    std::atomic<bool> under_way_{false};
    std::vector<std::size_t> pending_;  // reports that bucket b still waits for
    std::uint64_t begun_ = 0;           // steps

    // between steps written, within them read by both
    std::vector<std::uint8_t> frozen_, silent_;  // by parameter; by bucket: all in it are frozen
    bool any_frozen_ = false;
    std::size_t active_buckets_;
    bool changes_gradients_;

    // between the sides: one writer, one reader, never more than one step's messages
    std::vector<std::size_t> mail_;
    std::atomic<std::size_t> posted_{0}, taken_{0};
    step_ticket ticket_;
    std::atomic<time_point> awaited_{never};

    // the communication side's
    std::uint64_t round_ = 0;    // steps begun
    std::uint64_t updates_ = 0;  // steps that changed values
    std::uint64_t weight_ = 0;
    bool everybody_done_ = false, stop_ = false;
    bool granted_ = false, torn_ = false, nonfinite_ = false;
    E inverse_ = 0;
    std::vector<std::uint8_t> full_;
    std::vector<time_point> full_at_;
    std::vector<std::optional<event>> go_;
    event released_, finishing_, gate_, measured_, used_known_, done_;
    std::vector<std::uint64_t> used_;  // by any rank, a bit a parameter; empty: all are
    detail::turnstile stepping_;
    std::vector<task<>> roots_;  // one a bucket, and the weights
    std::size_t unfinished_ = 0, launched_ = 0, ungated_ = 0, unmeasured_ = 0, unreduced_ = 0;
    std::size_t undriven_bytes_ = 0;  // worked through since we were driven last

    std::vector<std::vector<std::size_t>> block_cuts_;  // slices of bucket b in statistics blocks
    std::vector<std::size_t> first_block_;
    double norm_ = 0, clip_ = 1, previous_loss_ = 0;
    std::span<double const> norms_of_values_, norms_of_directions_;  // by parameter
    nanoseconds late_{};
};

// Made of

template <Transport T, Element E>
step_engine<T, E>::step_engine(scheduler<T>& on, group& of, step_subject<E> subject, step_parts<T, E> parts)
    : on_(on),
      of_(of),
      where_(std::move(subject.where)),
      buckets_(std::move(subject.buckets)),
      parameters_(subject.parameters),
      options_(subject.options),
      ready_releases_(subject.ready_releases && options_.unused == unused::error),  // else some may not be stepped
      gradients_(subject.gradients),
      values_(subject.values),
      stepper_(std::move(parts.optimizer), where_, parameters_),
      in_use_(std::make_shared<posted_parts>(posted_parts{
          std::move(parts.exchange), detail::gradient_norm(options_.needs_norm() ? where_ : layout()),
          detail::gradient_norm(stepper_.needs_norms() ? where_ : layout()),
          detail::gradient_norm(stepper_.needs_norms() ? where_ : layout()), std::vector<step_ticket>(ranks()),
          std::vector<detail::nonfinite_place>(ranks()),
          std::vector<std::uint64_t>(options_.unused == unused::allowed ? ranks() * ((parameters_.size() + 63) / 64)
                                                                        : 0)})),
      observer_(std::move(parts.observer)),
      pending_(buckets_.count()),
      frozen_(parameters_.size()),
      silent_(buckets_.count()),
      active_buckets_(buckets_.count()),
      changes_gradients_(observer_ != nullptr && observer_->changes_gradients()),
      mail_(buckets_.count() + 4),
      full_(buckets_.count()),
      full_at_(buckets_.count()),
      go_(buckets_.count()),
      released_(on),
      finishing_(on),
      gate_(on),
      measured_(on),
      used_known_(on),
      done_(on),
      stepping_(on, buckets_.count()),
      roots_(buckets_.count() + 2) {
    if (ranks() == 1) options_.buckets_in_flight = buckets_.count();  // nothing to wait for, nothing to bound
    options_.buckets_in_flight = std::max<std::size_t>(1, options_.buckets_in_flight);
    make_plan();
    exchange().prepare(plan_);
    std::vector<arena_range> stepped;
    for (std::size_t b = 0; b < buckets_.count(); ++b) {
        go_[b].emplace(on_);
        stepped.push_back(own(b));
        if (!options_.needs_norm() && !stepper_.needs_norms()) continue;
        first_block_.push_back(where_.block_at(buckets_.begin(b)));
        block_cuts_.emplace_back();
        for (std::size_t const cut : cuts(b))
            block_cuts_[b].push_back(where_.block_at(buckets_.begin(b) + cut) - first_block_[b]);
    }
    stepper_.hold(stepped);
    done_.set();
    on_.add(*this);
}

template <Transport T, Element E>
void step_engine<T, E>::make_plan() {
    plan_.rank = of_.rank();
    plan_.ranks = of_.size();
    plan_.sharded = sharded();
    for (parameter<E> const& p : parameters_) plan_.parameters.push_back({p.name, p.shape});
    std::size_t const grain = slice_grain(options_.needs_norm() || stepper_.needs_norms());
    for (std::size_t b = 0; b < buckets_.count(); ++b) {
        exchange_bucket one{.begin = buckets_.begin(b), .count = buckets_.end(b) - buckets_.begin(b)};
        where_.for_each_in(buckets_.begin(b), buckets_.end(b), [&](std::size_t i, std::size_t from, std::size_t to) {
            one.pieces.push_back({i, from - where_.begin(i), from - buckets_.begin(b), to - from});
        });
        one.cuts = where_.slices(buckets_.begin(b), buckets_.end(b), ranks(), grain);
        for (std::size_t& cut : one.cuts) cut -= buckets_.begin(b);
        plan_.buckets.push_back(std::move(one));
    }
}

template <Transport T, Element E>
void step_engine<T, E>::freeze(std::span<std::uint8_t const> frozen) {
    frozen_.assign(frozen.begin(), frozen.end());
    any_frozen_ = std::ranges::any_of(frozen_, [](std::uint8_t one) { return one != 0; });
    std::ranges::fill(silent_, std::uint8_t{any_frozen_});
    for (std::size_t i = 0; i < frozen_.size(); ++i)
        if (frozen_[i] == 0)
            for (std::size_t const b : buckets_.touches(i)) silent_[b] = 0;
    active_buckets_ = static_cast<std::size_t>(std::ranges::count(silent_, std::uint8_t{0}));
    statistics().clear();  // what is frozen counts as 0
}

// The compute side

template <Transport T, Element E>
void step_engine<T, E>::begin(step_ticket mine) noexcept {
    ++begun_;
    if (options_.agreement_steps != 0 && ranks() > 1) {
        arena_range const part = compared_in(begun_);
        digest all;
        all.add(std::span<E const>(values_.subspan(part.begin, part.size())));
        if (!sharded()) stepper_.digest_state(all, part.begin, part.end);
        mine.digest = all.value();
    }
    for (std::size_t b = 0; b < pending_.size(); ++b) pending_[b] = buckets_.members(b);
    ticket_ = mine;
    await_from(never);
    under_way_ = true;
    post(mail_begin);
    for (std::size_t b = 0; b < pending_.size(); ++b)
        if (pending_[b] == 0 && silent_[b] == 0) post(b);
}
template <Transport T, Element E>
bool step_engine<T, E>::ready(std::size_t i) noexcept {
    bool mail = false;
    if (any_frozen_ && frozen_[i] != 0) std::ranges::fill(gradients_.subspan(where_.begin(i), where_.count(i)), E(0));
    for (std::size_t const b : buckets_.touches(i))
        if (--pending_[b] == 0 && silent_[b] == 0) {
            post(b);
            mail = true;
        }
    return mail;
}
template <Transport T, Element E>
void step_engine<T, E>::post(std::size_t message) noexcept {
    std::size_t const at = posted_.load(std::memory_order_relaxed);
    mail_[at % mail_.size()] = message;
    posted_.store(at + 1, std::memory_order_release);
}

// The communication side: how a step begins and ends

template <Transport T, Element E>
void step_engine<T, E>::collect() {
    undriven_bytes_ = 0;  // called at every turn of the driver's
    std::size_t const end = posted_.load(std::memory_order_acquire);
    for (std::size_t at = taken_.load(std::memory_order_relaxed); at != end; ++at) {
        std::size_t const message = mail_[at % mail_.size()];
        if (message == mail_begin)
            begin_step();
        else if (message == mail_released)
            released_.set();
        else
            fill(message);
        taken_.store(at + 1, std::memory_order_release);
    }
}
template <Transport T, Element E>
task<> step_engine<T, E>::finished() {
    finishing_.set();
    co_await done_;
}
template <Transport T, Element E>
void step_engine<T, E>::begin_step() {
    if (++round_ == 1) on_.frames().count();
    granted_ = false;
    torn_ = false;
    norm_ = 0;
    nonfinite_ = false;
    in_use_->places[me()] = {};
    late_ = {};
    std::fill(full_.begin(), full_.end(), std::uint8_t{0});
    for (std::optional<event>& go : go_) go->reset();
    released_.reset();
    finishing_.reset();
    gate_.reset();
    measured_.reset();
    used_known_.reset();
    done_.reset();
    stepping_.reset();
    ungated_ = unmeasured_ = unreduced_ = active_buckets_;
    unfinished_ = active_buckets_ + (tracks_used() ? 2 : 1);
    launched_ = 0;
    enter_step();
    // The receives of the first buckets, then our weight: a weight that arrives says that its sender is prepared.
    for (std::size_t k = 0; k < std::min(options_.buckets_in_flight, active_buckets_); ++k) launch();
    start(buckets_.count(), weigh());
    if (tracks_used()) start(buckets_.count() + 1, agree_on_used());
}
template <Transport T, Element E>
void step_engine<T, E>::start(std::size_t slot, task<> body) {
    roots_[slot] = {};  // its frame can be the new one's: reserve() has counted one a slot
    roots_[slot] = root(std::move(body));
    roots_[slot].start();
}
template <Transport T, Element E>
void step_engine<T, E>::launch() {
    while (launched_ != buckets_.count() && silent_[buckets_.launch()[launched_]] != 0) ++launched_;
    if (launched_ == buckets_.count()) return;
    std::size_t const b = buckets_.launch()[launched_++];
    start(b, bucket(b));
}
template <Transport T, Element E>
void step_engine<T, E>::fill(std::size_t b) {
    full_[b] = 1;
    full_at_[b] = on_.now();
    if (options_.nonfinite != nonfinite::unchecked) look_at(b);
    if (granted_) go_[b]->set();
}
/// Whether this rank's gradients of bucket b are finite. What stands first in the order of parameters is remembered.
template <Transport T, Element E>
void step_engine<T, E>::look_at(std::size_t b) noexcept {
    detail::nonfinite_place& first = in_use_->places[me()];
    where_.for_each_in(buckets_.begin(b), buckets_.end(b), [&](std::size_t i, std::size_t from, std::size_t to) {
        std::size_t const at = from + first_nonfinite(std::span<E const>(gradients_.subspan(from, to - from)));
        if (at == to) return;
        detail::nonfinite_place const here{i, at - where_.begin(i), static_cast<double>(gradients_[at])};
        if (here.parameter < first.parameter || (here.parameter == first.parameter && here.element < first.element))
            first = here;
    });
}
template <Transport T, Element E>
task<> step_engine<T, E>::root(task<> body) {
    std::exception_ptr error;
    try {
        co_await body;
    } catch (collective_aborted const&) {
    } catch (...) {
        error = std::current_exception();
    }
    body = {};
    if (error) on_.fail(error);
    if (--unfinished_ == 0 && !on_.failed()) finish_step();
}
template <Transport T, Element E>
void step_engine<T, E>::finish_step() noexcept {
    if (round_ == 1) reserve();
    torn_ = false;
    if (weight_ != 0 && !skipped()) ++updates_;
    on_.note(flight::updated, round_);
    done_.set();
    if (weight_ == 0 || skipped() || observer_ == nullptr) return;
    try {
        observer_->on(step_finished{round_, weight_, norm_});
    } catch (...) {
        on_.fail(std::current_exception());
    }
}
/// From the second step on nothing is allocated, whatever overlaps: buckets that are being reduced are bounded, their
/// later stages hold no scratch.
template <Transport T, Element E>
void step_engine<T, E>::reserve() noexcept {
    try {
        on_.frames().reserve_counted(std::size_t{16} << 10, options_.buckets_in_flight + 1);
    } catch (std::bad_alloc const&) {  // then it grows when it has to
    }
}

// Weights

/// Gathers what every rank says; from then on buckets may be sent.
template <Transport T, Element E>
task<> step_engine<T, E>::weigh() {
    std::vector<step_ticket>& tickets = in_use_->tickets;
    tickets[me()] = ticket_;
    if (exchange().blocking()) co_await finishing_;  // once all weights are here, so are all ranks
    co_await all_gather_small(lane_of(weights_channel, of_.history()), std::span<step_ticket>(tickets));
    expect_alike();
    std::uint64_t const weight_before = std::exchange(weight_, 0);
    double losses = 0;
    everybody_done_ = true;
    stop_ = false;
    for (step_ticket const& t : tickets) {
        losses += t.loss;
        weight_ += t.weight;
        everybody_done_ = everybody_done_ && t.done != 0;
        stop_ = stop_ || t.stop != 0;
    }
    previous_loss_ =
        weight_before == 0 ? std::numeric_limits<double>::quiet_NaN() : losses / static_cast<double>(weight_before);
    inverse_ = weight_ == 0 ? E(0) : static_cast<E>(1.0 / static_cast<double>(weight_));
    if (exchange().blocking()) exchange_blocking();
    granted_ = true;
    for (std::size_t b = 0; b < full_.size(); ++b)
        if (full_[b] != 0) go_[b]->set();
}
template <Transport T, Element E>
void step_engine<T, E>::use(std::span<std::uint8_t const> parameters) noexcept {
    if (!tracks_used()) return;
    std::span<std::uint64_t> const mine = std::span(in_use_->used).subspan(me() * words_of_used(), words_of_used());
    std::ranges::fill(mine, std::uint64_t{0});
    for (std::size_t i = 0; i < parameters.size(); ++i) mine[i / 64] |= std::uint64_t{parameters[i]} << i % 64;
}
/// Which parameters some rank has used in this step: no other one is stepped.
template <Transport T, Element E>
task<> step_engine<T, E>::agree_on_used() {
    co_await released_;
    std::size_t const words = words_of_used();
    if (ranks() > 1) {
        scratch const table((ranks() + 1) * sizeof(std::size_t));
        std::span<std::size_t> const cuts = table.as<std::size_t>();
        for (std::size_t r = 0; r < cuts.size(); ++r) cuts[r] = r * words;
        co_await direct_allreduce::all_gather({}, lane_of(used_channel, hash_), std::span(in_use_->used),
                                              std::span<std::size_t const>(cuts));
    }
    used_.assign(words, 0);
    for (std::size_t k = 0; k < in_use_->used.size(); ++k) used_[k % words] |= in_use_->used[k];
    used_known_.set();
}
/// All ranks find the same, and say so alike: whom most contradict, or all where there is no majority.
template <Transport T, Element E>
void step_engine<T, E>::expect_alike() {
    std::vector<step_ticket> const& tickets = in_use_->tickets;
    if (std::ranges::all_of(tickets, [&](step_ticket const& t) { return t.digest == tickets.front().digest; })) return;
    arena_range const part = compared_in(round_);
    std::vector<std::string_view> names;
    where_.for_each_in(part.begin, part.end,
                       [&](std::size_t i, std::size_t, std::size_t) { names.push_back(parameters_[i].name); });
    std::vector<std::uint64_t> digests;
    for (step_ticket const& t : tickets) digests.push_back(t.digest);
    on_.fail(failure_kind::mismatch, errc::replicas_differ, -1,
             detail::describe_difference(digests, of_.members(), round_, names));
    throw collective_aborted();
}
/// All buckets before any is stepped: no code of the user's comes between that might throw on one rank only, and leave
/// the others waiting in a call that has no deadline.
template <Transport T, Element E>
void step_engine<T, E>::exchange_blocking() {
    if (on_.failed()) throw collective_aborted();  // somebody has left: MPI would wait for good
    if (weight_ == 0) return;
    for (std::size_t const b : buckets_.launch())
        if (silent_[b] == 0) exchange().exchange_blocking(lane_of_bucket(b), exchange_of(b));
}

// The stages of a bucket

template <Transport T, Element E>
task<> step_engine<T, E>::bucket(std::size_t b) {
    co_await exchange_gradients(b);
    if (weight_ == 0) co_return;  // everybody knows: nothing is stepped
    co_await pass_gate(b);
    if (skipped()) co_return;
    co_await step_values(b);
    if (sharded()) co_await gather_values(b);
}

template <Transport T, Element E>
task<> step_engine<T, E>::exchange_gradients(std::size_t b) {
    lane<T> const over = lane_of_bucket(b);
    co_await exchange().exchange(over, exchange_of(b));
    launch();
    if (weight_ == 0) co_return;
    if (!sharded() && !exchange().everywhere(plan_, b)) co_await exchange().gather(over, exchange_of(b));
    reduced(b);
}

template <Transport T, Element E>
void step_engine<T, E>::reduced(std::size_t b) {
    if (--unreduced_ == 0) on_.note(flight::reduced, round_);
    if (observer_ == nullptr) return;
    observer_->on(bucket_reduced{round_, b, plan_.buckets[b].count * sizeof(E), on_.now() - full_at_[b]});
    if (!changes_gradients_) return;
    where_.for_each_in(own(b).begin, own(b).end, [&](std::size_t i, std::size_t from, std::size_t to) {
        if (frozen_[i] == 0)
            observer_->on(mean_gradient<E>{round_, weight_, i, from - where_.begin(i),
                                           gradients_.subspan(from, to - from), values_.subspan(from, to - from)});
    });
}

template <Transport T, Element E>
task<> step_engine<T, E>::pass_gate(std::size_t b) {
    if (options_.needs_norm()) {
        arena_range const mine = own(b);
        for (std::size_t from = mine.begin, to = from; from != mine.end; from = to) {
            if (its_turn()) co_await on_.yield();
            to = piece_end(from, mine.end, statistics_block, options_.step_piece_bytes);
            statistics().add(std::span<E const>(gradients_), from, to);
            worked_through(to - from);
        }
        if (sharded()) co_await gather_squares(b, statistics());
        if (--ungated_ == 0) {
            norm_ = statistics().value();
            if (auto const* const clip = options_.norm_clip()) clip_ = clip->factor(norm_);
            if (options_.nonfinite != nonfinite::unchecked && !detail::is_finite(norm_)) {
                nonfinite_ = true;  // the norm is the same on every rank
                co_await all_gather_small(lane_of(places_channel, hash_),
                                          std::span<detail::nonfinite_place>(in_use_->places));
            }
            gate_.set();
        }
        co_await gate_;
    }
    if (!ready_releases_) co_await released_;
    if (tracks_used()) co_await used_known_;
    if (stepper_.needs_norms() && !skipped()) co_await measure_parameters(b);
}
template <Transport T, Element E>
task<> step_engine<T, E>::gather_squares(std::size_t b, detail::gradient_norm& of) {
    return direct_allreduce::all_gather({}, lane_of_bucket(b), of.squares(first_block_[b], block_cuts_[b].back()),
                                        std::span<std::size_t const>(block_cuts_[b]));
}
template <Transport T, Element E>
task<> step_engine<T, E>::measure_parameters(std::size_t b) {
    arena_range const mine = own(b);
    for (std::size_t from = mine.begin, to = from; from != mine.end; from = to) {
        if (its_turn()) co_await on_.yield();
        to = piece_end(from, mine.end, statistics_block, options_.step_piece_bytes);
        if (auto const* const clip = options_.value_clip()) clip->apply(gradients_.subspan(from, to - from));
        torn_ = true;  // the optimizer's state is a new one from here on
        for_each_stepped(
            from, to, [&](std::size_t a, std::size_t z) { stepper_.prepare(update_now(), gradients_, values_, a, z); });
        in_use_->value_norms.add(std::span<E const>(values_), from, to);
        in_use_->direction_norms.add(std::span<E const>(gradients_), from, to);
        worked_through(2 * (to - from));
    }
    if (sharded()) {
        co_await gather_squares(b, in_use_->value_norms);
        co_await gather_squares(b, in_use_->direction_norms);
    }
    if (--unmeasured_ == 0) {
        norms_of_values_ = in_use_->value_norms.of_parameters();
        norms_of_directions_ = in_use_->direction_norms.of_parameters();
        measured_.set();
    }
    co_await measured_;
}

template <Transport T, Element E>
task<> step_engine<T, E>::step_values(std::size_t b) {
    co_await stepping_.enter(b);  // in turn: the first is on its way to the peers while the last is stepped
    arena_range const mine = own(b);
    for (std::size_t from = mine.begin, to = from; from != mine.end; from = to) {
        if (its_turn()) co_await on_.yield();
        to = piece_end(from, mine.end, 64 / sizeof(E), options_.step_piece_bytes);
        step_piece(from, to);
        worked_through(to - from);
    }
    torn_ = true;  // until all have come so far
    stepping_.leave();
}

template <Transport T, Element E>
std::size_t step_engine<T, E>::piece_end(std::size_t from, std::size_t to, std::size_t grain,
                                         std::size_t bytes) const noexcept {
    std::size_t const most = std::max(grain, bytes / sizeof(E));
    if (to - from <= most) return to;
    std::size_t const cut = where_.cut_before(from, from + most, grain);
    return cut == from ? to : cut;
}

template <Transport T, Element E>
update_info step_engine<T, E>::update_now() const {
    return {.update = updates_ + 1,
            .rate_factor = options_.schedule.factor(updates_),
            .gradient_scale = options_.norm_clip() ? clip_ : 1.0,
            .value_norms = norms_of_values_,
            .gradient_norms = norms_of_directions_};
}
template <Transport T, Element E>
void step_engine<T, E>::step_piece(std::size_t from, std::size_t to) {
    time_point const since = monotonic_clock::now();
    auto const* const clip = options_.value_clip();
    if (clip != nullptr && !stepper_.needs_norms()) clip->apply(gradients_.subspan(from, to - from));
    torn_ = true;  // whatever becomes of it
    for_each_stepped(from, to,
                     [&](std::size_t a, std::size_t z) { stepper_.step(update_now(), gradients_, values_, a, z); });
    time_point const end = monotonic_clock::now();
    time_point const awaited = awaited_.load(std::memory_order_relaxed);
    late_ += std::max(end, awaited) - std::max(since, awaited);
}

template <Transport T, Element E>
task<> step_engine<T, E>::gather_values(std::size_t b) {
    // Posting these receives is what tells the peers that our values may be overwritten.
    co_await direct_allreduce::all_gather({}, lane_of_bucket(b).phase(2),
                                          values_.subspan(buckets_.begin(b), buckets_.end(b) - buckets_.begin(b)),
                                          cuts(b));
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class step_engine<any_transport, float>;
DDP_INSTANTIATE class step_engine<any_transport, double>;
#endif

}  // namespace ddp
