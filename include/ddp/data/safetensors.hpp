/// \file
/// safetensors: named arrays in one file, written whole or not at all, read by a strict and bounded reader.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/core/error.hpp>
#include <ddp/data/safetensors_header.hpp>
#include <ddp/data/safetensors_parser.hpp>
#include <ddp/data/whole_file.hpp>

namespace ddp {

static_assert(std::endian::native == std::endian::little,
              "safetensors files are little endian and read as they lie; a big-endian machine needs a conversion here");

/// A tensor to be written, in somebody's memory.
struct tensor_view {
    std::string name;  // UTF-8, unique within the file
    element_type type;
    std::vector<std::size_t> shape;
    const_bytes bytes;  // row-major, dense
};

/// Writes a file that every implementation of the format reads; the same tensors and metadata give the same bytes.
///
/// Throws  usage_error for what the reader would refuse: names that are not unique or no UTF-8, sizes that do not fit
///         the shape. data_error (errc::file) if the file cannot be written: nothing has changed then. See whole_file.
/// Cost    one pass over the tensors, straight from where they are.
inline void write_safetensors(std::string const& path, std::vector<tensor_view> const& tensors,
                              string_map const& metadata = {}) {
    safetensors_header header;
    header.metadata = metadata;
    std::map<std::string_view, const_bytes> bytes;
    std::uint64_t all = 0;
    for (tensor_view const& t : tensors) {
        DDP_EXPECTS(t.name != "__metadata__", "'__metadata__' is no name for a tensor: the format keeps it for itself");
        header.tensors.push_back({t.name, t.type, t.shape, 0, t.bytes.size()});
        bytes.emplace(t.name, t.bytes);
        all += t.bytes.size();
    }
    lay_out(header.tensors);
    std::string const text = safetensors_header_text(header);
    try {
        DDP_EXPECTS(text.size() <= safetensors_limits{}.header_bytes, path + ": the names take too much space");
        (void)parse_safetensors_header(text, all, path);
    } catch (data_error const& e) {
        throw usage_error("these tensors make no safetensors file that could be read again: " + std::string(e.what()));
    }

    whole_file file(path);
    std::array<std::uint8_t, 8> length{};
    for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<std::uint8_t>(text.size() >> 8 * i);
    file.write(bytes_of(std::as_const(length)));
    file.write(as_const_bytes(std::span<char const>(text)));
    for (tensor_info const& t : header.tensors) file.write(bytes.at(t.name));
    file.commit();
}

/// A file that is open for reading, its header checked. What is read stays of one piece even if the name is given to
/// another file meanwhile.
///
/// Throws  data_error: errc::file if it is missing, no regular file or cannot be read; errc::format for a header that
///         is not strictly right (see parse_safetensors_header), or a length that is not what the header says.
class safetensors_file {
public:
    explicit safetensors_file(std::string path, safetensors_limits const& limits = {}) : name_(std::move(path)) {
        file_.number = ::open(name_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe without a writer would block
        if (file_.number < 0) fail("cannot be opened", errno);
        struct stat about{};
        if (::fstat(file_.number, &about) != 0) fail("cannot be read", errno);
        if (!S_ISREG(about.st_mode)) throw data_error(errc::file, name_ + ": is no regular file");
        header_ = read_safetensors_header(
            static_cast<std::uint64_t>(about.st_size),
            [this](std::uint64_t offset, mutable_bytes out) { read_at(offset, out); }, name_, limits);
    }

    [[nodiscard]] std::string const& name() const noexcept { return name_; }
    /// As they lie in the file.
    [[nodiscard]] std::vector<tensor_info> const& tensors() const noexcept { return header_.tensors; }
    [[nodiscard]] string_map const& metadata() const noexcept { return header_.metadata; }

    /// Fills `out` with the tensor's bytes from `offset` on, straight from the file.
    void read(tensor_info const& tensor, std::uint64_t offset, mutable_bytes out) const {
        DDP_EXPECTS(
            offset <= tensor.end - tensor.begin && out.size() <= tensor.end - tensor.begin - offset,
            "read: tensor '" + tensor.name + "' has only " + std::to_string(tensor.end - tensor.begin) + " bytes");
        read_at(header_.data_offset + tensor.begin + offset, out);
    }

private:
    void read_at(std::uint64_t offset, mutable_bytes out) const {
        while (!out.empty()) {
            ssize_t const count = ::pread(file_.number, out.data(), std::min(out.size(), std::size_t{1} << 30),
                                          static_cast<off_t>(offset));
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) fail("cannot be read", errno);
            if (count == 0) throw data_error(errc::file, name_ + ": became shorter while it was read");
            out = out.subspan(static_cast<std::size_t>(count));
            offset += static_cast<std::uint64_t>(count);
        }
    }
    [[noreturn]] void fail(char const* what, int reason) const {
        throw data_error(errc::file, name_ + ": " + what + ": " + std::generic_category().message(reason));
    }

    struct descriptor {
        int number = -1;
        descriptor() = default;
        descriptor(descriptor&& other) noexcept : number(std::exchange(other.number, -1)) {}
        ~descriptor() {
            if (number >= 0) ::close(number);
        }
    };

    std::string name_;
    descriptor file_;
    safetensors_header header_;
};

}  // namespace ddp
