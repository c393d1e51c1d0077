/// \file
/// gelu: x times the probability that a normal number is below x, by tanh.
#pragma once

#include <cstddef>
#include <utility>

#include <ddp/kernel/kernel.hpp>
#include <ddp/nn/activation.hpp>
#include <ddp/nn/layer.hpp>
#include <ddp/nn/products.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers' checks keep loops scalar, and nobody minds
#endif

namespace ddp::nn {

namespace detail {

inline constexpr double gelu_slope = 0.79788456080286535588;  // sqrt(2 / pi)
inline constexpr double gelu_cubic = 0.044715;

template <Element E>
DDP_KERNEL void gelu_argument(E* u, E const* x, std::size_t count) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) u[i] = E(gelu_slope) * x[i] * (E{1} + E(gelu_cubic) * x[i] * x[i]);
}

/// y = gelu(x), which may be in place, and t = gelu'(x), from t = tanh(u).
template <Element E>
DDP_KERNEL void gelu_from_tanh(E* y, E* t, E const* x, std::size_t count) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E const v = x[i], half = E(0.5) * (E{1} + t[i]);
        E const inner = E(gelu_slope) * (E{1} + E(3 * gelu_cubic) * v * v);
        t[i] = half + E(0.5) * v * (E{1} - t[i] * t[i]) * inner;
        y[i] = v * half;
    }
}

}  // namespace detail

/// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): the form of GPT-2, PyTorch's GELU(approximate="tanh"). The form by
/// erf, PyTorch's default, differs by less than 5e-4; it has no fast vectorised function here. The derivative is kept.
/// Cost: a tanh and two passes. Source: Hendrycks and Gimpel, "Gaussian error linear units", arXiv:1606.08415.
template <Element E = float>
class gelu {
public:
    using element = E;
    static constexpr bool output_is_free = true;

    matrix_view<E> forward(const_matrix_view<E> x, forward_mode) {
        matrix_view<E> y = y_.take(rows_of(x), columns_of(x));
        return value(y, x.data());
    }
    matrix_view<E> forward_in_place(matrix_view<E> y, forward_mode) { return value(y, std::as_const(y).data()); }
    matrix_view<E> backward(matrix_view<E> dy, backward_mode) {
        auto const count = static_cast<std::size_t>(dy.size());
        detail::multiply(dy.data(), std::as_const(dy).data(), slope_.take(count).data(), count);
        return dy;
    }

private:
    matrix_view<E> value(matrix_view<E> y, E const* x) {
        auto const count = static_cast<std::size_t>(y.size());
        std::span<E> const t = slope_.take(count);
        detail::gelu_argument(t.data(), x, count);
        hyperbolic_tangent::value(t.data(), t.data(), count);
        detail::gelu_from_tanh(y.data(), t.data(), x, count);
        return y;
    }

    buffer<E> slope_, y_;  // slope: of the last forward
};
static_assert(LayerOf<gelu<float>, float>);

}  // namespace ddp::nn

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
