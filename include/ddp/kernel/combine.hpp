/// \file
/// Combines arrays of several ranks in the canonical order, many sources in one pass over memory.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include <ddp/core/contract.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/kernel/operation.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp {

/// Where the canonical tree splits `count` >= 2 things: the largest power of two strictly below their count. To the
/// left and to the right of it are trees of the same kind.
[[nodiscard]] constexpr std::size_t canonical_split(std::size_t count) noexcept {
    return std::bit_floor(count - 1);
}

namespace detail::kernels {

/// Element i of the canonical tree over sources [Lo, Hi).
template <class Op, std::size_t Lo, std::size_t Hi, Number E>
[[gnu::always_inline]] inline E tree_at(E const* const* sources, std::size_t i) {
    if constexpr (Hi - Lo == 1) {
        return sources[Lo][i];
    } else {
        constexpr std::size_t middle = Lo + canonical_split(Hi - Lo);
        return Op::combine(tree_at<Op, Lo, middle>(sources, i), tree_at<Op, middle, Hi>(sources, i));
    }
}

/// out[i] = factor * (canonical tree over sources[0..Count) at begin + i). A factor of 1 changes no bit, and its
/// product hides behind the loads.
template <class Op, Number E, std::size_t Count>
DDP_KERNEL void combine_sources(E* out, E const* const* sources, std::size_t begin, std::size_t count, E factor) {
    DDP_NO_CONTRACTION
    E const* at[Count];
    for (std::size_t k = 0; k < Count; ++k) at[k] = sources[k] + begin;
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) out[i] = product::combine(factor, tree_at<Op, 0, Count>(at, i));
}

inline constexpr std::size_t sources_at_once = 8;  // one expression: 16 vector registers hold it
inline constexpr std::size_t combine_block = 512;  // elements: what a level of a wider tree keeps in L1

/// The kernel for 1 to sources_at_once sources.
template <class Op, Number E>
void combine_few(E* out, std::span<E const* const> sources, std::size_t begin, std::size_t count, E factor) {
    using kernel = void (*)(E*, E const* const*, std::size_t, std::size_t, E);
    static constexpr auto table = []<std::size_t... K>(std::index_sequence<K...>) {
        return std::array<kernel, sizeof...(K)>{&combine_sources<Op, E, K + 1>...};
    }(std::make_index_sequence<sources_at_once>{});
    table[sources.size() - 1](out, sources.data(), begin, count, factor);
}

/// One block of a tree of any width. `out` is written last, after everything has been read: it may be one of the
/// sources.
template <class Op, Number E>
void combine_many(E* out, std::span<E const* const> sources, std::size_t begin, std::size_t count, E factor) {
    if (sources.size() <= sources_at_once) return combine_few<Op>(out, sources, begin, count, factor);
    std::size_t const middle = canonical_split(sources.size());
    E left[combine_block];  // 2 of these a level: 8 KiB of stack for every doubling of P beyond 8
    E right[combine_block];
    combine_many<Op>(left, sources.first(middle), begin, count, E(1));
    combine_many<Op>(right, sources.subspan(middle), begin, count, E(1));
    E const* const halves[] = {left, right};
    combine_sources<Op, E, 2>(out, halves, 0, count, factor);
}

}  // namespace detail::kernels

/// Canonical tree over P sources, times a factor.
///
/// out      n elements; may be exactly one of the sources, and overlaps none otherwise.
/// sources  P >= 1 pointers to n elements each, in the order of ranks.
/// Order    ranks [lo, hi) split at canonical_split(hi - lo), Op::combine(left, right); then, rounded once more, times
///          `factor`: the bits of combine_tree followed by scale.
/// Cost     one pass: reads P n elements, writes n.
template <class Op, Number E>
    requires OperationOn<Op, E>
void combine_tree_scaled(std::span<E> out, std::span<std::type_identity_t<E> const* const> sources,
                         std::type_identity_t<E> factor) {
    DDP_EXPECTS(!sources.empty(), "a tree needs at least one source; over no ranks it has no value");
    namespace kernels = detail::kernels;
    if (sources.size() <= kernels::sources_at_once)
        return kernels::combine_few<Op>(out.data(), sources, 0, out.size(), factor);
    for (std::size_t begin = 0; begin < out.size(); begin += kernels::combine_block)
        kernels::combine_many<Op>(out.data() + begin, sources, begin,
                                  std::min(kernels::combine_block, out.size() - begin), factor);
}

/// Canonical tree: combine_tree_scaled with a factor of 1.
template <class Op, Number E>
    requires OperationOn<Op, E>
void combine_tree(std::span<E> out, std::span<std::type_identity_t<E> const* const> sources) {
    if (sources.size() == 1 && sources.front() == out.data()) return;
    combine_tree_scaled<Op>(out, sources, E(1));
}

/// out = Op::combine(left, right), element by element. All have the same length; out may be exactly left, right or both.
template <class Op, Number E>
    requires OperationOn<Op, E>
void combine(std::span<E> out, std::span<std::type_identity_t<E> const> left,
             std::span<std::type_identity_t<E> const> right) {
    DDP_EXPECTS(left.size() == out.size() && right.size() == out.size(), "combine needs three spans of one length");
    E const* const sources[] = {left.data(), right.data()};
    detail::kernels::combine_sources<Op, E, 2>(out.data(), sources, 0, out.size(), E(1));
}

/// data = data * factor, rounded once.
template <Number E>
void scale(std::span<E> data, std::type_identity_t<E> factor) {
    E const* const source = data.data();
    detail::kernels::combine_sources<sum, E, 1>(data.data(), &source, 0, data.size(), factor);
}

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
