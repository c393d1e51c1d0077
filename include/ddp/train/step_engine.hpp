/// \file
/// step_engine: processes buckets: their mean by messages, the gate, and new values, which are sent to all ranks.
///
/// Depends on the transport's and the element's type only: optimizer, exchange and observer are called virtually, once
/// per bucket or range, so an engine is compiled once for all of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/comm/lane.hpp>
#include <ddp/core/math.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/optim/clip.hpp>
#include <ddp/optim/optimizer_model.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/events.hpp>
#include <ddp/train/gradient_norm.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/plan_exchange.hpp>
#include <ddp/train/step_cycle.hpp>
#include <ddp/train/step_parts.hpp>
#include <ddp/train/stepper.hpp>
#include <ddp/train/turnstile.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {

/// Turns "gradient i is final" into exchanged buckets and stepped values, while backward still runs.
template <Transport T, Element E>
class step_engine : public step_cycle<T, E> {
    using cycle = step_cycle<T, E>;

public:
    using cycle::skipped, cycle::updates, cycle::weight;

    /// Among the ranks of `of`, which outlives the engine.
    [[gnu::cold]] step_engine(scheduler<T>& on, group& of, step_subject<E>&& subject, step_parts<T, E>&& parts)
        : step_engine(on, of, std::move(subject), std::move(parts), std::make_shared<posted_parts>()) {}

    /// Cuts inside a parameter fall on multiples of this many elements.
    [[nodiscard]] static constexpr std::size_t slice_grain(bool statistics) noexcept {
        return statistics ? statistics_block : 64 / sizeof(E);
    }

    void freeze(std::span<std::uint8_t const> which) override {
        cycle::freeze(which);
        messages_->statistics.clear();  // frozen parameters count as 0
        if (exchange().keeps_nothing())
            for (std::size_t b = 0; b < buckets().count(); ++b)
                sent_.buckets[b] = detail::without_frozen_ends(plan_.buckets[b], which);
    }

    /// Of the last finished step.
    [[nodiscard]] double gradient_norm() const noexcept { return norm_; }
    /// Time in the optimizer while the compute side only waited for the end of the step.
    [[nodiscard]] nanoseconds stepped_late() const noexcept { return late_; }
    /// Whether some values of the current step are new and others are not: after a failure such state must not be kept.
    [[nodiscard]] virtual bool torn() const noexcept { return torn_ && this->within_step(); }
    /// After a failure: from now on no other rank writes into the values.
    virtual void keep_values() noexcept {}

    [[nodiscard]] std::uint64_t optimizer_hash() const { return stepper_.hash(); }
    [[nodiscard]] std::string optimizer_words() const { return stepper_.words(); }
    /// Shows the optimizer's slots, by parameter, and what the exchange keeps. Between steps; what is shown may be written.
    void for_each_state(state_visitor visit) {
        stepper_.for_each_state(where(), this->parameters(), visit);
        exchange().for_each_state(visit);
    }
    /// Between steps.
    [[nodiscard]] ddp::exchange_statistics exchange_statistics() const { return exchange().statistics(); }
    /// "none" if gradients are sent as they are.
    [[nodiscard]] std::string exchange_words() const {
        return exchange().in_memory() ? "none" : exchange().hash_words();
    }
    [[nodiscard]] std::string exchange_refusal() const { return exchange().refusal(); }

protected:
    using cycle::buckets, cycle::frozen, cycle::gradients, cycle::inverse, cycle::its_turn, cycle::lane_of_bucket,
        cycle::me, cycle::options, cycle::range, cycle::ranks, cycle::ready_releases, cycle::round, cycle::values,
        cycle::where, cycle::worked_through;

    // The stages of a step, one bucket each, for a bucket() of another strategy that leaves one out.

