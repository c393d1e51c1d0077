/// \file
/// What model/layout.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <ddp/model/layout.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL bool detail::names_each_once(std::span<std::size_t const> numbers, std::size_t count) {
    std::vector<std::uint8_t> named(count);
    for (std::size_t const n : numbers)
        if (n >= count || std::exchange(named[n], std::uint8_t{1}) != 0) return false;
    return numbers.size() == count;
}

[[gnu::cold]] DDP_DECL layout::layout(std::vector<std::size_t> counts, std::vector<std::size_t> order,
                                      std::size_t element_bytes, parameter_placement placed)
    : counts_(std::move(counts)),
      order_(std::move(order)),
      begins_(counts_.size()),
      blocks_(counts_.size()),
      placed_(placed) {
    if (order_.empty()) {
        order_.resize(counts_.size());
        for (std::size_t i = 0; i < order_.size(); ++i) order_[i] = i;
    }
    DDP_EXPECTS(detail::names_each_once(order_, counts_.size()),
                "a bucket plan's order must name every parameter exactly once");
    DDP_EXPECTS(
        placed == parameter_placement::aligned || std::is_sorted(order_.begin(), order_.end()),
        "the model is `contiguous`: its parameters lie as it lists them, so neither a bucket policy nor frozen "
        "parameters of a local_parallel may give them another order. Take a policy without one, or list what is "
        "frozen last");
    std::size_t const alignment = placed == parameter_placement::contiguous ? 1 : 64 / element_bytes;
    for (std::size_t const i : order_) {
        begins_[i] = size_;
        size_ += (counts_[i] + alignment - 1) / alignment * alignment;
        blocks_[i] = all_blocks_;
        all_blocks_ += block_count(i);
    }
}
DDP_DECL std::size_t layout::cut_before(std::size_t from, std::size_t target, std::size_t grain) const noexcept {
    auto const after =
        std::partition_point(order_.begin(), order_.end(), [&](std::size_t i) { return begin(i) <= target; });
    if (after == order_.begin()) return from;
    std::size_t const i = *(after - 1), inside = std::min(target, end(i)) - begin(i);
    return std::max(from, begin(i) + inside / grain * grain);
}
DDP_DECL std::size_t layout::block_at(std::size_t position) const noexcept {
    auto const after =
        std::partition_point(order_.begin(), order_.end(), [&](std::size_t i) { return begin(i) < position; });
    if (after == order_.begin()) return 0;
    std::size_t const i = *(after - 1), inside = std::min(position, end(i)) - begin(i);
    return blocks_[i] + (inside + statistics_block - 1) / statistics_block;
}
DDP_DECL std::vector<std::size_t> layout::slices(std::size_t from, std::size_t to, std::size_t parts,
                                                 std::size_t grain) const {
    std::vector<std::size_t> cuts(parts + 1, to);
    cuts[0] = from;
    for (std::size_t p = 1; p < parts; ++p) {
        std::size_t const target = from + (to - from) / parts * p + (to - from) % parts * p / parts;
        cuts[p] = std::max(cut_before(from, target, grain), cuts[p - 1]);
    }
    return cuts;
}

}  // namespace ddp
