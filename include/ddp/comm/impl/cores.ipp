/// \file
/// What comm/cores.hpp declares.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include <ddp/comm/control_groups.hpp>
#include <ddp/comm/cores.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL std::string core_set::text() const {
    std::size_t used = words.size();
    while (used > 0 && words[used - 1] == 0) --used;
    std::string result;
    for (std::size_t i = 0; i < used; ++i) {
        std::array<char, 24> word{};
        std::snprintf(word.data(), word.size(), "%s%llx", i == 0 ? "" : ",", static_cast<unsigned long long>(words[i]));
        result += word.data();
    }
    return result;
}

[[gnu::cold]] DDP_DECL core_set core_set::parse(std::string const& text) {
    core_set result;
    char const* at = text.c_str();
    for (std::uint64_t& word : result.words) {
        char* end = nullptr;
        word = std::strtoull(at, &end, 16);
        if (end == at || *end != ',') break;
        at = end + 1;
    }
    return result;
}

[[gnu::cold]] DDP_DECL core_set cores_of_process() {
    core_set result;
    ::cpu_set_t set;
    CPU_ZERO(&set);
    if (::sched_getaffinity(0, sizeof set, &set) == 0) {
        for (int core = 0; core < std::min(core_set::most, CPU_SETSIZE); ++core)
            if (CPU_ISSET(core, &set)) result.add(core);
        return result;
    }
    long const online = std::clamp<long>(::sysconf(_SC_NPROCESSORS_ONLN), 1, core_set::most);
    for (int core = 0; core < online; ++core) result.add(core);
    return result;
}

[[gnu::cold]] DDP_DECL double core_quota(std::string const& root) {
    double least = 0;
    for (control_group const& one : control_groups("cpu", root)) {
        auto const number = [&](char const* name) { return std::atof(system_file(one.directory + name).c_str()); };
        double quota = 0, period = 0;  // microseconds; "max" and -1 are no limit
        if (one.unified) {
            std::string const text = system_file(one.directory + "cpu.max");  // "QUOTA PERIOD"
            quota = std::atof(text.c_str());
            if (std::size_t const space = text.find(' '); space != text.npos) period = std::atof(text.c_str() + space);
        } else {
            quota = number("cpu.cfs_quota_us");
            period = number("cpu.cfs_period_us");
        }
        if (quota <= 0 || period <= 0) continue;
        least = least > 0 ? std::min(least, quota / period) : quota / period;
    }
    return least;
}

[[gnu::cold]] DDP_DECL int usable_cores(core_set const& cores, double quota) noexcept {
    int const all = cores.count();
    int const allowed = quota > 0 && quota < all ? static_cast<int>(std::lround(quota)) : all;
    return std::max(allowed, 1);
}

}  // namespace ddp::detail