    /// Processes bucket b in a step: its mean, the gate, and new values, which are sent to all ranks.
    task<> bucket(std::size_t b) override;
    /// Gradients of bucket b become their mean, or this rank's slice of it if sharded; then the next bucket starts.
    task<> exchange_gradients(std::size_t b);
    /// Called once the mean of bucket b, or that of this rank's slice, is known on this rank.
    void reduced(std::size_t b);
    /// If clipping needs the norm, waits until that of all buckets is known. Then waits until values may be stepped.
    task<> pass_gate(std::size_t b);
    /// Steps this rank's part of bucket b, when it is its turn; a large one in pieces, between which the transport is driven.
    task<> step_values(std::size_t b);
    /// For processing piece by piece, one bucket after the other: awaits the turn of bucket b.
    [[nodiscard]] event& turn_of(std::size_t b) noexcept { return stepping_.enter(b); }
    void end_turn() noexcept { stepping_.leave(); }
    /// The end of the next piece: at most `bytes`, or one grain.
    [[nodiscard]] std::size_t piece_end(std::size_t from, std::size_t to, std::size_t grain,
                                        std::size_t bytes) const noexcept;
    void step_piece(std::size_t from, std::size_t to);
    /// Whether something must be known or done between a bucket's mean and its step.
    [[nodiscard]] bool two_passes() const noexcept {
        return options().needs_norm() || stepper_.needs_norms() || changes_gradients_;
    }
    /// With a sharded update: sends every rank's new slice to all ranks.
    task<> gather(std::size_t b) override {
        // Posting these receives tells the peers that this rank's values may be overwritten.
        co_await direct_allreduce::all_gather({}, lane_of_bucket(b).phase(2),
                                              values().subspan(sent(b).begin, sent(b).count),
                                              std::span<std::size_t const>(sent(b).cuts));
    }

    [[nodiscard]] bool sharded() const noexcept { return options().update == update::sharded; }
    /// The part of bucket b that this rank steps.
    [[nodiscard]] arena_range own(std::size_t b) const noexcept {
        if (!sharded()) return range(b);
        return {buckets().begin(b) + cuts(b)[me()], buckets().begin(b) + cuts(b)[me() + 1]};
    }
    [[nodiscard]] std::span<std::size_t const> cuts(std::size_t b) const noexcept { return plan_.buckets[b].cuts; }
    /// What is exchanged of bucket b.
    [[nodiscard]] exchange_bucket const& sent(std::size_t b) const noexcept { return sent_.buckets[b]; }

private:
    /// The memory of messages, besides the arenas and the pool.
    struct posted_parts final : detail::step_messages {
        std::unique_ptr<detail::exchange_model<T, E>> exchange;
        detail::gradient_norm statistics;                    // of the mean gradient
        detail::gradient_norm value_norms, direction_norms;  // of each parameter, for the optimizer
    };

    [[gnu::cold]] step_engine(scheduler<T>& on, group& of, step_subject<E>&& subject, step_parts<T, E>&& parts,
                              std::shared_ptr<posted_parts> messages);

    void step_begins() override;
    void step_ended() override {
        if (observer_ != nullptr) observer_->on(step_finished{round(), weight(), norm_});
    }
    void add_state(digest& all, arena_range part, std::uint64_t step) const noexcept override;
    [[nodiscard]] bool blocking() const noexcept override { return exchange().blocking(); }
    /// Exchanges all buckets before any is stepped: so no user code runs in between, which might throw on one rank only and
    /// leave the others waiting in a call that has no deadline.
    void exchange_blocking() override {
        if (weight() == 0) return;
        for (std::size_t const b : buckets().launch())
            if (!this->silent(b)) exchange().exchange_blocking(lane_of_bucket(b), exchange_of(b));
    }

    [[nodiscard]] detail::exchange_model<T, E>& exchange() const noexcept { return *messages_->exchange; }
    [[nodiscard]] bucket_exchange<E> exchange_of(std::size_t b) noexcept {
        return {b,        gradients().subspan(sent(b).begin, sent(b).count), sent(b).cuts, &this->full(b), &inverse(),
                updates()};
    }
    /// Sends the squares that this rank has added up for its slice of bucket b to all ranks.
    task<> gather_squares(std::size_t b, detail::gradient_norm& of);
    /// For an optimizer that steps by norms of parameters: prepares this rank's part of bucket b, and waits until all are known.
    task<> measure_parameters(std::size_t b);
    [[nodiscard]] update_info update_now() const;

    stepper<E> stepper_;
    std::shared_ptr<posted_parts> messages_;
    std::unique_ptr<detail::step_observer> observer_;
    bool changes_gradients_;
    exchange_plan<E> plan_, sent_;            // sent_: without frozen parameters, as far as the exchange allows
    std::vector<detail::block_cuts> blocks_;  // by bucket, where norms are asked for

    // the communication side's
    bool torn_ = false;
    event gate_, measured_;
    detail::turnstile stepping_;
    std::size_t ungated_ = 0, unmeasured_ = 0, unreduced_ = 0;
    double norm_ = 0, clip_ = 1;
    std::span<double const> norms_of_values_, norms_of_directions_;  // by parameter
    nanoseconds late_{};
};

// Made of

