/// \file
/// What comm/control_groups.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/comm/control_groups.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

/// A file of /proc or of a control group; "" if there is none.
[[gnu::cold]] DDP_DECL std::string system_file(std::string const& path) {
    std::string text;
    std::FILE* const file = std::fopen(path.c_str(), "re");
    if (file == nullptr) return text;
    char part[4096];
    for (std::size_t got = 1; got != 0;) {
        got = std::fread(part, 1, sizeof part, file);
        text.append(part, got);
    }
    std::fclose(file);
    return text;
}

/// Removes and returns the first word of `text`; words are separated by single blanks.
[[gnu::cold]] DDP_DECL std::string_view next_word(std::string_view& text) noexcept {
    std::size_t const end = std::min(text.find(' '), text.size());
    std::string_view const word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return word;
}

[[gnu::cold]] DDP_DECL std::vector<control_group> control_groups(std::string_view controller, std::string_view root) {
    std::vector<control_group> found;
    std::string const wanted = concat({",", controller, ","});
    // Where this process is: "4:memory:/a/b" in version 1, "0::/a/b" in version 2.
    std::string const cgroups = system_file(concat({root, "/proc/self/cgroup"}));
    std::optional<std::string_view> places[2];
    std::string_view rest = cgroups;
    while (!rest.empty()) {
        std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(line.size() + 1, rest.size()));
        std::size_t const first = line.find(':'), second = line.find(':', first + 1);
        if (second == line.npos) continue;
        std::string const controllers = concat({",", line.substr(first + 1, second - first - 1), ","});
        if (controllers == ",,") places[1] = line.substr(second + 1);
        if (controllers.find(wanted) != controllers.npos) places[0] = line.substr(second + 1);
    }
    // Where that can be seen: "32 31 0:35 /root /mount/point options … - cgroup source memory,…"
    std::string const mounts = system_file(concat({root, "/proc/self/mountinfo"}));
    rest = mounts;
    while (!rest.empty()) {
        std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(line.size() + 1, rest.size()));
        std::size_t const dash = line.find(" - ");
        if (dash == line.npos) continue;
        std::string_view kind = line.substr(dash + 3);
        std::string_view const type = next_word(kind);
        next_word(kind);
        bool const unified = type == "cgroup2";
        bool const legacy = type == "cgroup" && concat({",", kind, ","}).find(wanted) != std::string::npos;
        std::optional<std::string_view> const& place = places[unified ? 1 : 0];
        if ((!unified && !legacy) || !place) continue;
        for (int skip = 0; skip < 3; ++skip) next_word(line);
        std::string_view const base = next_word(line), point = next_word(line);
        // A place outside what is mounted (a container that shows its own cgroup as the root): the root is the nearest.
        std::string_view below = base == "/" ? *place : std::string_view();
        if (base != "/" && place->substr(0, base.size()) == base &&
            (place->size() == base.size() || (*place)[base.size()] == '/'))
            below = place->substr(base.size());
        if (below.substr(0, 3) == "/..") below = {};
        while (true) {
            if (below == "/") below = {};
            found.push_back({concat({root, point, below, "/"}), unified});
            if (below.empty()) break;
            below = below.substr(0, below.rfind('/'));
        }
    }
    return found;
}

}  // namespace ddp::detail
