/// \file
/// The canonical tree written as simply as possible, for tests to compare algorithms with.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <limits>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/kernel/operation.hpp>

namespace ddp {

namespace detail {

/// The operations written out once more: they share no code with kernel/, on purpose.
template <class Op, Number E>
[[nodiscard]] E reference_combine(E left, E right) {
    constexpr bool least = std::same_as<Op, minimum>, adds = std::same_as<Op, sum>;
    if constexpr (least || std::same_as<Op, maximum>) {
        if constexpr (std::floating_point<E>) {
            if (std::isnan(left) || std::isnan(right)) return std::numeric_limits<E>::quiet_NaN();
            if (left == 0 && right == 0) {
                bool const one = std::signbit(left), other = std::signbit(right);
                return (least ? one || other : one && other) ? -E(0) : E(0);
            }
        }
        if (left == right) return left;
        return (left < right) == least ? left : right;
    } else if constexpr (adds || std::same_as<Op, product>) {
        if constexpr (std::floating_point<E>) return adds ? left + right : left * right;
        auto const a = static_cast<unsigned long long>(left), b = static_cast<unsigned long long>(right);
        return static_cast<E>(adds ? a + b : a * b);
    } else {
        return Op::combine(left, right);  // a user's own
    }
}

}  // namespace detail

/// The result of an operation over all ranks. Every canonical algorithm must give these bits.
///
/// inputs  inputs[r] is the array of rank r; there is at least one, and all have the same length.
/// Order   ranks [first, last), or all, are split at the largest power of two below their number; the result of the left
///         part is combined with that of the right part.
/// Cost    P - 1 passes, each into new memory.
/// Throws  usage_error if there is no array, or if lengths differ.
template <class Op, Number E>
[[nodiscard]] std::vector<E> reference_reduce(std::vector<std::vector<E>> const& inputs, std::size_t first,
                                              std::size_t last) {
    DDP_EXPECTS(first < last && last <= inputs.size(), "reference_reduce needs at least one rank's array");
    if (last - first == 1) return inputs[first];
    std::size_t left_ranks = 1;
    while (2 * left_ranks < last - first) left_ranks *= 2;
    std::vector<E> result = reference_reduce<Op>(inputs, first, first + left_ranks);
    std::vector<E> const right = reference_reduce<Op>(inputs, first + left_ranks, last);
    DDP_EXPECTS(result.size() == right.size(), "reference_reduce needs arrays of one length");
    for (std::size_t i = 0; i < result.size(); ++i) result[i] = detail::reference_combine<Op>(result[i], right[i]);
    return result;
}
template <class Op, Number E>
[[nodiscard]] std::vector<E> reference_reduce(std::vector<std::vector<E>> const& inputs) {
    return reference_reduce<Op>(inputs, 0, inputs.size());
}

/// The sum over all ranks. Every canonical algorithm must give these bits: see reference_reduce.
template <Number E>
[[nodiscard]] std::vector<E> reference_sum(std::vector<std::vector<E>> const& addends) {
    return reference_reduce<sum>(addends, 0, addends.size());
}

}  // namespace ddp
