/// \file
/// slice_reports: how a layer says, within backward, that some rows of a gradient are final.
#pragma once

#include <algorithm>
#include <cstddef>

#include <ddp/core/function_ref.hpp>

namespace ddp::nn {

/// What a layer with `reports_slices` finds in backward_mode where its gradients are to be reported before backward returns.
/// It reports all of its parameters then, or none.
///
/// A product by Eigen may be cut in rows of the result: each element is still summed in the same order, because how Eigen
/// blocks and unrolls a sum depends on the sum's length and on where in a group of result rows an element stands, and cuts at
/// multiples of `grain` rows leave groups whole. Not so where rows or columns are so few that Eigen takes another kernel:
/// hence no slice is smaller than `grain` rows, and a matrix of fewer than 4 columns is not cut.
class slice_reports {
public:
    static constexpr std::size_t grain = 16;  ///< rows

    /// `bytes` of a slice, about. `report(p, first, count)`: elements [first, first + count) of the layer's parameter p are final.
    slice_reports(std::size_t bytes, function_ref<void(std::size_t, std::size_t, std::size_t)> report)
        : bytes_(bytes), report_(report) {}

    /// Elements of the layer's parameter p are final: from its end backwards, without gaps. Their values are not read again.
    void report(std::size_t p, std::size_t first, std::size_t count) {
        used_ = true;
        report_(p, first, count);
    }
    /// Whether the layer has reported.
    [[nodiscard]] bool used() const noexcept { return used_; }

    /// Rows of a slice of a matrix (rows, columns); not fewer than `rows` where it is not to be cut.
    [[nodiscard]] std::size_t slice_rows(std::size_t rows, std::size_t columns,
                                         std::size_t element_bytes) const noexcept {
        if (columns < 4) return rows;
        std::size_t const fitting = bytes_ / (columns * element_bytes) / grain * grain;
        return std::max(grain, fitting);
    }
    /// f(first, end) for slices of `slice` rows of a matrix of `rows`, last first. The last call gets the rest: less than two
    /// slices.
    template <class F>
    static void for_each_slice(std::size_t rows, std::size_t slice, F&& f) {
        for (std::size_t end = rows; end > 0;) {
            // Cuts are multiples of the grain: the first call may get a few rows more than a slice, never fewer.
            std::size_t const first = end < 2 * slice ? 0 : (end - slice) / grain * grain;
            f(first, end);
            end = first;
        }
    }

private:
    std::size_t bytes_;
    function_ref<void(std::size_t, std::size_t, std::size_t)> report_;
    bool used_ = false;
};

}  // namespace ddp::nn
