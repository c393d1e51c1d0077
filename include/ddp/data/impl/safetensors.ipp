/// \file
/// What data/safetensors.hpp declares.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/safetensors.hpp>
#include <ddp/data/whole_file.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL void write_safetensors(std::string const& path, std::vector<tensor_view> const& tensors,
                                              string_map const& metadata) {
    safetensors_header header;
    header.metadata = metadata;
    std::uint64_t all = 0;
    for (tensor_view const& t : tensors) {
        DDP_EXPECTS(t.name != "__metadata__", "'__metadata__' cannot be a tensor's name: the format reserves it");
        header.tensors.push_back({t.name, t.type, t.shape, 0, t.bytes.size()});
        all += t.bytes.size();
    }
    for (auto const& [key, value] : metadata)
        DDP_EXPECTS(detail::is_utf8(key) && detail::is_utf8(value),
                    detail::concat({path, ": the metadata ", detail::in_quotes(key), " is not text in UTF-8"}));
    lay_out(header.tensors);
    std::string const text = safetensors_header_text(header);
    try {
        constexpr std::size_t most = safetensors_limits{}.header_bytes;
        DDP_EXPECTS(text.size() <= most,
                    detail::concat({path, ": names and metadata make a header of ", text.size(),
                                    " bytes, and readers accept at most ", most, "; make them shorter"}));
        (void)parse_safetensors_header(text, all, path);
    } catch (data_error const& e) {
        throw usage_error("these tensors make no safetensors file that could be read again: " + std::string(e.what()));
    }

    whole_file file(path);
    std::array<std::uint8_t, 8> length{};
    for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<std::uint8_t>(text.size() >> 8 * i);
    file.write(bytes_of(std::as_const(length)));
    file.write(as_const_bytes(std::span<char const>(text)));
    for (tensor_info const& t : header.tensors)
        file.write(std::find_if(tensors.begin(), tensors.end(), [&](tensor_view const& v) {
                       return v.name == t.name;
                   })->bytes);
    file.commit();
}

[[gnu::cold]] DDP_DECL safetensors_file::safetensors_file(std::string path, safetensors_limits const& limits)
    : name_(std::move(path)), file_(detail::open_regular_file(name_)) {
    header_ = read_safetensors_header(
        file_.bytes, [this](std::uint64_t offset, mutable_bytes out) { read_at(offset, out); }, name_, limits);
}

DDP_DECL void safetensors_file::read(tensor_info const& tensor, std::uint64_t offset, mutable_bytes out) const {
    DDP_EXPECTS(offset <= tensor.end - tensor.begin && out.size() <= tensor.end - tensor.begin - offset,
                detail::concat({"read: tensor '", tensor.name, "' has only ", tensor.end - tensor.begin, " bytes"}));
    read_at(header_.data_offset + tensor.begin + offset, out);
}

DDP_DECL void safetensors_file::read_at(std::uint64_t offset, mutable_bytes out) const {
    while (!out.empty()) {
        ssize_t const count =
            ::pread(file_.number, out.data(), std::min(out.size(), std::size_t{1} << 30), static_cast<off_t>(offset));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) fail("cannot be read", errno);
        if (count == 0) throw data_error(errc::file, name_ + ": became shorter while it was read");
        out = out.subspan(static_cast<std::size_t>(count));
        offset += static_cast<std::uint64_t>(count);
    }
}

[[gnu::cold]] DDP_DECL void safetensors_file::fail(char const* what, int reason) const {
    throw data_error(errc::file, detail::concat({name_, ": ", what, ": ", std::generic_category().message(reason)}));
}

}  // namespace ddp
