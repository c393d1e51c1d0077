/// \file
/// reducer: turns "gradient i is final" into reduced buckets and stepped values, while backward still runs.
///
/// Two sides that never share a thread's time: the compute side calls begin, ready, backward_done and await_from, which
/// only count down and leave mail; the communication side collects the mail and runs one coroutine a bucket. Between them
/// lies a fixed mailbox. Nothing here owns a thread: a thousand reducers run in one.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <limits>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/collective/all_gather.hpp>
#include <ddp/collective/concepts.hpp>
#include <ddp/comm/lane.hpp>
#include <ddp/core/observe.hpp>
#include <ddp/kernel/sum.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/optim/clip.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/events.hpp>
#include <ddp/train/gradient_norm.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/stepper.hpp>

namespace ddp {

/// What one rank says at the start of a step; the sum of weights divides the sum of gradients.
struct step_ticket {
    std::uint64_t weight = 0;  // samples this rank's gradient sums over
    std::uint64_t done = 0;    // 1: this rank is out of data
};

template <Transport T, Element E, class Opt, class A, class Obs = null_observer>
    requires AllreduceOver<A, T, E> && OptimizerFor<Opt, E>
class reducer final : public mailbox_client {
public:
    /// `gradients` and `values` are arenas of where.size() elements that outlive the reducer. `groups` has the group of
    /// each parameter; empty: there is one.
    reducer(scheduler<T>& on, group& of, A algorithm, Opt const& optimizer, layout const& where,
            detail::bucket_map buckets, training_options const& options, bool ready_releases, std::span<E> gradients,
            std::span<E> values, Obs& observer, std::vector<std::size_t> const& groups = {})
        : on_(on),
          of_(of),
          algorithm_(algorithm),
          stepper_(optimizer, where, groups),
          statistics_(options.norm_clip() != nullptr ? where : layout()),
          buckets_(std::move(buckets)),
          options_(options),
          ready_releases_(ready_releases),
          gradients_(gradients),
          values_(values),
          observer_(observer),
          pending_(buckets_.count()),
          mail_(buckets_.count() + 4),
          tickets_(static_cast<std::size_t>(of.size())),
          full_(buckets_.count()),
          full_at_(buckets_.count()),
          released_(on),
          finishing_(on),
          gate_(on),
          done_(on) {
        if (ranks() == 1) options_.buckets_in_flight = buckets_.count();  // nothing to wait for, nothing to bound
        options_.buckets_in_flight = std::max<std::size_t>(1, options_.buckets_in_flight);
        std::size_t const grain = slice_grain(options_.norm_clip() != nullptr);
        std::size_t state = 0;
        for (std::size_t b = 0; b < buckets_.count(); ++b) {
            go_.emplace_back(on_);
            cuts_.push_back(where.slices(buckets_.begin(b), buckets_.end(b), ranks(), grain));
            state_begin_.push_back(state);
            state += sharded() ? cuts_[b][me() + 1] - cuts_[b][me()] : buckets_.end(b) - buckets_.begin(b);
            if (options_.norm_clip()) {
                first_block_.push_back(statistics_.block_at(buckets_.begin(b)));
                block_cuts_.emplace_back();
                for (std::size_t const cut : cuts_[b])
                    block_cuts_[b].push_back(statistics_.block_at(cut) - first_block_[b]);
            }
            for (std::size_t& cut : cuts_[b]) cut -= buckets_.begin(b);
        }
        roots_.resize(buckets_.count() + 1);
        stepper_.hold(state);
        done_.set();
        on_.add(*this);
    }
    ~reducer() { on_.remove(*this); }
    reducer(reducer const&) = delete;
    reducer& operator=(reducer const&) = delete;

    /// Cuts inside a parameter fall on multiples of this many elements.
    [[nodiscard]] static constexpr std::size_t slice_grain(bool statistics) noexcept {
        return statistics ? statistics_block : 64 / sizeof(E);
    }

    // The compute side: one call at a time, none of them throws, blocks or allocates.

