/// \file
/// Views of trivially copyable things as the bytes that transports move.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <cstddef>
#include <span>
#include <type_traits>

namespace ddp {

using const_bytes = std::span<std::byte const>;
using mutable_bytes = std::span<std::byte>;

template <class T>
    requires std::is_trivially_copyable_v<T>
[[nodiscard]] const_bytes as_const_bytes(std::span<T> values) noexcept {
    return {reinterpret_cast<std::byte const*>(values.data()), values.size_bytes()};
}

template <class T>
    requires(std::is_trivially_copyable_v<T> && !std::is_const_v<T>)
[[nodiscard]] mutable_bytes as_mutable_bytes(std::span<T> values) noexcept {
    return {reinterpret_cast<std::byte*>(values.data()), values.size_bytes()};
}

template <class T>
    requires std::is_trivially_copyable_v<T>
[[nodiscard]] const_bytes bytes_of(T const& value) noexcept {
    return {reinterpret_cast<std::byte const*>(&value), sizeof(T)};
}

template <class T>
    requires(std::is_trivially_copyable_v<T> && !std::is_const_v<T>)
[[nodiscard]] mutable_bytes bytes_of(T& value) noexcept {
    return {reinterpret_cast<std::byte*>(&value), sizeof(T)};
}

}  // namespace ddp
