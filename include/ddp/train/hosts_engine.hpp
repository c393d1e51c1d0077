/// \file
/// hosts_engine: a step_engine for ranks on several hosts, where those of a host see each other's arenas.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ddp/collective/host_role.hpp>
#include <ddp/comm/lane.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/kernel/store.hpp>
#include <ddp/kernel/sum.hpp>
#include <ddp/train/memory_engine.hpp>
#include <ddp/train/step_engine.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {

namespace detail {
/// Warns once per process if hosts have several ranks of which no two follow each other: then none can be added up inside a
/// host.
[[gnu::cold]] inline void warn_of_scattered_ranks(host_trees const& trees) noexcept {
    static std::atomic<bool> said = false;
    std::size_t const ranks = trees.subtrees().back().end;
    for (std::size_t r = 1; r < ranks; ++r)
        if (trees.host_of(r) == trees.host_of(r - 1)) return;
    if (ranks == trees.hosts() || said.exchange(true)) return;
    std::fputs(
        "ddp: warning: ranks that follow each other are on different hosts, so no gradients are added up inside a "
        "host, and the network carries as much as without shared memory. Number the ranks host by host (mpirun "
        "--map-by slot, srun --distribution=block)\n",
        stderr);
}
}  // namespace detail

/// As in memory_engine, each rank owns a slice of every bucket, and stores the result into every replica of its host.
/// On each other host its counterpart, the rank at the same place there, adds up that host's subtrees of the canonical
/// tree, sends their sums to the owner, and later stores the owner's result into that host's replicas.
///
/// Grants   barriers among the ranks of a host, as in memory_engine. A receive into values is posted when the values of all
///          ranks of the host may be written.
/// Cost     with h hosts of g ranks, in blocks of a power of two, a step of n bytes of gradients: a rank sends
///          2 n (h-1) / (h g) bytes to other hosts, in messages of 256 KiB, and adds up n / g bytes of each rank of its host.
///          Scratch: 4 chunks for each subtree of another host and bucket under way.
/// Sums     the canonical tree over ranks, then the factor: the bits of direct_allreduce and a step.
/// Failure  as in memory_engine.
template <Transport T, Element E>
class hosts_engine final : public memory_engine<T, E> {
    using base = memory_engine<T, E>;

public:
    [[gnu::cold]] hosts_engine(scheduler<T>& on, group& of, step_subject<E>&& subject, step_parts<T, E>&& parts,
                               std::shared_ptr<shared_memory> memory)
        : base(on, of, std::move(subject), std::move(parts), std::move(memory)),
          role_(this->memory().hosts(), this->me()) {
        if (this->me() == 0) detail::warn_of_scattered_ranks(role_.trees);
    }

private:
    static constexpr std::size_t chunk = (std::size_t{256} << 10) / sizeof(E);
    static constexpr std::size_t window = 4;

    // Phases of messages between hosts. Barriers of a host take the same numbers: their messages never leave it.
    static constexpr std::uint32_t addends = 0, results = 2;
    [[nodiscard]] lane<T> stream(std::size_t b, std::uint32_t phase) noexcept {
        return this->lane_of_bucket(b).phase(phase);
    }
    [[nodiscard]] static std::size_t chunks(arena_range const& part) noexcept {
        return (part.size() + chunk - 1) / chunk;
    }
    [[nodiscard]] static arena_range chunk_of(arena_range const& part, std::size_t c) noexcept {
        return {part.begin + c * chunk, std::min(part.begin + (c + 1) * chunk, part.end)};
    }
    [[nodiscard]] std::size_t carried_chunks(std::size_t b) const noexcept {
        std::size_t count = 0;
        for (std::size_t const owner : role_.carried) count += chunks(this->slice(b, owner));
        return count;
    }

    task<> bucket(std::size_t b) override;
    /// Leaves the mean of this rank's slice in its gradients.
    task<> add_up(std::size_t b);
    /// Brings this rank's slice of `mine`, which the ranks of this host have, to the other hosts, and theirs to this host's
    /// `copies`.
    task<> exchange_slices(std::size_t b, std::vector<E*> const& copies, std::span<E> mine);
    /// The sum of one of this host's subtrees, [from, to), where the gradients of its first rank lie.
    [[nodiscard]] E* add_subtree(std::size_t k, std::size_t from, std::size_t to);

    host_role role_;
};

template <Transport T, Element E>
task<> hosts_engine<T, E>::bucket(std::size_t b) {
    bool const whole = !this->sharded();
    co_await this->full(b);
    co_await this->meet(b, base::filled);
    if (this->weight() == 0) co_return;  // all ranks know: nothing is stepped
    co_await add_up(b);
    if (whole) {
        co_await this->go_through(b, base::spreads);
        co_await exchange_slices(b, this->gradients_here(), this->gradients());
        co_await this->meet(b, base::written);
    }
    this->reduced(b);
    co_await this->pass_gate(b);
    if (this->skipped()) co_return;
    if (whole) {
        co_await this->step_values(b);
        co_return;
    }
    if (!this->ready_releases()) co_await this->meet(b, base::writable);
    co_await this->go_through(b, base::steps);
    this->mark();
    this->memory().word(this->me()).store(this->made(), std::memory_order_relaxed);  // slices arrive one by one
    co_await exchange_slices(b, this->values_here(), this->values());
    co_await this->meet(b, base::written);
}

