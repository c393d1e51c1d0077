/// \file
/// conv2d: every filter over every place of an image.
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
#include <ddp/kernel/kernel.hpp>
#include <ddp/nn/gemm.hpp>
#include <ddp/nn/image.hpp>
#include <ddp/nn/layer.hpp>
#include <ddp/nn/sums.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::nn {

/// Options of conv2d.
struct conv2d_options {
    std::size_t filters = 1;  ///< channels of the output
    std::size_t kernel = 3;   ///< pixels, in both directions
    std::size_t stride = 1;   ///< pixels
    std::size_t padding = 0;  ///< pixels of 0 on each side; (kernel - 1) / 2 keeps the size if the stride is 1
};

namespace detail {

/// Columns [begin, end) of a matrix := 0.
template <Element E>
void clear_columns(E* m, std::size_t rows, std::size_t columns, std::size_t begin, std::size_t end) {
    for (std::size_t c = begin; c < end; ++c)
        for (std::size_t r = 0; r < rows; ++r) m[r * columns + c] = 0;
}

/// The window's pixels as rows: panel (channels * kernel * kernel, out_height * out_width), 0 outside the image.
///
/// Where the windows are as many as the image is wide, a row of the panel is the plane, shifted: it is copied as one
/// run, and what has wrapped around is cleared. A copy a line of the image took two to three times as long.
template <Element E>
DDP_KERNEL void unfold(E* panel, E const* image, window const& w) {
    for (std::size_t c = 0; c < w.in.channels; ++c, image += w.in.plane())
        for (std::size_t ky = 0; ky < w.kernel; ++ky)
            for (std::size_t kx = 0; kx < w.kernel; ++kx, panel += w.out_plane()) {
                window::range const ys = w.reach(ky, w.in.height, w.out_height);
                window::range const xs = w.reach(kx, w.in.width, w.out_width);
                if (ys.size() == 0 || xs.size() == 0) {
                    std::fill_n(panel, w.out_plane(), E{0});
                    continue;
                }
                std::size_t const y = ys.begin * w.stride + ky - w.padding, x = xs.begin * w.stride + kx - w.padding;
                E const* from = image + y * w.in.width + x;
                E* to = panel + ys.begin * w.out_width;
                std::fill_n(panel, ys.begin * w.out_width, E{0});
                if (w.stride == 1 && w.out_width == w.in.width) {
                    std::copy_n(from, (ys.size() - 1) * w.out_width + xs.size(), to + xs.begin);
                    clear_columns(to, ys.size(), w.out_width, 0, xs.begin);
                    clear_columns(to, ys.size(), w.out_width, xs.end, w.out_width);
                } else {
                    for (std::size_t line = 0; line < ys.size(); ++line) {
                        std::fill_n(to, xs.begin, E{0});
                        if (w.stride == 1)
                            std::copy_n(from, xs.size(), to + xs.begin);
                        else
                            for (std::size_t o = 0; o < xs.size(); ++o) to[xs.begin + o] = from[o * w.stride];
                        std::fill(to + xs.end, to + w.out_width, E{0});
                        from += w.stride * w.in.width;
                        to += w.out_width;
                    }
                }
                std::fill(panel + ys.end * w.out_width, panel + w.out_plane(), E{0});
            }
}

/// The transpose of unfold: image[i] = the sum of the panel's elements that unfold copies it to, in the panel's order.
/// Overwrites what the panel has outside the image.
template <Element E>
DDP_KERNEL void fold(E* image, E* panel, window const& w) {
    DDP_NO_CONTRACTION
    std::fill_n(image, w.in.size(), E{0});
    for (std::size_t c = 0; c < w.in.channels; ++c, image += w.in.plane())
        for (std::size_t ky = 0; ky < w.kernel; ++ky)
            for (std::size_t kx = 0; kx < w.kernel; ++kx, panel += w.out_plane()) {
                window::range const ys = w.reach(ky, w.in.height, w.out_height);
                window::range const xs = w.reach(kx, w.in.width, w.out_width);
                if (ys.size() == 0 || xs.size() == 0) continue;
                std::size_t const y = ys.begin * w.stride + ky - w.padding, x = xs.begin * w.stride + kx - w.padding;
                E* to = image + y * w.in.width + x;
                E* from = panel + ys.begin * w.out_width + xs.begin;
                std::size_t lines = ys.size(), length = xs.size();
                if (w.stride == 1 && w.out_width == w.in.width) {  // one run, as in unfold
                    clear_columns(from, lines - 1, w.out_width, length, w.out_width);
                    length += (lines - 1) * w.out_width;
                    lines = 1;
                }
                for (; lines > 0; --lines, from += w.out_width, to += w.stride * w.in.width)
                    if (w.stride == 1) {
                        DDP_INDEPENDENT
                        for (std::size_t o = 0; o < length; ++o) to[o] += from[o];
                    } else {
                        for (std::size_t o = 0; o < length; ++o) to[o * w.stride] += from[o];
                    }
            }
}

}  // namespace detail

