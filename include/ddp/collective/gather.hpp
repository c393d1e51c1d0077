/// \file
/// gather: values of every rank, to one rank.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>

namespace ddp {

/// Gather over a lane. `mine` has the same length on every rank; `all`, P times as long, is written on `root` only, except
/// for the root's own part, which the caller copies there.
///
/// Cost    every rank but the root sends 1 message of its length; the root sends none.
/// Throws  collective_aborted inside the scheduler.
template <Transport T>
task<> gather(lane<T> over, const_bytes mine, mutable_bytes all, int root) {
    if (over.rank() != root) {
        operation out;
        over.send(out, root, mine);
        co_await out;
        co_return;
    }
    std::size_t const ranks = static_cast<std::size_t>(over.size());
    operations in(ranks - 1);
    std::size_t posted = 0;
    for (std::size_t r = 0; r < ranks; ++r)
        if (static_cast<int>(r) != root)
            over.receive(in[posted++], static_cast<int>(r), all.subspan(r * mine.size(), mine.size()));
    for (std::size_t i = 0; i < in.size(); ++i) co_await in[i];
}

namespace detail {
template <class How, Transport T, Movable V>
auto gather_by(communicator<T> const& comm, std::span<V const> mine, std::span<V> all, int root) {
    detail::expect_root("gather", root, comm.size());
    if (comm.rank() == root) {
        std::size_t const m = mine.size(), at = static_cast<std::size_t>(root) * m;
        DDP_EXPECTS(all.size() == static_cast<std::size_t>(comm.size()) * m,
                    "gather: on the root `all` needs size() times as many values as `mine`");
        if (m > 0 && all.data() + at != mine.data()) std::memcpy(all.data() + at, mine.data(), mine.size_bytes());
    }
    return How::run(comm, about<V>("gather", mine.size(), "", root), [=](lane<T> over) {
        return mine.empty() ? barrier(over) : gather(over, as_const_bytes(mine), as_mutable_bytes(all), root);
    });
}
}  // namespace detail

/// Gathers the same number of values from each rank on rank `root`.
///
/// mine    this rank's m values (Source), the same m on every rank; on the root it may be (exactly) its place in `all`.
/// all     on the root P m values (Target): on return those of rank r are at [r m, (r + 1) m). Ignored on other ranks, where
///         it may be empty.
/// Cost    1 message of m values sent by every rank but the root. No values: a barrier. A rank that has sent does not
///         wait for the others.
/// Throws  comm_error (the same verdict on every rank); all is then unspecified. usage_error if there is no rank `root`, or,
///         on the root, if the sizes do not match.
template <Transport T, Source M, Target D>
    requires SameValues<M, D>
void gather(communicator<T> const& comm, M const& mine, D&& all, int root = 0) {
    using V = value_in<D>;
    detail::gather_by<detail::blocking>(comm, detail::source_of(mine), std::span<V>(detail::span_of(all)), root);
}

/// Returns what is gathered: P m values on the root, none elsewhere.
template <Transport T, Source M>
[[nodiscard]] std::vector<value_in<M>> gather(communicator<T> const& comm, M const& mine, int root = 0) {
    auto const values = detail::source_of(mine);
    std::size_t const ranks = comm.rank() == root ? static_cast<std::size_t>(comm.size()) : 0;
    detail::posted const all(comm, detail::result_of<value_in<M>>(ranks * values.size()));
    detail::gather_by<detail::blocking>(comm, values, all->memory(), root);
    return all->take();
}

/// Starts a gather. Data and errors: see request.
template <Transport T, LastingSource M, Target D>
    requires SameValues<M, D>
[[nodiscard]] request start_gather(communicator<T> const& comm, M&& mine, D&& all, int root = 0) {
    using V = value_in<D>;
    return detail::gather_by<detail::starting>(comm, detail::source_of(mine), std::span<V>(detail::span_of(all)), root);
}

}  // namespace ddp
