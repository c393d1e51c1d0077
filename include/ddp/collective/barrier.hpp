/// \file
/// barrier: no rank leaves before all have entered.
#pragma once

#include <bit>
#include <cstddef>
#include <span>

#include <ddp/collective/call.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {

/// Dissemination barrier over a lane: in round k a rank tells the one 2^k further on that all ranks up to itself have
/// entered.
///
/// Cost    ceil(log2 P) rounds; every rank sends ceil(log2 P) empty messages.
/// Throws  collective_aborted inside the scheduler.
/// Source  Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 17(1), 1988.
///
/// `members`: the ranks of the lane that take part, of which this one is members[place]; empty: all.
template <Transport T>
task<> barrier(lane<T> over, std::span<std::size_t const> members = {}, std::size_t place = 0) {
    std::size_t const ranks = members.empty() ? static_cast<std::size_t>(over.size()) : members.size(),
                      me = members.empty() ? static_cast<std::size_t>(over.rank()) : place;
    std::size_t const rounds = static_cast<std::size_t>(std::bit_width(ranks - 1));
    auto const rank = [members](std::size_t r) { return static_cast<int>(members.empty() ? r : members[r]); };
    operations in(rounds), out(rounds);
    for (std::size_t k = 0; k < rounds; ++k)
        over.receive(in[k], rank((me + ranks - (std::size_t{1} << k)) % ranks), {});
    for (std::size_t k = 0; k < rounds; ++k) {
        over.send(out[k], rank((me + (std::size_t{1} << k)) % ranks), {});
        co_await in[k];
    }
    for (std::size_t k = 0; k < rounds; ++k) co_await out[k];
}

namespace detail {
template <class How, Transport T>
auto barrier_by(communicator<T> const& comm) {
    operation_info what;
    what.name = "barrier";
    return How::run(comm, what, [](lane<T> over) { return barrier(over); });
}
}  // namespace detail

/// Returns once every rank has called it.
///
/// Cost    ceil(log2 P) rounds; every rank sends ceil(log2 P) empty messages.
/// Throws  comm_error (the same verdict on every rank).
/// Source  the dissemination barrier of Hensgen, Finkel and Manber, IJPP 17(1), 1988.
template <Transport T>
void barrier(communicator<T> const& comm) {
    detail::barrier_by<detail::blocking>(comm);
}

/// Starts a barrier: the request ends once every rank has started it. Errors: see request.
template <Transport T>
[[nodiscard]] request start_barrier(communicator<T> const& comm) {
    return detail::barrier_by<detail::starting>(comm);
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE task<> barrier(lane<any_transport>, std::span<std::size_t const>, std::size_t);
DDP_INSTANTIATE void barrier(communicator<any_transport> const&);
#endif

}  // namespace ddp
