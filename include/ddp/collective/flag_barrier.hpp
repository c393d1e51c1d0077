/// \file
/// flag_barrier: ranks that see each other's memory wait for one another by flags in it, and hand over a few bytes.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <ddp/comm/lane.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/spin.hpp>
#include <ddp/core/task.hpp>

namespace ddp::detail {

/// A barrier of the ranks of a shared_memory, part of collectives that all of them call in the same order: one round at a
/// time. In each round a rank announces its arrival, with up to capacity() bytes for the others.
///
///     flags.arrive(over.fingerprint, payload);
///     if (!flags.all_here(patience)) co_await flags.exchange(over);
///     // of(r): the payload of rank r, until this rank arrives in the next round
///
/// Flags   a rank sets its own flag, and looks at those of all others; a round needs no message. A rank that has looked
///         for long enough marks the flags of the ranks that are late, and exchanges an empty message with each of them:
///         it then sleeps like any receive, with a deadline and a culprit. A rank learns from its own flag, in the
///         instruction that sets it, who has marked it. Ranks whose fingerprints differ exchange a message too, which
///         fails with DDP-E205.
/// Slots   rounds take two in turn. A rank that announces round n + 2 has seen all others in round n + 1, so they have
///         read what it announced in round n.
/// Cost    P - 1 cache lines read, one written (two and more beyond 48 ranks), and the payload once on each rank; no messages
///         if no rank is late. If all look for no time, or in vain, P - 1 empty messages on each rank.
class flag_barrier {
public:
    /// The bytes that it takes of each rank's memory.
    [[nodiscard]] static constexpr std::size_t bytes(std::size_t ranks, std::size_t capacity) noexcept {
        return 2 * slot_bytes(ranks, capacity);
    }
    /// `offset`: where it begins in the memory of each rank, a multiple of `line`. That memory is zero at first.
    flag_barrier(std::shared_ptr<shared_memory> memory, std::size_t ranks, std::size_t rank, std::size_t offset,
                 std::size_t capacity)
        : memory_(std::move(memory)),
          ranks_(ranks),
          me_(rank),
          offset_(offset),
          capacity_(capacity),
          marked_by_(words(ranks)) {}

    static constexpr std::size_t line = 128;  ///< processors fetch lines of 64 bytes in pairs

