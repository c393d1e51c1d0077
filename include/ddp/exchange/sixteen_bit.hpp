/// \file
/// bfloat16 and half: numbers of 16 bits, as they travel. Nothing is computed in them.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <ddp/kernel/kernel.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp {

/// The upper half of a float: its range, 8 bits of precision (relative error at most 2^-9).
struct bfloat16 {
    static constexpr char const* name = "bfloat16";

    /// To the nearest, ties to even; beyond the largest to infinity; NaN stays NaN.
    [[nodiscard, gnu::always_inline]] static constexpr std::uint16_t narrow(float x) noexcept {
        auto const bits = std::bit_cast<std::uint32_t>(x);
        std::uint32_t const nan = bits >> 16 | 0x40u, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
    [[nodiscard, gnu::always_inline]] static constexpr float widen(std::uint16_t x) noexcept {
        return std::bit_cast<float>(std::uint32_t{x} << 16);
    }
};

/// IEEE 754 binary16: 11 bits of precision (relative error at most 2^-12) between 2^-14 and 65504, multiples of 2^-24 below.
struct half {
    static constexpr char const* name = "half";

    // Each case is computed, and masks choose: GCC leaves loops scalar where a floating-point operation is conditional.

    /// To the nearest, ties to even; from 65520 on to infinity; NaN stays NaN.
    [[nodiscard, gnu::always_inline]] static constexpr std::uint16_t narrow(float x) noexcept {
        auto const all = std::bit_cast<std::uint32_t>(x);
        std::uint32_t const sign = all & 0x80000000u, bits = all ^ sign;
        // Below 2^-14 the addition of 1/2 leaves the number's multiple of 2^-24 in the last bits, rounded by the processor.
        std::uint32_t const small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3f000000u;
        std::uint32_t const normal = (bits + 0xc8000fffu + (bits >> 13 & 1u)) >> 13;  // the exponent's bias less 112
        std::uint32_t const large = 0x7c00u | (mask(bits > 0x7f800000u) & 0x0200u);
        std::uint32_t const is_small = mask(bits < 0x38800000u), is_large = mask(bits >= 0x47800000u);
        return static_cast<std::uint16_t>((small & is_small) | (large & is_large) | (normal & ~(is_small | is_large)) |
                                          sign >> 16);
    }
    [[nodiscard, gnu::always_inline]] static constexpr float widen(std::uint16_t x) noexcept {
        std::uint32_t const bits = (x & 0x7fffu) << 13, exponent = bits & 0x0f800000u;
        // Below 2^-14 the bits count multiples of 2^-24: put behind 2^-14's exponent, of which 2^-14 is then taken away.
        std::uint32_t const small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits + 0x38800000u) - 0x1p-14f);
        std::uint32_t const normal = bits + 0x38000000u + (mask(exponent == 0x0f800000u) & 0x38000000u);
        std::uint32_t const is_small = mask(exponent == 0);
        return std::bit_cast<float>((small & is_small) | (normal & ~is_small) | (x & 0x8000u) << 16);
    }

private:
    [[nodiscard, gnu::always_inline]] static constexpr std::uint32_t mask(bool yes) noexcept {
        return 0u - static_cast<std::uint32_t>(yes);
    }
};

namespace detail::kernels {

#if defined(__F16C__)
/// half::narrow of eight numbers by the processor's own conversion, whose NaN are given the bits of half::narrow's.
[[gnu::always_inline]] inline void narrow_eight(float const* in, std::uint16_t* out) noexcept {
    using floats [[gnu::vector_size(32)]] = float;
    using halves [[gnu::vector_size(16)]] = std::int16_t;
    floats x;
    std::memcpy(&x, in, sizeof x);
    auto const to_nearest = std::bit_cast<halves>(__builtin_ia32_vcvtps2ph256(x, 0));
    halves const nan = (to_nearest & 0x7fff) > 0x7c00;
    halves const all = (to_nearest & ~nan) | (((to_nearest & std::int16_t{-0x8000}) | 0x7e00) & nan);
    std::memcpy(out, &all, sizeof all);
}
#endif

/// A double is rounded to float first.
template <class Format, std::floating_point E>
DDP_KERNEL void narrow(E const* in, std::uint16_t* out, std::size_t count) {
    DDP_NO_CONTRACTION
    std::size_t i = 0;
#if defined(__F16C__)
    if constexpr (std::is_same_v<Format, half> && std::is_same_v<E, float>)
        for (; i + 8 <= count; i += 8) narrow_eight(in + i, out + i);
#endif
    DDP_INDEPENDENT
    for (; i < count; ++i) out[i] = Format::narrow(static_cast<float>(in[i]));
}
template <class Format, std::floating_point E>
DDP_KERNEL void widen(std::uint16_t const* in, E* out, std::size_t count) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<E>(Format::widen(in[i]));
}

}  // namespace detail::kernels
}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
