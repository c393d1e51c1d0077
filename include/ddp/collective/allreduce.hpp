/// \file
/// allreduce: sums an array over all ranks, as a blocking call.
#pragma once

#include <span>

#include <ddp/collective/automatic_allreduce.hpp>
#include <ddp/collective/concepts.hpp>
#include <ddp/comm/communicator.hpp>

namespace ddp {

/// Replaces `data` by its sum over all ranks; every rank calls it with the same count and algorithm.
///
/// Cost and order of summation: the algorithm's. One rank: nothing happens.
/// Throws comm_error (the same verdict on every rank); data is then unspecified.
template <Transport T, Element E, class A = automatic_allreduce>
    requires AllreduceOver<A, T, E>
void allreduce(communicator<T>& comm, std::span<E> data, A algorithm = {}) {
    identity const id = comm.next_identity();
    std::uint64_t const fingerprint = detail::agree("allreduce", data.size(), element_name<E>, algorithm.name);
    comm.run([&] {
        comm.tasks().entered({"allreduce", data.size(), element_name<E>, algorithm.name, id, fingerprint});
        return comm.size() == 1 ? detail::nothing() : A::sum(algorithm, lane<T>{&comm.tasks(), id, fingerprint}, data);
    });
}

}  // namespace ddp
