/// \file
/// Sums of squares whose bits depend neither on how a gradient is cut into buckets nor on who sums which part.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <span>

#include <ddp/core/contract.hpp>
#include <ddp/kernel/kernel.hpp>

namespace ddp {

/// Elements of a statistics block, counted from each parameter's start.
inline constexpr std::size_t norm_block = 4096;

/// Blocks of a parameter, or of a piece that starts at a block's boundary. The last may be partial.
[[nodiscard]] constexpr std::size_t norm_blocks(std::size_t elements) noexcept {
    return (elements + norm_block - 1) / norm_block;
}

namespace detail::kernels {

/// Sum of squares of at most norm_block elements, in double: element i goes to lane i mod 16, in order of i; then the
/// canonical tree over the lanes.
template <std::floating_point E>
DDP_KERNEL double sum_of_squares(E const* data, std::size_t count) {
    DDP_NO_CONTRACTION
    constexpr std::size_t lanes = 16;  // four chains of four doubles hide an addition's latency
    double sums[lanes] = {};
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes)
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            double const x = static_cast<double>(data[i + lane]);
            sums[lane] += x * x;
        }
    for (std::size_t lane = 0; i + lane < count; ++lane) {
        double const x = static_cast<double>(data[i + lane]);
        sums[lane] += x * x;
    }
    for (std::size_t width = 1; width < lanes; width *= 2)
        for (std::size_t lane = 0; lane < lanes; lane += 2 * width) sums[lane] += sums[lane + width];
    return sums[0];
}

/// The canonical tree, kept as a binary counter: after value k, as many equal subtrees join as k has trailing zeros; at
/// the end the rest join from the right.
DDP_KERNEL inline double tree_over(double const* values, std::size_t count) {
    double subtree[65];  // one a bit of the count, and the value that has just arrived
    std::size_t depth = 0;
    for (std::size_t k = 1; k <= count; ++k) {
        subtree[depth++] = values[k - 1];
        for (std::size_t joins = k; (joins & 1) == 0; joins >>= 1, --depth) subtree[depth - 2] += subtree[depth - 1];
    }
    if (depth == 0) return 0;
    for (; depth > 1; --depth) subtree[depth - 2] += subtree[depth - 1];
    return subtree[0];
}

}  // namespace detail::kernels

/// Sums of squares of the blocks of a piece of one parameter's gradient.
///
/// piece   starts at a block's boundary: a multiple of norm_block elements from the parameter's start; it ends at one,
///         or with the parameter.
/// out     norm_blocks(piece.size()) sums.
/// Sums    in double, in an order that depends on the element's place in its block only. NaN and infinity stay visible.
template <std::floating_point E>
void block_squares(std::span<E const> piece, std::span<double> out) {
    DDP_EXPECTS(out.size() == norm_blocks(piece.size()),
                "block_squares needs one result a block: norm_blocks(piece.size()) of them");
    for (std::size_t block = 0; block < out.size(); ++block) {
        std::size_t const begin = block * norm_block;
        out[block] = detail::kernels::sum_of_squares(piece.data() + begin, std::min(norm_block, piece.size() - begin));
    }
}

/// Sum in the shape of the canonical tree (split at the largest power of two below the count, left plus right): over
/// the blocks of a parameter, then over the parameters. Zero for no values. Throws nothing.
[[nodiscard]] inline double tree_sum(std::span<double const> values) {
    return detail::kernels::tree_over(values.data(), values.size());
}

}  // namespace ddp