    void begin(step_ticket const& mine) noexcept {
        for (std::size_t b = 0; b < pending_.size(); ++b) pending_[b] = buckets_.members(b);
        ticket_ = mine;
        await_from(never);
        under_way_ = true;
        post(mail_begin);
        for (std::size_t b = 0; b < pending_.size(); ++b)
            if (pending_[b] == 0) post(b);
    }
    /// Gradient i is final, once a step. Says whether there is mail now.
    bool ready(std::size_t i) noexcept {
        bool mail = false;
        for (std::size_t const b : buckets_.touches(i))
            if (--pending_[b] == 0) {
                post(b);
                mail = true;
            }
        return mail;
    }
    void backward_done() noexcept { post(mail_released); }
    /// From then on the compute side does nothing but wait for the end of the step.
    /// The step is over for the compute side, or was left by an exception.
    void end() noexcept { under_way_ = false; }
    [[nodiscard]] bool under_way(group const& ranks) const noexcept override { return under_way_ && &ranks == &of_; }
    void await_from(time_point since) noexcept { awaited_.store(since, std::memory_order_relaxed); }

    // The communication side: for whoever drives the scheduler.

    void collect() override {
        std::size_t const end = posted_.load(std::memory_order_acquire);
        for (; taken_ != end; ++taken_) {
            std::size_t const message = mail_[taken_ % mail_.size()];
            if (message == mail_begin)
                begin_step();
            else if (message == mail_released)
                released_.set();
            else
                fill(message);
        }
    }
    /// Ends when every value is new. Collect first, so that the step has begun.
    task<> finished() {
        finishing_.set();
        co_await done_;
    }
    [[nodiscard]] bool idle() const noexcept { return unfinished_ == 0; }

    /// Of the last finished step.
    [[nodiscard]] std::uint64_t weight() const noexcept { return weight_; }
    [[nodiscard]] bool everybody_done() const noexcept { return everybody_done_; }
    [[nodiscard]] double gradient_norm() const noexcept { return norm_; }
    [[nodiscard]] std::uint64_t updates() const noexcept { return updates_; }
    /// In the optimizer while the compute side did nothing but wait for the step to end.
    [[nodiscard]] nanoseconds stepped_late() const noexcept { return late_; }
    /// Some values of the current step are new and others are not: after a failure such state must not be kept.
    [[nodiscard]] bool torn() const noexcept { return stepped_ != 0 && !complete_; }

    /// What all ranks must have alike, besides the model.
    [[nodiscard]] std::uint64_t hash() const noexcept { return hash_; }
    /// `context`: free on all ranks.
    void agree_on(std::uint64_t hash, std::uint32_t context) noexcept {
        hash_ = hash | 1;
        context_ = context;
    }

private:
    static constexpr std::size_t mail_begin = std::numeric_limits<std::size_t>::max();
    static constexpr std::size_t mail_released = mail_begin - 1;

    [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(of_.size()); }
    [[nodiscard]] std::size_t me() const noexcept { return static_cast<std::size_t>(of_.rank()); }
    [[nodiscard]] bool sharded() const noexcept { return options_.update == update::sharded; }

    void post(std::size_t message) noexcept {
        std::size_t const at = posted_.load(std::memory_order_relaxed);
        mail_[at % mail_.size()] = message;
        posted_.store(at + 1, std::memory_order_release);
    }

    void begin_step() {
        if (++round_ == 1) on_.frames().count();
        granted_ = false;
        stepped_ = 0;
        complete_ = false;
        norm_ = 0;
        late_ = {};
        std::fill(full_.begin(), full_.end(), std::uint8_t{0});
        for (event& go : go_) go.reset();
        released_.reset();
        finishing_.reset();
        gate_.reset();
        done_.reset();
        ungated_ = buckets_.count();
        unfinished_ = buckets_.count() + 1;
        launched_ = 0;
        of_.enter({"step", 0, "", "", {.group = context_, .channel = channel::weights, .index = round_}, hash_});
        // The receives of the first buckets, then our weight: a weight that arrives says that its sender is prepared.
        while (launched_ < std::min(options_.buckets_in_flight, buckets_.count())) launch();
        start(buckets_.count(), weigh());
    }
    void start(std::size_t slot, task<> body) {
        roots_[slot] = root(std::move(body));
        roots_[slot].start();
    }
    void launch() {
        if (launched_ == buckets_.count()) return;
        std::size_t const b = buckets_.launch()[launched_++];
        start(b, bucket(b));
    }
    void fill(std::size_t b) {
        full_[b] = 1;
        full_at_[b] = on_.now();
        if (granted_) go_[b].set();
    }

