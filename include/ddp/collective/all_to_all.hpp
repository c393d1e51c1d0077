/// \file
/// all_to_all: values of every rank, for every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>

namespace ddp {

namespace detail {

/// Everything at once: receives are posted, then each rank sends to the next, the next but one, and so on, so that each
/// begins with another one. Cuts in bytes. Empty messages are sent too, so that a rank that expects something gets an error.
/// This rank's own part has been copied already.
template <Transport T>
task<> direct_all_to_all(lane<T> over, const_bytes out, std::vector<std::size_t> out_cuts, mutable_bytes in,
                         std::vector<std::size_t> in_cuts) {
    std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
    operations receives(ranks - 1), sends(ranks - 1);
    for (std::size_t d = 1; d < ranks; ++d) {
        std::size_t const p = (me + ranks - d) % ranks;
        over.receive(receives[d - 1], static_cast<int>(p), in.subspan(in_cuts[p], in_cuts[p + 1] - in_cuts[p]));
    }
    for (std::size_t d = 1; d < ranks; ++d) {
        std::size_t const p = (me + d) % ranks;
        over.send(sends[d - 1], static_cast<int>(p), out.subspan(out_cuts[p], out_cuts[p + 1] - out_cuts[p]));
    }
    for (std::size_t i = 0; i < receives.size(); ++i) co_await receives[i];
    for (std::size_t i = 0; i < sends.size(); ++i) co_await sends[i];
}

/// Whether two arrays share memory.
template <class V>
[[nodiscard]] bool overlap(std::span<V const> a, std::span<V const> b) noexcept {
    auto const at = [](V const* where) { return reinterpret_cast<std::uintptr_t>(where); };
    return !a.empty() && !b.empty() && at(a.data()) < at(b.data() + b.size()) && at(b.data()) < at(a.data() + a.size());
}

template <Movable V>
void copy_own(std::span<V const> out, std::size_t out_begin, std::span<V> in, std::size_t in_begin,
              std::size_t bytes) noexcept {
    if (bytes > 0) std::memcpy(as_mutable_bytes(in).data() + in_begin, as_const_bytes(out).data() + out_begin, bytes);
}

template <class How, Transport T, Movable V>
auto all_to_all_by(communicator<T> const& comm, std::span<V const> out, std::span<V> in) {
    std::size_t const ranks = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
    DDP_EXPECTS(
        out.size() % ranks == 0 && in.size() == out.size(),
        "all_to_all: `out` and `in` need equally many values, a multiple of size(); where they differ, pass the "
        "counts for all ranks");
    DDP_EXPECTS(!overlap(out, std::span<V const>(in)), "all_to_all: `out` and `in` may not overlap");
    std::size_t const m = out.size() / ranks, bytes = m * sizeof(V);
    copy_own(out, me * bytes, in, me * bytes, bytes);
    return How::run(comm, about<V>("all_to_all", m), [=](lane<T> over) {
        if (m == 0) return barrier(over);
        std::vector<std::size_t> const cuts = cuts_of(std::vector<std::size_t>(ranks, m), sizeof(V));
        return direct_all_to_all(over, as_const_bytes(out), cuts, as_mutable_bytes(in), cuts);
    });
}

template <class How, Transport T, Movable V>
auto all_to_all_by(communicator<T> const& comm, std::span<V const> out, std::span<std::size_t const> out_counts,
                   std::span<V> in, std::span<std::size_t const> in_counts) {
    std::size_t const ranks = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
    DDP_EXPECTS(out_counts.size() == ranks && in_counts.size() == ranks,
                "all_to_all: `out_counts` and `in_counts` need one number per rank");
    std::vector<std::size_t> out_cuts = cuts_of(out_counts, sizeof(V)), in_cuts = cuts_of(in_counts, sizeof(V));
    DDP_EXPECTS(out.size_bytes() == out_cuts[ranks] && in.size_bytes() == in_cuts[ranks],
                "all_to_all: `out` and `in` need as many values as their counts add up to");
    DDP_EXPECTS(out_counts[me] == in_counts[me],
                "all_to_all: a rank receives from itself what it sends to itself: out_counts[rank] is in_counts[rank]");
    DDP_EXPECTS(!overlap(out, std::span<V const>(in)), "all_to_all: `out` and `in` may not overlap");
    copy_own(out, out_cuts[me], in, in_cuts[me], out_counts[me] * sizeof(V));
    operation_info what;  // ranks have other counts: only the type is compared, and the length of every message
    what.name = "all_to_all";
    what.detail = "differing counts";
    return How::run(
        comm, what,
        [&](lane<T> over) {
            return direct_all_to_all(over, as_const_bytes(out), std::move(out_cuts), as_mutable_bytes(in),
                                     std::move(in_cuts));
        },
        digest().add(std::string_view(value_name<V>())).add(std::uint64_t{sizeof(V)}).value());
}

}  // namespace detail

/// Every rank sends m values to every rank.
///
/// out     P m values (Source), the same m on every rank: those at [r m, (r + 1) m) are for rank r.
/// in      P m values (Target), which do not overlap `out`: on return those at [r m, (r + 1) m) are from rank r.
/// Cost    (P-1) m values sent per rank, in P-1 messages. No values: a barrier.
/// Throws  comm_error (the same verdict on every rank); in is then unspecified. usage_error if the sizes do not match.
template <Transport T, Source S, Target D>
    requires SameValues<S, D>
void all_to_all(communicator<T> const& comm, S const& out, D&& in) {
    using V = value_in<D>;
    detail::all_to_all_by<detail::blocking>(comm, detail::source_of(out), std::span<V>(detail::span_of(in)));
}

/// Returns what this rank receives: as many values as `out` has.
template <Transport T, Source S>
[[nodiscard]] std::vector<value_in<S>> all_to_all(communicator<T> const& comm, S const& out) {
    auto const values = detail::source_of(out);
    detail::posted const in(comm, detail::result_of<value_in<S>>(values.size()));
    detail::all_to_all_by<detail::blocking>(comm, values, in->memory());
    return in->take();
}

/// Every rank sends values to every rank; the numbers may differ between pairs of ranks, as in MPI_Alltoallv.
///
/// out_counts, in_counts   P numbers each: how many values go to rank r, and how many come from it. Rank a's out_counts[b]
///         must equal rank b's in_counts[a].
/// out, in   as many values as their counts add up to, which do not overlap; the parts for, and from, ranks 0, 1, … one after
///         the other.
/// Cost    the values that the counts say, in P-1 messages per rank, empty ones included.
/// Throws  comm_error (the same verdict on every rank; DDP-E205, with what was expected and what was sent, if counts do not
///         match); in is then unspecified. usage_error if the sizes do not match.
template <Transport T, Source S, Target D>
    requires SameValues<S, D>
void all_to_all(communicator<T> const& comm, S const& out, std::span<std::size_t const> out_counts, D&& in,
                std::span<std::size_t const> in_counts) {
    using V = value_in<D>;
    detail::all_to_all_by<detail::blocking>(comm, detail::source_of(out), out_counts, std::span<V>(detail::span_of(in)),
                                            in_counts);
}

/// Starts an all_to_all. Data and errors: see request; counts are copied.
template <Transport T, LastingSource S, Target D>
    requires SameValues<S, D>
[[nodiscard]] request start_all_to_all(communicator<T> const& comm, S&& out, D&& in) {
    using V = value_in<D>;
    return detail::all_to_all_by<detail::starting>(comm, detail::source_of(out), std::span<V>(detail::span_of(in)));
}
template <Transport T, LastingSource S, Target D>
    requires SameValues<S, D>
[[nodiscard]] request start_all_to_all(communicator<T> const& comm, S&& out, std::span<std::size_t const> out_counts,
                                       D&& in, std::span<std::size_t const> in_counts) {
    using V = value_in<D>;
    return detail::all_to_all_by<detail::starting>(comm, detail::source_of(out), out_counts,
                                                   std::span<V>(detail::span_of(in)), in_counts);
}

}  // namespace ddp
