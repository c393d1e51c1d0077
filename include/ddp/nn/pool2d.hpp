/// \file
/// max_pool2d and average_pool2d: one number for each window of a plane.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include <ddp/kernel/kernel.hpp>
#include <ddp/nn/image.hpp>
#include <ddp/nn/layer.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::nn {

/// Options of max_pool2d and average_pool2d.
struct pool2d_options {
    std::size_t kernel = 2;   ///< pixels, in both directions
    std::size_t stride = 0;   ///< pixels; 0: the same as kernel
    std::size_t padding = 0;  ///< pixels on each side
};

/// For pool2d: the largest pixel of a window, the first of several equal ones; NaN if any is NaN. Pixels outside the
/// image are ignored.
struct window_largest {
    static constexpr char const* name = "max_pool2d";

    /// The larger of two, the first among equals, NaN before all.
    template <Element E>
    static E of(E a, E b) {
        return a >= b || a != a ? a : b;
    }
    template <Element E>
    DDP_KERNEL static void value(E* y, E const* x, detail::window const& w) {
        for (std::size_t oy = 0; oy < w.out_height; ++oy)
            for (std::size_t ox = 0; ox < w.out_width; ++ox) *y++ = x[place(x, w, oy, ox)];
    }
    template <Element E>
    DDP_KERNEL static void gradient(E* dx, E const* dy, E const* x, detail::window const& w) {
        std::fill_n(dx, w.in.plane(), E{0});
        for (std::size_t oy = 0; oy < w.out_height; ++oy)
            for (std::size_t ox = 0; ox < w.out_width; ++ox) dx[place(x, w, oy, ox)] += *dy++;
    }

    // Halving, the common case: compares and selections that compilers vectorise, and no memory of where.

    template <Element E>
    DDP_KERNEL static void halved(E* y, E const* x, detail::window const& w) {
        for (std::size_t oy = 0; oy < w.out_height; ++oy, y += w.out_width) {
            E const* const top = x + 2 * oy * w.in.width;
            E const* const low = top + w.in.width;
            DDP_INDEPENDENT
            for (std::size_t o = 0; o < w.out_width; ++o)
                y[o] = of(of(top[2 * o], top[2 * o + 1]), of(low[2 * o], low[2 * o + 1]));
        }
    }
    template <Element E>
    DDP_KERNEL static void halved_gradient(E* dx, E const* dy, E const* x, detail::window const& w) {
        for (std::size_t oy = 0; oy < w.out_height; ++oy, dy += w.out_width) {
            std::size_t const line = 2 * oy * w.in.width;
            E const* const top = x + line;
            E const* const low = top + w.in.width;
            E* const dtop = dx + line;
            E* const dlow = dtop + w.in.width;
            DDP_INDEPENDENT
            for (std::size_t o = 0; o < w.out_width; ++o) {
                E const a = top[2 * o], b = top[2 * o + 1], c = low[2 * o], d = low[2 * o + 1];
                E const ab = of(a, b), cd = of(c, d);
                E const up = ab >= cd || ab != ab ? dy[o] : E{0}, down = ab >= cd || ab != ab ? E{0} : dy[o];
                dtop[2 * o] = a >= b || a != a ? up : E{0};
                dtop[2 * o + 1] = a >= b || a != a ? E{0} : up;
                dlow[2 * o] = c >= d || c != c ? down : E{0};
                dlow[2 * o + 1] = c >= d || c != c ? E{0} : down;
            }
            for (std::size_t i = 2 * w.out_width; i < w.in.width; ++i) dtop[i] = dlow[i] = 0;
        }
        std::fill(dx + 2 * w.out_height * w.in.width, dx + w.in.plane(), E{0});
    }

private:
    template <Element E>
    static std::size_t place(E const* x, detail::window const& w, std::size_t oy, std::size_t ox) {
        auto const ys = w.covers(oy, w.in.height), xs = w.covers(ox, w.in.width);
        std::size_t best = ys.begin * w.in.width + xs.begin;
        for (std::size_t iy = ys.begin; iy < ys.end; ++iy)
            for (std::size_t ix = xs.begin; ix < xs.end; ++ix) {
                std::size_t const at = iy * w.in.width + ix;
                if (!(x[best] >= x[at] || x[best] != x[best])) best = at;
            }
        return best;
    }
};

/// For pool2d: the mean of a window's kernel^2 pixels, in which those outside the image count as 0 (PyTorch's default).
struct window_mean {
    static constexpr char const* name = "average_pool2d";