/// Convolution of images (strictly speaking cross-correlation, as in other libraries):
///
///     ddp::nn::conv2d first({.channels = 1, .height = 28, .width = 28}, {.filters = 16, .kernel = 3, .padding = 1});
///     ddp::nn::max_pool2d half(first.output_shape());  // before first is moved from
///     ddp::nn::sequential net{std::move(first), ddp::nn::relu(), std::move(half), ddp::nn::linear(16 * 14 * 14, 10),
///                             ddp::nn::softmax_cross_entropy()};
///
/// Parameters "weight" (filters, channels, kernel, kernel) and "bias" (filters), with PyTorch's names and layout. Each
/// image is unfolded into a panel (im2col) and multiplied by the weights; all images share the memory of the panel, which
/// stays in the cache. Backward unfolds the image again, which is cheaper than loading a stored panel from memory.
///
/// Initial values  both are uniform in [-k, k) with k = 1 / sqrt(channels kernel^2), PyTorch's default.
/// Cost            2 filters channels kernel^2 flops for each pixel of the result forward, twice that backward, in
///                 Eigen's GEMM (which allocates packing buffers, on the stack below 128 KiB), image by image. Memory:
///                 the results, and one panel of (channels kernel^2, pixels of the result).
/// Sums            gradients of parameters are added image by image, in the order of the batch. The bits of an image's
///                 result do not depend on its position in the batch, except in products so small (filters + pixels +
///                 channels kernel^2 < 20) that Eigen does not use its GEMM.
/// Throws          usage_error if samples are not images of this shape, or the windows do not fit.
/// Source          Chellapilla, Puri and Simard, "High performance convolutional neural networks for document
///                 processing", IWFHR 2006.
template <Element E = float>
class conv2d {
public:
    using element = E;
    static constexpr bool output_is_free = true, draws = false;

    conv2d(image_shape in, conv2d_options const& options)
        : window_("conv2d", in, options.kernel, options.stride, options.padding),
          filters_(checked(options.filters)),
          taps_(in.channels * options.kernel * options.kernel),
          parameters_{trainable<E>("weight", {filters_, in.channels, options.kernel, options.kernel}),
                      trainable<E>("bias", {filters_})} {
        initialize(0, 0);
    }

    /// Ranks and checkpoints compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept { return window_.hash("conv2d"); }
    [[nodiscard]] std::string hash_words() const { return window_.hash_words("conv2d"); }
    [[nodiscard]] image_shape output_shape() const noexcept {
        return {filters_, window_.out_height, window_.out_width};
    }
    [[nodiscard]] std::size_t inputs() const noexcept { return window_.in.size(); }
    [[nodiscard]] std::size_t outputs() const noexcept { return filters_ * window_.out_plane(); }
    [[nodiscard]] std::span<trainable<E>> parameters() noexcept { return parameters_; }

