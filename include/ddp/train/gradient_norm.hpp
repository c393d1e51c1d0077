/// \file
/// Norms of gradients and values from squares over fixed blocks, so that their bits do not depend on buckets or slices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <ddp/core/math.hpp>
#include <ddp/kernel/norm.hpp>
#include <ddp/kernel/sum.hpp>
#include <ddp/model/layout.hpp>

namespace ddp::detail {

static_assert(statistics_block == norm_block);

/// Order of summation: within each block of each parameter (see block_squares), then trees over the blocks of a
/// parameter, then over the parameters.
class gradient_norm {
public:
    /// The norm of no elements.
    gradient_norm() = default;
    explicit gradient_norm(layout const& where)
        : layout_(where), squares_(where.blocks()), norms_(where.parameters()) {}

    /// Squares of the arena's gradients[from, to), which begins and ends at blocks' boundaries; zeros if `gradients` is empty.
    template <class E>
    void add(std::span<E const> gradients, std::size_t from, std::size_t to) {
        layout_.for_each_in(from, to, [&](std::size_t i, std::size_t a, std::size_t z) {
            std::size_t const first = layout_.first_block(i) + (a - layout_.begin(i)) / norm_block;
            std::span<double> const squares = std::span<double>(squares_).subspan(first, norm_blocks(z - a));
            if (gradients.empty())
                std::ranges::fill(squares, 0.0);
            else
                block_squares(gradients.subspan(a, z - a), squares);
        });
    }
    /// The norm. Call it once every block has been added, here or on another rank whose squares were gathered into
    /// squares().
    [[nodiscard]] double value() {
        add_up();
        return detail::square_root(tree_sum(norms_));
    }
    /// Likewise, but the norm of each parameter.
    [[nodiscard]] std::span<double const> of_parameters() {
        add_up();
        for (double& norm : norms_) norm = detail::square_root(norm);
        return norms_;
    }
    /// As if every element were 0.
    void clear() noexcept { std::ranges::fill(squares_, 0.0); }

    [[nodiscard]] std::span<double> squares(std::size_t first, std::size_t count) noexcept {
        return std::span<double>(squares_).subspan(first, count);
    }

private:
    void add_up() {
        for (std::size_t i = 0; i < norms_.size(); ++i)
            norms_[i] =
                tree_sum(std::span<double const>(squares_).subspan(layout_.first_block(i), layout_.block_count(i)));
    }

    layout layout_;
    std::vector<double> squares_;  // by block
    std::vector<double> norms_;    // by parameter
};

}  // namespace ddp::detail
