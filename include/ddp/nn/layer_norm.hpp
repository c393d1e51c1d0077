/// \file
/// layer_norm: every sample with mean 0 and deviation 1, then scaled and shifted unit by unit.
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
#include <ddp/core/digest.hpp>
#include <ddp/core/text.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/nn/layer.hpp>
#include <ddp/nn/products.hpp>
#include <ddp/nn/sums.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::nn {

namespace detail {

/// n = (x - mean) * inverse, y = n * weight + bias. y and x may be the same.
template <Element E>
DDP_KERNEL void normalise(E* n, E* y, E const* x, E mean, E inverse, E const* weight, E const* bias,
                          std::size_t count) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        n[i] = (x[i] - mean) * inverse;
        y[i] = n[i] * weight[i] + bias[i];
    }
}
/// d[i] = x[i] - mean.
template <Element E>
DDP_KERNEL void subtract(E* d, E const* x, E mean, std::size_t count) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) d[i] = x[i] - mean;
}
/// d = inverse * (d - mean - n * slope).
template <Element E>
DDP_KERNEL void normalise_gradient(E* d, E const* n, E mean, E slope, E inverse, std::size_t count) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t c = 0; c < count; ++c) d[c] = inverse * (d[c] - mean - n[c] * slope);
}
}  // namespace detail

/// Computes (x - mean) / sqrt(variance + epsilon) * weight + bias with the mean and variance (divided by n, not n - 1) of
/// each row.
///
/// Parameters "weight" and "bias" (width), initially 1 and 0, as in PyTorch. Works in place in both directions.
/// Cost    about five passes in each direction over a row, which stays in the first-level cache. Memory: the normalised
///         rows.
/// Sums    along a row in sixteen partial sums, which are then added in pairs; over rows in order.
/// Throws  usage_error if x does not have `width` columns.
/// Source  Ba, Kiros and Hinton, "Layer normalization", arXiv:1607.06450.
template <Element E = float>
class layer_norm {
public:
    using element = E;
    static constexpr bool output_is_free = true, draws = false;

    explicit layer_norm(std::size_t width, double epsilon = 1e-5)
        : width_(width),
          epsilon_(static_cast<E>(epsilon)),
          parameters_{trainable<E>("weight", {width}), trainable<E>("bias", {width})} {
        DDP_EXPECTS(width > 0, "layer_norm: width is 0; pass the number of features");
        DDP_EXPECTS(epsilon > 0, "layer_norm: epsilon keeps rows of equal numbers finite; pass a positive one");
        initialize(0, 0);
    }

    /// Ranks and checkpoints compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash("layer_norm", epsilon_); }
    [[nodiscard]] std::string hash_words() const {
        return ddp::detail::concat({"layer_norm(epsilon ", ddp::detail::decimal(epsilon_), ")"});
    }
    [[nodiscard]] std::size_t inputs() const noexcept { return width_; }
    [[nodiscard]] std::size_t outputs() const noexcept { return width_; }
    [[nodiscard]] std::span<trainable<E>> parameters() noexcept { return parameters_; }
    void initialize(std::uint64_t, std::uint64_t) {
        std::fill(parameters_[0].value().begin(), parameters_[0].value().end(), E{1});
        std::fill(parameters_[1].value().begin(), parameters_[1].value().end(), E{0});
    }

    matrix_view<E> forward(const_matrix_view<E> x, forward_mode) {
        matrix_view<E> y = y_.take(rows_of(x), columns_of(x));
        return normalised(y, x);
    }
    matrix_view<E> forward_in_place(matrix_view<E> y, forward_mode) { return normalised(y, read_only(y)); }

    matrix_view<E> backward(matrix_view<E> dy, backward_mode mode) {
        std::span<E> const dw = parameters_[0].gradient(), db = parameters_[1].gradient();
        if (!mode.accumulate) std::fill(dw.begin(), dw.end(), E{0});
        detail::sum_rows(db.data(), std::as_const(dy).data(), rows_, width_, mode.accumulate);
        E const share = E{1} / static_cast<E>(width_);
        for (std::size_t r = 0; r < rows_; ++r) {
            E* const d = dy.data() + r * width_;
            E const* const n = normal_.take(rows_ * width_).data() + r * width_;
            detail::add_products(dw.data(), d, n, width_);
            if (!mode.input_gradient) continue;
            detail::multiply(d, d, parameters_[0].value().data(), width_);
            E const mean = detail::lane_sum<E>::of(d, width_) * share;
            E const slope = detail::lane_sum<E>::of(d, n, width_) * share;
            detail::normalise_gradient(d, n, mean, slope, inverse_.take(rows_)[r], width_);
        }
        return dy;
    }

private:
    matrix_view<E> normalised(matrix_view<E> y, const_matrix_view<E> x) {
        DDP_EXPECTS(columns_of(x) == width_, "layer_norm(" + std::to_string(width_) + ") was given samples of " +
                                                 std::to_string(columns_of(x)) +
                                                 " features: pass that number as its argument");
        rows_ = rows_of(x);
        std::span<E> const normal = normal_.take(rows_ * width_), inverse = inverse_.take(rows_);
        E const share = E{1} / static_cast<E>(width_);
        for (std::size_t r = 0; r < rows_; ++r) {
            E const* const from = x.data() + r * width_;
            E* const n = normal.data() + r * width_;
            E const mean = detail::lane_sum<E>::of(from, width_) * share;
            detail::subtract(n, from, mean, width_);
            E const variance = detail::lane_sum<E>::of(n, n, width_) * share;
            inverse[r] = E{1} / std::sqrt(variance + epsilon_);
            detail::normalise(n, y.data() + r * width_, from, mean, inverse[r], parameters_[0].value().data(),
                              parameters_[1].value().data(), width_);
        }
        return y;
    }

    std::size_t width_;
    E epsilon_;
    std::array<trainable<E>, 2> parameters_;
    std::size_t rows_ = 0;  // of the last forward
    buffer<E> normal_;      // (rows, width) rows of mean 0 and deviation 1
    buffer<E> inverse_;     // (rows) of the deviations
    buffer<E> y_;
};
static_assert(LayerOf<layer_norm<float>, float>);

}  // namespace ddp::nn

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
