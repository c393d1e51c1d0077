/// \file
/// The header of a safetensors file: which tensors it holds, where they lie, and how that is written as JSON.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/element_type.hpp>

namespace ddp {

using string_map = std::map<std::string, std::string>;

/// One tensor in a file: row-major, little endian, dense.
struct tensor_info {
    std::string name;
    element_type type = element_type::f32;
    std::vector<std::size_t> shape;  // none: one element
    std::uint64_t begin = 0;         // of its bytes, counted from the end of the header
    std::uint64_t end = 0;
};

struct safetensors_header {
    std::vector<tensor_info> tensors;  // as they lie in the file, without a gap
    string_map metadata;               // what the writer wanted to say
    std::uint64_t data_offset = 0;     // where the tensors begin in the file
};

namespace detail {

/// Bytes of the valid UTF-8 sequence that `text` begins with, 1 to 4; 0 if there is none: overlong, surrogate, too large.
[[nodiscard]] inline std::size_t utf8_length(std::string_view text) noexcept {
    auto const byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    auto const in = [](unsigned b, unsigned low, unsigned high) { return b >= low && b <= high; };
    unsigned const a = byte(0), b = byte(1);
    if (text.empty()) return 0;
    if (a < 0x80) return 1;
    if (in(a, 0xC2, 0xDF)) return in(b, 0x80, 0xBF) ? 2 : 0;
    unsigned const low = a == 0xE0 ? 0xA0 : a == 0xF0 ? 0x90 : 0x80, high = a == 0xED ? 0x9F : a == 0xF4 ? 0x8F : 0xBF;
    if (!in(a, 0xE0, 0xF4) || !in(b, low, high) || !in(byte(2), 0x80, 0xBF)) return 0;
    if (a < 0xF0) return 3;
    return in(byte(3), 0x80, 0xBF) ? 4 : 0;
}

/// A name out of a file for an error message: in quotes, on one line, of bounded length.
[[nodiscard]] inline std::string in_quotes(std::string_view name) {
    std::string text = "'";
    while (!name.empty() && text.size() < 80) {
        std::size_t const length = std::max<std::size_t>(1, utf8_length(name));
        bool const odd = static_cast<unsigned char>(name[0]) < 0x20 || name[0] == 0x7F || utf8_length(name) == 0;
        text += odd ? "?" : name.substr(0, length);
        name.remove_prefix(length);
    }
    return text + (name.empty() ? "'" : "…'");
}

/// Such as "F32 [128 x 784]".
[[nodiscard]] inline std::string type_and_shape(element_type type, std::span<std::size_t const> shape) {
    std::string text = std::string(name_of(type)) + " [";
    for (std::size_t d = 0; d < shape.size() && d < 8; ++d) text += (d == 0 ? "" : " x ") + std::to_string(shape[d]);
    return text + (shape.size() > 8 ? " x …]" : "]");
}

/// Bytes of so many elements; none if that is no whole number of bytes, or no number at all.
[[nodiscard]] inline std::optional<std::uint64_t> bytes_of_tensor(element_type type,
                                                                  std::span<std::size_t const> shape) noexcept {
    std::uint64_t bits = bits_of(type);
    for (std::size_t const extent : shape) {
        if (extent != 0 && bits > std::numeric_limits<std::uint64_t>::max() / extent) return std::nullopt;
        bits *= extent;
    }
    return bits % 8 == 0 ? std::optional(bits / 8) : std::nullopt;
}

}  // namespace detail

/// Places tensors whose `end` is their size as the reference implementation does, by falling alignment, then by name.
inline void lay_out(std::vector<tensor_info>& tensors) {
    std::sort(tensors.begin(), tensors.end(),
              [](auto const& a, auto const& b) { return a.type != b.type ? a.type > b.type : a.name < b.name; });
    std::uint64_t at = 0;
    for (tensor_info& t : tensors) {
        std::uint64_t const bytes = t.end - t.begin;
        t.begin = at;
        t.end = at += bytes;
    }
}

/// The JSON of a header, padded with spaces to a multiple of 8 bytes. The same header gives the same text. Names are
/// written as they are: UTF-8, checked by whoever reads it.
[[nodiscard]] inline std::string safetensors_header_text(safetensors_header const& header) {
    std::string json = "{";
    auto const string = [&](std::string_view text) {
        constexpr std::string_view hex = "0123456789abcdef", letters = "\b\f\n\r\t", short_forms = "bfnrt";
        json += '"';
        for (char const c : text) {
            if (c == '"' || c == '\\')
                (json += '\\') += c;
            else if (std::size_t const i = letters.find(c); i != letters.npos)
                (json += '\\') += short_forms[i];
            else if (static_cast<unsigned char>(c) < 0x20)
                ((json += "\\u00") += hex[static_cast<std::size_t>(c) >> 4]) += hex[static_cast<std::size_t>(c) & 15];
            else
                json += c;
        }
        json += '"';
    };
    auto const comma = [&] {
        if (json.back() != '{') json += ',';
    };
    if (!header.metadata.empty()) {
        json += "\"__metadata__\":{";
        for (auto const& [key, value] : header.metadata) {
            comma();
            string(key);
            json += ':';
            string(value);
        }
        json += '}';
    }
    for (tensor_info const& t : header.tensors) {
        comma();
        string(t.name);
        (json += ":{\"dtype\":\"") += name_of(t.type);
        json += "\",\"shape\":[";
        for (std::size_t d = 0; d < t.shape.size(); ++d) (json += d == 0 ? "" : ",") += std::to_string(t.shape[d]);
        json += "],\"data_offsets\":[" + std::to_string(t.begin) + "," + std::to_string(t.end) + "]}";
    }
    json += '}';
    json.resize((json.size() + 7) / 8 * 8, ' ');
    return json;
}

}  // namespace ddp
