/// \file
/// layout: where each parameter lies in the one arena that holds them all. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <span>
#include <vector>

#include <ddp/core/contract.hpp>

namespace ddp {

/// Statistics are summed over blocks of this many elements, counted from each parameter's start: so their bits do not
/// depend on buckets or slices, which are cut at block boundaries where an optimizer needs statistics.
inline constexpr std::size_t statistics_block = 4096;

/// A range of the arena, in elements.
struct arena_range {
    std::size_t begin = 0;
    std::size_t end = 0;
    [[nodiscard]] std::size_t size() const noexcept { return end - begin; }
};

/// Parameters in the plan's order, each contiguous and on a 64-byte boundary whatever the plan: kernels give other bits at
/// other alignments. Positions and counts are in elements; the gaps between parameters hold zeros.
class layout {
public:
    layout() = default;
    /// `counts[i]` is the size of parameter i; `order` lists the parameters as they lie in the arena (empty: as declared).
    layout(std::vector<std::size_t> counts, std::vector<std::size_t> order, std::size_t element_bytes)
        : counts_(std::move(counts)), order_(std::move(order)), begins_(counts_.size()), blocks_(counts_.size()) {
        if (order_.empty()) {
            order_.resize(counts_.size());
            std::iota(order_.begin(), order_.end(), std::size_t{0});
        }
        std::vector<std::size_t> sorted = order_;
        std::sort(sorted.begin(), sorted.end());
        for (std::size_t i = 0; i < sorted.size(); ++i)
            DDP_EXPECTS(sorted.size() == counts_.size() && sorted[i] == i,
                        "a bucket plan's order must name every parameter exactly once");
        std::size_t const alignment = 64 / element_bytes;
        for (std::size_t const i : order_) {
            begins_[i] = size_;
            size_ += (counts_[i] + alignment - 1) / alignment * alignment;
            blocks_[i] = all_blocks_;
            all_blocks_ += block_count(i);
        }
    }

    [[nodiscard]] std::size_t parameters() const noexcept { return counts_.size(); }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] std::size_t begin(std::size_t i) const noexcept { return begins_[i]; }
    [[nodiscard]] std::size_t end(std::size_t i) const noexcept { return begins_[i] + counts_[i]; }
    [[nodiscard]] std::size_t count(std::size_t i) const noexcept { return counts_[i]; }
    /// The parameters as they lie in the arena.
    [[nodiscard]] std::span<std::size_t const> order() const noexcept { return order_; }

    /// Statistics blocks, numbered along the arena: parameter i owns block_count(i) of them from first_block(i).
    [[nodiscard]] std::size_t first_block(std::size_t i) const noexcept { return blocks_[i]; }
    [[nodiscard]] std::size_t block_count(std::size_t i) const noexcept {
        return (counts_[i] + statistics_block - 1) / statistics_block;
    }
    [[nodiscard]] std::size_t blocks() const noexcept { return all_blocks_; }

    /// Calls f(i, from, to) for every parameter that has elements in the arena's [from, to), clipped to it. Cost: a binary
    /// search, and one call a parameter.
    template <class F>
    void for_each_in(std::size_t from, std::size_t to, F&& f) const {
        auto at = std::partition_point(order_.begin(), order_.end(), [&](std::size_t i) { return end(i) <= from; });
        for (; at != order_.end() && begin(*at) < to; ++at) {
            std::size_t const a = std::max(from, begin(*at)), b = std::min(to, end(*at));
            if (a < b) f(*at, a, b);
        }
    }

    /// The last position in [from, target] that is `from`, the begin of a parameter or a multiple of `grain` elements
    /// behind one. Cost: a binary search.
    [[nodiscard]] std::size_t cut_before(std::size_t from, std::size_t target, std::size_t grain) const noexcept {
        auto const after =
            std::partition_point(order_.begin(), order_.end(), [&](std::size_t i) { return begin(i) <= target; });
        if (after == order_.begin()) return from;
        std::size_t const i = *std::prev(after), inside = std::min(target, end(i)) - begin(i);
        return std::max(from, begin(i) + inside / grain * grain);
    }

    /// Slices of [from, to) for `parts` ranks, as even as cuts at multiples of `grain` elements from a parameter's start
    /// allow; parts + 1 positions in the arena.
    [[nodiscard]] std::vector<std::size_t> slices(std::size_t from, std::size_t to, std::size_t parts,
                                                  std::size_t grain) const {
        std::vector<std::size_t> cuts(parts + 1, to);
        cuts[0] = from;
        for (std::size_t p = 1; p < parts; ++p) {
            std::size_t const target = from + (to - from) / parts * p + (to - from) % parts * p / parts;
            cuts[p] = std::max(cut_before(from, target, grain), cuts[p - 1]);
        }
        return cuts;
    }

private:
    std::vector<std::size_t> counts_;
    std::vector<std::size_t> order_;
    std::vector<std::size_t> begins_;
    std::vector<std::size_t> blocks_;
    std::size_t size_ = 0;
    std::size_t all_blocks_ = 0;
};

}  // namespace ddp