    template <Element E>
    DDP_KERNEL static void value(E* y, E const* x, detail::window const& w) {
        DDP_NO_CONTRACTION
        E const share = E{1} / static_cast<E>(w.kernel * w.kernel);
        for (std::size_t oy = 0; oy < w.out_height; ++oy)
            for (std::size_t ox = 0; ox < w.out_width; ++ox) {
                auto const ys = w.covers(oy, w.in.height), xs = w.covers(ox, w.in.width);
                E sum = 0;
                for (std::size_t iy = ys.begin; iy < ys.end; ++iy)
                    for (std::size_t ix = xs.begin; ix < xs.end; ++ix) sum += x[iy * w.in.width + ix];
                *y++ = sum * share;
            }
    }
    template <Element E>
    DDP_KERNEL static void gradient(E* dx, E const* dy, E const*, detail::window const& w) {
        DDP_NO_CONTRACTION
        E const share = E{1} / static_cast<E>(w.kernel * w.kernel);
        std::fill_n(dx, w.in.plane(), E{0});
        for (std::size_t oy = 0; oy < w.out_height; ++oy)
            for (std::size_t ox = 0; ox < w.out_width; ++ox, ++dy) {
                auto const ys = w.covers(oy, w.in.height), xs = w.covers(ox, w.in.width);
                for (std::size_t iy = ys.begin; iy < ys.end; ++iy)
                    for (std::size_t ix = xs.begin; ix < xs.end; ++ix) dx[iy * w.in.width + ix] += *dy * share;
            }
    }
};

/// A layer that computes one number for each window of each plane by `Function`, which is window_largest (max_pool2d) or
/// window_mean (average_pool2d): (rows, channels * height * width) -> (rows, channels * output height * output width).
/// With the default options, `max_pool2d half(first.output_shape());` halves height and width.
///
/// Windows that would reach beyond the right or lower edge are left out, as in PyTorch. Backward reads the input again
/// instead of storing positions.
/// Cost    one pass over the activations in each direction; each window reads kernel^2 pixels.
/// Throws  usage_error if samples are not images of this shape, or the windows do not fit.
template <Element E, class Function>
class pool2d {
public:
    using element = E;
    static constexpr bool output_is_free = true, draws = false;

    explicit pool2d(image_shape in, pool2d_options const& options = {})
        : window_(Function::name, in, options.kernel, options.stride == 0 ? options.kernel : options.stride,
                  options.padding),
          halves_(window_.kernel == 2 && window_.stride == 2 && window_.padding == 0) {}

    /// Ranks and checkpoints compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept { return window_.hash(Function::name); }
    [[nodiscard]] std::string hash_words() const { return window_.hash_words(Function::name); }
    [[nodiscard]] image_shape output_shape() const noexcept {
        return {window_.in.channels, window_.out_height, window_.out_width};
    }
    [[nodiscard]] std::size_t inputs() const noexcept { return window_.in.size(); }
    [[nodiscard]] std::size_t outputs() const noexcept { return output_shape().size(); }

    matrix_view<E> forward(const_matrix_view<E> x, forward_mode) {
        detail::expect_images(Function::name, window_.in, columns_of(x));
        x_ = x.data();
        rows_ = rows_of(x);
        matrix_view<E> y = y_.take(rows_, outputs());
        for (std::size_t p = 0; p < rows_ * window_.in.channels; ++p) {
            E* const to = y.data() + p * window_.out_plane();
            E const* const from = x_ + p * window_.in.plane();
            if constexpr (requires { Function::halved(to, from, window_); })
                if (halves_) {
                    Function::halved(to, from, window_);
                    continue;
                }
            Function::value(to, from, window_);
        }
        return y;
    }
    matrix_view<E> backward(matrix_view<E> dy, backward_mode mode) {
        matrix_view<E> dx = dx_.take(mode.input_gradient ? rows_ : 0, inputs());
        for (std::size_t p = 0; p < rows_of(dx) * window_.in.channels; ++p) {
            std::size_t const at = p * window_.in.plane();
            E const* const from = dy.data() + p * window_.out_plane();
            if constexpr (requires { Function::halved_gradient(dx.data(), from, x_, window_); })
                if (halves_) {
                    Function::halved_gradient(dx.data() + at, from, x_ + at, window_);
                    continue;
                }
            Function::gradient(dx.data() + at, from, x_ + at, window_);
        }
        return dx;
    }

private:
    detail::window window_;
    bool halves_;
    E const* x_ = nullptr;  // (rows_, inputs()), of the last forward
    std::size_t rows_ = 0;
    buffer<E> y_, dx_;
};

/// The largest pixel of each window, or NaN if any is NaN; padding is ignored. No parameters. Throws and cost:
/// see pool2d.
template <Element E = float>
struct max_pool2d : pool2d<E, window_largest> {
    explicit max_pool2d(image_shape in, pool2d_options const& options = {}) : pool2d<E, window_largest>(in, options) {}
};

/// The mean of each window's kernel^2 pixels; those that padding adds count as 0. No parameters. Throws and cost:
/// see pool2d.
template <Element E = float>
struct average_pool2d : pool2d<E, window_mean> {
    explicit average_pool2d(image_shape in, pool2d_options const& options = {}) : pool2d<E, window_mean>(in, options) {}
};

static_assert(LayerOf<max_pool2d<float>, float> && LayerOf<average_pool2d<double>, double>);

}  // namespace ddp::nn

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
