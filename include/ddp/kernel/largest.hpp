/// \file
/// largest_elements: where the k elements of largest magnitude stand.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <ddp/core/contract.hpp>
#include <ddp/kernel/kernel.hpp>

namespace ddp {

namespace detail::kernels {

template <std::floating_point E>
using magnitude_bits = std::conditional_t<sizeof(E) == 4, std::uint32_t, std::uint64_t>;
/// Ordered as magnitudes are; NaN last.
template <std::floating_point E>
[[nodiscard, gnu::always_inline]] inline magnitude_bits<E> magnitude(E x) noexcept {
    return static_cast<magnitude_bits<E>>(std::bit_cast<magnitude_bits<E>>(x) << 1);
}
inline constexpr std::size_t magnitude_block = 32;

/// Whether one of magnitude_block elements has a magnitude whose bits under `known` are `wanted`.
template <std::floating_point E>
DDP_KERNEL bool has_magnitude(E const* data, magnitude_bits<E> known, magnitude_bits<E> wanted) {
    magnitude_bits<E> found = 0;
    for (std::size_t i = 0; i < magnitude_block; ++i)
        found |= static_cast<magnitude_bits<E>>((magnitude(data[i]) & known) == wanted ? 1 : 0);
    return found != 0;
}
template <std::floating_point E>
DDP_KERNEL bool has_magnitude_from(E const* data, magnitude_bits<E> least) {
    magnitude_bits<E> most = 0;
    for (std::size_t i = 0; i < magnitude_block; ++i) most = std::max(most, magnitude(data[i]));
    return most >= least;
}

}  // namespace detail::kernels

/// Indices of the `out.size()` elements of largest magnitude, ascending; of equal ones, those that stand first. NaN counts as
/// larger than infinity. Throws usage_error if there are fewer elements, or 2^32 or more.
///
/// Cost    one pass for each 11 bits of an element (3 for float, 6 for double), and one to collect; 32 KiB of stack.
template <std::floating_point E>
void largest_elements(std::span<E const> data, std::span<std::uint32_t> out) {
    namespace kernels = detail::kernels;
    using bits = kernels::magnitude_bits<E>;
    constexpr int width = sizeof(E) * 8, digit = 11;
    constexpr std::size_t block = kernels::magnitude_block;
    DDP_EXPECTS(out.size() <= data.size() && data.size() <= 0xffffffffu,
                "largest_elements: as many elements as are asked for, and no more than 2^32 - 1");
    if (out.empty()) return;
    // The magnitude of the last one that is taken, digit by digit from the highest; `left` of those that equal it so far.
    bits threshold = 0, known = 0;
    std::size_t left = out.size();
    for (int shift = width; shift > 0;) {
        int const taken = std::min(digit, shift);
        shift -= taken;
        std::array<std::array<std::uint32_t, std::size_t{1} << digit>, 4>
            histogram{};  // neighbours often have one digit
        auto const mask = static_cast<bits>((bits{1} << taken) - 1);
        for (std::size_t at = 0; at < data.size(); at += block) {
            std::size_t const end = std::min(data.size(), at + block);
            if (known != 0 && end - at == block && !kernels::has_magnitude(data.data() + at, known, threshold))
                continue;
            for (std::size_t i = at; i < end; ++i) {
                bits const m = kernels::magnitude(data[i]);
                if ((m & known) == threshold) ++histogram[i % 4][static_cast<std::size_t>(m >> shift & mask)];
            }
        }
        auto value = static_cast<std::size_t>(mask);
        for (;; --value) {
            std::size_t const here =
                std::size_t{histogram[0][value]} + histogram[1][value] + histogram[2][value] + histogram[3][value];
            if (here >= left) break;
            left -= here;
        }
        threshold = static_cast<bits>(threshold | static_cast<bits>(value) << shift);
        known = static_cast<bits>(known | mask << shift);
    }
    std::size_t found = 0;
    for (std::size_t at = 0; found < out.size(); at += block) {
        std::size_t const end = std::min(data.size(), at + block);
        if (end - at == block && !kernels::has_magnitude_from(data.data() + at, threshold)) continue;
        for (std::size_t i = at; i < end && found < out.size(); ++i) {
            bits const m = kernels::magnitude(data[i]);
            if (m < threshold || (m == threshold && left == 0)) continue;
            if (m == threshold) --left;
            out[found++] = static_cast<std::uint32_t>(i);
        }
    }
}

}  // namespace ddp
