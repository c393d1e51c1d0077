/// \file
/// ranks_apart: which ranks of one machine are in different network namespaces, for one line of the whole job.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <ddp/comm/blind_ranks.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

/// Whether the job has been told, as far as this process knows: see blindness_said.
[[nodiscard]] inline std::atomic<bool>& separation_said() noexcept {
    static std::atomic<bool> said = false;
    return said;
}

/// "ranks 0 to 3 are on one machine in 2 network namespaces (ranks 0 and 1; ranks 2 and 3)", of at most three machines and
/// four namespaces of each. `machines`: the ranks of each network namespace of each machine. Empty if none has two.
[[nodiscard, gnu::cold]] inline std::string ranks_apart(std::span<std::vector<std::vector<int>> const> machines) {
    std::string text;
    std::size_t found = 0;
    for (std::vector<std::vector<int>> const& spaces : machines) {
        if (spaces.size() < 2 || ++found > 3) continue;
        std::vector<int> all;
        std::string named;
        for (std::size_t i = 0; i < spaces.size(); ++i) {
            all.insert(all.end(), spaces[i].begin(), spaces[i].end());
            if (i < 4) named += concat({i == 0 ? "" : "; ", named_ranks(spaces[i])});
        }
        if (spaces.size() > 4) named += concat({"; ", spaces.size() - 4, " more"});
        std::sort(all.begin(), all.end());
        text += concat({text.empty() ? "" : ", ", named_ranks(all), " are on one machine in ", spaces.size(),
                        " network namespaces (", named, ")"});
    }
    if (found > 3)
        text += concat({", and so are ranks of ", found - 3, found == 4 ? " more machine" : " more machines"});
    return text;
}

/// What ends the line.
inline constexpr char const* what_to_do_if_apart =
    ", which is typical of containers: traffic between them uses TCP. Start the ranks of a machine in one network "
    "namespace (docker run --network host, one Kubernetes pod), so that they share memory, or set DDP_HOST to a name "
    "for each to silence this warning";

}  // namespace ddp::detail
