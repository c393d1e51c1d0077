/// \file
/// Views of trivially copyable things as the bytes that transports move.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <cstddef>
#include <span>
#include <type_traits>

namespace ddp {

/// Bytes that are read.
using const_bytes = std::span<std::byte const>;
/// Bytes that are written.
using mutable_bytes = std::span<std::byte>;

/// The bytes of these values, to be read.
template <class T, std::size_t Extent>
    requires std::is_trivially_copyable_v<T>
[[nodiscard]] const_bytes as_const_bytes(std::span<T, Extent> values) noexcept {
    return {reinterpret_cast<std::byte const*>(values.data()), values.size_bytes()};
}

/// The bytes of these values, to be written.
template <class T, std::size_t Extent>
    requires(std::is_trivially_copyable_v<T> && !std::is_const_v<T>)
[[nodiscard]] mutable_bytes as_mutable_bytes(std::span<T, Extent> values) noexcept {
    return {reinterpret_cast<std::byte*>(values.data()), values.size_bytes()};
}

/// The bytes of one value.
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
