/// \file
/// scatter: one rank's values to all ranks, a part to each.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>

#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>

namespace ddp {

/// Scatter over a lane. `mine` has the same length on every rank; `all`, P times as long, is read on `root` only. The root's own
/// part is not copied: its `mine` stays as it was.
///
/// Cost    the root sends P-1 messages, each of the length of `mine`; the others send none.
/// Throws  collective_aborted inside the scheduler.
template <Transport T>
task<> scatter(lane<T> over, const_bytes all, mutable_bytes mine, int root) {
    if (over.rank() != root) {
        operation in;
        over.receive(in, root, mine);
        co_await in;
        co_return;
    }
    std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(root);
    operations out(ranks - 1);
    for (std::size_t d = 1; d < ranks; ++d) {
        std::size_t const p = (me + d) % ranks;
        over.send(out[d - 1], static_cast<int>(p), all.subspan(p * mine.size(), mine.size()));
    }
    for (std::size_t i = 0; i < out.size(); ++i) co_await out[i];
}

namespace detail {
template <class How, Transport T, Movable V>
auto scatter_by(communicator<T> const& comm, std::span<V const> all, std::span<V> mine, int root) {
    detail::expect_root("scatter", root, comm.size());
    if (comm.rank() == root) {
        std::size_t const m = mine.size(), at = static_cast<std::size_t>(root) * m;
        DDP_EXPECTS(all.size() == static_cast<std::size_t>(comm.size()) * m,
                    "scatter: on the root `all` needs size() times as many values as `mine`");
        if (m > 0 && all.data() + at != mine.data()) std::memcpy(mine.data(), all.data() + at, mine.size_bytes());
    }
    return How::run(comm, about<V>("scatter", mine.size(), "", root), [=](lane<T> over) {
        return mine.empty() ? barrier(over) : scatter(over, as_const_bytes(all), as_mutable_bytes(mine), root);
    });
}
}  // namespace detail

/// Gives every rank its part of rank `root`'s values.
///
/// all     on the root P m values (Source): rank r gets those at [r m, (r + 1) m). Ignored on other ranks, where it may be
///         empty.
/// mine    m values (Target), the same m on every rank; on the root it may be (exactly) its place in `all`.
/// Cost    P-1 messages of m values sent by the root, none by others. No values: a barrier. A rank that has its part
///         does not wait for the others.
/// Throws  comm_error (the same verdict on every rank); mine is then unspecified. usage_error if there is no rank `root`, or,
///         on the root, if the sizes do not match.
template <Transport T, Source S, Target D>
    requires SameValues<S, D>
void scatter(communicator<T> const& comm, S const& all, D&& mine, int root = 0) {
    using V = value_in<D>;
    detail::scatter_by<detail::blocking>(comm, detail::source_of(all), std::span<V>(detail::span_of(mine)), root);
}

/// Returns one value on each rank: `all` holds P values on the root.
template <Transport T, Source S>
[[nodiscard]] value_in<S> scatter(communicator<T> const& comm, S const& all, int root = 0) {
    detail::posted const mine(comm, value_in<S>{});
    detail::scatter_by<detail::blocking>(comm, detail::source_of(all), std::span<value_in<S>>(&*mine, 1), root);
    return *mine;
}

/// Starts a scatter. Data and errors: see request.
template <Transport T, LastingSource S, Target D>
    requires SameValues<S, D>
[[nodiscard]] request start_scatter(communicator<T> const& comm, S&& all, D&& mine, int root = 0) {
    using V = value_in<D>;
    return detail::scatter_by<detail::starting>(comm, detail::source_of(all), std::span<V>(detail::span_of(mine)),
                                                root);
}

}  // namespace ddp
