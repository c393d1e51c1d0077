/// \file
/// largest_elements: where the k elements of largest magnitude stand.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
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
/// A table: SSE2 does not shift each number by its own count.
template <std::signed_integral Bits>
inline constexpr std::array<Bits, magnitude_block> bit_of_place = [] {
    std::array<Bits, magnitude_block> all{};
    for (std::size_t i = 0; i < magnitude_block; ++i) all[i] = static_cast<Bits>(std::uint32_t{1} << i);
    return all;
}();

/// A bit for each of magnitude_block elements: set where its magnitude, shifted right by one, is at least `from`.
template <std::floating_point E>
[[nodiscard, gnu::always_inline]] inline std::uint32_t hits_from(E const* data,
                                                                 std::make_signed_t<magnitude_bits<E>> from) noexcept {
    using ordered = std::make_signed_t<magnitude_bits<E>>;  // SSE2 compares signed numbers only
    ordered const all = std::numeric_limits<ordered>::max();
    ordered whole = 0;  // as wide as elements, so that the loop is vectorised
    for (std::size_t i = 0; i < magnitude_block; ++i)
        whole |=
            static_cast<ordered>((std::bit_cast<ordered>(data[i]) & all) >= from ? -1 : 0) & bit_of_place<ordered>[i];
    return static_cast<std::uint32_t>(whole);
}
/// Writes indices and values of the elements of at least this magnitude, ascending. Returns how many; room + 1 where there are
/// more than `room`.
///
/// Of several blocks first the bits, then which blocks have any, without a branch, and then these: whether a block has any is
/// as good as random where one element in a hundred is wanted, and a branch on it costs more than the comparisons.
template <std::floating_point E>
DDP_KERNEL std::size_t collect_from(E const* data, std::size_t count, magnitude_bits<E> least, std::uint32_t* indices,
                                    E* values, std::size_t room) {
    constexpr std::size_t blocks = 64;
    using ordered = std::make_signed_t<magnitude_bits<E>>;
    ordered const from = static_cast<ordered>(least >> 1);
    std::size_t found = 0;
    std::uint32_t hits[blocks];
    std::uint8_t some[blocks];
    for (std::size_t at = 0; at < count; at += blocks * magnitude_block) {
        std::size_t const here = std::min(count - at, blocks * magnitude_block), whole = here / magnitude_block;
        for (std::size_t b = 0; b < whole; ++b) hits[b] = hits_from(data + at + b * magnitude_block, from);
        std::size_t used = 0;
        for (std::size_t b = 0; b < whole; ++b) {
            some[used] = static_cast<std::uint8_t>(b);
            used += hits[b] != 0 ? 1 : 0;
        }
        if (whole * magnitude_block != here) {  // only at the end
            hits[whole] = 0;
            for (std::size_t i = 0; i < here % magnitude_block; ++i)
                if (magnitude(data[at + whole * magnitude_block + i]) >= least) hits[whole] |= std::uint32_t{1} << i;
            some[used] = static_cast<std::uint8_t>(whole);
            used += hits[whole] != 0 ? 1 : 0;
        }
        for (std::size_t k = 0; k < used; ++k) {
            std::uint32_t left = hits[some[k]];
            do {
                if (found == room) return room + 1;
                std::size_t const i = at + some[k] * magnitude_block + static_cast<std::size_t>(std::countr_zero(left));
                indices[found] = static_cast<std::uint32_t>(i);
                values[found++] = data[i];
                left &= left - 1;
            } while (left != 0);
        }
    }
    return found;
}

inline constexpr int magnitude_digit = 11;  // bits
inline constexpr std::size_t magnitude_digits = std::size_t{1} << magnitude_digit;

/// Of the magnitudes whose bits under `known` are `wanted`, in every stride-th block: counts the values of the bits above `shift`
/// that are in `mask`. In four histograms, because neighbours often have one value.
template <std::floating_point E>
DDP_KERNEL void count_digits(E const* data, std::size_t count, std::size_t stride, magnitude_bits<E> known,
                             magnitude_bits<E> wanted, int shift, magnitude_bits<E> mask, std::uint32_t* histograms) {
    for (std::size_t at = 0; at < count; at += stride * magnitude_block) {
        std::size_t const end = count - at < magnitude_block ? count : at + magnitude_block;
        if (known != 0 && end - at == magnitude_block && !has_magnitude(data + at, known, wanted)) continue;
        for (std::size_t i = at; i < end; ++i) {
            magnitude_bits<E> const m = magnitude(data[i]);
            if ((m & known) == wanted)
                ++histograms[i % 4 * magnitude_digits + static_cast<std::size_t>(m >> shift & mask)];
        }
    }
}
/// Writes the indices of the elements above this magnitude and of the first `equal` that have it: `wanted` in all.
template <std::floating_point E>
DDP_KERNEL void take_from(E const* data, std::size_t count, magnitude_bits<E> least, std::size_t equal,
                          std::uint32_t* out, std::size_t wanted) {
    for (std::size_t at = 0, found = 0; found < wanted; at += magnitude_block) {
        std::size_t const end = count - at < magnitude_block ? count : at + magnitude_block;
        if (end - at == magnitude_block && !has_magnitude_from(data + at, least)) continue;
        for (std::size_t i = at; i < end && found < wanted; ++i) {
            magnitude_bits<E> const m = magnitude(data[i]);
            if (m < least || (m == least && equal == 0)) continue;
            if (m == least) --equal;
            out[found++] = static_cast<std::uint32_t>(i);
        }
    }
}

