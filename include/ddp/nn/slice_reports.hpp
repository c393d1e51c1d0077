/// \file
/// slice_reports: how a layer says, within backward, that some rows of a gradient are final.
#pragma once

#include <algorithm>
#include <cstddef>

#include <ddp/core/function_ref.hpp>

namespace ddp::nn {

/// How a layer with `reports_slices` reports parts of its gradients before backward returns; backward_mode holds one if
/// slices are wanted. The layer then reports either all of its parameters through it or none.
///
/// A matrix product by Eigen may be computed in slices of rows of the result: each element is still summed in the same
/// order, because the way in which Eigen blocks and unrolls a sum depends only on the length of the sum and on the
/// position of the element within a group of result rows, and slices that begin at multiples of `grain` rows leave these
/// groups whole. This does not hold where rows or columns are so few that Eigen uses another kernel: therefore no slice
/// is smaller than `grain` rows, and a matrix of fewer than 4 columns is not sliced.
class slice_reports {
public:
    static constexpr std::size_t grain = 16;  ///< rows

    /// `bytes`: the approximate size of a slice. `report(p, first, count)` is called when elements [first, first + count)
    /// of the layer's parameter p are final.
    slice_reports(std::size_t bytes, function_ref<void(std::size_t, std::size_t, std::size_t)> report)
        : bytes_(bytes), report_(report) {}

    /// Says that elements [first, first + count) of the gradient of the layer's parameter p are final, and that these
    /// values of the parameter are not read again in this pass. Reports of a parameter come from its end backwards,
    /// without gaps.
    void report(std::size_t p, std::size_t first, std::size_t count) {
        used_ = true;
        report_(p, first, count);
    }
    /// Whether report() has been called.
    [[nodiscard]] bool used() const noexcept { return used_; }

    /// The number of rows in a slice of a matrix of (rows, columns); at least `rows` if the matrix should not be sliced.
    [[nodiscard]] std::size_t slice_rows(std::size_t rows, std::size_t columns,
                                         std::size_t element_bytes) const noexcept {
        if (columns < 4) return rows;
        std::size_t const fitting = bytes_ / (columns * element_bytes) / grain * grain;
        return std::max(grain, fitting);
    }
    /// Calls f(first, end) for slices of `slice` rows of a matrix with `rows` rows, the last slice first. The last call
    /// gets the remaining rows, fewer than two slices.
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
