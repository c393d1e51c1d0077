/// \file
/// rank_settings: what ranks should set alike although no result depends on it; rank 0 says what differs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/timing.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

/// "timing.heartbeat=250 ms,timing.dead=3000 ms,": one entry for each setting, in an order that all ranks share. No semicolon.
[[nodiscard, gnu::cold]] inline std::string rank_settings(timing const& times, std::string const& congestion,
                                                          bool shares_memory) {
    std::string text;
    using named = std::pair<char const*, timing::milliseconds>;
    named const all[] = {{"heartbeat", times.heartbeat}, {"suspect", times.suspect},
                         {"dead", times.dead},           {"collective", times.collective},
                         {"straggler", times.straggler}, {"end_of_file", times.end_of_file},
                         {"verdict", times.verdict},     {"handshake", times.handshake},
                         {"join", times.join},           {"shutdown", times.shutdown}};
    static_assert(sizeof(timing) == std::size(all) * sizeof(timing::milliseconds), "all times are compared");
    for (auto const& [name, value] : all) text += concat({"timing.", name, "=", value.count(), " ms,"});
    std::string control = congestion.empty() ? "the default" : printable(congestion, 16);
    std::ranges::replace_if(control, [](char c) { return c == ',' || c == ';'; }, '?');
    return text + concat({"TCP congestion control=", control,
                          ",messages within a host=", shares_memory ? "through memory" : "over TCP", ","});
}

/// Removes what stands before `separator` from `text`, and the separator, and returns it.
[[nodiscard]] inline std::string_view take_field(std::string_view& text, char separator) {
    std::string_view const field = text.substr(0, text.find(separator));
    text.remove_prefix(std::min(text.size(), field.size() + 1));
    return field;
}

/// One line of text about the settings in which a rank differs from rank 0; empty if there are none. `of`: those of each rank,
/// from the network. Nothing is said of a rank that has sent none.
[[nodiscard, gnu::cold]] inline std::string different_settings(std::vector<std::string> const& of) {
    constexpr std::size_t shown = 4;
    auto const in_one_line = [](std::string_view part) {
        std::string text = printable(part, 64);
        std::ranges::replace_if(text, [](char c) { return c == '\n' || c == '\t'; }, ' ');
        return text;
    };
    std::string text;
    std::vector<std::string_view> left(of.begin(), of.end());
    while (!left.empty() && !left[0].empty()) {
        std::string_view const zero = take_field(left[0], ','), name = zero.substr(0, zero.find('='));
        std::size_t differ = 0;
        for (std::size_t rank = 1; rank < left.size(); ++rank) {
            std::string_view const here = take_field(left[rank], ',');
            if (here.empty() || here == zero || ++differ > shown) continue;
            auto const value = [&](std::string_view entry) {
                return in_one_line(entry.substr(std::min(entry.size(), name.size() + 1)));
            };
            if (differ == 1)
                text += concat({text.empty() ? "" : "; ", in_one_line(name), " is ", value(zero), " on rank 0"});
            text += concat({", ", value(here), " on rank ", rank});
        }
        if (differ > shown) text += concat({", and other values on ", differ - shown, " more ranks"});
    }
    return text;
}

/// Prints that line, on rank 0.
[[gnu::cold]] inline void tell_different_settings(std::vector<std::string> const& of) {
    if (std::string const text = different_settings(of); !text.empty())
        std::fprintf(stderr,
                     "ddp: warning: ranks have different settings: %s. No result depends on them, but what is noticed "
                     "when, and how fast, does: set them alike on all ranks\n",
                     text.c_str());
}

}  // namespace ddp::detail
