/// \file
/// recursive_doubling_allreduce: neighbours exchange everything, then pairs, then fours: few messages, for small data.
#pragma once

#include <cstddef>
#include <span>

#include <ddp/collective/concepts.hpp>
#include <ddp/kernel/combine.hpp>

namespace ddp {

/// Recursive doubling in the order of the canonical tree, for any number of ranks.
///
/// The ranks fall into blocks, one for each binary digit of P, largest first (P = 7: 4, 2, 1): the canonical tree is
/// block 0 + (block 1 + (block 2 + ...)). Each block doubles on its own, neighbours first; then the smaller blocks'
/// sums are joined from the right, and the result goes back. No rank is folded into another before the doubling.
///
/// data    n elements (S bytes), the same n on every rank; on return every rank holds the same bits.
/// Cost    log2(b) steps in a block of b ranks, and one or two more per further block; every message is S bytes. The rank
///         in place i of block 0 of b ranks sends log2(b) messages, one more if i < P - b; the rank in place i of any
///         other block sends log2(b) + ceil((b' - i) / b), b' being the size of the block to its left. Scratch S bytes.
/// Sums    the canonical tree over ranks; other operations likewise.
/// Throws  collective_aborted inside the scheduler, comm_error to the caller; data is then unspecified.
/// Source  Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1),
///         2005; the order for numbers of ranks that are not powers of two is this library's.
struct recursive_doubling_allreduce {
    static constexpr char const* name = "recursive_doubling";
    static constexpr bool canonical = true;

    [[nodiscard]] static bool everywhere(std::size_t /*bytes*/, int /*ranks*/) noexcept { return true; }

    template <Transport T, Number E>
    static task<> sum(recursive_doubling_allreduce self, lane<T> over, std::span<E> data) {
        return combine(self, over, data, ddp::sum{});
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> combine(recursive_doubling_allreduce /*self*/, lane<T> over, std::span<E> data, Op /*op*/) {
        int const me = over.rank();
        detail::rank_block const mine = detail::block_of(me, over.size());
        scratch memory(data.size_bytes());
        std::span<E> const theirs = memory.as<E>();
        operation in, out;

        for (int distance = 1; distance < mine.size; distance *= 2) {
            int const peer = mine.first + ((me - mine.first) ^ distance);
            over.receive(in, peer, as_mutable_bytes(theirs));
            over.send(out, peer, as_const_bytes(data));
            co_await in;
            co_await out;  // before data changes
            bool const left = me < peer;
            ddp::combine<Op>(data, std::span<E const>(left ? data : theirs), std::span<E const>(left ? theirs : data));
        }
        if (mine.size == over.size()) co_return;

        // The rest of the tree on the right, summed; each of its ranks sends to one or more of this block.
        lane<T> const join = over.phase(1), result = over.phase(2);
        int const right = mine.first + mine.size;
        if (right < over.size()) {
            detail::rank_block const next = detail::block_of(right, over.size());
            join.receive(in, next.first + (me - mine.first) % next.size, as_mutable_bytes(theirs));
            co_await in;
            ddp::combine<Op>(data, std::span<E const>(data), std::span<E const>(theirs));
        }
        if (mine.first == 0) {
            if (mine.size + me < over.size()) {  // what is right of block 0 is smaller than it
                result.send(out, mine.size + me, as_const_bytes(data));
                co_await out;
            }
            co_return;
        }
        detail::rank_block const before = detail::block_of(mine.first - 1, over.size());
        int const place = me - mine.first;
        operations joins(static_cast<std::size_t>((before.size - place + mine.size - 1) / mine.size));
        for (std::size_t k = 0; k < joins.size(); ++k)
            join.send(joins[k], before.first + place + static_cast<int>(k) * mine.size, as_const_bytes(data));
        for (std::size_t k = 0; k < joins.size(); ++k) co_await joins[k];  // before data changes
        result.receive(in, me - detail::block_of(0, over.size()).size, as_mutable_bytes(data));
        co_await in;
    }

    template <Transport T, Number E, OperationOn<E> Op>
    static task<> reduce(recursive_doubling_allreduce self, lane<T> over, reduction<E, Op> what) {
        if (what.go != nullptr) co_await *what.go;
        co_await combine(self, over, what.data, Op{});
        if (what.factor != nullptr) scale(what.data, *what.factor);
    }
    template <Transport T, Number E>
    static task<> all_gather(recursive_doubling_allreduce /*self*/, lane<T> /*over*/, std::span<E> /*data*/,
                             std::span<std::size_t const> /*cuts*/) {
        co_return;  // reduce left everything everywhere
    }
};

}  // namespace ddp
