/// \file
/// What data/safetensors_header.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/text.hpp>
#include <ddp/data/safetensors_header.hpp>

namespace ddp {

namespace detail {

[[gnu::cold]] DDP_DECL std::size_t utf8_length(std::string_view text) noexcept {
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

[[gnu::cold]] DDP_DECL std::string in_quotes(std::string_view name) {
    std::string text = "'";
    while (!name.empty() && text.size() < 80) {
        std::size_t const length = std::max<std::size_t>(1, utf8_length(name));
        bool const odd = static_cast<unsigned char>(name[0]) < 0x20 || name[0] == 0x7F || utf8_length(name) == 0;
        text += odd ? "?" : name.substr(0, length);
        name.remove_prefix(length);
    }
    return text + (name.empty() ? "'" : "…'");
}

[[gnu::cold]] DDP_DECL std::string type_and_shape(element_type type, std::span<std::size_t const> shape) {
    std::string text = std::string(name_of(type)) + " [";
    for (std::size_t d = 0; d < shape.size() && d < 8; ++d) text += concat({d == 0 ? "" : " x ", shape[d]});
    return text + (shape.size() > 8 ? " x …]" : "]");
}

[[gnu::cold]] DDP_DECL std::optional<std::uint64_t> bytes_of_tensor(element_type type,
                                                                    std::span<std::size_t const> shape) noexcept {
    std::uint64_t bits = bits_of(type);
    for (std::size_t const extent : shape) {
        if (extent != 0 && bits > std::numeric_limits<std::uint64_t>::max() / extent) return std::nullopt;
        bits *= extent;
    }
    return bits % 8 == 0 ? std::optional(bits / 8) : std::nullopt;
}

}  // namespace detail

[[gnu::cold]] DDP_DECL void lay_out(std::vector<tensor_info>& tensors) {
    std::sort(tensors.begin(), tensors.end(),
              [](auto const& a, auto const& b) { return a.type != b.type ? a.type > b.type : a.name < b.name; });
    std::uint64_t at = 0;
    for (tensor_info& t : tensors) {
        std::uint64_t const bytes = t.end - t.begin;
        t.begin = at;
        t.end = at += bytes;
    }
}

[[gnu::cold]] DDP_DECL std::string safetensors_header_text(safetensors_header const& header) {
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
        for (std::size_t d = 0; d < t.shape.size(); ++d) json += detail::concat({d == 0 ? "" : ",", t.shape[d]});
        json += detail::concat({"],\"data_offsets\":[", t.begin, ",", t.end, "]}"});
    }
    json += '}';
    json.resize((json.size() + 7) / 8 * 8, ' ');
    return json;
}

}  // namespace ddp