template <Transport T, Element E>
step_engine<T, E>::step_engine(scheduler<T>& on, group& of, step_subject<E>&& subject, step_parts<T, E>&& parts,
                               std::shared_ptr<posted_parts> messages)
    : cycle(on, of, std::move(subject), messages),
      stepper_(std::move(parts.optimizer), where(), this->parameters()),
      messages_(std::move(messages)),
      observer_(std::move(parts.observer)),
      changes_gradients_(observer_ != nullptr && observer_->changes_gradients()),
      gate_(on),
      measured_(on),
      stepping_(on, buckets().count()) {
    messages_->exchange = std::move(parts.exchange);
    bool const norms = options().needs_norm() || stepper_.needs_norms();
    if (options().needs_norm()) messages_->statistics = detail::gradient_norm(where());
    if (stepper_.needs_norms()) messages_->value_norms = messages_->direction_norms = detail::gradient_norm(where());
    plan_ = detail::plan_exchange(where(), buckets(), this->parameters(), static_cast<int>(me()),
                                  static_cast<int>(ranks()), sharded(), slice_grain(norms));
    if (norms) blocks_ = detail::cut_in_blocks(where(), buckets(), plan_);
    sent_ = plan_;
    exchange().prepare(plan_);
    exchange().for_each_shared([&](const_bytes one) {
        if (!one.empty()) this->compare_exchange();
    });
    std::vector<arena_range> stepped;
    for (std::size_t b = 0; b < buckets().count(); ++b) stepped.push_back(own(b));
    stepper_.hold(stepped);
}

template <Transport T, Element E>
void step_engine<T, E>::step_begins() {
    torn_ = false;
    norm_ = 0;
    late_ = {};
    gate_.reset();
    measured_.reset();
    stepping_.reset();
    ungated_ = unmeasured_ = unreduced_ = this->active_buckets();
    if (options().may_skip()) exchange().save_state();
}
template <Transport T, Element E>
void step_engine<T, E>::add_state(digest& all, arena_range part, std::uint64_t step) const noexcept {
    if (!sharded()) stepper_.digest_state(all, part.begin, part.end);
    std::size_t bytes = 0;
    exchange().for_each_shared([&](const_bytes one) { bytes += one.size(); });
    arena_range const shared = detail::compared_in(step, options().agreement_steps, bytes);
    std::size_t begin = 0;
    exchange().for_each_shared([&](const_bytes one) {
        std::size_t const from = std::max(begin, shared.begin), to = std::min(begin + one.size(), shared.end);
        if (from < to) all.add(one.subspan(from - begin, to - from));
        begin += one.size();
    });
}

// The stages of a bucket

template <Transport T, Element E>
task<> step_engine<T, E>::bucket(std::size_t b) {
    co_await exchange_gradients(b);
    if (weight() == 0) co_return;  // all ranks know: nothing is stepped
    co_await pass_gate(b);
    if (skipped()) co_return;
    co_await step_values(b);
    if (sharded() && this->late() == nullptr) co_await gather(b);
}

template <Transport T, Element E>
task<> step_engine<T, E>::exchange_gradients(std::size_t b) {
    lane<T> const over = lane_of_bucket(b);
    co_await exchange().exchange(over, exchange_of(b));
    this->launch();
    if (weight() == 0) co_return;
    if (!sharded() && !exchange().everywhere(sent_, b)) co_await exchange().gather(over, exchange_of(b));
    reduced(b);
}

template <Transport T, Element E>
void step_engine<T, E>::reduced(std::size_t b) {
    if (--unreduced_ == 0) this->on().note(flight::mark, round(), 0, 0, "reduced");
    if (observer_ == nullptr) return;
    observer_->on(bucket_reduced{round(), b, sent(b).count * sizeof(E), this->on().now() - this->full_since(b)});
    if (!changes_gradients_) return;
    where().for_each_in(own(b).begin, own(b).end, [&](std::size_t i, std::size_t from, std::size_t to) {
        if (!frozen(i))
            observer_->on(mean_gradient<E>{round(), weight(), i, from - where().begin(i),
                                           gradients().subspan(from, to - from), values().subspan(from, to - from)});
    });
}

