/// \file
/// shared_array: numbers of every rank, in memory that all of them see where they share a host; and allreduce there.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>
#include <ddp/collective/concepts.hpp>
#include <ddp/collective/flag_barrier.hpp>
#include <ddp/collective/share_memory.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/kernel/combine.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {

/// An allreduce of numbers that lie in shared memory, over a lane of its ranks, without messages unless a rank is late.
///
/// Small arrays, up to handed_over_up_to(): every rank hands its numbers over, and combines those of all. Larger ones: the
/// owner of a slice combines it from all ranks and stores the result into all.
///
/// Cost    one flag_barrier; each rank reads P n numbers. For larger arrays two of them; each rank reads and writes n
///         numbers. No scratch but 2 P pointers.
/// Order   the canonical tree over ranks.
/// Throws  collective_aborted inside the scheduler.
struct memory_allreduce {
    static constexpr std::size_t piece_bytes = std::size_t{64} << 10;  ///< of each rank: all fit the L2 cache
    /// Bytes for which a second barrier costs more than reading all of them on every rank. Measured with 2 ranks on 2 cores,
    /// and with 4 and 8, where waiting for a barrier is to switch between ranks.
    [[nodiscard]] static constexpr std::size_t handed_over_up_to(int ranks) noexcept {
        return std::size_t{ranks == 2 ? 2u : 4u} << 10;
    }
    /// Bytes that are worked on between two turns of the transport.
    static constexpr std::size_t turn_bytes = std::size_t{1} << 20;
    /// How long a blocking call looks for ranks that are late before it waits for their messages.
    static constexpr std::chrono::microseconds patience{50};

    /// `mine`: this rank's numbers, which begin its memory. `looks_for`: up to `patience`; 0 where nothing may wait in place.
    template <class Op, Transport T, Number E>
    static task<> combine(lane<T> over, std::shared_ptr<detail::flag_barrier> flags, std::span<E> mine,
                          nanoseconds looks_for) {
        std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
        bool const small = mine.size_bytes() <= flags->capacity();
        flags->arrive(over.fingerprint, small ? as_const_bytes(mine) : const_bytes{});
        if (!flags->all_here(looks_for)) co_await flags->exchange(over);
        scratch table(ranks * sizeof(E*) * 2);
        std::span<E const*> const sources = table.as<E const*>().first(ranks);
        if (small) {
            for (std::size_t r = 0; r < ranks; ++r) sources[r] = reinterpret_cast<E const*>(flags->of(r));
            sources[me] = mine.data();
            combine_tree<Op>(mine, std::span<E const* const>(sources));
            co_return;
        }
        std::span<E*> const all = table.as<E*>().subspan(ranks);
        for (std::size_t r = 0; r < ranks; ++r) all[r] = reinterpret_cast<E*>(flags->memory().of(r));
        detail::slice_cuts<E> const slices(mine.size(), over.size());
        constexpr std::size_t piece = piece_bytes / sizeof(E);
        std::size_t const end = slices.get()[me + 1];
        std::size_t done = 0;
        for (std::size_t at = slices.get()[me]; at < end; at += piece) {
            if (done >= turn_bytes) {
                co_await over.on->yield();
                done = 0;
            }
            work<Op, E>(all, me, at, std::min(piece, end - at), sources);
            done += piece_bytes;
        }
        flags->arrive(over.fingerprint);
        if (!flags->all_here(looks_for)) co_await flags->exchange(over.phase(1));
    }

private:
    template <class Op, Number E>
    static void work(std::span<E* const> all, std::size_t me, std::size_t at, std::size_t count,
                     std::span<E const*> sources) {
        for (std::size_t r = 0; r < all.size(); ++r) sources[r] = all[r] + at;
        std::span<E> const mine(all[me] + at, count);
        combine_tree<Op>(mine, std::span<E const* const>(sources));
        for (std::size_t d = 1; d < all.size(); ++d)  // each rank begins with another one
            std::copy(mine.begin(), mine.end(), all[(me + d) % all.size()] + at);
    }
};

/// `count` numbers on every rank of a communicator, zero at first. If all of these ranks are on one host, the numbers are in
/// memory that all of them see, and allreduce works there, without messages that carry data. Otherwise each rank has memory
/// of its own, and allreduce sends messages.
///
///     ddp::shared_array<float> gradient(comm, n);
///     compute(gradient.span());
///     ddp::allreduce(comm, gradient);
///
/// Making one is collective: all ranks pass the same count; if they do not, the first allreduce throws E205. Each rank
/// may destroy its own array at any time.
///
/// Cost    count sizeof(E) bytes of memory per rank, and up to 9 KiB for allreduce (a little more beyond 100 ranks). Sharing
///         them: a few small all-gathers.
/// Throws  comm_error (the same verdict on every rank); environment_error, on every rank, if one is out of memory.
template <Number E>
class shared_array {
public:
    template <Transport T>
    shared_array(communicator<T> const& comm, std::size_t count)
        : memory_(detail::share_memory(comm, bytes(count, comm.size()))),
          own_(memory_ ? nullptr : std::make_unique<E[]>(count)),
          numbers_(memory_ ? reinterpret_cast<E*>(memory_->mine().get()) : own_.get(), count) {
        if (memory_)
            flags_ = std::make_shared<detail::flag_barrier>(memory_, static_cast<std::size_t>(comm.size()),
                                                            static_cast<std::size_t>(comm.rank()), flags_at(count),
                                                            handed_over(count, comm.size()));
    }

