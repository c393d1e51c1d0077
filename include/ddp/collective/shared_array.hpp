/// \file
/// shared_array: numbers of every rank, in memory that all of them see where they share a host; and allreduce there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>
#include <ddp/collective/concepts.hpp>
#include <ddp/collective/share_memory.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/kernel/combine.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {

/// `count` numbers on every rank of a communicator, zero at first. If all of these ranks are on one host, the numbers are in
/// memory that all of them see, and allreduce of more than 16 KiB (4 KiB with two ranks) works there, without messages that
/// carry data. Otherwise each rank has memory of its own, and allreduce sends messages.
///
///     ddp::shared_array<float> gradient(comm, n);
///     compute(gradient.span());
///     ddp::allreduce(comm, gradient);
///
/// Making one is collective: all ranks pass the same count; if they do not, the first allreduce throws E205. Each rank
/// may destroy its own array at any time.
///
/// Cost    count sizeof(E) bytes of memory per rank. Sharing them: a few small all-gathers.
/// Throws  comm_error (the same verdict on every rank); environment_error, on every rank, if one is out of memory.
template <Number E>
class shared_array {
public:
    template <Transport T>
    shared_array(communicator<T> const& comm, std::size_t count)
        : memory_(detail::share_memory(comm, count * sizeof(E))),
          own_(memory_ ? nullptr : std::make_unique<E[]>(count)),
          numbers_(memory_ ? reinterpret_cast<E*>(memory_->mine().get()) : own_.get(), count) {}

    /// This rank's numbers.
    [[nodiscard]] std::span<E> span() const noexcept { return numbers_; }
    [[nodiscard]] std::size_t size() const noexcept { return numbers_.size(); }
    [[nodiscard]] E& operator[](std::size_t i) const noexcept { return numbers_[i]; }
    /// The memory that all ranks see; null if each rank has memory of its own.
    [[nodiscard]] std::shared_ptr<shared_memory> const& memory() const noexcept { return memory_; }

private:
    std::shared_ptr<shared_memory> memory_;
    std::unique_ptr<E[]> own_;
    std::span<E> numbers_;
};

/// An allreduce of `count` numbers that lie in shared memory, over a lane of its ranks: the owner of a slice combines it from
/// all ranks and stores the result into all.
///
/// Cost    two barriers; each rank reads and writes n numbers. No scratch but P pointers.
/// Order   the canonical tree over ranks.
/// Throws  collective_aborted inside the scheduler.
struct memory_allreduce {
    static constexpr std::size_t piece_bytes = std::size_t{64} << 10;  ///< of each rank: all fit the L2 cache
    /// Bytes for which messages are faster. Two ranks exchange one message each for a barrier.
    [[nodiscard]] static constexpr std::size_t messages_up_to(int ranks) noexcept {
        return std::size_t{ranks == 2 ? 4u : 16u} << 10;
    }
    /// Bytes that are worked on between two turns of the transport.
    static constexpr std::size_t turn_bytes = std::size_t{1} << 20;

    template <class Op, Transport T, Number E>
    static task<> combine(lane<T> over, std::shared_ptr<shared_memory> memory, std::size_t count) {
        std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
        detail::slice_cuts<E> const slices(count, over.size());
        scratch table(ranks * sizeof(E*) * 2);
        std::span<E*> const all = table.as<E*>().first(ranks);
        for (std::size_t r = 0; r < ranks; ++r) all[r] = reinterpret_cast<E*>(memory->of(r));
        co_await barrier(over);
        constexpr std::size_t piece = piece_bytes / sizeof(E);
        std::size_t const end = slices.get()[me + 1];
        std::size_t done = 0;
        for (std::size_t at = slices.get()[me]; at < end; at += piece) {
            if (done >= turn_bytes) {
                co_await over.on->yield();
                done = 0;
            }
            work<Op, E>(all, me, at, std::min(piece, end - at), table.as<E const*>().subspan(ranks));
            done += piece_bytes;
        }
        co_await barrier(over.phase(1));
    }

private:
    template <class Op, Number E>
    static void work(std::span<E* const> all, std::size_t me, std::size_t at, std::size_t count,
                     std::span<E const*> sources) {
        for (std::size_t r = 0; r < all.size(); ++r) sources[r] = all[r] + at;
        std::span<E> const mine(all[me] + at, count);
        combine_tree<Op>(mine, std::span<E const* const>(sources.first(all.size())));
        for (std::size_t d = 1; d < all.size(); ++d)  // each rank begins with another one
            std::copy(mine.begin(), mine.end(), all[(me + d) % all.size()] + at);
    }
};

/// Whether allreduce of this array over these ranks works in shared memory. If not, it sends messages: where memory is not
/// shared, for up to 16 KiB (4 KiB with two ranks), where messages are faster, and over ranks other than those that
/// made the array.
template <Transport T, Number E>
[[nodiscard]] bool in_memory(communicator<T> const& comm, shared_array<E> const& data) noexcept {
    return data.memory() != nullptr && data.memory()->belongs_to(comm.members()) &&
           data.span().size_bytes() > memory_allreduce::messages_up_to(comm.size());
}

namespace detail {
template <class How, Transport T, Number E, class Op>
auto allreduce_array(communicator<T> const& comm, shared_array<E> const& data, Op op) {
    bool const here = in_memory(comm, data);
    auto const make = [op, here, by = automatic_allreduce{}.fitted_to(comm), numbers = data.span(),
                       memory = data.memory()](lane<T> over) {
        if (numbers.empty()) return barrier(over);
        if (!here) return automatic_allreduce::combine(by, over, numbers, op);
        return memory_allreduce::combine<Op, T, E>(over, memory, numbers.size());
    };
    std::uint64_t const which = here ? data.memory()->number() : 0;
    return How::run(comm, about<E>(name_by<"allreduce", Op>, data.size(), "shared array"), make, which);
}
}  // namespace detail

/// Replaces the array on every rank by the sum of the arrays of all ranks, or by another operation.
///
/// Cost    above 16 KiB (4 KiB with two ranks), if memory is shared: two barriers, and every rank reads and writes each byte
///         once. Otherwise that of automatic_allreduce.
/// Order   the canonical tree over ranks: the bits of any canonical algorithm.
/// Throws  comm_error (the same verdict on every rank); data is then unspecified.
template <Transport T, Number E, OperationOn<E> Op = sum>
void allreduce(communicator<T> const& comm, shared_array<E> const& data, Op op = {}) {
    detail::allreduce_array<detail::blocking>(comm, data, op);
}
/// Starts an allreduce of the arrays of all ranks. Data: see request; the array must outlive the request.
template <Transport T, Number E, OperationOn<E> Op = sum>
[[nodiscard]] request start_allreduce(communicator<T> const& comm, shared_array<E> const& data, Op op = {}) {
    return detail::allreduce_array<detail::starting>(comm, data, op);
}

}  // namespace ddp
