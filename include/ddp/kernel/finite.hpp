/// \file
/// first_nonfinite: where NaN or an infinity stands.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <ddp/kernel/kernel.hpp>

namespace ddp {

namespace detail::kernels {

template <std::floating_point E>
DDP_KERNEL bool all_finite(E const* data, std::size_t count) {
    using bits = std::conditional_t<sizeof(E) == 4, std::uint32_t, std::uint64_t>;
    constexpr bits exponent = sizeof(E) == 4 ? bits{0x7f800000u} : static_cast<bits>(0x7ff0000000000000u);
    bits bad = 0;
    for (std::size_t i = 0; i < count; ++i)
        bad |= static_cast<bits>((std::bit_cast<bits>(data[i]) & exponent) == exponent ? 1 : 0);
    return bad == 0;
}

}  // namespace detail::kernels

/// Index of the first element that is NaN or infinite; data.size() if there is none.
/// Cost    one pass at the speed of memory.
template <std::floating_point E>
[[nodiscard]] std::size_t first_nonfinite(std::span<E const> data) {
    constexpr std::size_t block = 1024;
    for (std::size_t at = 0; at < data.size(); at += block) {
        std::size_t const end = std::min(data.size(), at + block);
        if (detail::kernels::all_finite(data.data() + at, end - at)) continue;
        while (at < end && detail::kernels::all_finite(data.data() + at, 1)) ++at;
        return at;
    }
    return data.size();
}

}  // namespace ddp
