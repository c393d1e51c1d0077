/// \file
/// NPY: one array as numpy.save writes it, read strictly and within bounds.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/source.hpp>

namespace ddp {

static_assert(std::endian::native == std::endian::little,
              "NPY files are read as they lie, little endian; a big-endian machine needs a conversion here");

/// The contents of an NPY file.
struct npy_array {
    element_type type;               ///< f32, f64, u8, i32 or i64
    std::vector<std::size_t> shape;  ///< outermost dimension first; empty: one element
    std::vector<std::uint8_t> data;  ///< the elements, row-major, little endian

    /// A copy of the elements as numbers of type E. Throws usage_error unless E is the type of the array.
    template <class E>
        requires std::is_arithmetic_v<E>
    [[nodiscard]] std::vector<E> values() const {
        DDP_EXPECTS(type == element_type_of<E>(),
                    detail::concat({"npy_array::values: the array holds ", name_of(type), ", not ",
                                    name_of(element_type_of<E>()), "; ask for its own type and convert"}));
        std::vector<E> all(data.size() / sizeof(E));
        if (!all.empty()) std::memcpy(all.data(), data.data(), data.size());
        return all;
    }
};

namespace detail {
[[nodiscard]] npy_array read_npy(function_ref<std::size_t(mutable_bytes)> read,
                                 function_ref<bool(std::uint64_t)> expect, std::string const& name,
                                 std::size_t max_bytes);
}  // namespace detail

/// Reads one array of format version 1.0, 2.0 or 3.0, as numpy.save writes it. The source must end after it.
///
/// Elements   float32, float64, uint8, int32 and int64, little endian, in C order. Other types, big-endian files and
///            Fortran order are rejected with a message that says what to do in NumPy.
/// max_bytes  the largest size of the elements to accept, whatever the header says; a header may have at most 64 KiB
///            and 64 dimensions.
/// Memory     as in read_idx: the size that the header gives, once the source has confirmed it; otherwise it grows with
///            what has been read.
/// Throws     data_error (errc::format), with the position in the header, if it is not what numpy.save writes: magic
///            number, version, header, type, sizes whose product exceeds max_bytes, fewer or more bytes than the header
///            says; and what the source throws.
/// Source     NumPy's documentation of numpy.lib.format.
template <ByteSource S>
[[nodiscard]] npy_array read_npy(S& source, std::size_t max_bytes) {
    auto const expect = [&](std::uint64_t count) {
        constexpr bool can_tell = requires { source.expect_more(count); };
        if constexpr (can_tell) source.expect_more(count);
        return can_tell;
    };
    return detail::read_npy([&](mutable_bytes out) { return source.read(out); }, expect, source.name(), max_bytes);
}

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/npy.ipp>
#endif
