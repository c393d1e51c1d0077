/// \file
/// IDX, the format of MNIST and similar data sets: a magic number, big-endian sizes, then the elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/data/source.hpp>

namespace ddp {

/// The type of the elements in an IDX file, which is the third byte of the file.
enum class idx_type : std::uint8_t {
    unsigned_byte = 0x08,
    signed_byte = 0x09,
    int16 = 0x0B,
    int32 = 0x0C,
    float32 = 0x0D,
    float64 = 0x0E,
};

/// Bytes of one element; 0 for a value that is not a type.
[[nodiscard]] constexpr std::size_t size_of(idx_type type) noexcept {
    switch (type) {
        case idx_type::unsigned_byte:
        case idx_type::signed_byte: return 1;
        case idx_type::int16: return 2;
        case idx_type::int32:
        case idx_type::float32: return 4;
        case idx_type::float64: return 8;
    }
    return 0;
}

/// The name of the type in error messages, such as "unsigned bytes".
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

/// The contents of an IDX file.
struct idx_array {
    idx_type type;                   ///< of an element
    std::vector<std::size_t> shape;  ///< outermost dimension first
    std::vector<std::uint8_t> data;  ///< the elements, row-major; each big-endian, as in the file
};

namespace detail {

[[noreturn]] void idx_error(std::string const& name, std::string const& text);
/// Such as "28 x 28".
[[nodiscard]] std::string shape_text(std::span<std::size_t const> shape);
/// expect(bytes) throws unless that many bytes can follow, and returns whether it could tell.
[[nodiscard]] idx_array read_idx(function_ref<std::size_t(mutable_bytes)> read,
                                 function_ref<bool(std::uint64_t)> expect, std::string const& name,
                                 std::size_t max_bytes);

}  // namespace detail

/// Reads one IDX array. The source must end after it.
///
/// max_bytes  the largest size of the elements to accept, whatever the header says.
/// Memory     the size that the header gives, once the source has confirmed that this many bytes can follow
///            (expect_more). With a source that does not offer this, memory grows with what has been read, up to one
///            and a half times the final size.
/// Throws     data_error (errc::format) for a wrong magic number, type or number of dimensions, sizes whose product
///            exceeds max_bytes, or fewer or more bytes than the header says; and what the source throws.
/// Source     LeCun, Cortes and Burges, "The MNIST database of handwritten digits", section on file formats.
template <ByteSource S>
[[nodiscard]] idx_array read_idx(S& source, std::size_t max_bytes) {
    auto const expect = [&](std::uint64_t count) {
        constexpr bool can_tell = requires { source.expect_more(count); };
        if constexpr (can_tell) source.expect_more(count);
        return can_tell;
    };
    return detail::read_idx([&](mutable_bytes out) { return source.read(out); }, expect, source.name(), max_bytes);
}

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/idx.ipp>
#endif
