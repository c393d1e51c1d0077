/// \file
/// What transport/shm/memory_limits.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include <ddp/core/text.hpp>
#include <ddp/transport/shm/memory_limits.hpp>

namespace ddp::detail {

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

[[gnu::cold]] DDP_DECL memory_limits::memory_limits(std::string_view root)
    : root_(root), groups_(control_groups("memory", root)) {}

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
    for (control_group const& one : groups_) {
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
    // This many ranks may ask at the same moment, and each take its step, before there is too little.
    constexpr std::uint64_t ranks = 256;
    constexpr std::uint64_t least = std::uint64_t{4} << 10, most = std::uint64_t{16} << 20;
    std::uint64_t const some = std::clamp(now.bytes / ranks, least, most) / least * least;
    return static_cast<std::size_t>(std::min<std::uint64_t>(missing, some));
}

}  // namespace ddp::detail
