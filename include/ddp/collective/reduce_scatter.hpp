/// \file
/// reduce_scatter: combines arrays of all ranks and leaves each rank its slice of the result.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>

namespace ddp {

namespace detail {

/// Keeps the cuts for as long as the algorithm needs them.
template <Transport T, Number E, class Op, class A>
task<> reduce_over_cuts(A algorithm, lane<T> over, std::span<E> data, std::vector<std::size_t> cuts, Op /*op*/) {
    co_await A::reduce(algorithm, over, reduction<E, Op>{.data = data, .cuts = cuts});
}

template <class How, Transport T, Number E, class Op, class A>
auto reduce_scatter_by(communicator<T> const& comm, std::span<E> data, std::vector<std::size_t> cuts, Op op,
                       A const& given) {
    check_group(given, comm.members());
    A const algorithm = fitted(given, comm);
    DDP_EXPECTS(cuts.size() == static_cast<std::size_t>(comm.size()) + 1 && cuts.front() == 0 &&
                    cuts.back() == data.size() && std::is_sorted(cuts.begin(), cuts.end()),
                concat({"reduce_scatter: cuts need size() + 1 ascending positions from 0 to data.size(), here ",
                        comm.size() + 1, " from 0 to ", data.size()}));
    std::uint64_t const agreed = digest()
                                     .add(std::span<std::size_t const>(cuts))
                                     .add(hash_used(algorithm, data.size_bytes(), comm.size()))
                                     .value();
    char const* const how = name_used(algorithm, data.size_bytes(), comm.size(), true);
    return How::run(
        comm, about<E>(name_by<"reduce_scatter", Op>, data.size(), how),
        [&](lane<T> over) {
            return data.empty() ? barrier(over) : reduce_over_cuts(algorithm, over, data, std::move(cuts), op);
        },
        agreed);
}
template <Transport T>
std::vector<std::size_t> even_cuts_for(communicator<T> const& comm, std::size_t count) {
    std::vector<std::size_t> cuts(static_cast<std::size_t>(comm.size()) + 1);
    even_cuts(count, 1, cuts);
    return cuts;
}
/// Reduces, and returns this rank's part.
template <Transport T, Number E, class Op, class A>
std::span<E> reduce_scatter_now(communicator<T> const& comm, std::span<E> data, std::vector<std::size_t> const& cuts,
                                Op op, A const& algorithm) {
    reduce_scatter_by<blocking>(comm, data, cuts, op, algorithm);
    std::size_t const me = static_cast<std::size_t>(comm.rank());
    return data.subspan(cuts[me], cuts[me + 1] - cuts[me]);
}

}  // namespace detail

/// Sums `data` over all ranks; this rank gets elements [cuts[rank], cuts[rank + 1]) of the sum.
///
/// data    n numbers (NumbersTarget), the same n on every rank. The slice of the sum replaces these elements; the rest of
///         `data` is unspecified afterwards.
/// cuts    P + 1 ascending positions from 0 to n, the same on every rank; slices may be empty.
/// Returns the part of `data` that holds this rank's slice of the sum.
/// Cost    and order of summation: those of the algorithm's member `A::reduce`. No elements: a barrier.
/// Throws  comm_error (the same verdict on every rank); usage_error if the cuts do not fit, or if the algorithm was made for
///         other ranks.
template <Transport T, NumbersTarget D, class A = automatic_allreduce>
    requires SlicedAllreduceOver<A, T, value_in<D>>
std::span<value_in<D>> reduce_scatter(communicator<T> const& comm, D&& data, std::span<std::size_t const> cuts,
                                      A const& algorithm = {}) {
    return detail::reduce_scatter_now(comm, std::span<value_in<D>>(data), {cuts.begin(), cuts.end()}, sum{}, algorithm);
}
/// The same with another operation.
template <Transport T, NumbersTarget D, OperationOn<value_in<D>> Op, class A = automatic_allreduce>
    requires SlicedAllreduceOver<A, T, value_in<D>, Op>
std::span<value_in<D>> reduce_scatter(communicator<T> const& comm, D&& data, std::span<std::size_t const> cuts, Op op,
                                      A const& algorithm = {}) {
    return detail::reduce_scatter_now(comm, std::span<value_in<D>>(data), {cuts.begin(), cuts.end()}, op, algorithm);
}

/// The same with slices of nearly equal size: the first n mod P ranks get ceil(n / P) elements, the others floor(n / P).
template <Transport T, NumbersTarget D, class A = automatic_allreduce>
    requires SlicedAllreduceOver<A, T, value_in<D>>
std::span<value_in<D>> reduce_scatter(communicator<T> const& comm, D&& data, A const& algorithm = {}) {
    std::span<value_in<D>> const numbers(data);
    return detail::reduce_scatter_now(comm, numbers, detail::even_cuts_for(comm, numbers.size()), sum{}, algorithm);
}
/// The same with another operation.
template <Transport T, NumbersTarget D, OperationOn<value_in<D>> Op, class A = automatic_allreduce>
    requires SlicedAllreduceOver<A, T, value_in<D>, Op>
std::span<value_in<D>> reduce_scatter(communicator<T> const& comm, D&& data, Op op, A const& algorithm = {}) {
    std::span<value_in<D>> const numbers(data);
    return detail::reduce_scatter_now(comm, numbers, detail::even_cuts_for(comm, numbers.size()), op, algorithm);
}

/// Starts a reduce_scatter. Data and errors: see request; `cuts` are copied.
template <Transport T, NumbersTarget D, OperationOn<value_in<D>> Op = sum, class A = automatic_allreduce>
    requires SlicedAllreduceOver<A, T, value_in<D>, Op>
[[nodiscard]] request start_reduce_scatter(communicator<T> const& comm, D&& data, std::span<std::size_t const> cuts,
                                           Op op = {}, A const& algorithm = {}) {
    return detail::reduce_scatter_by<detail::starting>(comm, std::span<value_in<D>>(data), {cuts.begin(), cuts.end()},
                                                       op, algorithm);
}
/// The same with slices of nearly equal size, as above.
template <Transport T, NumbersTarget D, OperationOn<value_in<D>> Op = sum, class A = automatic_allreduce>
    requires SlicedAllreduceOver<A, T, value_in<D>, Op>
[[nodiscard]] request start_reduce_scatter(communicator<T> const& comm, D&& data, Op op = {}, A const& algorithm = {}) {
    std::span<value_in<D>> const numbers(data);
    return detail::reduce_scatter_by<detail::starting>(comm, numbers, detail::even_cuts_for(comm, numbers.size()), op,
                                                       algorithm);
}

}  // namespace ddp
