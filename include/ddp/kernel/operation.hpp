/// \file
/// Operations that combine the numbers of several ranks: sum, minimum, maximum, product.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <ddp/kernel/kernel.hpp>

namespace ddp {

/// Numbers that collectives calculate with: float, double, and integers of 32 or 64 bits, signed or unsigned.
template <class E>
concept Number = std::same_as<E, float> || std::same_as<E, double> ||
                 (std::integral<E> && std::same_as<E, std::remove_cv_t<E>> && (sizeof(E) == 4 || sizeof(E) == 8) &&
                  !std::same_as<E, wchar_t> && !std::same_as<E, char32_t>);

/// Combines two numbers into one. An aggregate without state:
///
///  name                   for messages; ranks compare it
///  combine(left, right)   pure; associative up to rounding. `left` comes from the lower ranks of the canonical tree;
///                         algorithms that are not canonical swap sides, so it has to be commutative for those
template <class Op, class E>
concept OperationOn = Number<E> && std::is_empty_v<Op> && requires(E left, E right) {
    { Op::name } -> std::convertible_to<char const*>;
    { Op::combine(left, right) } -> std::same_as<E>;
};

namespace detail {

/// A float's bits as an integer that is ordered as the numbers are, -0 below +0. Its own inverse.
template <std::floating_point E>
struct ordered_bits {
    using integer = std::conditional_t<sizeof(E) == 4, std::int32_t, std::int64_t>;
    static constexpr integer magnitude = std::numeric_limits<integer>::max();
    static constexpr integer infinity = std::bit_cast<integer>(std::numeric_limits<E>::infinity());
    static constexpr integer nan = std::bit_cast<integer>(std::numeric_limits<E>::quiet_NaN());

    [[gnu::always_inline]] static constexpr integer turn(integer bits) noexcept {
        return bits ^ ((bits >> (8 * sizeof(E) - 1)) & magnitude);
    }
    /// All ones for a NaN, else zero. A mask, not a choice: GCC 12 vectorises trees of these, but not of nested choices.
    [[gnu::always_inline]] static constexpr integer is_nan(integer bits) noexcept {
        return -static_cast<integer>((bits & magnitude) > infinity);
    }
};

/// The lesser of two numbers or the greater one. On integers throughout: it has no exceptions for compiler flags that
/// know no NaN, and vectorises.
template <bool Greater, Number E>
[[gnu::always_inline]] constexpr E extreme(E left, E right) noexcept {
    if constexpr (std::floating_point<E>) {
        using bits = ordered_bits<E>;
        using integer = typename bits::integer;
        integer const l = std::bit_cast<integer>(left), r = std::bit_cast<integer>(right);
        integer const a = bits::turn(l), b = bits::turn(r);
        integer const chosen = bits::turn((a < b) != Greater ? a : b);
        integer const nan = bits::is_nan(l) | bits::is_nan(r);
        return std::bit_cast<E>((chosen & ~nan) | (bits::nan & nan));
    } else {
        return (left < right) != Greater ? left : right;
    }
}

/// Integers are combined as unsigned ones: what does not fit wraps.
template <Number E>
using wrapping =
    typename std::conditional_t<std::floating_point<E>, std::type_identity<E>, std::make_unsigned<E>>::type;

}  // namespace detail

/// Sums of integers wrap as unsigned arithmetic does; sums of floats are rounded once per addition.
struct sum {
    static constexpr char const* name = "sum";
    template <Number E>
    [[gnu::always_inline]] static constexpr E combine(E left, E right) noexcept {
        using U = detail::wrapping<E>;
        return static_cast<E>(static_cast<U>(left) + static_cast<U>(right));
    }
};

/// Products wrap and round likewise.
struct product {
    static constexpr char const* name = "product";
    template <Number E>
    [[gnu::always_inline]] static constexpr E combine(E left, E right) noexcept {
        using U = detail::wrapping<E>;
        return static_cast<E>(static_cast<U>(left) * static_cast<U>(right));
    }
};

/// The least number. -0 is less than +0. A NaN on any of several ranks gives the quiet NaN of std::numeric_limits, so
/// the bits do not depend on the order.
struct minimum {
    static constexpr char const* name = "minimum";
    template <Number E>
    [[gnu::always_inline]] static constexpr E combine(E left, E right) noexcept {
        return detail::extreme<false>(left, right);
    }
};

/// The greatest number; signed zeros and NaN as for minimum.
struct maximum {
    static constexpr char const* name = "maximum";
    template <Number E>
    [[gnu::always_inline]] static constexpr E combine(E left, E right) noexcept {
        return detail::extreme<true>(left, right);
    }
};

static_assert(OperationOn<sum, float> && OperationOn<product, std::int64_t> && OperationOn<minimum, double> &&
              OperationOn<maximum, std::uint32_t>);
static_assert(!Number<bool> && !Number<float const> && !Number<short> && !Number<wchar_t>);

}  // namespace ddp
