/// \file
/// IDX, the format of MNIST and its kin: a magic number, big-endian sizes, then nothing but elements.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/error.hpp>
#include <ddp/data/source.hpp>

namespace ddp {

/// The third byte of an IDX file.
enum class idx_type : std::uint8_t {
    unsigned_byte = 0x08,
    signed_byte = 0x09,
    int16 = 0x0B,
    int32 = 0x0C,
    float32 = 0x0D,
    float64 = 0x0E,
};

/// Bytes of one element; zero for what is no type.
[[nodiscard]] constexpr std::size_t size_of(idx_type type) noexcept {
    switch (type) {
        case idx_type::unsigned_byte: return 1;
        case idx_type::signed_byte: return 1;
        case idx_type::int16: return 2;
        case idx_type::int32: return 4;
        case idx_type::float32: return 4;
        case idx_type::float64: return 8;
    }
    return 0;
}

[[nodiscard]] constexpr std::string_view name_of(idx_type type) noexcept {
    switch (type) {
        case idx_type::unsigned_byte: return "unsigned bytes";
        case idx_type::signed_byte: return "signed bytes";
        case idx_type::int16: return "16-bit integers";
        case idx_type::int32: return "32-bit integers";
        case idx_type::float32: return "32-bit floats";
        case idx_type::float64: return "64-bit floats";
    }
    return "elements of no known type";
}

struct idx_array {
    idx_type type;
    std::vector<std::size_t> shape;  // outermost first
    std::vector<std::uint8_t> data;  // row-major, product of shape elements, each big-endian as in the file
};

namespace detail {

[[noreturn]] inline void idx_error(std::string const& name, std::string const& text) {
    throw data_error(errc::format, name + ": " + text);
}

[[nodiscard]] inline std::string hex(std::span<std::uint8_t const> bytes) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string text;
    for (std::uint8_t const b : bytes) (text += digits[b >> 4]) += digits[b & 15];
    return text;
}

[[nodiscard]] inline std::string shape_text(std::span<std::size_t const> shape) {
    std::string text;
    for (std::size_t const extent : shape) text += (text.empty() ? "" : " x ") + std::to_string(extent);
    return text;
}

}  // namespace detail

/// Reads one IDX array and insists that the source then ends.
///
/// max_bytes  the most data to accept, whatever the header says.
/// Memory     grows with what is really there: a short file that promises much costs little.
/// Throws     data_error (errc::format): magic number, type or number of dimensions wrong, sizes whose product passes
///            max_bytes, fewer bytes than the header says, or more; and whatever the source throws.
/// Source     LeCun, Cortes and Burges, "The MNIST database of handwritten digits", section on file formats.
template <ByteSource S>
[[nodiscard]] idx_array read_idx(S& source, std::size_t max_bytes) {
    std::string const& name = source.name();

    std::array<std::uint8_t, 4> magic{};  // zero, zero, type, number of dimensions
    std::size_t const got = source.read(bytes_of(magic));
    if (got < magic.size())
        detail::idx_error(name, "is no IDX file: it has " + std::to_string(got) + " bytes, a header takes at least 4");
    if (magic[0] != 0 || magic[1] != 0)
        detail::idx_error(name, "is no IDX file: it begins with " + detail::hex(magic) +
                                    ", expected 0000, a type and a number of dimensions");
    auto const type = static_cast<idx_type>(magic[2]);
    if (size_of(type) == 0)
        detail::idx_error(name, "has type code 0x" + detail::hex(std::span(magic).subspan(2, 1)) +
                                    ", IDX knows 0x08, 0x09, 0x0b, 0x0c, 0x0d and 0x0e");
    std::size_t const dimensions = magic[3];
    if (dimensions == 0) detail::idx_error(name, "has no dimensions, expected at least one");

    std::vector<std::uint8_t> extents(4 * dimensions);
    if (std::size_t const count = source.read(as_mutable_bytes(std::span(extents))); count < extents.size())
        detail::idx_error(name, "is truncated: it ends after " + std::to_string(4 + count) + " bytes, its header of " +
                                    std::to_string(dimensions) + " dimensions takes " +
                                    std::to_string(4 + extents.size()));

    idx_array array{type, std::vector<std::size_t>(dimensions), {}};
    std::size_t bytes = size_of(type);
    bool fits = bytes <= max_bytes;
    bool empty = false;
    for (std::size_t d = 0; d < dimensions; ++d) {
        std::span const e = std::span(extents).subspan(4 * d, 4);
        std::size_t const extent = std::size_t{e[0]} << 24 | std::size_t{e[1]} << 16 | std::size_t{e[2]} << 8 | e[3];
        array.shape[d] = extent;
        empty = empty || extent == 0;
        if (extent != 0 && bytes > max_bytes / extent) fits = false;  // so that the product cannot overflow
        if (fits && extent != 0) bytes *= extent;
    }
    if (empty) bytes = 0;
    if (!empty && !fits)
        detail::idx_error(name, "promises " + detail::shape_text(array.shape) + " " + std::string(name_of(type)) +
                                    ", more than the limit of " + std::to_string(max_bytes) +
                                    " bytes; raise the limit if that is what it holds");

    constexpr std::size_t first_piece = std::size_t{1} << 20;  // then as much again as there is already
    while (array.data.size() < bytes) {
        std::size_t const before = array.data.size();
        array.data.resize(std::min(bytes, before + std::max(before, first_piece)));
        std::size_t const count = source.read(as_mutable_bytes(std::span(array.data).subspan(before)));
        if (before + count < array.data.size())
            detail::idx_error(name, "is truncated: it holds " + std::to_string(before + count) + " bytes of data, " +
                                        "its header (" + detail::shape_text(array.shape) + " " +
                                        std::string(name_of(type)) + ") promises " + std::to_string(bytes));
    }
    std::byte one_more{};
    if (source.read({&one_more, 1}) != 0)
        detail::idx_error(name, "goes on after the " + std::to_string(bytes) + " bytes of data that its header (" +
                                    detail::shape_text(array.shape) + " " + std::string(name_of(type)) + ") promises");
    return array;
}

}  // namespace ddp
