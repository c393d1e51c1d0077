/// \file
/// The cores that ddprun may use, and each rank's share of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <sched.h>

#include <ddp/comm/cores.hpp>

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
    return ddp::detail::usable_cores(ddp::detail::cores_of_process(), ddp::detail::core_quota());
}

/// The cores of rank `local` of `ranks`: neighbours, none shared. None where there are more ranks than cores.
[[nodiscard]] inline std::vector<int> cores_of(std::vector<int> const& all, int usable, int local, int ranks) {
    if (ranks > usable || static_cast<std::size_t>(ranks) > all.size()) return {};
    std::size_t const n = static_cast<std::size_t>(ranks), i = static_cast<std::size_t>(local);
    return {all.begin() + static_cast<std::ptrdiff_t>(all.size() * i / n),
            all.begin() + static_cast<std::ptrdiff_t>(all.size() * (i + 1) / n)};
}

}  // namespace ddprun
