/// \file
/// halving_doubling_allreduce: reduce-scatter by halving, all-gather by doubling: few messages and little traffic.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include <ddp/collective/concepts.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/kernel/combine.hpp>

namespace ddp {

/// Reduce-scatter by recursive halving and all-gather by recursive doubling, in the order of the canonical tree.
///
/// The ranks fall into blocks as in recursive_doubling_allreduce (P = 7: 4, 2, 1). In each block, neighbours first
/// exchange halves of the data, then ranks at distance 2 exchange quarters, and so on. Each rank adds the part that
/// it keeps. In a block of b ranks, each rank then holds 1/b of the block's sum. It sends that part to the b'/b ranks
/// of the next larger block, of b' ranks, that hold pieces of it; they add it on the right. The result returns along
/// the same links. (reduce leaves partial sums in the slices that are not this rank's.)
///
/// data    n elements (S bytes), the same n on every rank; on return every rank holds the same bits.
/// Cost    2 floor(log2 P) steps of latency. If P is a power of two, each rank sends 2S(P-1)/P bytes in 2 log2(P)
///         messages. Otherwise a rank in a block of b sends 2S(b-1)/b bytes in 2 log2(b) messages, and S/b bytes more
///         in b'/b messages if there is a larger block, and S/b bytes more in 1 message if there is a smaller block:
///         at most 2S bytes. The data is cut at multiples of 64 bytes, so parts may differ by 64 bytes. A message is
///         sent in chunks of chunk_bytes, and not at all if it is empty. Scratch of `window` chunks, or of `window`
///         halves of the data if these are shorter.
/// Halves  reduce sends what goes towards block 0, all_gather what returns. The ranks of block 0 (b of them) then
///         hold parts that are not the slices of the cuts, so each half has one more step, which moves slices to or
///         from their owners: in reduce each rank of block 0 sends at most S/b bytes, in all_gather each rank at most
///         its slice. With even cuts these are at most 3 messages per rank.
/// Sums    the canonical tree over ranks; the factor in the last step; other operations likewise.
/// Throws  collective_aborted inside the scheduler, comm_error to the caller; data is then unspecified.
/// Source  Rabenseifner, "Optimization of collective reduction operations", ICCS 2004. Here neighbours come first, to add
///         in the canonical order, and the scheme for numbers that are not powers of two is this library's.
struct halving_doubling_allreduce {
    static constexpr char const* name = "halving_doubling";
    static constexpr bool canonical = true;

    std::size_t chunk_bytes = std::size_t{256} << 10;  ///< bytes of a chunk: one is added while the next arrives
    std::size_t window = 4;                            ///< chunks that may be under way to this rank to be added

    [[nodiscard]] static bool everywhere(std::size_t /*bytes*/, int ranks) noexcept { return ranks == 1; }
    /// A digest of the options that shape the messages; ranks compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash(name, chunk_bytes); }
    [[nodiscard]] std::string hash_words() const { return policy_words(name, {{"chunk_bytes", chunk_bytes}}); }