    task<> root(task<> body) {
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
    void finish_step() noexcept {
        if (round_ == 1) reserve();
        complete_ = true;
        if (weight_ != 0) ++updates_;
        done_.set();
        if (weight_ == 0) return;
        try {
            notify(observer_, step_finished{round_, weight_, norm_});
        } catch (...) {
            on_.fail(std::current_exception());
        }
    }

    /// From the second step on nothing is allocated, whatever overlaps: buckets that are being reduced are bounded, their
    /// later stages hold no scratch.
    void reserve() noexcept {
        try {
            on_.frames().reserve_counted(std::size_t{16} << 10, options_.buckets_in_flight + 1);
        } catch (std::bad_alloc const&) {  // then it grows when it has to
        }
    }

    /// Gathers what every rank says; from then on buckets may be sent.
    task<> weigh() {
        tickets_[me()] = ticket_;
        if constexpr (BlockingAllreduceOver<A, T, E>)
            co_await finishing_;  // once all weights are here, so are all ranks
        lane<T> const weights(on_, of_, {.group = context_, .channel = channel::weights, .index = round_},
                              of_.history());
        co_await all_gather_small(weights, std::span<step_ticket>(tickets_));
        weight_ = 0;
        everybody_done_ = true;
        for (step_ticket const& t : tickets_) {
            weight_ += t.weight;
            everybody_done_ = everybody_done_ && t.done != 0;
        }
        inverse_ = weight_ == 0 ? E(0) : static_cast<E>(1.0 / static_cast<double>(weight_));
        if constexpr (BlockingAllreduceOver<A, T, E>) sum_blocking();
        granted_ = true;
        for (std::size_t b = 0; b < full_.size(); ++b)
            if (full_[b] != 0) go_[b].set();
    }
    /// All buckets before any is stepped: no code of the user's comes between that might throw on one rank only, and leave
    /// the others waiting in a call that has no deadline.
    void sum_blocking() {
        if (on_.failed()) throw collective_aborted();  // somebody has left: MPI would wait for good
        if (weight_ == 0) return;
        for (std::size_t const b : buckets_.launch()) {
            std::span<E> const data = gradients_.subspan(buckets_.begin(b), buckets_.end(b) - buckets_.begin(b));
            A::sum_blocking(algorithm_, lane<T>(on_, of_, {.group = context_}, hash_), data);
            scale(data, inverse_);
        }
    }

    /// One bucket, for every policy: reduce, scale, [statistics, gather them, decide], step, gather what travels back.
    task<> bucket(std::size_t b) {
        std::size_t const begin = buckets_.begin(b);
        std::span<E> const data = gradients_.subspan(begin, buckets_.end(b) - begin);
        std::span<std::size_t const> const cuts = cuts_[b];
        lane<T> const over(on_, of_, {.group = context_, .channel = channel_of(b), .index = round_}, hash_);
        bool everywhere = true;
        if constexpr (SlicedAllreduceOver<A, T, E>) {
            everywhere = algorithm_.everywhere(data.size_bytes(), of_.size());
            co_await A::reduce(algorithm_, over, reduction<E>{data, cuts, &go_[b], &inverse_});
        } else {
            co_await go_[b];
            if constexpr (!BlockingAllreduceOver<A, T, E>) {
                co_await A::sum(algorithm_, over, data);
                scale(data, inverse_);
            }
        }
        launch();
        if (weight_ == 0) co_return;  // everybody knows: nothing is stepped
        if constexpr (SlicedAllreduceOver<A, T, E>) {
            if (!sharded() && !everywhere) co_await A::all_gather(algorithm_, over, data, cuts);
        }
        notify(observer_, bucket_reduced{round_, b, data.size_bytes(), on_.now() - full_at_[b]});

        std::size_t const from = begin + (sharded() ? cuts[me()] : 0);
        std::size_t const to = begin + (sharded() ? cuts[me() + 1] : data.size());
        if (options_.norm_clip()) {
            statistics_.add(std::span<E const>(gradients_), from, to);
            if (sharded())
                co_await direct_allreduce::all_gather({}, over,
                                                      statistics_.squares(first_block_[b], block_cuts_[b].back()),
                                                      std::span<std::size_t const>(block_cuts_[b]));
            if (--ungated_ == 0) {
                norm_ = statistics_.value();
                clip_ = options_.norm_clip()->factor(norm_);
                gate_.set();
            }
            co_await gate_;
        }
        if (!ready_releases_) co_await released_;
        time_point const since = clock::now();
        step_range(b, from, to);
        time_point const end = clock::now();
        time_point const awaited = awaited_.load(std::memory_order_relaxed);
        late_ += std::max(end, awaited) - std::max(since, awaited);
        ++stepped_;
        // Posting these receives is what tells the peers that our values may be overwritten.
        if (sharded())
            co_await direct_allreduce::all_gather({}, over.phase(2), values_.subspan(begin, data.size()), cuts);
    }
    static std::uint32_t channel_of(std::size_t b) noexcept {
        return channel::buckets + 4 * static_cast<std::uint32_t>(b);
    }

    void step_range(std::size_t b, std::size_t from, std::size_t to) {
        if (auto const* const clip = options_.value_clip()) clip->apply(gradients_.subspan(from, to - from));
        std::size_t const origin = buckets_.begin(b) + (sharded() ? cuts_[b][me()] : 0);
        stepper_.step(updates_ + 1, options_.rate.factor(updates_), options_.norm_clip() ? clip_ : 1.0, gradients_,
                      values_, from, to, state_begin_[b] + (from - origin));
    }

    scheduler<T>& on_;
    group& of_;
    std::uint32_t context_ = 0;  // of its messages
    A algorithm_;
    detail::stepper<E, Opt> stepper_;
    detail::gradient_norm statistics_;
    detail::bucket_map buckets_;
    training_options options_;
    bool ready_releases_;  // values may be stepped as soon as their bucket is reduced
    std::span<E> gradients_;
    std::span<E> values_;
    Obs& observer_;
    std::uint64_t hash_ = 1;

    // the compute side's
    std::atomic<bool> under_way_{false};
    std::vector<std::size_t> pending_;  // reports that bucket b still waits for

    // between the sides: one writer, one reader, never more than one step's messages
    std::vector<std::size_t> mail_;
    std::atomic<std::size_t> posted_{0};
    step_ticket ticket_;
    std::atomic<time_point> awaited_{never};

    // the communication side's
    std::size_t taken_ = 0;
    std::uint64_t round_ = 0;    // steps begun
    std::uint64_t updates_ = 0;  // steps that changed values
    std::vector<step_ticket> tickets_;
    std::uint64_t weight_ = 0;
    bool everybody_done_ = false;
    bool granted_ = false, complete_ = true;
    E inverse_ = 0;
    std::vector<std::uint8_t> full_;
    std::vector<time_point> full_at_;
    std::deque<event> go_;
    event released_, finishing_, gate_, done_;
    std::vector<task<>> roots_;  // one a bucket, and the weights
    std::size_t unfinished_ = 0, launched_ = 0, ungated_ = 0, stepped_ = 0;

    std::vector<std::vector<std::size_t>> cuts_;        // slices of bucket b, counted from its begin
    std::vector<std::vector<std::size_t>> block_cuts_;  // the same in statistics blocks
    std::vector<std::size_t> first_block_;
    std::vector<std::size_t> state_begin_;
    double norm_ = 0, clip_ = 1;
    nanoseconds late_{};
};

}  // namespace ddp
