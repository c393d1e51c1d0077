/// \file
/// broadcast: one rank's values to all ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {

/// How a broadcast of S bytes travels. v is a rank's distance from the root: (rank - root) mod P.
///
///  tree   binomial: v receives once and sends to v + 2^k for every 2^k > v below P. ceil(log2 P) rounds; the root sends
///         ceil(log2 P) messages of S bytes. For small data, and for two ranks.
///  chain  v receives from v - 1 and sends to v + 1, chunk after chunk: every rank but the last sends S bytes in
///         ceil(S / chunk(S, P)) messages, and the last has everything after the time of S bytes and P - 2 chunks.
/// Source  the pipelined chain of Pjesivac-Grbovic et al., "Performance analysis of MPI collective operations", 2007.
struct automatic_broadcast {
    /// Data of at least P times this many bytes goes by the chain: its P - 2 chunks then add little time.
    std::size_t chain_bytes_per_rank = std::size_t{32} << 10;
    std::size_t chunk_bytes = std::size_t{256} << 10;  ///< the largest chunk of a chain

    [[nodiscard]] bool chains(std::size_t bytes, int ranks) const noexcept {
        return ranks > 2 && bytes >= chain_bytes_per_rank * static_cast<std::size_t>(ranks);
    }
    /// Bytes of a chunk. Four for each rank keep the chain full; below 16 KiB per-message costs would matter.
    [[nodiscard]] std::size_t chunk(std::size_t bytes, int ranks) const noexcept {
        std::size_t const even = bytes / (4 * static_cast<std::size_t>(ranks));
        return std::max<std::size_t>(1, std::min(chunk_bytes, std::max(even, std::size_t{16} << 10)));
    }
};

/// Broadcast over a lane, in place; `data` has the same length on every rank. Cost: automatic_broadcast.
template <Transport T>
task<> broadcast(lane<T> over, mutable_bytes data, int root, automatic_broadcast how = {}) {
    int const ranks = over.size(), v = (over.rank() + ranks - root) % ranks;
    auto const at = [=](int distance) { return (root + distance) % ranks; };

    if (how.chains(data.size(), ranks)) {
        std::size_t const chunk = how.chunk(data.size(), ranks), chunks = (data.size() + chunk - 1) / chunk;
        auto const part = [=](std::size_t c) {
            return data.subspan(c * chunk, std::min(chunk, data.size() - c * chunk));
        };
        operations in(v > 0 ? chunks : 0), out(v + 1 < ranks ? chunks : 0);
        for (std::size_t c = 0; c < in.size(); ++c) over.receive(in[c], at(v - 1), part(c));
        for (std::size_t c = 0; c < chunks; ++c) {
            if (v > 0) co_await in[c];
            if (v + 1 < ranks) over.send(out[c], at(v + 1), part(c));
        }
        for (std::size_t c = 0; c < out.size(); ++c) co_await out[c];
        co_return;
    }

    int above = 1, parent = 0;  // the powers of two around v
    for (; above <= v; above *= 2) parent = above;
    operation in;
    std::size_t children = 0;
    for (int d = above; v + d < ranks; d *= 2) ++children;
    operations out(children);
    if (v > 0) {
        over.receive(in, at(v - parent), data);
        co_await in;
    }
    for (std::size_t c = 0; c < children; ++c) over.send(out[c], at(v + (above << c)), data);
    for (std::size_t c = 0; c < children; ++c) co_await out[c];
}

namespace detail {
template <class How, Transport T, Movable V>
auto broadcast_by(communicator<T> const& comm, std::span<V> data, int root, automatic_broadcast how) {
    detail::expect_root("broadcast", root, comm.size());
    return How::run(comm, about<V>("broadcast", data.size(), "", root), [=](lane<T> over) {
        return data.empty() ? barrier(over) : broadcast(over, as_mutable_bytes(data), root, how);
    });
}
}  // namespace detail

/// Replaces `data` on every rank by rank `root`'s; every rank calls it with the same count and root.
///
/// data    n values of any trivially copyable type (Target), the same n on every rank; or a single value. No values: a
///         barrier.
/// Cost    for data below 32 KiB times P, ceil(log2 P) rounds, in each of which a rank sends at most one message; for more,
///         every rank but the last sends the data once, in chunks (automatic_broadcast).
/// Throws  comm_error (the same verdict on every rank); data is then unspecified. usage_error if there is no rank `root`.
template <Transport T, Target D>
void broadcast(communicator<T> const& comm, D&& data, int root = 0, automatic_broadcast how = {}) {
    detail::broadcast_by<detail::blocking>(comm, std::span<value_in<D>>(detail::span_of(data)), root, how);
}

/// Starts a broadcast. Data and errors: see request. The root must not change its data either until the request has ended.
template <Transport T, Target D>
[[nodiscard]] request start_broadcast(communicator<T> const& comm, D&& data, int root = 0,
                                      automatic_broadcast how = {}) {
    return detail::broadcast_by<detail::starting>(comm, std::span<value_in<D>>(detail::span_of(data)), root, how);
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE task<> broadcast(lane<any_transport>, mutable_bytes, int, automatic_broadcast);
#endif

}  // namespace ddp
