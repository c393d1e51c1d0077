/// \file
/// reduce_scatter: sums an array over all ranks and leaves each rank its slice of the sum.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>

namespace ddp {

/// Sums `data` over all ranks; this rank gets elements [cuts[rank], cuts[rank + 1]) of the sum.
///
/// data    n elements, the same n on every rank. The slice ends in place; the rest of `data` is unspecified afterwards.
/// cuts    P + 1 ascending positions from 0 to n, the same on every rank; slices may be empty.
/// Returns the part of `data` that holds this rank's slice of the sum.
/// Cost    and order of summation: the algorithm's `reduce`. No elements: a barrier.
/// Throws  comm_error (the same verdict on every rank); usage_error if the cuts do not fit.
template <Transport T, Element E, class A = automatic_allreduce>
    requires SlicedAllreduceOver<A, T, E>
std::span<E> reduce_scatter(communicator<T> const& comm, std::span<E> data, std::span<std::size_t const> cuts,
                            A algorithm = {}) {
    std::size_t const me = static_cast<std::size_t>(comm.rank());
    DDP_EXPECTS(cuts.size() == static_cast<std::size_t>(comm.size()) + 1 && cuts.front() == 0 &&
                    cuts.back() == data.size() && std::is_sorted(cuts.begin(), cuts.end()),
                "reduce_scatter: cuts need size() + 1 ascending positions from 0 to data.size()");
    detail::call(
        comm, detail::about<E>("reduce_scatter", data.size(), algorithm.name),
        [&](lane<T> over) {
            return data.empty() ? barrier(over) : A::reduce(algorithm, over, reduction<E>{.data = data, .cuts = cuts});
        },
        digest().add(as_const_bytes(cuts)).value());
    return data.subspan(cuts[me], cuts[me + 1] - cuts[me]);
}

/// The same with slices as even as can be: the first n mod P ranks get ceil(n / P) elements, the others floor(n / P).
template <Transport T, Element E, class A = automatic_allreduce>
    requires SlicedAllreduceOver<A, T, E>
std::span<E> reduce_scatter(communicator<T> const& comm, std::span<E> data, A algorithm = {}) {
    std::vector<std::size_t> cuts(static_cast<std::size_t>(comm.size()) + 1);
    detail::even_cuts(data.size(), 1, cuts);
    return reduce_scatter(comm, data, std::span<std::size_t const>(cuts), algorithm);
}

}  // namespace ddp
