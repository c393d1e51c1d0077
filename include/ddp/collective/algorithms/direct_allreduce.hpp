/// \file
/// direct_allreduce: every rank sends each slice straight to its owner, which adds all at once and sends the sum to all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

#include <ddp/collective/concepts.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/kernel/combine.hpp>

namespace ddp {

/// Direct reduce-scatter and all-gather.
///
/// data    n elements (S bytes), the same n on every rank; on return every rank holds the same bits.
/// Cost    2 steps of latency, 2S(P-1)/P bytes sent per rank in 2(P-1)*ceil(S/P / chunk_bytes) messages, scratch of
///         (P-1)*window chunks, or (P-1) slices where these are shorter. The owner reduces and forwards one chunk while
///         the next arrives.
/// Sums    the canonical tree over ranks, all sources in one pass; other operations likewise.
/// Throws  collective_aborted inside the scheduler, comm_error to the caller; data is then unspecified.
/// Source  Gloo's allreduce_bcube with base P, which has one step each way; slices as in Rabenseifner, ICCS 2004.
struct direct_allreduce {
    static constexpr char const* name = "direct";
    static constexpr bool canonical = true;

    std::size_t chunk_bytes = std::size_t{256} << 10;  ///< bytes of a chunk: one from each rank should fit the L2 cache
    std::size_t window = 4;                            ///< chunks that may be under way from each peer

    [[nodiscard]] static bool everywhere(std::size_t /*bytes*/, int ranks) noexcept { return ranks == 1; }
    /// A digest of the options that shape the messages; ranks compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash(name, chunk_bytes); }
    [[nodiscard]] std::string hash_words() const { return policy_words(name, {{"chunk_bytes", chunk_bytes}}); }

