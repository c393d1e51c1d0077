/// \file
/// What train/nonfinite.hpp declares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include <ddp/core/text.hpp>
#include <ddp/train/nonfinite.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL void say_nonfinite(std::uint64_t step, bool skipped, std::uint64_t so_far,
                                          std::string const& what) noexcept {
    std::fprintf(stderr, "ddp: step %llu %s: the mean gradient is not finite: %s (such steps so far: %llu)\n",
                 static_cast<unsigned long long>(step), skipped ? "was skipped" : "was applied anyway", what.c_str(),
                 static_cast<unsigned long long>(so_far));
}
[[gnu::cold]] DDP_DECL std::string describe(std::span<nonfinite_place const> by_rank, std::span<int const> members,
                                            function_ref<std::string_view(std::size_t)> name_of) {
    std::string text;
    std::size_t found = 0;
    for (std::size_t r = 0; r < by_rank.size(); ++r) {
        nonfinite_place const& at = by_rank[r];
        if (at.parameter == std::numeric_limits<std::uint64_t>::max() || ++found > 3) continue;
        std::string_view const value = at.value != at.value ? "NaN" : at.value > 0 ? "infinity" : "-infinity";
        text += concat({found == 1 ? "" : "; ", "rank ", members[r], "'s gradient of parameter \"",
                        printable(name_of(static_cast<std::size_t>(at.parameter))), "\" is ", value, " at element ",
                        at.element});
    }
    if (found > 3) text += concat({"; ", found - 3, " more of the ranks have such elements"});
    if (found == 0)
        text =
            "each rank's own gradient is finite, but their sum, its norm, what the exchange sends of it "
            "(half_exchange: numbers from 65520 on become infinite), or what an observer made of it, is not";
    return text;
}

}  // namespace ddp::detail
