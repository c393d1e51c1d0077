/// \file
/// all_gather: values of every rank, to all ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>
#include <ddp/comm/small_gather.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {
namespace detail {

/// Each rank sends its slice to all others, and receives theirs in place. `cuts` in bytes.
template <Transport T>
task<> direct_all_gather(lane<T> over, mutable_bytes data, std::vector<std::size_t> cuts) {
    std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
    auto const part = [&](std::size_t r) { return data.subspan(cuts[r], cuts[r + 1] - cuts[r]); };
    std::size_t sources = 0;
    for (std::size_t r = 0; r < ranks; ++r) sources += r != me && !part(r).empty() ? 1u : 0u;
    operations in(sources), out(part(me).empty() ? 0 : ranks - 1);
    std::size_t posted = 0;
    for (std::size_t d = 1; d < ranks; ++d)
        if (std::size_t const p = (me + d) % ranks; !part(p).empty())
            over.receive(in[posted++], static_cast<int>(p), part(p));
    for (std::size_t i = 0; i < out.size(); ++i)  // in rotated order: each rank begins with another one
        over.send(out[i], static_cast<int>((me + 1 + i) % ranks), part(me));
    for (std::size_t i = 0; i < in.size(); ++i) co_await in[i];
    for (std::size_t i = 0; i < out.size(); ++i) co_await out[i];
}

}  // namespace detail

/// The amount of data up to which all_gather sends few messages.
struct automatic_all_gather {
    /// Bytes of all ranks together: up to here ranks send ceil(log2 P) messages, which cost copies; above, P-1.
    std::size_t bruck_bytes = std::size_t{32} << 10;
};

namespace detail {

template <class How, Transport T, Movable V>
auto all_gather_by(communicator<T> const& comm, std::span<V const> mine, std::span<V> all, automatic_all_gather how) {
    std::size_t const ranks = static_cast<std::size_t>(comm.size()), m = mine.size();
    DDP_EXPECTS(all.size() == ranks * m,
                "all_gather: `all` needs size() times as many values as `mine`; where ranks "
                "bring different numbers, pass the counts of all ranks");
    std::span<V> const place = all.subspan(static_cast<std::size_t>(comm.rank()) * m, m);
    if (m > 0 && place.data() != mine.data()) std::memcpy(place.data(), mine.data(), mine.size_bytes());
    return How::run(comm, about<V>("all_gather", m), [=](lane<T> over) {
        if (m == 0) return barrier(over);
        if (all.size_bytes() <= how.bruck_bytes)
            return bruck_all_gather(over, as_mutable_bytes(all), mine.size_bytes());
        std::vector<std::size_t> cuts(ranks + 1);
        for (std::size_t r = 0; r <= ranks; ++r) cuts[r] = r * mine.size_bytes();
        return direct_all_gather(over, as_mutable_bytes(all), std::move(cuts));
    });
}

template <class How, Transport T, Movable V>
auto all_gather_by(communicator<T> const& comm, std::span<V const> mine, std::span<std::size_t const> counts,
                   std::span<V> all) {
    std::size_t const ranks = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
    DDP_EXPECTS(counts.size() == ranks, "all_gather: `counts` needs one number per rank");
    DDP_EXPECTS(mine.size() == counts[me], "all_gather: `mine` needs as many values as `counts` says for this rank");
    std::vector<std::size_t> cuts = cuts_of(counts, sizeof(V));
    DDP_EXPECTS(all.size_bytes() == cuts[ranks], "all_gather: `all` needs as many values as `counts` adds up to");
    std::byte* const place = as_mutable_bytes(all).data() + cuts[me];
    if (!mine.empty() && place != as_const_bytes(mine).data()) std::memcpy(place, mine.data(), mine.size_bytes());
    return How::run(
        comm, about<V>("all_gather", all.size(), "differing counts"),
        [&](lane<T> over) {
            return all.empty() ? barrier(over) : direct_all_gather(over, as_mutable_bytes(all), std::move(cuts));
        },
        digest().add(as_const_bytes(counts)).value());
}

}  // namespace detail

/// Gathers the same number of values from each rank on every rank.
///
/// mine    this rank's m values (Source); may be (exactly) its place in `all`.
/// all     P m values (Target), the same m on every rank; on return those of rank r are at [r m, (r + 1) m).
/// Cost    (P-1) m values sent per rank: in ceil(log2 P) messages if `all` has at most bruck_bytes, otherwise in P-1. No
///         values: a barrier.
/// Throws  comm_error (the same verdict on every rank); all is then unspecified. usage_error if the sizes do not match.
/// Source  few messages: Bruck et al., IEEE TPDS 8(11), 1997.
template <Transport T, Source M, Target D>
    requires SameValues<M, D>
void all_gather(communicator<T> const& comm, M const& mine, D&& all, automatic_all_gather how = {}) {
    using V = value_in<D>;
    detail::all_gather_by<detail::blocking>(comm, detail::source_of(mine), std::span<V>(detail::span_of(all)), how);
}

/// Returns what is gathered: P m values, or P if `mine` is a single value.
template <Transport T, Source M>
[[nodiscard]] std::vector<value_in<M>> all_gather(communicator<T> const& comm, M const& mine,
                                                  automatic_all_gather how = {}) {
    auto const values = detail::source_of(mine);
    std::size_t const count = static_cast<std::size_t>(comm.size()) * values.size();
    detail::posted const all(comm, detail::result_of<value_in<M>>(count));
    detail::all_gather_by<detail::blocking>(comm, values, all->memory(), how);
    return all->take();
}

/// Gathers values from each rank on every rank; ranks may have different numbers of them.
///
/// counts  P numbers, the same on every rank: counts[r] is the number of values from rank r.
/// mine    this rank's counts[rank] values; may be (exactly) its place in `all`.
/// all     as many values as counts add up to; on return the ranks' values one after the other.
/// Cost    rank r sends counts[r] values to each of the others, in P-1 messages, or nothing if it has none. If no rank has
///         any: a barrier.
/// Throws  comm_error (the same verdict on every rank); all is then unspecified. usage_error if the sizes do not match.
template <Transport T, Source M, Target D>
    requires SameValues<M, D>
void all_gather(communicator<T> const& comm, M const& mine, std::span<std::size_t const> counts, D&& all) {
    using V = value_in<D>;
    detail::all_gather_by<detail::blocking>(comm, detail::source_of(mine), counts, std::span<V>(detail::span_of(all)));
}

/// Starts an all_gather. Data and errors: see request; `counts` is copied.
template <Transport T, LastingSource M, Target D>
    requires SameValues<M, D>
[[nodiscard]] request start_all_gather(communicator<T> const& comm, M&& mine, D&& all, automatic_all_gather how = {}) {
    using V = value_in<D>;
    return detail::all_gather_by<detail::starting>(comm, detail::source_of(mine), std::span<V>(detail::span_of(all)),
                                                   how);
}
template <Transport T, LastingSource M, Target D>
    requires SameValues<M, D>
[[nodiscard]] request start_all_gather(communicator<T> const& comm, M&& mine, std::span<std::size_t const> counts,
                                       D&& all) {
    using V = value_in<D>;
    return detail::all_gather_by<detail::starting>(comm, detail::source_of(mine), counts,
                                                   std::span<V>(detail::span_of(all)));
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE task<> detail::direct_all_gather(lane<any_transport>, mutable_bytes, std::vector<std::size_t>);
#endif

}  // namespace ddp