    template <Transport T, Number E>
    static task<> sum(direct_allreduce self, lane<T> over, std::span<E> data) {
        return combine(self, over, data, ddp::sum{});
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> combine(direct_allreduce self, lane<T> over, std::span<E> data, Op /*op*/) {
        detail::slice_cuts<E> const cuts(data.size(), over.size());
        co_await run(self, over, reduction<E, Op>{data, cuts.get()}, everybody);
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> reduce(direct_allreduce self, lane<T> over, reduction<E, Op> what) {
        co_await run(self, over, what, nobody);
    }
    /// Brings the result to one rank only; elsewhere `data` stays as it is. Cost: as for all, but each rank sends its
    /// slice of the result once, and the root not at all; one more slice of scratch.
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> combine_at(direct_allreduce self, lane<T> over, std::span<E> data, int root, Op /*op*/) {
        detail::slice_cuts<E> const cuts(data.size(), over.size());
        co_await run(self, over, reduction<E, Op>{data, cuts.get()}, root);
    }
    template <Transport T, Number E>
    static task<> all_gather(direct_allreduce self, lane<T> over, std::span<E> data,
                             std::span<std::size_t const> cuts) {
        std::size_t const chunk = self.chunk<E>();
        std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
        lane<T> const second = over.phase(1);
        operations in(incoming(cuts, me, chunk)), out((ranks - 1) * pieces(cuts, me, chunk));
        receive_slices(second, in, data, cuts, chunk);
        std::size_t posted = 0;
        for (std::size_t at = cuts[me]; at < cuts[me + 1]; at += chunk)
            send_to_all(second, out, posted, data.subspan(at, std::min(chunk, cuts[me + 1] - at)));
        for (std::size_t i = 0; i < in.size(); ++i) co_await in[i];
        for (std::size_t i = 0; i < out.size(); ++i) co_await out[i];
    }

private:
    template <Number E>
    [[nodiscard]] std::size_t chunk() const noexcept {
        return std::max<std::size_t>(1, chunk_bytes / sizeof(E));
    }
    static std::size_t pieces(std::span<std::size_t const> cuts, std::size_t rank, std::size_t chunk) noexcept {
        return (cuts[rank + 1] - cuts[rank] + chunk - 1) / chunk;
    }
    /// Messages of all slices but `me`'s.
    static std::size_t incoming(std::span<std::size_t const> cuts, std::size_t me, std::size_t chunk) noexcept {
        std::size_t count = 0;
        for (std::size_t r = 0; r + 1 < cuts.size(); ++r)
            if (r != me) count += pieces(cuts, r, chunk);
        return count;
    }
    /// Peers in rotated order, so that each rank begins with another one: the d-th after `me`.
    static std::size_t peer(std::size_t me, std::size_t d, std::size_t ranks) noexcept { return (me + d) % ranks; }

    template <Transport T, Number E>
    static void receive_slices(lane<T> const& over, operations& in, std::span<E> data,
                               std::span<std::size_t const> cuts, std::size_t chunk, operations* readers = nullptr) {
        std::size_t const ranks = cuts.size() - 1, me = static_cast<std::size_t>(over.rank());
        std::size_t posted = 0;
        for (std::size_t d = 1; d < ranks; ++d) {
            std::size_t const p = peer(me, d, ranks);
            for (std::size_t at = cuts[p]; at < cuts[p + 1]; at += chunk, ++posted)
                over.receive(in[posted], static_cast<int>(p),
                             as_mutable_bytes(data.subspan(at, std::min(chunk, cuts[p + 1] - at))),
                             readers == nullptr ? nullptr : &(*readers)[posted]);
        }
    }
    template <Transport T, Number E>
    static void send_to_all(lane<T> const& over, operations& out, std::size_t& posted, std::span<E> piece) {
        std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
        for (std::size_t d = 1; d < ranks; ++d)
            over.send(out[posted++], static_cast<int>(peer(me, d, ranks)), as_const_bytes(piece));
    }

    /// Where a reduced slice goes: to the rank of that number, or
    static constexpr int nobody = -2;  // it stays with its owner
    static constexpr int everybody = -1;

    template <Transport T, Number E, class Op>
    static task<> run(direct_allreduce self, lane<T> over, reduction<E, Op> what, int goal) {
        std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
        std::size_t const chunk = self.chunk<E>();
        std::span<std::size_t const> const cuts = what.cuts;
        std::size_t const slice = cuts[me + 1] - cuts[me], mine = pieces(cuts, me, chunk),
                          window = std::min(mine, std::max<std::size_t>(1, self.window));
        bool const collects = goal == everybody || goal == over.rank(), keeps = collects || goal == nobody;
        lane<T> const second = over.phase(1);

        constexpr std::size_t line = 64 / sizeof(E);
        std::size_t const room = std::min(chunk, (slice + line - 1) / line * line);  // elements of a chunk here
        scratch memory(window * (ranks - 1) * room * sizeof(E)), table(ranks * sizeof(E const*));
        scratch elsewhere(keeps ? 0 : slice * sizeof(E));  // this slice of the result if data has to stay as it is
        operations receives(mine * (ranks - 1)), sends(incoming(cuts, me, chunk));
        operations gathers(collects ? sends.size() : 0);
        operations forwards(goal == everybody ? receives.size() : goal == nobody || collects ? 0 : mine);
        std::span<E> const space = memory.as<E>(),
                           result = keeps ? what.data.subspan(cuts[me], slice) : elsewhere.as<E>();
        std::span<E const*> const sources = table.as<E const*>();

        // Chunk c of this rank's slice from the d-th peer, and where it is put.
        auto const length = [&](std::size_t c) { return std::min(chunk, slice - c * chunk); };
        auto const slot = [&](std::size_t c, std::size_t d) {
            return space.subspan(((c % window) * (ranks - 1) + d - 1) * room, length(c));
        };
        auto const expect = [&](std::size_t c) {
            for (std::size_t d = 1; d < ranks; ++d)
                over.receive(receives[c * (ranks - 1) + d - 1], static_cast<int>(peer(me, d, ranks)),
                             as_mutable_bytes(slot(c, d)));
        };
        for (std::size_t c = 0; c < window; ++c) expect(c);
        if (what.go != nullptr) co_await *what.go;

        // A result overwrites this rank's addend of its slice. There is no result before the owner has received that.
        if (collects) receive_slices(second, gathers, what.data, cuts, chunk, &sends);
        std::size_t longest = 0, forwarded = 0;
        for (std::size_t r = 0; r < ranks; ++r) longest = std::max(longest, cuts[r + 1] - cuts[r]);
        for (std::size_t begin = 0; begin < longest; begin += chunk)
            for (std::size_t d = 1, first = 0; d < ranks; ++d) {
                std::size_t const p = peer(me, d, ranks), at = cuts[p] + begin;
                if (at < cuts[p + 1])
                    over.send(sends[first + begin / chunk], static_cast<int>(p),
                              as_const_bytes(what.data.subspan(at, std::min(chunk, cuts[p + 1] - at))));
                first += pieces(cuts, p, chunk);
            }
        for (std::size_t c = 0; c < mine; ++c) {
            for (std::size_t d = 0; d + 1 < ranks; ++d) co_await receives[c * (ranks - 1) + d];
            std::span<E> const piece = result.subspan(c * chunk, length(c));
            for (std::size_t d = 1; d < ranks; ++d) sources[peer(me, d, ranks)] = slot(c, d).data();
            sources[me] = what.data.data() + cuts[me] + c * chunk;
            if (what.factor != nullptr)
                combine_tree_scaled<Op>(piece, std::span<E const* const>(sources), *what.factor);
            else
                combine_tree<Op>(piece, std::span<E const* const>(sources));
            if (c + window < mine) expect(c + window);
            if (goal == everybody)
                send_to_all(second, forwards, forwarded, piece);
            else if (!keeps)
                second.send(forwards[c], goal, as_const_bytes(piece));
        }
        for (std::size_t i = 0; i < gathers.size(); ++i) co_await gathers[i];
        for (std::size_t i = 0; i < sends.size(); ++i) co_await sends[i];
        for (std::size_t i = 0; i < forwards.size(); ++i) co_await forwards[i];
    }
};

}  // namespace ddp