template <Transport T, Element E>
E* hosts_engine<T, E>::add_subtree(std::size_t k, std::size_t from, std::size_t to) {
    std::vector<E*> const& here = this->gradients_here();
    E* const sum = here[role_.firsts[k]] + from;
    if (role_.ours[k].size() == 1) return sum;
    std::span<E const*> const sources = this->sources(role_.ours[k].size());
    // Ranks of a subtree follow each other, on this host as in the job.
    for (std::size_t i = 0; i < sources.size(); ++i) sources[i] = here[role_.firsts[k] + i] + from;
    sum_tree_scaled(std::span<E>(sum, to - from), std::span<E const* const>(sources), E(1));
    return sum;
}

template <Transport T, Element E>
task<> hosts_engine<T, E>::add_up(std::size_t b) {
    std::size_t const me = this->me(), trees = role_.senders.size(), others = role_.foreign_trees();
    arena_range const mine = this->slice(b, me);
    std::size_t const count = chunks(mine), ahead = std::min(count, window),
                      room = std::min(chunk, (mine.size() * sizeof(E) + 63) / 64 * 64 / sizeof(E));
    lane<T> const over = stream(b, addends);
    scratch memory(ahead * others * room * sizeof(E)), table(trees * sizeof(E const*));
    operations receives(count * others), sends(carried_chunks(b) * role_.ours.size());
    std::span<E const*> const sources = table.as<E const*>();

    auto const slot = [&](std::size_t c, std::size_t k) {
        return memory.as<E>().subspan(((c % window) * others + k) * room, chunk_of(mine, c).size());
    };
    auto const expect = [&](std::size_t c) {
        for (std::size_t t = 0, k = 0; t < trees; ++t)
            if (role_.senders[t] != me) {
                over.receive(receives[c * others + k], static_cast<int>(role_.senders[t]),
                             as_mutable_bytes(slot(c, k)));
                ++k;
            }
    };
    for (std::size_t c = 0; c < ahead; ++c) expect(c);

    std::size_t posted = 0;
    for (std::size_t const owner : role_.carried) {
        arena_range const theirs = this->slice(b, owner);
        for (std::size_t c = 0; c < chunks(theirs); ++c) {
            if (this->its_turn()) co_await this->on().yield();
            arena_range const part = chunk_of(theirs, c);
            for (std::size_t k = 0; k < role_.ours.size(); ++k) {
                std::span<E const> const sum(add_subtree(k, part.begin, part.end), part.size());
                over.send(sends[posted++], static_cast<int>(owner), as_const_bytes(sum));
            }
            this->worked_through(part.size());
        }
    }
    for (std::size_t c = 0; c < count; ++c) {
        if (this->its_turn()) co_await this->on().yield();
        arena_range const part = chunk_of(mine, c);
        for (std::size_t k = 0; k < others; ++k) co_await receives[c * others + k];
        for (std::size_t t = 0, here = 0, k = 0; t < trees; ++t) {
            if (role_.senders[t] == me)
                sources[t] = add_subtree(here++, part.begin, part.end);
            else
                sources[t] = slot(c, k++).data();
        }
        role_.trees.combine<sum>(this->gradients().subspan(part.begin, part.size()), std::span<E const* const>(sources),
                                 this->inverse());
        if (c + window < count) expect(c + window);
        this->worked_through(part.size());
    }
    for (std::size_t i = 0; i < posted; ++i) co_await sends[i];
}

template <Transport T, Element E>
task<> hosts_engine<T, E>::exchange_slices(std::size_t b, std::vector<E*> const& copies, std::span<E> mine) {
    lane<T> const over = stream(b, results);
    arena_range const own = this->slice(b, this->me());
    operations receives(carried_chunks(b)), sends(role_.counterparts.size() * chunks(own));
    std::size_t expected = 0, sent = 0, come = 0;
    for (std::size_t const owner : role_.carried) {
        arena_range const theirs = this->slice(b, owner);
        for (std::size_t c = 0; c < chunks(theirs); ++c) {
            arena_range const part = chunk_of(theirs, c);
            over.receive(receives[expected++], static_cast<int>(owner),
                         as_mutable_bytes(mine.subspan(part.begin, part.size())));
        }
    }
    for (std::size_t c = 0; c < chunks(own); ++c) {
        arena_range const part = chunk_of(own, c);
        for (std::size_t const peer : role_.counterparts)
            over.send(sends[sent++], static_cast<int>(peer), as_const_bytes(mine.subspan(part.begin, part.size())));
    }
    for (std::size_t const owner : role_.carried) {
        arena_range const theirs = this->slice(b, owner);
        for (std::size_t c = 0; c < chunks(theirs); ++c) {
            if (this->its_turn()) co_await this->on().yield();
            co_await receives[come++];
            arena_range const part = chunk_of(theirs, c);
            this->spread(copies, mine, part.begin, part.end);
            this->worked_through(part.size());
        }
    }
    finish_streams();
    for (std::size_t i = 0; i < sent; ++i) co_await sends[i];
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class hosts_engine<any_transport, float>;
DDP_INSTANTIATE class hosts_engine<any_transport, double>;
#endif

}  // namespace ddp
