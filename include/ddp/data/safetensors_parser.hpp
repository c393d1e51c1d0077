/// \file
/// The reader of safetensors headers: strict, bounded, and pure: bytes in, a header or a data_error out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <ddp/core/bytes.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/data/safetensors_header.hpp>

namespace ddp {

/// Limits of a reader, independent of what the file contains.
struct safetensors_limits {
    std::size_t header_bytes = 100'000'000;  ///< largest header, in bytes; that of the reference implementation
    std::size_t dimensions = 64;             ///< most dimensions of a tensor
};

/// Parses the JSON `text` of a header, which describes the `data_bytes` bytes that follow it. Names are unique, sizes
/// are those of type and shape, and the tensors cover the data without overlap or hole.
///
/// Accepts  JSON of that form only: an unknown member, or a number with a sign, fraction or exponent, is an error.
/// Cost     linear in the text, except for sorting; memory at most a dozen times the text.
/// Throws   data_error (errc::format), naming `file`, the position or the tensor, and what was expected.
/// Source   safetensors, the format's README and the checks of the reference implementation (version 0.4 to 0.6).
[[nodiscard]] safetensors_header parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                                          std::string const& file,
                                                          safetensors_limits const& limits = {});

/// Reads the header of a file of `file_bytes` bytes. read(offset, out) copies the bytes from `offset` on to `out`. A
/// header length that exceeds the file is rejected without allocating. Throws as above, and what `read` throws.
[[nodiscard]] safetensors_header read_safetensors_header(
    std::uint64_t file_bytes, function_ref<void(std::uint64_t offset, mutable_bytes out)> read, std::string const& file,
    safetensors_limits const& limits = {});

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/safetensors_parser.ipp>
#endif
