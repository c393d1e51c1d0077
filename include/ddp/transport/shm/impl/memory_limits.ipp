/// \file
/// What transport/shm/memory_limits.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/core/text.hpp>
#include <ddp/transport/shm/memory_limits.hpp>

namespace ddp::detail {

/// A file of /proc or of a cgroup; "" if there is none.
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

/// The number that `text` begins with, after blanks. None: it begins with something else ("max").
[[gnu::cold]] DDP_DECL std::optional<std::uint64_t> leading_number(std::string_view text) noexcept {
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
    if (text.empty() || text.front() < '0' || text.front() > '9') return std::nullopt;
    std::uint64_t number = 0;
    for (char const c : text) {
        if (c < '0' || c > '9') break;
        number = number * 10 + static_cast<std::uint64_t>(c - '0');
    }
    return number;
}

/// The number on the line of a table that begins with `name`.
[[gnu::cold]] DDP_DECL std::optional<std::uint64_t> number_of(std::string const& table, std::string_view name) {
    for (std::size_t at = 0; at < table.size();) {
        std::size_t const end = std::min(table.find('\n', at), table.size());
        std::string_view const line(table.data() + at, end - at);
        if (line.substr(0, name.size()) == name) return leading_number(line.substr(name.size()));
        at = end + 1;
    }
    return std::nullopt;
}

/// The first word of `text`, which is taken off it; words are separated by single blanks.
[[gnu::cold]] DDP_DECL std::string_view next_word(std::string_view& text) noexcept {
    std::size_t const end = std::min(text.find(' '), text.size());
    std::string_view const word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return word;
}

[[gnu::cold]] DDP_DECL memory_limits::memory_limits(std::string_view root) : root_(root) {
    // Where this process is: "4:memory:/a/b" in version 1, "0::/a/b" in version 2.
    std::string const cgroups = system_file(root_ + "/proc/self/cgroup");
    std::optional<std::string_view> places[2];
    std::string_view rest = cgroups;
    while (!rest.empty()) {
        std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(line.size() + 1, rest.size()));
        std::size_t const first = line.find(':'), second = line.find(':', first + 1);
        if (second == line.npos) continue;
        std::string const controllers = concat({",", line.substr(first + 1, second - first - 1), ","});
        if (controllers == ",,") places[1] = line.substr(second + 1);
        if (controllers.find(",memory,") != controllers.npos) places[0] = line.substr(second + 1);
    }
    // Where that can be seen: "32 31 0:35 /root /mount/point options … - cgroup source memory,…"
    std::string const mounts = system_file(root_ + "/proc/self/mountinfo");
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
        bool const legacy = type == "cgroup" && concat({",", kind, ","}).find(",memory,") != std::string::npos;
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
            levels_.push_back({concat({root_, point, below, "/"}), unified});
            if (below.empty()) break;
            below = below.substr(0, below.rfind('/'));
        }
    }
}

[[gnu::cold]] DDP_DECL memory_limits::room memory_limits::left() const {
    constexpr std::uint64_t endless = std::numeric_limits<std::uint64_t>::max();
    auto const less = [](std::uint64_t a, std::uint64_t b) { return a > b ? a - b : 0; };
    auto const add = [](std::uint64_t a, std::uint64_t b) { return a > endless - b ? endless : a + b; };
    auto const mib = [](std::uint64_t bytes) { return concat({bytes >> 20, " MiB"}); };
    std::string const memory = system_file(root_ + "/proc/meminfo");
    std::optional<std::uint64_t> const available = number_of(memory, "MemAvailable:");
    std::uint64_t const swap = number_of(memory, "SwapFree:").value_or(0) << 10;
    room tightest{endless, "no limit"};
    if (available) tightest = {add(*available << 10, swap), "MemAvailable of its host"};
    for (level const& one : levels_) {
        auto const number = [&](char const* file) { return leading_number(system_file(one.directory + file)); };
        char const* const name = one.unified ? "memory.max" : "memory.limit_in_bytes";
        std::optional<std::uint64_t> const most = number(name);
        std::optional<std::uint64_t> const used = number(one.unified ? "memory.current" : "memory.usage_in_bytes");
        if (!most || !used) continue;
        // Pages of files can be dropped. Those of a memfd are not among them.
        std::string const table = system_file(one.directory + "memory.stat");
        std::uint64_t files = 0;
        for (char const* const kind : {"inactive_file ", "active_file "})
            files += number_of(table, one.unified ? kind : concat({"total_", kind})).value_or(0);
        std::uint64_t swappable = swap;
        if (one.unified)
            if (std::optional<std::uint64_t> const limit = number("memory.swap.max"))
                swappable = std::min(swap, less(*limit, number("memory.swap.current").value_or(0)));
        std::uint64_t here = add(less(*most, less(*used, files)), swappable);
        if (!one.unified) {  // a second limit there: memory and swap together
            std::optional<std::uint64_t> const both = number("memory.memsw.limit_in_bytes");
            std::optional<std::uint64_t> const taken = number("memory.memsw.usage_in_bytes");
            if (both && taken) here = std::min(here, less(*both, less(*taken, files)));
        }
        if (here < tightest.bytes) tightest = {here, concat({name, " is ", mib(*most)})};
    }
    return tightest;
}

[[gnu::cold]] DDP_DECL std::size_t memory_limits::step(room const& now, std::size_t missing) noexcept {
    constexpr std::uint64_t least = std::uint64_t{256} << 10, most = std::uint64_t{16} << 20;
    std::uint64_t const some = std::clamp(now.bytes / 64, least, most) / least * least;
    return static_cast<std::size_t>(std::min<std::uint64_t>(missing, some));
}

}  // namespace ddp::detail