    [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
    [[nodiscard]] shared_memory const& memory() const noexcept { return *memory_; }

    /// Announces this rank's arrival in the next round, with at most capacity() bytes.
    void arrive(std::uint64_t fingerprint, const_bytes payload = {}) noexcept {
        ++round_;
        head& mine = head_of(me_);
        mine.fingerprint = fingerprint;
        mine.core = ::sched_getcpu();
        if (!payload.empty()) std::memcpy(payload_of(me_), payload.data(), payload.size());
        marked_ = false;
        for (std::size_t w = marked_by_.size(); w-- > 0;) {
            marked_by_[w] = flag_of(me_, w).exchange(stamp(), std::memory_order_acq_rel) & marks;
            marked_ |= marked_by_[w] != 0;
        }
    }
    /// Whether all ranks have arrived in this round with this rank's fingerprint and without messages. Looks for up to
    /// `patience` at those that have not.
    [[nodiscard]] bool all_here(nanoseconds patience) noexcept {
        if (marked_) return false;
        time_point end = never;
        for (std::size_t d = 1; d < ranks_; ++d) {
            std::size_t const r = me_ + d < ranks_ ? me_ + d : me_ + d - ranks_;
            if (!arrived(r) && !arrives(r, patience, end)) return false;
            if (differs(r)) return false;
        }
        look_at_cores();
        return true;
    }
    /// Exchanges a message with each rank that is late, that has marked this one as late, or that does something else.
    template <Transport T>
    task<> exchange(lane<T> over) {
        operations in(ranks_), out(ranks_);
        std::size_t posted = 0;
        for (std::size_t r = 0; r < ranks_; ++r) {
            if (r == me_ || !(has_marked(r) || is_late(r) || differs(r))) continue;
            over.receive(in[posted], static_cast<int>(r), {});
            over.send(out[posted++], static_cast<int>(r), {});
        }
        for (std::size_t i = 0; i < posted; ++i) {
            co_await in[i];
            co_await out[i];
        }
        for (std::size_t r = 0; r < ranks_; ++r) static_cast<void>(arrived(r));  // what it announced is visible
        look_at_cores();
    }
    /// What rank `r` has announced in this round.
    [[nodiscard]] std::byte const* of(std::size_t r) const noexcept { return payload_of(r); }

private:
    // A flag: the round, modulo 2^16, above a bit for each of `marked` ranks that have marked it.
    static constexpr std::size_t marked = 48;
    static constexpr std::uint64_t marks = (std::uint64_t{1} << marked) - 1;

    /// A slot begins with it. Further flags of the same round, for ranks from 48 on, take a line each before it.
    struct head {
        std::uint64_t flag;
        std::uint64_t fingerprint;
        std::int64_t core;  // on which this rank ran
    };

    [[nodiscard]] static constexpr std::size_t words(std::size_t ranks) noexcept {
        return (ranks + marked - 1) / marked;
    }
    [[nodiscard]] static constexpr std::size_t slot_bytes(std::size_t ranks, std::size_t capacity) noexcept {
        return (words(ranks) - 1) * line + (sizeof(head) + capacity + line - 1) / line * line;
    }
    [[nodiscard]] std::uint64_t stamp() const noexcept { return round_ << marked; }
    [[nodiscard]] std::byte* slot_of(std::size_t r) const noexcept {
        return memory_->of(r) + offset_ + (round_ & 1) * slot_bytes(ranks_, capacity_);
    }
    [[nodiscard]] head& head_of(std::size_t r) const noexcept {
        return *reinterpret_cast<head*>(slot_of(r) + (marked_by_.size() - 1) * line);
    }
    [[nodiscard]] std::byte* payload_of(std::size_t r) const noexcept {
        return reinterpret_cast<std::byte*>(&head_of(r)) + sizeof(head);
    }
    [[nodiscard]] std::atomic_ref<std::uint64_t> flag_of(std::size_t r, std::size_t word) const noexcept {
        return std::atomic_ref<std::uint64_t>(
            word == 0 ? head_of(r).flag : *reinterpret_cast<std::uint64_t*>(slot_of(r) + (word - 1) * line));
    }

    /// The flag of rank `r` at which this rank looks.
    [[nodiscard]] std::atomic_ref<std::uint64_t> my_flag_of(std::size_t r) const noexcept {
        return flag_of(r, me_ / marked);
    }
    [[nodiscard]] bool arrived(std::size_t r) const noexcept {
        return ((my_flag_of(r).load(std::memory_order_acquire) ^ stamp()) >> marked) == 0;
    }
    /// Of a rank that has arrived.
    [[nodiscard]] bool differs(std::size_t r) const noexcept {
        return head_of(r).fingerprint != head_of(me_).fingerprint;
    }
    [[nodiscard]] bool has_marked(std::size_t r) const noexcept {
        return (marked_by_[r / marked] >> (r % marked) & 1) != 0;
    }
    /// Marks the flag of rank `r`, unless it arrives before that.
    [[nodiscard]] bool is_late(std::size_t r) noexcept {
        std::atomic_ref<std::uint64_t> const flag = my_flag_of(r);
        std::uint64_t seen = flag.load(std::memory_order_acquire);
        while (((seen ^ stamp()) >> marked) != 0)
            if (flag.compare_exchange_weak(seen, seen | std::uint64_t{1} << (me_ % marked), std::memory_order_acq_rel,
                                           std::memory_order_acquire))
                return true;
        return false;
    }
    /// Looks again and again, and gives up the core in between: every time if another rank has run on it. The first call of
    /// a round sets `end`.
    [[nodiscard]] bool arrives(std::size_t r, nanoseconds patience, time_point& end) const noexcept {
        if (patience <= nanoseconds{0}) return false;
        // Where ranks share cores, each has to run once before all have arrived.
        if (end == never) end = monotonic_clock::now() + patience * (crowded_ ? 1 + ranks_ / 8 : 1);
        for (int looks = 1; !arrived(r); ++looks) {
            bool const yields = crowded_ || looks % 256 == 0;
            yields ? void(::sched_yield()) : spin_pause();
            if ((yields || looks % 32 == 0) && monotonic_clock::now() >= end) return false;
        }
        return true;
    }
    /// All have arrived. Ranks may move from core to core, so it looks again now and then.
    void look_at_cores() noexcept {
        if (round_ < looks_again_) return;
        looks_again_ = round_ + 32;
        crowded_ = false;
        for (std::size_t r = 0; r < ranks_; ++r) crowded_ |= r != me_ && head_of(r).core == head_of(me_).core;
    }

    std::shared_ptr<shared_memory> memory_;
    std::size_t ranks_, me_, offset_, capacity_;
    std::uint64_t round_ = 0, looks_again_ = 0;
    std::vector<std::uint64_t> marked_by_;  // in this round, by ranks
    bool marked_ = false;                   // by any
    bool crowded_ = false;                  // another rank has run on this rank's core
};

}  // namespace ddp::detail
