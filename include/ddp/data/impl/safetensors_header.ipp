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
#include <ddp/data/json_reader.hpp>
#include <ddp/data/safetensors_header.hpp>

namespace ddp {

namespace detail {

[[gnu::cold]] DDP_DECL std::string type_and_shape(element_type type, std::span<std::size_t const> shape) {
    std::string text = std::string(name_of(type)) + " [";
    for (std::size_t d = 0; d < shape.size(); ++d) text += concat({d == 0 ? "" : " x ", shape[d]});
    return text + "]";
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
    auto const string = [&](std::string_view text) { detail::append_json_string(json, text); };
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
