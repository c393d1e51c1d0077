/// \file
/// The header of a safetensors file: which tensors it holds, where they lie, and how that is written as JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/element_type.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/string_map.hpp>

namespace ddp {

/// One tensor in a file: row-major, little endian, dense.
struct tensor_info {
    std::string name;                       ///< unique in the file
    element_type type = element_type::f32;  ///< of an element
    std::vector<std::size_t> shape;         ///< none: one element
    std::uint64_t begin = 0;                ///< of its bytes, counted from the end of the header
    std::uint64_t end = 0;                  ///< one past its last byte
};

/// What the header of a safetensors file says.
struct safetensors_header {
    std::vector<tensor_info> tensors;  ///< as they lie in the file, without a gap
    string_map metadata;               ///< what the writer wanted to say
    std::uint64_t data_offset = 0;     ///< where the tensors begin in the file
};

namespace detail {

/// Such as "F32 [128 x 784]".
[[nodiscard]] std::string type_and_shape(element_type type, std::span<std::size_t const> shape);

/// Bytes of so many elements; none if that is no whole number of bytes, or no number at all.
[[nodiscard]] std::optional<std::uint64_t> bytes_of_tensor(element_type type,
                                                           std::span<std::size_t const> shape) noexcept;

}  // namespace detail

/// Places tensors whose `end` is their size as the reference implementation does, by falling alignment, then by name.
void lay_out(std::vector<tensor_info>& tensors);

/// The JSON of a header, padded with spaces to a multiple of 8 bytes. The same header gives the same text. Names are
/// written as they are: UTF-8, checked by whoever reads it.
[[nodiscard]] std::string safetensors_header_text(safetensors_header const& header);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/safetensors_header.ipp>
#endif