/// The magnitude at a given rank, and how many elements of exactly that magnitude are among the largest `rank`.
template <std::floating_point E>
struct ranked {
    magnitude_bits<E> magnitude = 0;
    std::size_t equal = 0;
};
/// Finds the `rank`-th largest magnitude, from 1, in every stride-th block. These must hold at least `rank` elements.
template <std::floating_point E>
[[nodiscard]] ranked<E> magnitude_of_rank(std::span<E const> data, std::size_t stride, std::size_t rank) {
    using bits = magnitude_bits<E>;
    // Digit by digit from the highest; `left` of those that equal it so far.
    bits threshold = 0, known = 0;
    std::size_t left = rank;
    for (int shift = sizeof(E) * 8; shift > 0;) {
        int const taken = std::min(magnitude_digit, shift);
        shift -= taken;
        std::array<std::uint32_t, 4 * magnitude_digits> histograms{};
        auto const mask = static_cast<bits>((bits{1} << taken) - 1);
        count_digits(data.data(), data.size(), stride, known, threshold, shift, mask, histograms.data());
        auto value = static_cast<std::size_t>(mask);
        for (;; --value) {
            std::size_t here = 0;
            for (std::size_t of = 0; of < 4; ++of) here += histograms[of * magnitude_digits + value];
            if (here >= left) break;
            left -= here;
        }
        threshold = static_cast<bits>(threshold | static_cast<bits>(value) << shift);
        known = static_cast<bits>(known | mask << shift);
    }
    return {threshold, left};
}
/// largest_elements() by passes over all of them.
template <std::floating_point E>
void largest_of_all(std::span<E const> data, std::span<std::uint32_t> out) {
    auto const [least, equal] = magnitude_of_rank(data, 1, out.size());
    take_from(data.data(), data.size(), least, equal, out.data(), out.size());
}

/// One block in this many is looked at first, to guess where the largest begin.
inline constexpr std::size_t sample_stride = 64;

}  // namespace detail::kernels

/// How many candidates largest_elements() needs room for to choose k of n elements in little more than one pass; 0 where it
/// would not: k is more than n / 8, or n small.
[[nodiscard]] constexpr std::size_t largest_elements_room(std::size_t n, std::size_t k) noexcept {
    return n < (std::size_t{1} << 15) || k > n / 8 ? 0 : 2 * k + 4096;
}

/// Indices of the `out.size()` elements of largest magnitude, ascending; of equal ones, those that stand first. NaN counts as
/// larger than infinity. `indices` and `values` are room for candidates, of one length. Throws usage_error if there are fewer
/// elements than are asked for, or 2^32 or more.
///
/// Cost    with room for largest_elements_room() candidates one pass that collects, and one over a 64th before it, from which
///         the candidates' least magnitude is guessed. Without room, and where the guess was bad (most elements are equal;
///         the large ones stand together) one pass for each 11 bits of an element (3 for float, 6 for double), and one to
///         collect. 32 KiB of stack.
template <std::floating_point E>
void largest_elements(std::span<E const> data, std::span<std::uint32_t> out, std::span<std::uint32_t> indices = {},
                      std::span<std::type_identity_t<E>> values = {}) {
    namespace kernels = detail::kernels;
    constexpr std::size_t block = kernels::magnitude_block, stride = kernels::sample_stride;
    DDP_EXPECTS(out.size() <= data.size() && data.size() <= 0xffffffffu,
                "largest_elements: as many elements as are asked for, and no more than 2^32 - 1");
    DDP_EXPECTS(indices.size() == values.size(), "largest_elements: room for as many indices as values");
    if (out.empty()) return;
    if (std::size_t const room = largest_elements_room(data.size(), out.size()); room != 0 && indices.size() >= room) {
        std::size_t const sampled = data.size() / (stride * block) * block;  // of whole blocks
        double const expected =
            static_cast<double>(out.size()) * static_cast<double>(sampled) / static_cast<double>(data.size());
        auto const rank = static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 4);
        auto const least =
            kernels::magnitude_of_rank(data.first(sampled * stride), stride, std::min(rank, sampled)).magnitude;
        std::size_t const found = least == 0 ? 0
                                             : kernels::collect_from(data.data(), data.size(), least, indices.data(),
                                                                     values.data(), indices.size());
        if (found >= out.size() && found <= indices.size()) {
            kernels::largest_of_all(std::span<E const>(values.first(found)), out);
            for (std::uint32_t& one : out) one = indices[one];
            return;
        }
    }
    kernels::largest_of_all(data, out);
}

}  // namespace ddp