    /// This rank's numbers.
    [[nodiscard]] std::span<E> span() const noexcept { return numbers_; }
    [[nodiscard]] std::size_t size() const noexcept { return numbers_.size(); }
    [[nodiscard]] E& operator[](std::size_t i) const noexcept { return numbers_[i]; }
    /// The memory that all ranks see; null if each rank has memory of its own.
    [[nodiscard]] std::shared_ptr<shared_memory> const& memory() const noexcept { return memory_; }
    /// How its ranks wait for one another in that memory; null without it.
    [[nodiscard]] std::shared_ptr<detail::flag_barrier> const& flags() const noexcept { return flags_; }

private:
    [[nodiscard]] static constexpr std::size_t flags_at(std::size_t count) noexcept {
        constexpr std::size_t line = detail::flag_barrier::line;
        return (count * sizeof(E) + line - 1) / line * line;
    }
    [[nodiscard]] static constexpr std::size_t handed_over(std::size_t count, int ranks) noexcept {
        return std::min(count * sizeof(E), memory_allreduce::handed_over_up_to(ranks));
    }
    [[nodiscard]] static constexpr std::size_t bytes(std::size_t count, int ranks) noexcept {
        if (count == 0) return 0;
        return flags_at(count) +
               detail::flag_barrier::bytes(static_cast<std::size_t>(ranks), handed_over(count, ranks));
    }

    std::shared_ptr<shared_memory> memory_;
    std::shared_ptr<detail::flag_barrier> flags_;
    std::unique_ptr<E[]> own_;
    std::span<E> numbers_;
};

/// Whether allreduce of this array over these ranks works in shared memory. If not, it sends messages: where memory is not
/// shared, and over ranks other than those that made the array.
template <Transport T, Number E>
[[nodiscard]] bool in_memory(communicator<T> const& comm, shared_array<E> const& data) noexcept {
    return data.memory() != nullptr && data.memory()->belongs_to(comm.members());
}

namespace detail {
template <class How, Transport T, Number E, class Op>
auto allreduce_array(communicator<T> const& comm, shared_array<E> const& data, Op op) {
    bool const here = in_memory(comm, data);
    auto const make = [op, here, by = automatic_allreduce{}.fitted_to(comm), numbers = data.span(),
                       flags = data.flags()](lane<T> over) {
        if (numbers.empty()) return barrier(over);
        if (!here) return automatic_allreduce::combine(by, over, numbers, op);
        nanoseconds const looks_for =
            std::is_same_v<How, blocking> ? memory_allreduce::patience : nanoseconds{0};  // others start more meanwhile
        return memory_allreduce::combine<Op, T, E>(over, flags, numbers, looks_for);
    };
    std::uint64_t const which = here ? data.memory()->number() : 0;
    return How::run(comm, about<E>(name_by<"allreduce", Op>, data.size(), "shared array"), make, which);
}
}  // namespace detail

/// Replaces the array on every rank by the sum of the arrays of all ranks, or by another operation.
///
/// Cost    if memory is shared: up to 4 KiB (2 KiB with two ranks), one barrier, and every rank reads the arrays of all; above,
///         two barriers, and every rank reads and writes each byte once. At a barrier a rank looks at flags in memory for up
///         to 50 us (1 + P/8 times as long if ranks share cores), and then waits for messages of the ranks that are late.
///         Otherwise the cost of automatic_allreduce.
/// Order   the canonical tree over ranks: the bits of any canonical algorithm.
/// Throws  comm_error (the same verdict on every rank); data is then unspecified.
template <Transport T, Number E, OperationOn<E> Op = sum>
void allreduce(communicator<T> const& comm, shared_array<E> const& data, Op op = {}) {
    detail::allreduce_array<detail::blocking>(comm, data, op);
}
/// Starts an allreduce of the arrays of all ranks. Data: see request; the array must outlive the request. Cost: as above, but a
/// barrier is an empty message with each rank that has not arrived; that of the last rank to arrive may combine up to 1 MiB.
template <Transport T, Number E, OperationOn<E> Op = sum>
[[nodiscard]] request start_allreduce(communicator<T> const& comm, shared_array<E> const& data, Op op = {}) {
    return detail::allreduce_array<detail::starting>(comm, data, op);
}

}  // namespace ddp
