/// \file
/// Square roots of many elements: correctly rounded, hence the same everywhere, and several at a time.
#pragma once

#include <concepts>
#include <cstddef>

#include <ddp/core/math.hpp>
#include <ddp/kernel/kernel.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::detail::kernels {

/// data[i] = sqrt(data[i]). Both compilers keep std::sqrt scalar because it may set errno, GCC even under
/// optimize("no-math-errno"); so each compiler needs its own form.
template <std::floating_point E>
DDP_KERNEL void square_roots(E* data, std::size_t count) {
    std::size_t i = 0;
#if defined(__clang__) && __has_builtin(__builtin_elementwise_sqrt)
    DDP_INDEPENDENT
    for (; i < count; ++i) data[i] = __builtin_elementwise_sqrt(data[i]);
#elif defined(__GNUC__) && !defined(__clang__) && defined(__SSE2__)
#if defined(__AVX__)
    typedef E lanes __attribute__((vector_size(32)));
#else
    typedef E lanes __attribute__((vector_size(16)));
#endif
    constexpr std::size_t width = sizeof(lanes) / sizeof(E);
    for (; i + width <= count; i += width) {
        lanes x;
        __builtin_memcpy(&x, data + i, sizeof x);
#if defined(__AVX__)
        if constexpr (sizeof(E) == sizeof(float)) x = __builtin_ia32_sqrtps256(x);
        if constexpr (sizeof(E) == sizeof(double)) x = __builtin_ia32_sqrtpd256(x);
#else
        if constexpr (sizeof(E) == sizeof(float)) x = __builtin_ia32_sqrtps(x);
        if constexpr (sizeof(E) == sizeof(double)) x = __builtin_ia32_sqrtpd(x);
#endif
        __builtin_memcpy(data + i, &x, sizeof x);
    }
#endif
    for (; i < count; ++i) data[i] = detail::square_root(data[i]);
}

}  // namespace ddp::detail::kernels

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
