/// \file
/// reference_sum: the canonical tree sum as plainly as it can be written, for tests to compare algorithms with.
#pragma once

#include <cstddef>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/model/model.hpp>

namespace ddp {

/// The sum of the addends of all ranks, which every canonical algorithm has to give, bit by bit.
///
/// addends  addends[r] is rank r's array; at least one, all of one length.
/// Sums     ranks [first, last) split behind the largest power of two below their number; left sum plus right sum.
/// Cost     P - 1 passes, each into memory of its own. Shares no code with kernel/sum.hpp, on purpose.
template <Element E>
[[nodiscard]] std::vector<E> reference_sum(std::vector<std::vector<E>> const& addends, std::size_t first,
                                           std::size_t last) {
    DDP_EXPECTS(first < last && last <= addends.size(), "reference_sum needs at least one rank's addend");
    if (last - first == 1) return addends[first];
    std::size_t left_ranks = 1;
    while (2 * left_ranks < last - first) left_ranks *= 2;
    std::vector<E> sum = reference_sum(addends, first, first + left_ranks);
    std::vector<E> const right = reference_sum(addends, first + left_ranks, last);
    DDP_EXPECTS(sum.size() == right.size(), "reference_sum needs addends of one length");
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] + right[i];
    return sum;
}
template <Element E>
[[nodiscard]] std::vector<E> reference_sum(std::vector<std::vector<E>> const& addends) {
    return reference_sum(addends, 0, addends.size());
}

}  // namespace ddp