template <Transport T, Element E>
task<> step_engine<T, E>::pass_gate(std::size_t b) {
    if (options().needs_norm()) {
        if (this->tracks_used()) co_await this->used_known();
        arena_range const mine = own(b);
        for (std::size_t from = mine.begin, to = from; from != mine.end; from = to) {
            if (its_turn()) co_await this->on().yield();
            to = piece_end(from, mine.end, statistics_block, options().step_piece_bytes);
            where().for_each_in(from, to, [&](std::size_t i, std::size_t a, std::size_t z) {
                messages_->statistics.add(this->steps(i) ? std::span<E const>(gradients()) : std::span<E const>(), a,
                                          z);
            });
            worked_through(to - from);
        }
        if (sharded()) co_await gather_squares(b, messages_->statistics);
        if (--ungated_ == 0) {
            norm_ = messages_->statistics.value();
            if (auto const* const clip = options().norm_clip()) clip_ = clip->factor(norm_);
            // With a sharded update all ranks have it from the same squares; a rank that has its own must not be alone with it.
            if (options().nonfinite != nonfinite::unchecked && !(sharded() && detail::is_finite(norm_)))
                co_await this->agree_on_finite(norm_);
            if (skipped()) exchange().restore_state();
            gate_.set();
        }
        co_await gate_;
    }
    if (!ready_releases()) co_await this->released();
    if (this->tracks_used()) co_await this->used_known();
    if (stepper_.needs_norms() && !skipped()) co_await measure_parameters(b);
}
template <Transport T, Element E>
task<> step_engine<T, E>::gather_squares(std::size_t b, detail::gradient_norm& of) {
    return direct_allreduce::all_gather({}, lane_of_bucket(b), of.squares(blocks_[b].first, blocks_[b].cuts.back()),
                                        std::span<std::size_t const>(blocks_[b].cuts));
}
template <Transport T, Element E>
task<> step_engine<T, E>::measure_parameters(std::size_t b) {
    arena_range const mine = own(b);
    for (std::size_t from = mine.begin, to = from; from != mine.end; from = to) {
        if (its_turn()) co_await this->on().yield();
        to = piece_end(from, mine.end, statistics_block, options().step_piece_bytes);
        if (auto const* const clip = options().value_clip()) clip->apply(gradients().subspan(from, to - from));
        torn_ = true;  // from here on the optimizer's state changes
        this->for_each_stepped(from, to, [&](std::size_t a, std::size_t z) {
            stepper_.prepare(update_now(), gradients(), values(), a, z);
        });
        messages_->value_norms.add(std::span<E const>(values()), from, to);
        messages_->direction_norms.add(std::span<E const>(gradients()), from, to);
        worked_through(2 * (to - from));
    }
    if (sharded()) {
        co_await gather_squares(b, messages_->value_norms);
        co_await gather_squares(b, messages_->direction_norms);
    }
    if (--unmeasured_ == 0) {
        norms_of_values_ = messages_->value_norms.of_parameters();
        norms_of_directions_ = messages_->direction_norms.of_parameters();
        measured_.set();
    }
    co_await measured_;
}

template <Transport T, Element E>
task<> step_engine<T, E>::step_values(std::size_t b) {
    co_await stepping_.enter(b);  // in turn: the first is on its way to the peers while the last is stepped
    arena_range const mine = own(b);
    for (std::size_t from = mine.begin, to = from; from != mine.end; from = to) {
        if (its_turn()) co_await this->on().yield();
        to = piece_end(from, mine.end, 64 / sizeof(E), options().step_piece_bytes);
        step_piece(from, to);
        worked_through(to - from);
    }
    torn_ = true;  // until all ranks have reached this point
    stepping_.leave();
}

template <Transport T, Element E>
std::size_t step_engine<T, E>::piece_end(std::size_t from, std::size_t to, std::size_t grain,
                                         std::size_t bytes) const noexcept {
    std::size_t const most = std::max(grain, bytes / sizeof(E));
    if (to - from <= most) return to;
    std::size_t const cut = where().cut_before(from, from + most, grain);
    return cut == from ? to : cut;
}

template <Transport T, Element E>
update_info step_engine<T, E>::update_now() const {
    return {.update = updates() + 1,
            .rate_factor = options().schedule.factor(updates()),
            .gradient_scale = options().norm_clip() ? clip_ : 1.0,
            .value_norms = norms_of_values_,
            .gradient_norms = norms_of_directions_};
}
template <Transport T, Element E>
void step_engine<T, E>::step_piece(std::size_t from, std::size_t to) {
    time_point const since = monotonic_clock::now();
    auto const* const clip = options().value_clip();
    if (clip != nullptr && !stepper_.needs_norms()) clip->apply(gradients().subspan(from, to - from));
    torn_ = true;  // whatever happens to it
    this->for_each_stepped(
        from, to, [&](std::size_t a, std::size_t z) { stepper_.step(update_now(), gradients(), values(), a, z); });
    time_point const end = monotonic_clock::now();
    time_point const awaited = this->awaited();
    late_ += std::max(end, awaited) - std::max(since, awaited);
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class step_engine<any_transport, float>;
DDP_INSTANTIATE class step_engine<any_transport, double>;
#endif

}  // namespace ddp
