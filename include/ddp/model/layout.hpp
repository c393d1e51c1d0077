/// \file
/// layout: the position of each parameter in the arena that holds them all. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// Statistics are summed over blocks of this many elements, counted from each parameter's start: so their bits do not
/// depend on buckets or slices, which are cut at block boundaries where an optimizer needs statistics.
inline constexpr std::size_t statistics_block = 4096;

namespace detail {
/// Whether `numbers` are 0 to count - 1, each once, in any order.
[[nodiscard]] bool names_each_once(std::span<std::size_t const> numbers, std::size_t count);
}  // namespace detail

/// A range of positions in an arena, in elements.
struct arena_range {
    std::size_t begin = 0;  ///< the first
    std::size_t end = 0;    ///< one past the last
    [[nodiscard]] std::size_t size() const noexcept { return end - begin; }
};

/// How parameters are placed in an arena.
enum class parameter_placement : std::uint8_t {
    aligned,    ///< each begins on a 64-byte boundary
    contiguous  ///< without gaps, in declared order: for models that need one array of all parameters
};

/// The position of each parameter in an arena. Parameters are in the order of the bucket plan, each contiguous and, with
/// parameter_placement::aligned, on a 64-byte boundary, because kernels can give different bits at different
/// alignments. Positions and counts are in elements; the gaps between parameters hold zeros. Without gaps, the order is
/// the declared one, so that the alignment of each parameter is the same for every plan.
class layout {
public:
    layout() = default;
    /// `counts[i]` is the size of parameter i; `order` lists the parameters as they lie in the arena (empty: as declared).
    /// Throws usage_error if it does not name each once, and, without gaps, for any order but the declared one.
    layout(std::vector<std::size_t> counts, std::vector<std::size_t> order, std::size_t element_bytes,
           parameter_placement placed = parameter_placement::aligned);

    /// The number of parameters.
    [[nodiscard]] std::size_t parameters() const noexcept { return counts_.size(); }
    /// The number of elements in the arena, with gaps.
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    /// Whether there are gaps.
    [[nodiscard]] parameter_placement placed() const noexcept { return placed_; }
    /// Parameter i is at [begin(i), end(i)), which are count(i) elements.
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
    /// The first block at or behind an arena position that is a cut. Cost: a binary search.
    [[nodiscard]] std::size_t block_at(std::size_t position) const noexcept;

    /// Calls f(i, from, to) for every parameter that has elements in the arena's [from, to), clipped to it. Cost: a binary
    /// search, and one call per parameter.
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
    [[nodiscard]] std::size_t cut_before(std::size_t from, std::size_t target, std::size_t grain) const noexcept;

    /// Slices of [from, to) for `parts` ranks, as even as cuts at multiples of `grain` elements from a parameter's start
    /// allow; parts + 1 positions in the arena.
    [[nodiscard]] std::vector<std::size_t> slices(std::size_t from, std::size_t to, std::size_t parts,
                                                  std::size_t grain) const;

private:
    std::vector<std::size_t> counts_;
    std::vector<std::size_t> order_;
    std::vector<std::size_t> begins_;
    std::vector<std::size_t> blocks_;
    std::size_t size_ = 0;
    std::size_t all_blocks_ = 0;
    parameter_placement placed_ = parameter_placement::aligned;
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/model/impl/layout.ipp>
#endif
