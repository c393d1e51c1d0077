/// \file
/// safetensors: named arrays in one file, written whole or not at all, read by a strict and bounded reader.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/data/safetensors_header.hpp>
#include <ddp/data/safetensors_parser.hpp>
#include <ddp/data/source.hpp>

namespace ddp {

static_assert(std::endian::native == std::endian::little,
              "safetensors files are little endian and read as they lie; a big-endian machine needs a conversion here");

/// A tensor to write, as a view of memory that it does not own.
struct tensor_view {
    std::string name;                ///< UTF-8, unique within the file
    element_type type;               ///< of each element
    std::vector<std::size_t> shape;  ///< outermost dimension first; empty: one element
    const_bytes bytes;               ///< the elements, row-major, little endian, without gaps
};

/// Writes a file that every implementation of the format can read; the same tensors and metadata give the same bytes. The
/// file is written in full or not at all: it is first written next to `path` as `path.<pid>.<number>.tmp`, flushed to the
/// disk, and then renamed. A reader of `path` sees either the old file or the new one, even after a crash; only a process
/// that is killed leaves the temporary file behind. A symbolic link at `path` is replaced.
///
/// Throws  usage_error for what a reader would reject: names that are not unique or not UTF-8, sizes that do not match
///         the shape. data_error (errc::file) if the file cannot be written, with the reason that the system gives; what
///         was at `path` before is then unchanged.
/// Cost    one pass over the tensors, which are written directly from their memory.
void write_safetensors(std::string const& path, std::vector<tensor_view> const& tensors,
                       string_map const& metadata = {});

/// A safetensors file that is open for reading, with its header checked. If another file takes its name in the
/// meantime, this object still reads the file that it opened.
///
/// The header must follow the format exactly: JSON with names that are unique, no unknown members, no numbers with sign,
/// fraction or exponent, sizes that match type and shape, and tensors that cover the data without overlap or gap.
/// Throws  data_error: errc::file if the file is missing, is not a regular file or cannot be read; errc::format for a
///         header that violates the format, naming the position or the tensor and what was expected, or for a file whose
///         length is not what the header says.
class safetensors_file {
public:
    explicit safetensors_file(std::string path, safetensors_limits const& limits = {});

    [[nodiscard]] std::string const& name() const noexcept { return name_; }
    /// The tensors, in the order of their data in the file.
    [[nodiscard]] std::vector<tensor_info> const& tensors() const noexcept { return header_.tensors; }
    [[nodiscard]] string_map const& metadata() const noexcept { return header_.metadata; }

    /// Fills `out` with the bytes of a tensor from `offset` on, directly from the file. Throws data_error (errc::file) if
    /// the file cannot be read, and usage_error for bytes beyond the tensor's end.
    void read(tensor_info const& tensor, std::uint64_t offset, mutable_bytes out) const;

private:
    void read_at(std::uint64_t offset, mutable_bytes out) const;
    [[noreturn]] void fail(char const* what, int reason) const;

    std::string name_;
    detail::open_file file_;
    safetensors_header header_;
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/safetensors.ipp>
#endif
