/// \file
/// The cores that ddprun may use, and each rank's share of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <vector>

#include <sched.h>

namespace ddprun {

/// The numbers of the cores in this process's mask. None where they cannot be had: beyond 1,024.
[[nodiscard]] inline std::vector<int> cores_in_mask() {
    cpu_set_t set;
    CPU_ZERO(&set);
    std::vector<int> cores;
    if (::sched_getaffinity(0, sizeof set, &set) != 0) return cores;
    for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &set)) cores.push_back(core);
    return cores;
}

/// How many cores this process may use, container quota included.
[[nodiscard]] inline int usable_cores() {
    int cores = static_cast<int>(cores_in_mask().size());
    std::ifstream quota("/sys/fs/cgroup/cpu.max");  // "max 100000" or "<microseconds> <per microseconds>"
    double allowed = 0, period = 0;
    if (quota >> allowed >> period && period > 0) cores = std::min(cores, static_cast<int>(allowed / period + 0.5));
    return std::max(cores, 1);
}

/// The cores of rank `local` of `ranks`: neighbours, none shared. None where there are more ranks than cores.
[[nodiscard]] inline std::vector<int> cores_of(std::vector<int> const& all, int usable, int local, int ranks) {
    if (ranks > usable || static_cast<std::size_t>(ranks) > all.size()) return {};
    std::size_t const n = static_cast<std::size_t>(ranks), i = static_cast<std::size_t>(local);
    return {all.begin() + static_cast<std::ptrdiff_t>(all.size() * i / n),
            all.begin() + static_cast<std::ptrdiff_t>(all.size() * (i + 1) / n)};
}

}  // namespace ddprun
