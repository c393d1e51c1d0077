/// \file
/// What train/odd_ranks.hpp declares.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <ddp/core/text.hpp>
#include <ddp/train/odd_ranks.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL odd_ranks describe_difference(std::span<std::uint64_t const> digests, std::span<int const> ranks,
                                                     std::uint64_t step, std::span<std::string_view const> names,
                                                     difference what) {
    static constexpr std::array<std::array<std::string_view, 2>, 3> words{
        {{"other values (or another optimizer state)", "values (or optimizer states)"},
         {"other values (or another state of optimizer or exchange)", "values (or states of optimizer or exchange)"},
         {"another mean gradient", "mean gradients"}}};
    auto const& [other, all] = words[static_cast<std::size_t>(what)];
    bool const gradients = what == difference::gradients;
    auto const votes_for = [&](std::uint64_t one) { return std::count(digests.begin(), digests.end(), one); };
    std::uint64_t const usual = std::ranges::max(digests, {}, votes_for);
    std::size_t const votes = static_cast<std::size_t>(votes_for(usual));
    bool const majority = 2 * votes > digests.size();
    std::string odd;
    std::size_t count = 0;
    int first = -1;
    for (std::size_t r = 0; r < digests.size(); ++r) {
        if (majority && digests[r] == usual) continue;
        if (majority && first < 0) first = ranks[r];
        if (++count <= 4) odd += concat({count == 1 ? "" : ", ", ranks[r]});
    }
    if (count > 4) odd += concat({" and ", static_cast<std::uint64_t>(count - 4), " more"});
    std::string text = concat({count == 1 ? "rank " : "ranks ", odd, count == 1 ? " holds " : " hold "});
    text += majority ? concat({other, " than the other ", static_cast<std::uint64_t>(votes)})
                     : concat({"different ", all, ", without a majority"});
    text += concat({gradients ? ", seen by the norm in step " : ", seen before step ", step});
    if (!names.empty())
        text += concat({" in ", "\"", printable(names.front()), "\"",
                        names.size() > 1 ? concat({" to \"", printable(names.back()), "\""}) : std::string()});
    if (what == difference::exchange) text += concat({names.empty() ? " in" : " or in", " what the exchange keeps"});
    text += gradients
                ? ". No value was changed. An exchange, an allreduce or an observer of the program's own gives ranks "
                  "different means, or a rank's memory is faulty."
                : ". Either a rank has changed its model between steps, where all ranks must make the same change, "
                  "or its memory is faulty.";
    return {first, text + " Start again from a checkpoint."};
}

}  // namespace ddp::detail
