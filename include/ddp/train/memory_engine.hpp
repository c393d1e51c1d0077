/// \file
/// memory_engine: a step_engine for ranks that see each other's arenas. Messages only say that something is ready.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ddp/collective/barrier.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/kernel/store.hpp>
#include <ddp/kernel/sum.hpp>
#include <ddp/train/arena.hpp>
#include <ddp/train/step_engine.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {

/// The owner of a slice adds it up from all ranks' gradients where they lie, steps it, and stores the new values into
/// every replica. If a bucket may be stepped as soon as it is full (ready_releases, and no norm is needed), it does so
/// piece by piece, so that each stage finds the previous one's results in the cache; otherwise the sums are computed
/// while backward runs. With update::replicated the owner stores the mean into all ranks' gradients instead, and every
/// rank steps everything.
///
/// Grants   a barrier says that a bucket is full on all ranks: gradients may be read. Another says that values are
///          released, so that they may be written, unless ready implies it. A last one ends the bucket.
/// Cost     a step of n bytes of gradients on P ranks, a rank: reads n bytes of gradients, writes n of values; 1/P of the
///          optimizer's work; 2 or 3 barriers a bucket. No scratch.
/// Sums     the canonical tree over ranks, then the factor: the bits of direct_allreduce and a step.
/// Failure  as over messages. A rank that was stopped, while the others went on to fail, may still have written a piece
///          of values: torn() says so if one was begun, and keep_values() ends that.
template <Transport T, Element E>
class memory_engine : public step_engine<T, E> {
public:
    /// Gradients and values of `subject` lie in this rank's part of `memory`, as arena puts them.
    [[gnu::cold]] memory_engine(scheduler<T>& on, group& of, step_subject<E>&& subject, step_parts<T, E>&& parts,
                                std::shared_ptr<shared_memory> memory)
        : step_engine<T, E>(on, of, all_at_once(std::move(subject)), std::move(parts)), memory_(std::move(memory)) {
        std::size_t const bytes = arena<E>::half_bytes(this->values().size());
        for (std::size_t const r : memory_->here()) {
            if (r == this->me()) place_ = values_of_.size();
            values_of_.push_back(reinterpret_cast<E*>(memory_->of(r)));
            gradients_of_.push_back(reinterpret_cast<E*>(memory_->of(r) + bytes));
        }
        sources_.resize(gradients_of_.size());
        streams_ = this->values().size_bytes() >= stream_from_bytes;
    }

    bool torn() const noexcept override {
        return step_engine<T, E>::torn() || unsafe_ ||
               (this->within_step() && memory_->word(this->me()).load(std::memory_order_acquire) == this->made());
    }
    void keep_values() noexcept override { unsafe_ = !memory_->keep(this->values().size_bytes()); }

protected:
    static constexpr std::size_t piece_bytes = std::size_t{64} << 10;       ///< all ranks' pieces fit the L2 cache
    static constexpr std::size_t stream_from_bytes = std::size_t{4} << 20;  ///< smaller models stay in the caches

    /// Nothing is posted for a bucket before it is full: there is nothing to bound.
    static step_subject<E>&& all_at_once(step_subject<E>&& subject) {
        subject.options.buckets_in_flight = std::max<std::size_t>(1, subject.buckets.count());
        return std::move(subject);
    }

    // Phases of a bucket's messages. The squares of the norm take another.
    static constexpr std::uint32_t filled = 0, writable = 2, written = 3;
    /// Waits until all ranks of this host have reached this phase.
    task<> meet(std::size_t b, std::uint32_t phase) {
        return barrier(this->lane_of_bucket(b).phase(phase), memory_->here(), place_);
    }

