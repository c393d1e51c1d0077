/// \file
/// Activations: element-wise functions whose derivative is a function of their value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <ddp/core/digest.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/nn/layer.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::nn {

/// max(x, 0). NaN stays NaN, so that a diverged training is noticed. The derivative at 0 is 0.
struct rectifier {
    static constexpr char const* name = "relu";
    template <Element E>
    DDP_KERNEL static void value(E* y, E const* x, std::size_t count) {
        DDP_INDEPENDENT
        for (std::size_t i = 0; i < count; ++i) y[i] = x[i] < E{0} ? E{0} : x[i];
    }
    template <Element E>
    DDP_KERNEL static void derivative(E* d, E const* y, std::size_t count) {  // d *= f', f' from the value y
        DDP_INDEPENDENT
        for (std::size_t i = 0; i < count; ++i) d[i] = y[i] <= E{0} ? E{0} : d[i];
    }
};

/// tanh(x), by Eigen: a rational approximation in float (a few units in the last place), the C library's in double.
struct hyperbolic_tangent {
    static constexpr char const* name = "tanh";
    template <Element E>
    static void value(E* y, E const* x, std::size_t count) {
        auto const n = static_cast<Eigen::Index>(count);
        Eigen::Map<Eigen::Array<E, Eigen::Dynamic, 1>>(y, n) =
            Eigen::Map<Eigen::Array<E, Eigen::Dynamic, 1> const>(x, n).tanh();
    }
    template <Element E>
    DDP_KERNEL static void derivative(E* d, E const* y, std::size_t count) {
        DDP_NO_CONTRACTION
        DDP_INDEPENDENT
        for (std::size_t i = 0; i < count; ++i) d[i] *= E{1} - y[i] * y[i];
    }
};

/// A layer that applies a function to each element. `Function` has two static function templates over arrays of `count`
/// elements:
///  value(y, x, count)       y[i] = f(x[i]); y and x may be the same array
///  derivative(d, y, count)  multiplies d[i] by the derivative of f, computed from its value y[i]
///
/// Optional: a static constant `name`, which ranks and checkpoints compare. With DDP_KERNEL both functions give the same bits
/// with every compiler option and vector length; without it, in one build only.
///
/// Backward works in place on the gradient that it is given, and so does forward on its input if the layer before no
/// longer needs it. No parameters. Cost: one pass over the activations in each direction.
template <Element E, class Function>
class activation {
public:
    using element = E;
    static constexpr bool draws = false;  ///< no random numbers

    /// A digest of the function's name; 0 if it has none.
    [[nodiscard]] std::uint64_t hash() const noexcept {
        if constexpr (requires { Function::name; }) return policy_hash(Function::name);
        return 0;
    }
    [[nodiscard]] std::string hash_words() const {
        if constexpr (requires { Function::name; }) return std::string(Function::name);
        return {};
    }
    matrix_view<E> forward(const_matrix_view<E> x, forward_mode) {
        matrix_view<E> y = y_.take(rows_of(x), columns_of(x));
        Function::value(y.data(), x.data(), static_cast<std::size_t>(x.size()));
        kept_ = y.data();
        return y;
    }
    matrix_view<E> forward_in_place(matrix_view<E> y, forward_mode) {
        Function::value(y.data(), std::as_const(y).data(), static_cast<std::size_t>(y.size()));
        kept_ = y.data();
        return y;
    }
    matrix_view<E> backward(matrix_view<E> dy, backward_mode) {
        Function::derivative(dy.data(), kept_, static_cast<std::size_t>(dy.size()));
        return dy;
    }

private:
    E const* kept_ = nullptr;  // y of the last forward
    buffer<E> y_;
};

/// max(x, 0) for each element. The derivative at 0 is 0, and NaN stays NaN. No parameters. Cost: see activation.
template <Element E = float>
struct relu : activation<E, rectifier> {};

/// tanh(x) for each element: in float accurate to a few units in the last place, in double the C library's. No
/// parameters. Cost: see activation.
template <Element E = float>
struct tanh : activation<E, hyperbolic_tangent> {};

static_assert(LayerOf<relu<float>, float> && LayerOf<tanh<double>, double>);

}  // namespace ddp::nn

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
