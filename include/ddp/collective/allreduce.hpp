/// \file
/// allreduce: combines the numbers of all ranks, and every rank gets the result.
#pragma once

#include <span>

#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>
#include <ddp/collective/concepts.hpp>

namespace ddp {

namespace detail {

template <class How, Transport T, Number E, class Op, class A>
auto allreduce_by(communicator<T> const& comm, std::span<E> data, Op op, A const& given) {
    check_group(given, comm.members());
    A const algorithm = fitted(given, comm);
    char const* const how = name_used(algorithm, data.size_bytes(), comm.size());
    return How::run(
        comm, about<E>(name_by<"allreduce", Op>, data.size(), how),
        [=](lane<T> over) {
            if (data.empty()) return barrier(over);
            if constexpr (std::is_same_v<Op, sum>)
                return A::sum(algorithm, over, data);
            else
                return A::combine(algorithm, over, data, op);
        },
        hash_used(algorithm, data.size_bytes(), comm.size()));
}

}  // namespace detail

/// Replaces `data` by its sum over all ranks; every rank calls it with the same count, type and algorithm.
///
/// data    n numbers (NumbersTarget): a span, vector, std::array or array of float, double, or 32- or 64-bit integers.
/// Cost    and order of summation: the algorithm's; the default adds in the canonical tree over ranks. One rank: nothing
///         happens. No elements: a barrier, so that a rank that passes data is detected.
/// Throws  comm_error (the same verdict on every rank; DDP-E205 if ranks differ in count, type, operation or algorithm); data
///         is then unspecified. usage_error if the algorithm was made for other ranks.
template <Transport T, NumbersTarget D, class A = automatic_allreduce>
    requires AllreduceOver<A, T, value_in<D>>
void allreduce(communicator<T> const& comm, D&& data, A const& algorithm = {}) {
    auto const numbers = detail::span_of(data);
    if constexpr (BlockingAllreduceOver<A, T, value_in<D>>)
        if (!numbers.empty())
            return detail::call_blocking(
                comm, detail::about<value_in<D>>("allreduce", numbers.size(), algorithm.name),
                [&](lane<T> over) { A::sum_blocking(algorithm, over, std::span<value_in<D>>(numbers)); });
    detail::allreduce_by<detail::blocking>(comm, std::span<value_in<D>>(numbers), sum{}, algorithm);
}

/// The same with another operation: sum{}, product{}, minimum{}, maximum{}, or your own (OperationOn).
template <Transport T, NumbersTarget D, OperationOn<value_in<D>> Op, class A = automatic_allreduce>
    requires CombiningAllreduceOver<A, T, value_in<D>, Op>
void allreduce(communicator<T> const& comm, D&& data, Op op, A const& algorithm = {}) {
    detail::allreduce_by<detail::blocking>(comm, std::span<value_in<D>>(detail::span_of(data)), op, algorithm);
}

/// Returns the sum of one number of each rank; the argument stays as it is. Cost and errors: as above.
template <Transport T, Number V, class A = automatic_allreduce>
    requires AllreduceOver<A, T, V>
[[nodiscard]] V allreduce(communicator<T> const& comm, V mine, A const& algorithm = {}) {
    detail::posted const number(comm, mine);
    allreduce(comm, std::span<V>(&*number, 1), algorithm);
    return *number;
}

/// The same with another operation.
template <Transport T, Number V, OperationOn<V> Op, class A = automatic_allreduce>
    requires CombiningAllreduceOver<A, T, V, Op>
[[nodiscard]] V allreduce(communicator<T> const& comm, V mine, Op op, A const& algorithm = {}) {
    detail::posted const number(comm, mine);
    allreduce(comm, std::span<V>(&*number, 1), op, algorithm);
    return *number;
}

/// Starts an allreduce in place, also of a single number. Data and errors: see request. The algorithm must not be one that
/// blocks (BlockingAllreduceOver).
template <Transport T, NumberTarget D, class A = automatic_allreduce>
    requires AllreduceOver<A, T, value_in<D>>
[[nodiscard]] request start_allreduce(communicator<T> const& comm, D&& data, A const& algorithm = {}) {
    static_assert(!BlockingAllreduceOver<A, T, value_in<D>>, "this algorithm blocks: it can be called, not started");
    return detail::allreduce_by<detail::starting>(comm, std::span<value_in<D>>(detail::span_of(data)), sum{},
                                                  algorithm);
}

/// The same with another operation.
template <Transport T, NumberTarget D, OperationOn<value_in<D>> Op, class A = automatic_allreduce>
    requires CombiningAllreduceOver<A, T, value_in<D>, Op>
[[nodiscard]] request start_allreduce(communicator<T> const& comm, D&& data, Op op, A const& algorithm = {}) {
    return detail::allreduce_by<detail::starting>(comm, std::span<value_in<D>>(detail::span_of(data)), op, algorithm);
}

}  // namespace ddp