    [[nodiscard]] shared_memory const& memory() const noexcept { return *memory_; }
    /// The values of the ranks of this host, in their order.
    [[nodiscard]] std::vector<E*> const& values_here() const noexcept { return values_of_; }
    [[nodiscard]] std::vector<E*> const& gradients_here() const noexcept { return gradients_of_; }
    /// The slice of bucket b that rank r adds up and steps.
    [[nodiscard]] arena_range slice(std::size_t b, std::size_t r) const noexcept {
        exchange_bucket const& part = this->sent(b);
        return {part.begin + part.cuts[r], part.begin + part.cuts[r + 1]};
    }
    [[nodiscard]] std::size_t piece_to(std::size_t from, std::size_t to) const noexcept {
        return this->piece_end(from, to, 64 / sizeof(E), std::min(piece_bytes, this->options().step_piece_bytes));
    }
    task<> bucket(std::size_t b) override;
    static constexpr unsigned adds = 1, steps = 2, spreads = 4;  // spreads: the mean, to all ranks' gradients
    /// Processes this rank's slice of bucket b, piece by piece; if values are stepped, it waits for its turn.
    task<> go_through(std::size_t b, unsigned what);
    /// Copies elements [from, to) to the other ranks of this host.
    void spread(std::vector<E*> const& copies, std::span<E const> mine, std::size_t from, std::size_t to) const;
    /// Says to every other rank of this host that its values are no longer all of one step.
    void mark() const noexcept {
        for (std::size_t const r : memory_->here())
            if (r != this->me()) memory_->word(r).store(this->made(), std::memory_order_release);
        finish_streams();  // not after what follows
    }
    /// Room for `count` pointers, at most one for each rank of this host.
    [[nodiscard]] std::span<E const*> sources(std::size_t count) noexcept { return std::span(sources_).first(count); }

private:
    void add(std::size_t from, std::size_t to) {
        for (std::size_t r = 0; r < sources_.size(); ++r) sources_[r] = gradients_of_[r] + from;
        sum_tree_scaled(this->gradients().subspan(from, to - from), std::span<E const* const>(sources_),
                        this->inverse());
    }

    std::shared_ptr<shared_memory> memory_;
    std::vector<E*> values_of_, gradients_of_;  // by place among the ranks of this host
    std::size_t place_ = 0;                     // this rank's
    std::vector<E const*> sources_;
    bool streams_ = false;
    bool unsafe_ = false;  // after a failure: others may still write
};

template <Transport T, Element E>
task<> memory_engine<T, E>::bucket(std::size_t b) {
    bool const whole = !this->sharded();
    bool const fused = !this->two_passes() && !whole && this->ready_releases();
    co_await this->full(b);
    co_await meet(b, filled);
    if (this->weight() == 0) co_return;  // all ranks know: nothing is stepped
    if (fused) {
        co_await go_through(b, adds | steps);
        this->reduced(b);
        co_await meet(b, written);
        co_return;
    }
    co_await go_through(b, whole ? adds | spreads : adds);
    if (whole) co_await meet(b, written);
    this->reduced(b);
    co_await this->pass_gate(b);
    if (this->skipped()) co_return;
    if (whole) {
        co_await this->step_values(b);
        co_return;
    }
    if (!this->ready_releases()) co_await meet(b, writable);  // else a gate that is open says that all are full
    co_await go_through(b, steps);
    co_await meet(b, written);
}

template <Transport T, Element E>
task<> memory_engine<T, E>::go_through(std::size_t b, unsigned what) {
    bool const in_turn = (what & steps) != 0;
    if (in_turn) co_await this->turn_of(b);
    arena_range const mine = slice(b, this->me());
    if (in_turn && mine.size() != 0) mark();
    for (std::size_t from = mine.begin, to = from; from != mine.end; from = to) {
        if (this->its_turn()) co_await this->on().yield();
        to = piece_to(from, mine.end);
        if ((what & adds) != 0) add(from, to);
        if ((what & spreads) != 0) spread(gradients_of_, this->gradients(), from, to);
        if (in_turn) {
            this->step_piece(from, to);
            spread(values_of_, this->values(), from, to);
        }
        this->worked_through(to - from);
    }
    finish_streams();
    if (in_turn) this->end_turn();
}

template <Transport T, Element E>
void memory_engine<T, E>::spread(std::vector<E*> const& copies, std::span<E const> mine, std::size_t from,
                                 std::size_t to) const {
    std::span<E const> const piece = mine.subspan(from, to - from);
    for (std::size_t d = 1; d < copies.size(); ++d) {  // each rank starts with a different peer
        std::span<E> const copy(copies[(place_ + d) % copies.size()] + from, piece.size());
        if (streams_)
            stream(copy, piece);
        else
            std::copy(piece.begin(), piece.end(), copy.begin());
    }
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class memory_engine<any_transport, float>;
DDP_INSTANTIATE class memory_engine<any_transport, double>;
#endif

}  // namespace ddp
