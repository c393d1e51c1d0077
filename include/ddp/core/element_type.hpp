/// \file
/// element_type: the types that elements of arrays in files and of a model's buffers may have, more than the
/// library calculates with.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

namespace ddp {

/// The type of the elements of an array in a file or of a model's buffer. Names and order are those of the safetensors
/// format, which sorts by alignment.
enum class element_type : std::uint8_t {
    boolean,
    f4,
    f6_e2m3,
    f6_e3m2,
    u8,
    i8,
    f8_e5m2,
    f8_e4m3,
    f8_e8m0,
    i16,
    u16,
    f16,
    bf16,
    i32,
    u32,
    f32,
    c64,
    f64,
    i64,
    u64,
};

namespace detail {
struct element_type_entry {
    std::string_view name;
    std::size_t bits;
};
inline constexpr std::array<element_type_entry, 20> element_types = {{
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},   {"I8", 8},    {"F8_E5M2", 8},
    {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16}, {"BF16", 16}, {"I32", 32},
    {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},    {"I64", 64}, {"U64", 64},
}};
}  // namespace detail

/// The name of the type in safetensors files, such as "F32".
[[nodiscard]] constexpr std::string_view name_of(element_type type) noexcept {
    return detail::element_types[static_cast<std::size_t>(type)].name;
}
/// The size of one element in bits; elements of 4 and 6 bits share bytes.
[[nodiscard]] constexpr std::size_t bits_of(element_type type) noexcept {
    return detail::element_types[static_cast<std::size_t>(type)].bits;
}
/// The type with this name in safetensors files; nothing if there is none.
[[nodiscard]] constexpr std::optional<element_type> element_type_named(std::string_view name) noexcept {
    for (std::size_t i = 0; i < detail::element_types.size(); ++i)
        if (detail::element_types[i].name == name) return static_cast<element_type>(i);
    return std::nullopt;
}

/// The element type of the C++ arithmetic type E: that of the same kind and size.
template <class E>
    requires std::is_arithmetic_v<E>
[[nodiscard]] constexpr element_type element_type_of() noexcept {
    if constexpr (std::is_same_v<E, bool>) return element_type::boolean;
    if constexpr (std::is_floating_point_v<E>) return sizeof(E) == 4 ? element_type::f32 : element_type::f64;
    constexpr element_type integers[] = {element_type::i8,  element_type::u8,  element_type::i16, element_type::u16,
                                         element_type::i32, element_type::u32, element_type::i64, element_type::u64};
    constexpr std::size_t size = sizeof(E) == 1 ? 0 : sizeof(E) == 2 ? 2 : sizeof(E) == 4 ? 4 : 6;
    return integers[size + (std::is_unsigned_v<E> ? 1 : 0)];
}

static_assert(element_type_named(name_of(element_type::u64)) == element_type::u64);
static_assert(element_type_of<float>() == element_type::f32 && element_type_of<std::int64_t>() == element_type::i64);

}  // namespace ddp
