/// \file
/// What train/odd_ranks.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/core/text.hpp>
#include <ddp/train/odd_ranks.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL odd_ranks describe_difference(std::span<std::uint64_t const> digests, std::span<int const> ranks,
                                                     std::uint64_t step, std::span<std::string_view const> names,
                                                     bool exchange) {
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
    std::string text = concat({count == 1 ? "rank " : "ranks ", odd});
    if (majority)
        text += concat({count == 1 ? " holds" : " hold", " other values (or another ",
                        exchange ? "state of optimizer or exchange" : "optimizer state", ") than the other ",
                        static_cast<std::uint64_t>(votes)});
    else
        text += concat({" hold different values (or ",
                        exchange ? "states of optimizer or exchange" : "optimizer states", "), without a majority"});
    text += concat({", seen before step ", step});
    if (!names.empty())
        text += concat({" in ", "\"", printable(names.front()), "\"",
                        names.size() > 1 ? concat({" to \"", printable(names.back()), "\""}) : std::string()});
    if (exchange) text += concat({names.empty() ? " in" : " or in", " what the exchange keeps"});
    text +=
        ". Either a rank has changed its model between steps, where all ranks must make the same change, or its memory "
        "is faulty. Start again from a checkpoint.";
    return {first, std::move(text)};
}

}  // namespace ddp::detail
