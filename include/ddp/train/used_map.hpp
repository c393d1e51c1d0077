/// \file
/// used_map: which parameters some rank has used in a step.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ddp::detail {

/// One bit per parameter, rank after rank; ranks exchange their parts of the table between set() and merge().
class used_map {
public:
    /// Tracks nothing: all parameters count as used.
    used_map() = default;
    used_map(std::size_t ranks, std::size_t parameters)
        : words_((parameters + 63) / 64), table_(ranks * words_), any_(words_) {}

    [[nodiscard]] bool tracks() const noexcept { return !table_.empty(); }
    /// used[i] != 0: rank `rank` has used parameter i.
    void set(std::size_t rank, std::span<std::uint8_t const> used) noexcept {
        std::span<std::uint64_t> const mine = std::span(table_).subspan(rank * words_, words_);
        std::ranges::fill(mine, std::uint64_t{0});
        for (std::size_t i = 0; i < used.size(); ++i) mine[i / 64] |= std::uint64_t{used[i] != 0} << i % 64;
    }
    [[nodiscard]] std::span<std::uint64_t> table() noexcept { return table_; }
    [[nodiscard]] std::size_t words_a_rank() const noexcept { return words_; }
    void merge() noexcept {
        std::ranges::fill(any_, std::uint64_t{0});
        for (std::size_t k = 0; k < table_.size(); ++k) any_[k % words_] |= table_[k];
    }
    /// Whether any rank in the parts that merge() has seen has used parameter i.
    [[nodiscard]] bool by_any(std::size_t i) const noexcept { return !tracks() || (any_[i / 64] >> i % 64 & 1) != 0; }

private:
    std::size_t words_ = 0;
    std::vector<std::uint64_t> table_, any_;
};

}  // namespace ddp::detail
