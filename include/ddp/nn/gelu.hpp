/// \file
/// gelu and gelu_erf: x times the probability that a normal number is below x, by tanh and by erf.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <ddp/core/digest.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/nn/activation.hpp>
#include <ddp/nn/layer.hpp>
#include <ddp/nn/products.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
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

/// y = erf(x / sqrt(2)). In float a rational approximation, absolute error below 5e-7, of odd degree 13 over even degree
/// 8 (the one of Eigen's unsupported module); in double the C library's, which compilers do not vectorise.
template <Element E>
DDP_KERNEL void error_function(E* y, E const* x, std::size_t count) {
    DDP_NO_CONTRACTION
    constexpr E root = E(0.70710678118654752440);
    if constexpr (std::same_as<E, float>) {
        DDP_INDEPENDENT
        for (std::size_t i = 0; i < count; ++i) {
            E const u = x[i] * root;
            E const v = u > E(4) ? E(4) : u < E(-4) ? E(-4) : u;  // NaN stays
            E const z = v * v;
            E top = E(-2.72614225801306e-10);
            top = top * z + E(2.77068142495902e-08);
            top = top * z + E(-2.10102402082508e-06);
            top = top * z + E(-5.69250639462346e-05);
            top = top * z + E(-7.34990630326855e-04);
            top = top * z + E(-2.95459980854025e-03);
            top = top * z + E(-1.60960333262415e-02);
            E bottom = E(-1.45660718464996e-05);
            bottom = bottom * z + E(-2.13374055278905e-04);
            bottom = bottom * z + E(-1.68282697438203e-03);
            bottom = bottom * z + E(-7.37332916720468e-03);
            bottom = bottom * z + E(-1.42647390514189e-02);
            y[i] = v * top / bottom;
        }
    } else {
        for (std::size_t i = 0; i < count; ++i) y[i] = std::erf(x[i] * root);
    }
}

/// t = exp(-x^2 / 2) / sqrt(2 pi), by Eigen's exp.
template <Element E>
void normal_density(E* t, E const* x, std::size_t count) {
    auto const n = static_cast<Eigen::Index>(count);
    Eigen::Map<Eigen::Array<E, Eigen::Dynamic, 1> const> const from(x, n);
    Eigen::Map<Eigen::Array<E, Eigen::Dynamic, 1>>(t, n) = E(0.39894228040143267794) * (E(-0.5) * from * from).exp();
}

/// y = gelu(x), which may be in place, and t = gelu'(x), from t = the density and erf = erf(x / sqrt(2)).
template <Element E>
DDP_KERNEL void gelu_from_erf(E* y, E* t, E const* erf, E const* x, std::size_t count) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E const v = x[i], below = E(0.5) * (E{1} + erf[i]);
        t[i] = below + v * t[i];
        y[i] = v * below;
    }
}

}  // namespace detail

/// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) for each element: the form that GPT-2 uses, PyTorch's
/// GELU(approximate="tanh"). It differs by less than 5e-4 from gelu_erf, PyTorch's default form. No parameters.
///
/// Cost    forward: a tanh and two passes; it keeps the derivative, one array of the input's size. Backward: one pass.
/// Source  Hendrycks and Gimpel, "Gaussian error linear units", arXiv:1606.08415.
template <Element E = float>
class gelu {
public:
    using element = E;
    static constexpr bool output_is_free = true, draws = false;

    /// Ranks and checkpoints compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash("gelu"); }
    [[nodiscard]] std::string hash_words() const { return "gelu"; }

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

/// 0.5 x (1 + erf(x / sqrt(2))) for each element: the form that BERT uses, PyTorch's default GELU(). Absolute error about
/// 3e-7 |x| in float; in double the C library's erf. No parameters.
///
/// Cost    forward: an exp, an erf (in double one call for each element) and a pass; it keeps the derivative, which is
///         that of the exact function, and needs two arrays of the input's size. Backward: one pass.
/// Source  as gelu.
template <Element E = float>
class gelu_erf {
public:
    using element = E;
    static constexpr bool output_is_free = true, draws = false;

    /// Ranks and checkpoints compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash("gelu_erf"); }
    [[nodiscard]] std::string hash_words() const { return "gelu_erf"; }

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
        std::span<E> const t = slope_.take(count), erf = erf_.take(count);
        detail::error_function(erf.data(), x, count);
        detail::normal_density(t.data(), x, count);
        detail::gelu_from_erf(y.data(), t.data(), std::as_const(erf).data(), x, count);
        return y;
    }

    buffer<E> slope_, erf_, y_;  // slope: of the last forward
};
static_assert(LayerOf<gelu<float>, float> && LayerOf<gelu_erf<double>, double>);

}  // namespace ddp::nn

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
