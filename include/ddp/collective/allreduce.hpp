/// \file
/// allreduce: sums an array over all ranks, as a blocking call.
#pragma once

#include <span>

#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>
#include <ddp/collective/concepts.hpp>
#include <ddp/comm/communicator.hpp>

namespace ddp {

/// Replaces `data` by its sum over all ranks; every rank calls it with the same count and algorithm.
///
/// Cost and order of summation: the algorithm's. One rank: nothing happens. No elements: a barrier, so that a rank that
/// brings some is found.
/// Throws comm_error (the same verdict on every rank); data is then unspecified.
template <Transport T, Element E, class A = automatic_allreduce>
    requires AllreduceOver<A, T, E>
void allreduce(communicator<T> const& comm, std::span<E> data, A algorithm = {}) {
    if constexpr (BlockingAllreduceOver<A, T, E>)
        if (!data.empty())
            return detail::call_blocking(comm, detail::about<E>("allreduce", data.size(), algorithm.name),
                                         [&](lane<T> over) { A::sum_blocking(algorithm, over, data); });
    detail::call(comm, detail::about<E>("allreduce", data.size(), algorithm.name),
                 [&](lane<T> over) { return data.empty() ? barrier(over) : A::sum(algorithm, over, data); });
}

}  // namespace ddp