    template <Transport T, Number E>
    static task<> sum(halving_doubling_allreduce self, lane<T> over, std::span<E> data) {
        return run(self, over, reduction<E>{.data = data, .cuts = {}}, true);
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> combine(halving_doubling_allreduce self, lane<T> over, std::span<E> data, Op /*op*/) {
        return run(self, over, reduction<E, Op>{.data = data, .cuts = {}}, true);
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> reduce(halving_doubling_allreduce self, lane<T> over, reduction<E, Op> what) {
        co_await run(self, over, what, false);
        route<E> const way{self.chunk_bytes, over.rank(), over.size(), what.data};
        co_await hand_over(way, over.phase(2), what.cuts, true);
    }
    template <Transport T, Number E>
    static task<> all_gather(halving_doubling_allreduce self, lane<T> over, std::span<E> data,
                             std::span<std::size_t const> cuts) {
        route<E> const way{self.chunk_bytes, over.rank(), over.size(), data};
        co_await hand_over(way, over.phase(3), cuts, false);
        operations results(way.chunks(&link<E>::gives));
        std::size_t posted = 0;
        for (int k = 0; k < way.links; ++k)
            for (std::size_t i = 0; i < way.chunks(way[k].gives); ++i)
                over.phase(1).receive(results[posted++], way[k].peer, as_mutable_bytes(way.piece(way[k].gives, i)));
        co_await spread(way, over.phase(1), results);
    }

private:
    /// What this rank exchanges with a peer: `gives` goes to the peer, which adds it, and comes back as the result;
    /// `keeps` goes the other way. Either may be empty.
    template <Number E>
    struct link {
        int peer;
        std::span<E> gives, keeps;
    };

    /// The links of a rank, in the order in which it adds. The result uses them in the opposite order.
    template <Number E>
    struct route {
        std::size_t chunk_bytes;
        int me, ranks;
        std::span<E> data;

        int holders = detail::block_of(0, ranks).size;
        detail::slice_cuts<E> cuts{data.size(), holders};
        std::size_t chunk = std::max<std::size_t>(1, chunk_bytes / sizeof(E));
        detail::rank_block mine = detail::block_of(me, ranks);
        detail::rank_block left = detail::block_of(std::max(mine.first - 1, 0), ranks);
        detail::rank_block right = detail::block_of(std::min(mine.first + mine.size, ranks - 1), ranks);
        int place = me - mine.first;
        int levels = std::countr_zero(static_cast<unsigned>(mine.size));
        int joined = levels + (right.first > mine.first ? 1 : 0);  // so many links add something here
        int links = joined + (left.first < mine.first ? left.size / mine.size : 0);

        /// What the rank in place `at` holds once groups of `size` ranks have added: the digits of `at` choose halves.
        [[nodiscard]] std::span<E> held(int at, int size) const noexcept {
            std::size_t first = 0, parts = cuts.get().size() - 1;
            for (int distance = 1; distance < size; distance *= 2) {
                parts /= 2;
                if ((at & distance) != 0) first += parts;
            }
            return data.subspan(cuts.get()[first], cuts.get()[first + parts] - cuts.get()[first]);
        }
        [[nodiscard]] link<E> operator[](int k) const noexcept {
            int const d = 1 << std::min(k, levels), peer = place ^ d, part = place + (k - joined) * mine.size;
            if (k < levels) return {mine.first + peer, held(peer, 2 * d), held(place, 2 * d)};
            if (k < joined) return {right.first + place % right.size, {}, held(place, mine.size)};
            return {left.first + part, held(part, left.size), {}};
        }
        [[nodiscard]] std::size_t chunks(std::span<E> part) const noexcept { return (part.size() + chunk - 1) / chunk; }
        [[nodiscard]] std::size_t chunks(std::span<E> link<E>::* side) const noexcept {
            std::size_t count = 0;
            for (int k = 0; k < links; ++k) count += chunks((*this)[k].*side);
            return count;
        }
        [[nodiscard]] std::span<E> piece(std::span<E> part, std::size_t i) const noexcept {
            return part.subspan(i * chunk, std::min(chunk, part.size() - i * chunk));
        }
    };

    template <Transport T, Number E, class Op>
    static task<> run(halving_doubling_allreduce self, lane<T> over, reduction<E, Op> what, bool forward) {
        route<E> const way{self.chunk_bytes, over.rank(), over.size(), what.data};
        operations receives(way.chunks(&link<E>::keeps)), sends(way.chunks(&link<E>::gives));
        operations results(forward ? sends.size() : 0);
        constexpr std::size_t line = 64 / sizeof(E);
        std::size_t const longest = (way[0].keeps.size() + line - 1) / line * line, room = std::min(way.chunk, longest),
                          window = std::min(receives.size(), std::max<std::size_t>(1, self.window));
        scratch memory(window * room * sizeof(E));

        std::size_t posted = 0, sent = 0, come = 0, ahead = 0;
        int next = 0;  // the link whose chunks are posted; `ahead` of them are
        auto const slot = [&](std::size_t i) { return memory.template as<E>().subspan(i % window * room, room); };
        auto const expect = [&] {
            for (; ahead == way.chunks(way[next].keeps); ahead = 0) ++next;
            std::size_t const count = way.piece(way[next].keeps, ahead++).size();
            over.receive(receives[posted], way[next].peer, as_mutable_bytes(slot(posted).first(count)));
            ++posted;
        };
        while (posted < window) expect();
        if (what.go != nullptr) co_await *what.go;

        for (int k = 0; k < way.links; ++k) {
            link<E> const at = way[k];
            for (std::size_t i = 0; i < way.chunks(at.gives); ++i, ++sent) {
                std::span<E> const part = way.piece(at.gives, i);  // its sum comes only after the peer has it
                over.send(sends[sent], at.peer, as_const_bytes(part));
                if (forward) over.phase(1).receive(results[sent], at.peer, as_mutable_bytes(part), &sends[sent]);
            }
            for (std::size_t i = 0; i < way.chunks(at.keeps); ++i, ++come) {
                co_await receives[come];
                std::span<E> const part = way.piece(at.keeps, i);
                E const* both[] = {part.data(), slot(come).data()};
                if (at.peer < way.me) std::swap(both[0], both[1]);
                bool const last = way.mine.first == 0 && k + 1 == way.links && what.factor != nullptr;
                combine_tree_scaled<Op>(part, both, last ? *what.factor : E(1));
                if (posted < receives.size()) expect();
            }
        }
        if (way.ranks == 1 && what.factor != nullptr) scale(what.data, *what.factor);
        if (forward) co_await spread(way, over.phase(1), results);
        for (std::size_t i = 0; i < sends.size(); ++i) co_await sends[i];
    }

    /// Brings the result from the ranks that hold parts of it to all. `results`: receives of what this rank gave.
    template <Transport T, Number E>
    static task<> spread(route<E> const& way, lane<T> over, operations& results) {
        operations sends(way.chunks(&link<E>::keeps));
        std::size_t sent = 0, end = results.size();
        for (int k = way.links - 1; k >= 0; --k) {
            link<E> const at = way[k];
            for (std::size_t i = 0; i < way.chunks(at.keeps); ++i)
                over.send(sends[sent++], at.peer, as_const_bytes(way.piece(at.keeps, i)));
            end -= way.chunks(at.gives);
            for (std::size_t i = 0; i < way.chunks(at.gives); ++i) co_await results[end + i];
        }
        for (std::size_t i = 0; i < sends.size(); ++i) co_await sends[i];
    }

    /// Moves parts from the ranks of block 0 to the owners of the slices (`home`), or back.
    template <Transport T, Number E>
    static task<> hand_over(route<E> const& way, lane<T> over, std::span<std::size_t const> cuts, bool home) {
        operations moved(2 * cuts.size());
        std::size_t posted = 0;
        auto const move = [&](int holder, int owner) {
            if (holder >= way.holders || holder == owner) return;
            std::size_t const r = static_cast<std::size_t>(owner);
            std::span<E> const held = way.held(holder, way.holders),
                               slice = way.data.subspan(cuts[r], cuts[r + 1] - cuts[r]);
            E* const begin = std::max(held.data(), slice.data());
            E* const end = std::min(held.data() + held.size(), slice.data() + slice.size());
            if (begin >= end) return;
            std::span<E> const part(begin, end);
            if ((holder == way.me) == home)
                over.send(moved[posted++], home ? owner : holder, as_const_bytes(part));
            else
                over.receive(moved[posted++], home ? holder : owner, as_mutable_bytes(part));
        };
        for (int p = 0; p < way.ranks; ++p) {
            move(p, way.me);
            move(way.me, p);
        }
        for (std::size_t i = 0; i < posted; ++i) co_await moved[i];
    }
};

}  // namespace ddp
