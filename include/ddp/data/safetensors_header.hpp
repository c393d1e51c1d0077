/// \file
/// The header of a safetensors file: its tensors, their positions, and how these are written as JSON.
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

/// One tensor in a safetensors file, stored row-major, little endian and without gaps.
struct tensor_info {
    std::string name;                       ///< unique in the file
    element_type type = element_type::f32;  ///< of each element
    std::vector<std::size_t> shape;         ///< outermost dimension first; empty: one element
    std::uint64_t begin = 0;                ///< position of its first byte, from the end of the header
    std::uint64_t end = 0;                  ///< one past the position of its last byte
};

/// The contents of the header of a safetensors file.
struct safetensors_header {
    std::vector<tensor_info> tensors;  ///< in the order of their data in the file
    string_map metadata;               ///< texts that the writer has added
    std::uint64_t data_offset = 0;     ///< position of the first tensor in the file, in bytes
};

namespace detail {

/// Such as "F32 [128 x 784]".
[[nodiscard]] std::string type_and_shape(element_type type, std::span<std::size_t const> shape);

/// The size of a tensor in bytes; none if it is not a whole number of bytes, or overflows.
[[nodiscard]] std::optional<std::uint64_t> bytes_of_tensor(element_type type,
                                                           std::span<std::size_t const> shape) noexcept;

}  // namespace detail

/// Places tensors, whose `end` is their size on entry, as the reference implementation does: by descending alignment,
/// then by name.
void lay_out(std::vector<tensor_info>& tensors);

/// The JSON of a header, padded with spaces to a multiple of 8 bytes. The same header gives the same text. Names are
/// written unchanged; the reader checks that they are UTF-8.
[[nodiscard]] std::string safetensors_header_text(safetensors_header const& header);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/safetensors_header.ipp>
#endif
