/// \file
/// int8_groups: numbers of 8 bits with a common scale a group, as they travel.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include <ddp/kernel/kernel.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::detail::kernels {

inline constexpr std::size_t int8_group = 256;  // elements with one scale

/// The largest magnitude; NaN or infinity if one of the elements is.
template <std::floating_point E>
DDP_KERNEL E largest_magnitude(E const* in, std::size_t count) {
    // Magnitudes are ordered as their bits are, and what is not finite comes last.
    using bits = std::conditional_t<sizeof(E) == 4, std::int32_t, std::int64_t>;
    bits most = 0;
    for (std::size_t i = 0; i < count; ++i)
        most = std::max(most, static_cast<bits>(std::bit_cast<bits>(in[i]) & std::numeric_limits<bits>::max()));
    return std::bit_cast<E>(most);
}
/// out[i] = in[i] * inverse, to the nearest whole number, ties to even; magnitudes stay below 2^21.
template <std::floating_point E>
DDP_KERNEL void to_whole(E const* in, std::int8_t* out, std::size_t count, float inverse) {
    DDP_NO_CONTRACTION
    constexpr float magic = 0x1.8p23f;  // at this magnitude floats are whole numbers
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i)
        out[i] =
            static_cast<std::int8_t>(static_cast<std::int32_t>((static_cast<float>(in[i]) * inverse + magic) - magic));
}
template <std::floating_point E>
DDP_KERNEL void from_whole(std::int8_t const* in, E* out, std::size_t count, float scale) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<E>(static_cast<float>(in[i]) * scale);
}

/// Bytes of `count` elements: each group's scale, a float, then its elements.
[[nodiscard]] constexpr std::size_t int8_bytes(std::size_t count) noexcept {
    return count + (count + int8_group - 1) / int8_group * sizeof(float);
}
/// Each group on the scale of its largest magnitude, which becomes 127. An element that is not finite makes its whole group NaN.
/// A group below 127 times the smallest normal float becomes zero.
template <std::floating_point E>
void to_int8(E const* in, std::byte* out, std::size_t count) {
    for (std::size_t at = 0; at < count; at += int8_group) {
        std::size_t const group = std::min(int8_group, count - at);
        float scale = static_cast<float>(largest_magnitude(in + at, group)) / 127.0f;
        if (scale < std::numeric_limits<float>::min()) scale = 0;
        bool const usable = scale > 0 && scale <= std::numeric_limits<float>::max() / 127;
        if (usable && !(scale * 127.0f <= std::numeric_limits<float>::max())) scale = std::nextafter(scale, 0.0f);
        auto* const numbers = reinterpret_cast<std::int8_t*>(out + sizeof scale);
        if (usable) {
            to_whole(in + at, numbers, group, 1 / scale);
        } else {
            if (scale != 0) scale = std::numeric_limits<float>::quiet_NaN();
            std::memset(numbers, 0, group);
        }
        std::memcpy(out, &scale, sizeof scale);
        out += sizeof scale + group;
    }
}
template <std::floating_point E>
void from_int8(std::byte const* in, E* out, std::size_t count) {
    for (std::size_t at = 0; at < count; at += int8_group) {
        std::size_t const group = std::min(int8_group, count - at);
        float scale = 0;
        std::memcpy(&scale, in, sizeof scale);
        from_whole(reinterpret_cast<std::int8_t const*>(in + sizeof scale), out + at, group, scale);
        in += sizeof scale + group;
    }
}

}  // namespace ddp::detail::kernels

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
