/// \file
/// What data/idx.hpp declares.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/idx.hpp>

namespace ddp {

namespace detail {

[[gnu::cold]] DDP_DECL void idx_error(std::string const& name, std::string const& text) {
    throw data_error(errc::format, concat({name, ": ", text}));
}

[[gnu::cold]] DDP_DECL std::string hex(std::span<std::uint8_t const> bytes) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string text;
    for (std::uint8_t const b : bytes) (text += digits[b >> 4]) += digits[b & 15];
    return text;
}

[[gnu::cold]] DDP_DECL std::string shape_text(std::span<std::size_t const> shape) {
    std::string text;
    for (std::size_t const extent : shape) text += concat({text.empty() ? "" : " x ", extent});
    return text;
}

[[gnu::cold]] DDP_DECL idx_array read_idx(function_ref<std::size_t(mutable_bytes)> read,
                                          function_ref<bool(std::uint64_t)> expect, std::string const& name,
                                          std::size_t max_bytes) {
    std::array<std::uint8_t, 4> magic{};  // zero, zero, type, number of dimensions
    std::size_t const got = read(bytes_of(magic));
    if (got < magic.size())
        idx_error(name, concat({"is not an IDX file: it has ", got, " bytes, a header takes at least 4"}));
    if (magic[0] != 0 || magic[1] != 0)
        idx_error(name, concat({"is not an IDX file: it begins with ", hex(magic),
                                ", expected 0000, a type and a number of dimensions"}));
    auto const type = static_cast<idx_type>(magic[2]);
    if (size_of(type) == 0)
        idx_error(name, concat({"has type code 0x", hex(std::span(magic).subspan(2, 1)),
                                ", IDX defines 0x08, 0x09, 0x0b, 0x0c, 0x0d and 0x0e"}));
    std::size_t const dimensions = magic[3];
    if (dimensions == 0) idx_error(name, "has no dimensions, expected at least one");

    std::vector<std::uint8_t> extents(4 * dimensions);
    if (std::size_t const count = read(as_mutable_bytes(std::span(extents))); count < extents.size())
        idx_error(name, concat({"is truncated: it ends after ", 4 + count, " bytes, its header of ", dimensions,
                                " dimensions takes ", 4 + extents.size()}));

    idx_array array{type, std::vector<std::size_t>(dimensions), {}};
    std::size_t bytes = size_of(type);
    bool fits = bytes <= max_bytes;
    bool empty = false;
    for (std::size_t d = 0; d < dimensions; ++d) {
        std::span const e = std::span(extents).subspan(4 * d, 4);
        std::size_t const extent = std::size_t{e[0]} << 24 | std::size_t{e[1]} << 16 | std::size_t{e[2]} << 8 | e[3];
        array.shape[d] = extent;
        empty = empty || extent == 0;
        if (extent != 0 && bytes > max_bytes / extent) fits = false;  // so that the product cannot overflow
        if (fits && extent != 0) bytes *= extent;
    }
    if (empty) bytes = 0;
    if (!empty && !fits)
        idx_error(name, concat({"promises ", shape_text(array.shape), " ", name_of(type), ", more than the limit of ",
                                max_bytes, " bytes; raise the limit if that is what it holds"}));

    // All at once if that many bytes can follow; otherwise a piece, then as much again as has been read.
    std::size_t const first_piece = expect(bytes) ? bytes : std::size_t{1} << 20;
    while (array.data.size() < bytes) {
        std::size_t const before = array.data.size();
        array.data.resize(std::min(bytes, before + std::max(before, first_piece)));
        std::size_t const count = read(as_mutable_bytes(std::span(array.data).subspan(before)));
        if (before + count < array.data.size())
            idx_error(name, concat({"is truncated: it holds ", before + count, " bytes of data, ", "its header (",
                                    shape_text(array.shape), " ", name_of(type), ") promises ", bytes}));
    }
    std::byte one_more{};
    if (read({&one_more, 1}) != 0)
        idx_error(name, concat({"continues after the ", bytes, " bytes of data that its header (",
                                shape_text(array.shape), " ", name_of(type), ") promises"}));
    return array;
}

}  // namespace detail

}  // namespace ddp