    void initialize(std::uint64_t seed, std::uint64_t first) {
        draw_uniform<E>(parameters_, E{1} / std::sqrt(static_cast<E>(taps_)), seed, first);
    }

    matrix_view<E> forward(const_matrix_view<E> x, forward_mode) {
        detail::expect_images("conv2d", window_.in, columns_of(x));
        x_ = x.data();
        rows_ = rows_of(x);
        matrix_view<E> y = y_.take(rows_, outputs());
        std::size_t const pixels = window_.out_plane();
        std::span<E const> const bias = parameters_[1].value();
        for (std::size_t r = 0; r < rows_; ++r) {
            matrix_view<E> of_image(y.data() + r * outputs(), index(filters_), index(pixels));
            for (std::size_t f = 0; f < filters_; ++f) std::fill_n(of_image.data() + f * pixels, pixels, bias[f]);
            detail::add_product<E>(of_image, weight(), unfolded(r));
        }
        return y;
    }

    matrix_view<E> backward(matrix_view<E> dy, backward_mode mode) {
        matrix_view<E> dx = dx_.take(mode.input_gradient ? rows_ : 0, inputs());
        matrix_view<E> dw = as_matrix(parameters_[0].gradient(), filters_, taps_);
        std::span<E> const db = parameters_[1].gradient();
        if (!mode.accumulate) {
            dw.setZero();
            std::fill(db.begin(), db.end(), E{0});
        }
        std::size_t const pixels = window_.out_plane();
        for (std::size_t r = 0; r < rows_; ++r) {
            const_matrix_view<E> const d(dy.data() + r * outputs(), index(filters_), index(pixels));
            detail::add_product_nt<E>(dw, d, unfolded(r));
            for (std::size_t f = 0; f < filters_; ++f) db[f] += detail::lane_sum<E>::of(d.data() + f * pixels, pixels);
            if (!mode.input_gradient) continue;
            E* const to = dx.data() + r * inputs();
            if (is_the_image()) {
                detail::product_tn<E>(matrix_view<E>(to, index(taps_), index(pixels)), weight(), d);
            } else {
                matrix_view<E> panel = panel_.take(taps_, pixels);
                detail::product_tn<E>(panel, weight(), d);
                detail::fold(to, panel.data(), window_);
            }
        }
        return dx;
    }

private:
    static std::size_t checked(std::size_t filters) {
        DDP_EXPECTS(filters > 0, "conv2d: filters is 0; set .filters to at least 1");
        return filters;
    }
    static Eigen::Index index(std::size_t n) noexcept { return static_cast<Eigen::Index>(n); }
    [[nodiscard]] const_matrix_view<E> weight() const {
        return as_matrix(std::span<E const>(parameters_[0].value()), filters_, taps_);
    }
    /// A 1 x 1 kernel's panel is the image.
    [[nodiscard]] bool is_the_image() const noexcept { return window_.kernel == 1 && window_.stride == 1; }
    /// Image r of the last forward as (taps, pixels). Valid until the next call.
    [[nodiscard]] const_matrix_view<E> unfolded(std::size_t r) {
        std::size_t const pixels = window_.out_plane();
        E const* const image = x_ + r * inputs();
        if (is_the_image()) return {image, index(taps_), index(pixels)};
        matrix_view<E> panel = panel_.take(taps_, pixels);
        detail::unfold(panel.data(), image, window_);
        return read_only(panel);
    }

    detail::window window_;
    std::size_t filters_, taps_;  // taps: weights of a filter
    std::array<trainable<E>, 2> parameters_;
    E const* x_ = nullptr;  // (rows_, inputs()), of the last forward
    std::size_t rows_ = 0;
    buffer<E> panel_, y_, dx_;
};
static_assert(LayerOf<conv2d<float>, float>);

}  // namespace ddp::nn

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
