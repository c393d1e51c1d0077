/// \file
/// linear: y = x W^T + b, the fully connected layer.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include <ddp/core/contract.hpp>
#include <ddp/nn/gemm.hpp>
#include <ddp/nn/layer.hpp>
#include <ddp/nn/slice_reports.hpp>
#include <ddp/nn/sums.hpp>

namespace ddp::nn {

/// The fully connected layer y = x W^T + b: ddp::nn::linear(784, 128) in float, ddp::nn::linear<double>(784, 128) in
/// double.
///
/// Parameters "weight" (outputs, inputs) and "bias" (outputs), with PyTorch's names and layout, so that weights can be
/// exchanged with PyTorch. The transposed layout takes the same time for the three products together, within noise, at
/// 784 or 1024 inputs and 1024 outputs; at 10 outputs, this layout computes the weight's gradient in 0.03 ms instead of
/// 0.09 (batch 128, float).
///
/// Initial values  both are uniform in [-k, k) with k = 1 / sqrt(inputs), PyTorch's default. A root, a quotient and a
///                 product round the same everywhere, so the bits are the same on every platform.
/// Cost            2 rows inputs outputs flops forward, twice that backward, in Eigen's GEMM, which allocates packing
///                 buffers (on the stack below 128 KiB). The product is added to rows that already hold the bias.
/// Slices          if sequential::report_slices asks for them, the gradient of the bias is computed first, then that of
///                 the weight in blocks of rows, the last rows first, and each block is reported: the same bits, in about
///                 the same time.
/// Throws          usage_error if inputs or outputs is 0, or if x does not have `inputs` columns.
template <Element E = float>
class linear {
public:
    using element = E;
    static constexpr bool output_is_free = true;
    static constexpr bool reports_slices = true;

    linear(std::size_t inputs, std::size_t outputs)
        : inputs_(checked(inputs)),
          outputs_(checked(outputs)),
          parameters_{trainable<E>("weight", {outputs, inputs}), trainable<E>("bias", {outputs})} {
        initialize(0, 0);
    }

    [[nodiscard]] std::size_t inputs() const noexcept { return inputs_; }
    [[nodiscard]] std::size_t outputs() const noexcept { return outputs_; }
    [[nodiscard]] std::span<trainable<E>> parameters() noexcept { return parameters_; }

    void initialize(std::uint64_t seed, std::uint64_t first) {
        draw_uniform<E>(parameters_, E{1} / std::sqrt(static_cast<E>(inputs_)), seed, first);
    }

    matrix_view<E> forward(const_matrix_view<E> x, forward_mode) {
        DDP_EXPECTS(columns_of(x) == inputs_, "linear(" + std::to_string(inputs_) + ", " + std::to_string(outputs_) +
                                                  ") was given samples of " + std::to_string(columns_of(x)) +
                                                  " features: pass that number as its first argument");
        x_ = x.data();
        rows_ = rows_of(x);
        matrix_view<E> y = y_.take(rows_, outputs_);
        std::span<E const> const bias = parameters_[1].value();
        for (std::size_t r = 0; r < rows_; ++r) std::copy(bias.begin(), bias.end(), y.data() + r * outputs_);
        if (rows_ > 0) detail::add_product_nt<E>(y, x, weight());
        return y;
    }

    matrix_view<E> backward(matrix_view<E> dy, backward_mode mode) {
        const_matrix_view<E> const x = as_matrix(std::span<E const>(x_, rows_ * inputs_), rows_, inputs_);
        matrix_view<E> dx = dx_.take(mode.input_gradient ? rows_ : 0, inputs_);
        const_matrix_view<E> const d = read_only(dy);
        if (mode.input_gradient) detail::product<E>(dx, d, weight());
        if (mode.slices != nullptr && 2 * slice_rows(*mode.slices) <= outputs_) {
            backward_in_slices(d, x, mode);
            return dx;
        }
        matrix_view<E> dw = as_matrix(parameters_[0].gradient(), outputs_, inputs_);
        if (!mode.accumulate)
            detail::product_tn<E>(dw, d, x);
        else if (rows_ > 0)
            detail::add_product_tn<E>(dw, d, x);
        detail::sum_rows(parameters_[1].gradient().data(), d.data(), rows_, outputs_, mode.accumulate);
        return dx;
    }

private:
    static std::size_t checked(std::size_t width) {
        DDP_EXPECTS(width > 0, "linear: inputs or outputs is 0; both must be at least 1");
        return width;
    }
    [[nodiscard]] std::size_t slice_rows(slice_reports const& wanted) const noexcept {
        return wanted.slice_rows(outputs_, inputs_, sizeof(E));
    }
    /// The parameters' gradients, the bias's first: its bucket holds the weight's last rows too.
    void backward_in_slices(const_matrix_view<E> d, const_matrix_view<E> x, backward_mode mode) {
        detail::sum_rows(parameters_[1].gradient().data(), d.data(), rows_, outputs_, mode.accumulate);
        mode.slices->report(1, 0, outputs_);
        matrix_view<E> dw = as_matrix(parameters_[0].gradient(), outputs_, inputs_);
        slice_reports::for_each_slice(outputs_, slice_rows(*mode.slices), [&](std::size_t first, std::size_t end) {
            auto const from = static_cast<Eigen::Index>(first), to = static_cast<Eigen::Index>(end);
            if (!mode.accumulate)
                detail::product_tn_rows<E>(dw, d, x, from, to);
            else if (rows_ > 0)
                detail::add_product_tn_rows<E>(dw, d, x, from, to);
            mode.slices->report(0, first * inputs_, (end - first) * inputs_);
        });
    }
    [[nodiscard]] const_matrix_view<E> weight() const {
        return as_matrix(std::span<E const>(parameters_[0].value()), outputs_, inputs_);
    }

    std::size_t inputs_, outputs_;
    std::array<trainable<E>, 2> parameters_;
    E const* x_ = nullptr;  // (rows_, inputs_), of the last forward
    std::size_t rows_ = 0;
    buffer<E> y_, dx_;
};
static_assert(LayerOf<linear<float>, float>);

}  // namespace ddp::nn
