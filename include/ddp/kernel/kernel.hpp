/// \file
/// DDP_KERNEL: marks functions that do arithmetic on elements, so that their bits do not depend on the compiler.
#pragma once

#include <cfloat>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include <ddp/core/error.hpp>

#if defined(__FAST_MATH__)
#error "ddp: -ffast-math lets every rank round differently. Compile without it; the kernels are vectorised anyway."
#endif
#if FLT_EVAL_METHOD != 0
#error "ddp: float expressions are evaluated in a wider type here. Compile with -msse2 -mfpmath=sse, or for 64 bits."
#endif

// GCC ignores the standard's contraction pragma, and leaves such loops scalar at -O2, with which users compile: so both
// are set per function, and hold at -O0 too.
#if defined(__clang__)
#define DDP_KERNEL __attribute__((noinline))
#define DDP_NO_CONTRACTION _Pragma("clang fp contract(off)")
#define DDP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define DDP_KERNEL __attribute__((noinline, optimize("O3", "fp-contract=off")))
#define DDP_NO_CONTRACTION
#define DDP_INDEPENDENT _Pragma("GCC ivdep")
#else
#error "ddp: unsupported compiler: define how it disables contraction, as above for GCC and Clang."
#endif

/// \def DDP_KERNEL
/// Marks a kernel: a function that does arithmetic on elements, and whose bits must not depend on the
/// compiler. A compiler may contract a * b + c into one fused operation, which rounds once instead of twice, and decides
/// this separately at each place: the same formula can give other bits in another function, with other flags, or in the
/// scalar remainder of a loop. Kernels are compiled without contraction, so a range has the same bits whether it is
/// computed in one piece or in several, in one pass or in three.
///
///     template <std::floating_point E>
///     DDP_KERNEL void axpy(E* out, E const* in, std::size_t count, E factor) {
///         DDP_NO_CONTRACTION
///         DDP_INDEPENDENT
///         for (std::size_t i = 0; i < count; ++i) out[i] += factor * in[i];
///     }
///
///  - Take pointers and scalars, not spans: accessors that the compiler does not inline, as in debug builds, remain
///    calls.
///  - DDP_NO_CONTRACTION is the first statement.
///  - Never put such a loop into a coroutine, where Clang does not vectorise it: it would be 9 to 11 times slower. For
///    the same reason a kernel is never inlined.
///  - Only + - * / and square roots round the same everywhere. exp, pow and cos of a C library may give other bits on
///    other processors.

/// \def DDP_NO_CONTRACTION
/// The first statement of a DDP_KERNEL function. It applies only to the function in which it is
/// written: a function that does arithmetic and is inlined into a kernel needs one of its own.

/// \def DDP_INDEPENDENT
/// Placed before a loop in which no iteration reads what another one writes. Its arrays may be the
/// same (computing in place) but may not overlap otherwise; without it, a loop that computes in place uses its scalar
/// form at run time. Clang warns (-Wpass-failed) if it cannot vectorise such a loop, for example because of UBSan's
/// checks; the library's own headers disable this warning around their kernels.

namespace ddp {

namespace detail::kernels {

/// The probe of contraction_is_off(): looks like the kernels do.
template <std::floating_point E>
DDP_KERNEL void products_minus(E* out, E const* left, E const* right, E const* minus, std::size_t count) {
    DDP_NO_CONTRACTION
    for (std::size_t i = 0; i < count; ++i) out[i] = left[i] * right[i] - minus[i];
}

/// Whether (1 + u)^2 - (1 + 2u) is 0 for a u whose square is lost in rounding; fused, it is u^2.
template <std::floating_point E>
[[nodiscard]] inline bool products_are_rounded() {
    constexpr std::size_t count = 37;  // vector body and scalar tail
    constexpr E u = sizeof(E) == sizeof(float) ? E(1) / (1 << 13) : E(1) / (1 << 27);
    E const volatile factor = E(1) + u;  // volatile: nothing is computed at compile time
    E const volatile rounded = E(1) + 2 * u;
    E left[count];
    E right[count];
    E minus[count];
    E out[count];
    for (std::size_t i = 0; i < count; ++i) {
        left[i] = right[i] = factor;
        minus[i] = rounded;
    }
    products_minus(out, left, right, minus, count);
    for (E const difference : out)
        if (difference != 0) return false;
    return true;
}

/// base^exponent by squaring, for scalars on which ranks must agree: the C library's pow differs between processors.
/// Relative error at most about exponent * 1e-16.
DDP_KERNEL inline double power(double base, std::uint64_t exponent) {
    DDP_NO_CONTRACTION
    double result = 1;
    for (; exponent != 0; exponent >>= 1, base *= base)
        if ((exponent & 1) != 0) result *= base;
    return result;
}

/// base - left * right, rounded twice: for scalars on which ranks must agree, whatever flags each was compiled with.
DDP_KERNEL inline double minus_product(double base, double left, double right) {
    DDP_NO_CONTRACTION
    return base - left * right;
}

/// cos(pi * x) for x in [0, 1], by its Taylor series on [0, 1/2] and by symmetry: the same bits on every processor,
/// exact at 0, 1/2 and 1, absolute error below 4e-16.
DDP_KERNEL inline double cosine(double x) {
    DDP_NO_CONTRACTION
    if (x == 0.5) return 0;
    bool const mirrored = x > 0.5;
    double const angle = 3.141592653589793238 * (mirrored ? 1 - x : x);
    double const square = angle * angle;
    double sum = 1;
    for (int k = 24; k > 0; k -= 2) sum = 1 - square / (k * (k - 1)) * sum;  // Horner, from the 24th power down
    return mirrored ? -sum : sum;
}

}  // namespace detail::kernels

/// Whether this program was compiled so that kernels round every product. Clang's -ffp-contract=fast overrides the
/// pragma and cannot be detected by the preprocessor. Called once at the start of training; costs a microsecond.
[[nodiscard]] inline bool contraction_is_off() {
    return detail::kernels::products_are_rounded<float>() && detail::kernels::products_are_rounded<double>();
}

/// Throws usage_error, with the remedy, unless contraction_is_off().
inline void expect_uncontracted_kernels() {
    if (!contraction_is_off())
        throw usage_error(
            "this program was compiled so that a * b + c rounds once, even where the library forbids it; ranks and "
            "buckets would then differ in their last bits. Compile without -ffp-contract=fast (Clang) and without "
            "-ffast-math or its parts.");
}

}  // namespace ddp
