/// \file
/// Source and Target: what may be passed to a collective.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/comm/small_gather.hpp>
#include <ddp/kernel/operation.hpp>

namespace ddp {

namespace detail {

/// What std::span can be made of: values one after the other in memory.
template <class D>
concept Contiguous = requires(std::remove_reference_t<D>& data) { std::span(data); };

template <class D>
struct element_in {
    using type = std::remove_reference_t<D>;
};
template <Contiguous D>
struct element_in<D> {
    using type = typename decltype(std::span(std::declval<std::remove_reference_t<D>&>()))::element_type;
};
template <class D>
using element_in_t = typename element_in<D>::type;

template <class D>
inline constexpr bool is_span = false;
template <class V, std::size_t N>
inline constexpr bool is_span<std::span<V, N>> = true;

/// An argument whose memory is still there after the call.
template <class D>
concept Lasting = std::is_lvalue_reference_v<D> || is_span<std::remove_cv_t<D>>;

}  // namespace detail

/// The type of the values in an argument of a collective: V for std::span<V>, std::vector<V>, std::array<V, n>, V[n] and
/// other contiguous containers of V; char for std::string; otherwise the type of the argument itself.
template <class D>
using value_in = std::remove_cv_t<detail::element_in_t<D>>;

/// What a collective can read: a span, std::vector, std::array, array or another object from which a std::span can be
/// made; or a single value. Values must be trivially copyable and not pointers, which have no meaning on another rank.
///
/// Strings are contiguous containers of char: std::string and std::string_view give their characters, and a string
/// literal gives an array that includes the terminating zero. A char const* is not accepted, and neither is a container
/// of strings, whose characters are elsewhere in memory; std::vector<bool> does not hold bools: use std::vector<char>.
template <class D>
concept Source = Movable<value_in<D>> && !std::is_pointer_v<value_in<D>>;

/// What a collective can write: a Source that is not const and not a temporary, because a temporary would be destroyed
/// with the result in it. A span may be a temporary, because its memory is elsewhere. A collective never changes the size
/// of a Target: a std::string or std::vector must have its final size before the call.
template <class D>
concept Target = Source<D> && detail::Lasting<D> && !std::is_const_v<detail::element_in_t<D>>;

/// A Source whose memory outlives the call, for operations that end later (start_send and others).
template <class D>
concept LastingSource = Source<D> && detail::Lasting<D>;

/// A Source that is a single value.
template <class D>
concept SingleValue = Source<D> && !detail::Contiguous<D>;

/// A Target of numbers, which a collective can reduce in place.
template <class D>
concept NumberTarget = Target<D> && Number<value_in<D>>;

/// A Target of several numbers. (Functions that reduce a single number return the result instead.)
template <class D>
concept NumbersTarget = NumberTarget<D> && detail::Contiguous<D>;

/// Two arguments whose values have the same type.
template <class A, class B>
concept SameValues = std::is_same_v<value_in<A>, value_in<B>>;

namespace detail {

/// The memory of an argument. Throws nothing.
template <class D>
[[nodiscard]] auto span_of(D&& data) noexcept {
    using V = element_in_t<D>;
    if constexpr (Contiguous<D>)
        return std::span<V>(data);
    else
        return std::span<V>(&data, 1);
}
template <class D>
[[nodiscard]] auto source_of(D const& data) noexcept {
    return std::span<value_in<D> const>(span_of(data));
}

/// The values of a result, and the vector that is returned: a std::vector<bool> has no bools in memory.
template <Movable V>
class result_of {
public:
    explicit result_of(std::size_t count) : values_(count) {}
    [[nodiscard]] std::span<V> memory() noexcept { return values_; }
    [[nodiscard]] std::vector<V> take() noexcept { return std::move(values_); }

private:
    std::vector<V> values_;
};
template <>
class result_of<bool> {
public:
    explicit result_of(std::size_t count) : count_(count), values_(std::make_unique<bool[]>(count)) {}
    [[nodiscard]] std::span<bool> memory() noexcept { return {values_.get(), count_}; }
    [[nodiscard]] std::vector<bool> take() { return std::vector<bool>(values_.get(), values_.get() + count_); }

private:
    std::size_t count_;
    std::unique_ptr<bool[]> values_;
};

}  // namespace detail

static_assert(Target<std::vector<float>&> && Target<std::span<float>> && Target<std::array<int, 3>&> &&
              Target<double&>);
static_assert(!Target<std::vector<float>> && !Target<std::vector<float> const&> && !Target<std::span<float const>>);
static_assert(!Source<std::vector<bool>&> && !Source<char const*> && Source<std::vector<float>> &&
              Source<double const&>);
static_assert(SingleValue<double&> && !SingleValue<std::array<int, 3>&> && NumbersTarget<float (&)[4]>);

}  // namespace ddp
