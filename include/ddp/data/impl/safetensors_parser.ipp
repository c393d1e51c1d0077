/// \file
/// What data/safetensors_parser.hpp declares.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/json_reader.hpp>
#include <ddp/data/safetensors_header.hpp>
#include <ddp/data/safetensors_parser.hpp>

namespace ddp {

namespace detail {

/// Reads only the form of JSON that a header has: an object of objects of known members. So nothing nests too deep, no
/// value has an unexpected type, and there is no recursion.
class header_parser {
public:
    header_parser(std::string_view text, std::string const& file, safetensors_limits const& limits)
        : text_(text), json_(text, file, "header"), limits_(limits) {}

    safetensors_header parse() {
        safetensors_header header;
        bool described = false;
        if (!text_.starts_with('{')) json_.fail("a header begins with '{'");
        for (bool more = json_.opens('{', '}'); more; more = json_.another('}')) {
            std::string name = json_.string();
            json_.expect(':');
            if (name == "__metadata__") {
                if (std::exchange(described, true)) json_.fail("__metadata__ occurs twice");
                header.metadata = json_.strings("__metadata__");
            } else {
                header.tensors.push_back(tensor(std::move(name)));
            }
        }
        json_.expect_end(" ");
        return header;
    }

private:
    std::vector<std::size_t> numbers(std::size_t at_most, std::string_view limit = {}) {
        static_assert(sizeof(std::size_t) == sizeof(std::uint64_t));
        std::vector<std::size_t> all;
        for (bool more = json_.opens('[', ']'); more; more = json_.another(']')) {
            if (all.size() == at_most) json_.fail(concat({"more than ", at_most, " numbers", limit}));
            all.push_back(json_.number());
        }
        return all;
    }

    tensor_info tensor(std::string name) {
        tensor_info info;
        info.name = std::move(name);
        json_.within("tensor " + in_quotes(info.name));
        bool typed = false, shaped = false, placed = false;
        for (bool more = json_.opens('{', '}'); more; more = json_.another('}')) {
            std::string const key = json_.string();
            json_.expect(':');
            bool* known = key == "dtype"          ? &typed
                          : key == "shape"        ? &shaped
                          : key == "data_offsets" ? &placed
                                                  : nullptr;
            if (known == nullptr) json_.fail("expected dtype, shape and data_offsets, found " + in_quotes(key));
            if (std::exchange(*known, true)) json_.fail(in_quotes(key) + " occurs twice");
            if (known == &typed) {
                std::string const type = json_.string();
                auto const found = element_type_named(type);
                if (!found) json_.fail(concat({"dtype ", in_quotes(type), " is not a type that the format defines"}));
                info.type = *found;
            } else if (known == &shaped) {
                info.shape = numbers(limits_.dimensions, ", which safetensors_limits::dimensions accepts at most");
            } else {
                std::vector<std::size_t> const ends = numbers(2);
                if (ends.size() != 2) json_.fail("data_offsets takes two numbers");
                info.begin = ends[0], info.end = ends[1];
            }
        }
        if (!typed || !shaped || !placed) json_.fail("dtype, shape or data_offsets is missing");
        auto const bytes = bytes_of_tensor(info.type, info.shape);
        if (info.begin > info.end || !bytes || info.end - info.begin != *bytes)
            json_.fail(concat({type_and_shape(info.type, info.shape), " takes ",
                               bytes ? concat({*bytes}) : "no possible number of", " bytes, data_offsets are ",
                               info.begin, " and ", info.end}));
        json_.within({});
        return info;
    }

    std::string_view text_;
    json_reader json_;
    safetensors_limits const& limits_;
};

/// Sorts tensors by their position in the file, and throws unless they cover each of its bytes exactly once.
[[gnu::cold]] DDP_DECL void expect_cover(std::vector<tensor_info>& tensors, std::uint64_t data_bytes,
                                         std::string const& file) {
    auto const refuse = [&](std::string const& text) { throw data_error(errc::format, concat({file, ": ", text})); };
    std::sort(tensors.begin(), tensors.end(), [](auto const& a, auto const& b) { return a.name < b.name; });
    for (std::size_t i = 1; i < tensors.size(); ++i)
        if (tensors[i - 1].name == tensors[i].name)
            refuse(concat({"tensor ", in_quotes(tensors[i].name), " occurs twice"}));
    std::sort(tensors.begin(), tensors.end(), [](auto const& a, auto const& b) {
        return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    std::uint64_t end = 0;
    for (tensor_info const& t : tensors) {
        std::string const which = concat({"tensor ", in_quotes(t.name), " begins at byte ", t.begin, " of the data"});
        if (t.begin < end) refuse(concat({which, " and overlaps the one before it, which ends at ", end}));
        if (t.begin > end) refuse(concat({which, "; no tensor has the bytes from ", end, " on"}));
        end = t.end;
    }
    if (end != data_bytes)
        refuse(concat({end > data_bytes ? "is truncated: " : "continues after its last tensor: ",
                       "the header promises ", end, " bytes of data, there are ", data_bytes}));
}

}  // namespace detail

[[gnu::cold]] DDP_DECL safetensors_header parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                                                   std::string const& file,
                                                                   safetensors_limits const& limits) {
    safetensors_header header = detail::header_parser(text, file, limits).parse();
    detail::expect_cover(header.tensors, data_bytes, file);
    header.data_offset = 8 + text.size();
    return header;
}

[[gnu::cold]] DDP_DECL safetensors_header read_safetensors_header(std::uint64_t file_bytes,
                                                                  function_ref<void(std::uint64_t, mutable_bytes)> read,
                                                                  std::string const& file,
                                                                  safetensors_limits const& limits) {
    auto const refuse = [&](std::string const& text) {
        throw data_error(errc::format, detail::concat({file, ": ", text}));
    };
    if (file_bytes < 8)
        refuse(detail::concat({"is not a safetensors file: it has ", file_bytes, " bytes, a header takes at least 8"}));
    std::array<std::uint8_t, 8> prefix{};
    read(std::uint64_t{0}, bytes_of(prefix));
    std::uint64_t length = 0;
    for (std::size_t i = 8; i-- > 0;) length = length << 8 | prefix[i];
    if (length > limits.header_bytes)
        refuse(detail::concat({"is not a safetensors file, or one with too large a header: it would be ", length,
                               " bytes long, and safetensors_limits::header_bytes accepts at most ",
                               limits.header_bytes}));
    if (length > file_bytes - 8)
        refuse(detail::concat(
            {"is truncated: its header should be ", length, " bytes long, but only ", file_bytes - 8, " follow"}));
    std::string text(static_cast<std::size_t>(length), '\0');
    read(std::uint64_t{8}, as_mutable_bytes(std::span<char>(text)));
    return parse_safetensors_header(text, file_bytes - 8 - length, file, limits);
}

}  // namespace ddp
