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

/// A tensor to be written, in somebody's memory.
struct tensor_view {
    std::string name;                ///< UTF-8, unique within the file
    element_type type;               ///< of an element
    std::vector<std::size_t> shape;  ///< outermost dimension first
    const_bytes bytes;               ///< row-major, dense
};

/// Writes a file that every implementation of the format reads; the same tensors and metadata give the same bytes.
///
/// Throws  usage_error for what the reader would refuse: names that are not unique or no UTF-8, sizes that do not fit
///         the shape. data_error (errc::file) if the file cannot be written: nothing has changed then. See whole_file.
/// Cost    one pass over the tensors, straight from where they are.
void write_safetensors(std::string const& path, std::vector<tensor_view> const& tensors,
                       string_map const& metadata = {});

/// A file that is open for reading, its header checked. What is read stays of one piece even if the name is given to
/// another file meanwhile.
///
/// Throws  data_error: errc::file if it is missing, no regular file or cannot be read; errc::format for a header that
///         is not strictly right (see parse_safetensors_header), or a length that is not what the header says.
class safetensors_file {
public:
    explicit safetensors_file(std::string path, safetensors_limits const& limits = {});

    [[nodiscard]] std::string const& name() const noexcept { return name_; }
    /// As they lie in the file.
    [[nodiscard]] std::vector<tensor_info> const& tensors() const noexcept { return header_.tensors; }
    [[nodiscard]] string_map const& metadata() const noexcept { return header_.metadata; }

    /// Fills `out` with the tensor's bytes from `offset` on, straight from the file.
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
