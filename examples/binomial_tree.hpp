// A binomial tree: an allreduce that the library does not have, as textbooks draw it.
// Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
#pragma once

#include <ddp/ddp.hpp>
#include <span>

/// Sums up to rank 0 (neighbours first, then pairs, then fours), and sends the sum down the way the addends came.
///
/// Cost    2 log2(P) steps of S bytes; rank 0 receives log2(P) messages. Scratch S bytes.
/// Sums    the canonical tree over ranks: rank r holds the sum of [r, r + d) when it adds that of [r + d, r + 2d).
struct binomial_tree_allreduce {
    static constexpr char const* name = "binomial_tree";
    static constexpr bool canonical = true;

    template <ddp::Transport T, ddp::Element E>
    static ddp::task<> sum(binomial_tree_allreduce /*self*/, ddp::lane<T> over, std::span<E> data) {
        int const me = over.rank(), ranks = over.size();
        ddp::scratch memory(data.size_bytes());
        std::span<E> const theirs = memory.as<E>();
        ddp::operation in, out;

        int distance = 1;
        for (; distance < ranks && me % (2 * distance) == 0; distance *= 2) {
            if (me + distance >= ranks) continue;
            over.receive(in, me + distance, ddp::as_mutable_bytes(theirs));
            co_await in;
            ddp::add(data, std::span<E const>(data), std::span<E const>(theirs));
        }
        ddp::lane<T> const down = over.phase(1);  // its messages match none of those above
        if (me != 0) {
            down.receive(in, me - distance, ddp::as_mutable_bytes(data), &out);  // comes only after ours has gone
            over.send(out, me - distance, ddp::as_const_bytes(data));
            co_await in;
            co_await out;
        }
        for (distance /= 2; distance > 0; distance /= 2) {
            if (me + distance >= ranks) continue;
            down.send(out, me + distance, ddp::as_const_bytes(data));
            co_await out;
        }
    }
};
static_assert(ddp::AllreduceOver<binomial_tree_allreduce, ddp::inproc_transport, float>);
