/// \file
/// reduce: combines arrays of all ranks on one of them.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>

#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/call.hpp>
#include <ddp/kernel/combine.hpp>

namespace ddp {

/// The algorithm of a reduction to one rank; S bytes.
///
///  tree    the canonical tree itself: of the two ranks that hold a node's halves, the left one combines them, or the root
///          if it is one of the two. ceil(log2 P) rounds; every rank but the root sends 1 message of S bytes. Scratch: S
///          bytes for each message that the rank receives, at most ceil(log2 P).
///  direct  direct_allreduce, whose owners send their slices of the result to the root: 2 steps, S bytes sent per rank,
///          S (P-1)/P by the root.
/// Source   binomial trees as in Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005. That they are canonical for any number of
///          ranks, and for any root by the rule above, is an addition of this library.
struct automatic_reduce {
    std::size_t tree_bytes = std::size_t{64}
                             << 10;  ///< the largest array that goes by the tree; between two ranks all do
    direct_allreduce direct = {};    ///< options of direct, for longer arrays

    [[nodiscard]] bool tree(std::size_t bytes, int ranks) const noexcept { return ranks == 2 || bytes <= tree_bytes; }
};

namespace detail {

template <class Op, Transport T, Number E>
task<> tree_reduce(lane<T> over, std::span<E> data, int root) {
    struct child {
        int rank;
        bool left;  // of this rank
    };
    int const me = over.rank();
    std::array<child, 32> children{};  // from the root of the tree downwards
    std::size_t count = 0;
    int parent = -1;
    for (int first = 0, last = over.size(); last - first > 1;) {
        int const middle = first + static_cast<int>(canonical_split(static_cast<std::size_t>(last - first)));
        auto const head = [root](int from, int to) { return root >= from && root < to ? root : from; };
        bool const left = me < middle;
        int const here = head(first, last), mine = left ? head(first, middle) : head(middle, last);
        if (here == me)
            children[count++] = {left ? head(middle, last) : head(first, middle), !left};
        else if (mine == me)
            parent = here;
        (left ? last : first) = middle;
    }

    scratch memory(count * data.size_bytes());
    operations in(count);
    auto const from = [&](std::size_t k) { return memory.as<E>().subspan(k * data.size(), data.size()); };
    for (std::size_t k = count; k-- > 0;) over.receive(in[k], children[k].rank, as_mutable_bytes(from(k)));
    std::span<E const> so_far = data;
    for (std::size_t k = count; k-- > 0;) {  // the last child holds the smallest subtree
        co_await in[k];
        std::span<E> const theirs = from(k), result = me == root && k == 0 ? data : theirs;
        combine<Op>(result, children[k].left ? std::span<E const>(theirs) : so_far,
                    children[k].left ? so_far : std::span<E const>(theirs));
        so_far = result;
    }
    if (parent < 0) co_return;
    operation out;
    over.send(out, parent, as_const_bytes(so_far));
    co_await out;
}

template <class How, Transport T, Number E, class Op>
auto reduce_by(communicator<T> const& comm, std::span<E> data, int root, Op op, automatic_reduce how) {
    detail::expect_root("reduce", root, comm.size());
    return How::run(comm, about<E>(name_by<"reduce", Op>, data.size(), "", root), [=](lane<T> over) {
        if (data.empty()) return barrier(over);
        if (how.tree(data.size_bytes(), over.size())) return tree_reduce<Op>(over, data, root);
        return direct_allreduce::combine_at(how.direct, over, data, root, op);
    });
}

}  // namespace detail

/// Replaces `data` on rank `root` by its sum over all ranks, or by another operation; elsewhere it stays as it is. Every
/// rank calls it with the same count, type, root and operation.
///
/// data    n numbers (NumbersTarget), the same n on every rank. No numbers: a barrier.
/// Cost    up to 64 KiB, and between two ranks, 1 message sent by every rank but the root; beyond, at most the size of
///         the data sent per rank, in slices (automatic_reduce). A rank that has sent everything does not wait for the
///         root.
/// Sums    the canonical tree over ranks: the bits of allreduce, whatever the root.
/// Throws  comm_error (the same verdict on every rank); the root's data is then unspecified. usage_error if there is no rank
///         `root`.
template <Transport T, NumbersTarget D, OperationOn<value_in<D>> Op = sum>
void reduce(communicator<T> const& comm, D&& data, int root = 0, Op op = {}, automatic_reduce how = {}) {
    detail::reduce_by<detail::blocking>(comm, std::span<value_in<D>>(data), root, op, how);
}

/// The same for one number of each rank. Returns the result on the root, std::nullopt elsewhere.
template <Transport T, Number V, OperationOn<V> Op = sum>
[[nodiscard]] std::optional<V> reduce(communicator<T> const& comm, V mine, int root = 0, Op op = {},
                                      automatic_reduce how = {}) {
    detail::posted const number(comm, mine);
    detail::reduce_by<detail::blocking>(comm, std::span<V>(&*number, 1), root, op, how);
    return comm.rank() == root ? std::optional<V>(*number) : std::nullopt;
}

/// Starts a reduce in place, also of a single number. Data and errors: see request; on ranks other than the root, data is only
/// read.
template <Transport T, NumberTarget D, OperationOn<value_in<D>> Op = sum>
[[nodiscard]] request start_reduce(communicator<T> const& comm, D&& data, int root = 0, Op op = {},
                                   automatic_reduce how = {}) {
    return detail::reduce_by<detail::starting>(comm, std::span<value_in<D>>(detail::span_of(data)), root, op, how);
}

}  // namespace ddp
