/// \file
/// rank_settings: what ranks should set alike although no result depends on it; rank 0 says what differs.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/communication_thread.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

/// What is compared, in the order of the values, and what follows a value.
inline constexpr std::array<std::pair<char const*, char const*>, 13> setting_names{
    {{"timing.heartbeat", " ms"},
     {"timing.suspect", " ms"},
     {"timing.dead", " ms"},
     {"timing.collective", " ms"},
     {"timing.straggler", " ms"},
     {"timing.end_of_file", " ms"},
     {"timing.verdict", " ms"},
     {"timing.handshake", " ms"},
     {"timing.join", " ms"},
     {"timing.shutdown", " ms"},
     {"TCP congestion control", ""},
     {"path of messages within a host", ""},
     {"communication thread", ""}}};

/// The values, each with a comma behind it; no semicolon. Every rank receives those of all, so they are short.
[[nodiscard, gnu::cold]] inline std::string rank_settings(timing const& times, std::string const& congestion,
                                                          bool shares_memory, communication_thread thread) {
    std::string text;
    timing::milliseconds const all[] = {times.heartbeat, times.suspect,     times.dead,    times.collective,
                                        times.straggler, times.end_of_file, times.verdict, times.handshake,
                                        times.join,      times.shutdown};
    static_assert(sizeof(timing) == sizeof all && std::size(all) + 3 == setting_names.size(), "all are compared");
    for (timing::milliseconds const value : all) text += concat({value.count(), ","});
    std::string control = congestion.empty() ? "default" : printable(congestion, 16);
    std::ranges::replace_if(control, [](char c) { return c == ',' || c == ';'; }, '?');
    return text + concat({control, ",", shares_memory ? "memory" : "TCP", ",", name_of(thread), ","});
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
    for (auto const& [name, unit] : setting_names) {
        std::string_view zero;
        std::size_t differ = 0;
        for (std::size_t rank = 0; rank < left.size(); ++rank) {
            std::string_view const here = take_field(left[rank], ',');
            if (rank == 0) zero = here;
            if (here.empty() || here == zero || ++differ > shown) continue;
            if (differ == 1)
                text += concat({text.empty() ? "" : "; ", name, " is ", in_one_line(zero), unit, " on rank 0"});
            text += concat({", ", in_one_line(here), unit, " on rank ", rank});
        }
        if (differ > shown) text += concat({", and other values on ", differ - shown, " more ranks"});
    }
    return text;
}

/// Prints that line, on rank 0.
[[gnu::cold]] inline void tell_different_settings(std::vector<std::string> const& of) {
    if (std::string const text = different_settings(of); !text.empty())
        std::fprintf(
            stderr,
            "ddp: warning: ranks have different settings: %s. No result depends on them, but they affect speed and "
            "how soon failures are noticed. Use the same values on all ranks\n",
            text.c_str());
}

}  // namespace ddp::detail
