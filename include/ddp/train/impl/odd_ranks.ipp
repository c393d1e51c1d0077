/// \file
/// What train/odd_ranks.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/core/math.hpp>
#include <ddp/core/text.hpp>
#include <ddp/train/odd_ranks.hpp>

namespace ddp::detail {

/// The ranks whose value is not that of a majority; all, if there is none.
struct minority {
    int first = -1;         ///< of them, if there is a majority
    std::size_t count = 0;  ///< how many they are
    std::size_t votes = 0;  ///< of the most frequent value
    std::size_t usual = 0;  ///< the first with that, in `values`
    bool majority = false;
    std::string text = {};  ///< "ranks 1, 2"
};
template <class V>
[[nodiscard]] minority minority_of(std::span<V const> values, std::span<int const> ranks) {
    auto const votes_for = [&](V const& one) { return std::ranges::count(values, one); };
    auto const usual = std::ranges::max_element(values, {}, votes_for);
    minority found{.votes = static_cast<std::size_t>(votes_for(*usual)),
                   .usual = static_cast<std::size_t>(usual - values.begin())};
    found.majority = 2 * found.votes > values.size();
    for (std::size_t r = 0; r < values.size(); ++r) {
        if (found.majority && values[r] == *usual) continue;
        if (found.majority && found.first < 0) found.first = ranks[r];
        if (++found.count <= 4) found.text += concat({found.count == 1 ? "" : ", ", ranks[r]});
    }
    if (found.count > 4) found.text += concat({" and ", static_cast<std::uint64_t>(found.count - 4), " more"});
    found.text = concat({found.count == 1 ? "rank " : "ranks ", found.text});
    return found;
}

[[gnu::cold]] DDP_DECL odd_ranks describe_difference(std::span<std::uint64_t const> digests, std::span<int const> ranks,
                                                     std::uint64_t step, std::span<std::string_view const> names,
                                                     bool exchange) {
    auto const [first, count, votes, usual, majority, who] = minority_of(digests, ranks);
    std::string text = who;
    if (majority)
        text += concat({count == 1 ? " holds" : " hold", " other values (or another ",
                        exchange ? "state of optimizer or exchange" : "optimizer state", ") than the other ",
                        std::uint64_t{votes}});
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

[[gnu::cold]] DDP_DECL odd_ranks describe_norms(std::span<double const> norms, std::span<int const> ranks,
                                                std::uint64_t step) {
    std::vector<double> comparable(norms.begin(), norms.end());
    for (double& one : comparable)
        if (!is_finite(one)) one = std::numeric_limits<double>::infinity();
    auto const [first, count, votes, usual, majority, who] = minority_of(std::span<double const>(comparable), ranks);
    auto const in_words = [&](double norm) { return is_finite(norm) ? decimal(norm) : std::string("not finite"); };
    std::string text = who;
    if (majority) {
        std::size_t const odd = static_cast<std::size_t>(std::ranges::find(ranks, first) - ranks.begin());
        text += concat({count == 1 ? " has another mean gradient" : " have other mean gradients", " in step ", step,
                        " than the other ", std::uint64_t{votes}, ": its norm on rank ", first, " is ",
                        in_words(comparable[odd]), ", on the others ", in_words(comparable[usual])});
    } else {
        text += concat({" have different mean gradients in step ", step, ", without a majority: the norms are"});
        for (std::size_t r = 0; r < std::min<std::size_t>(4, norms.size()); ++r)
            text += concat({r == 0 ? " " : ", ", in_words(comparable[r])});
        if (norms.size() > 4) text += ", …";
    }
    text +=
        ". No value was changed. Either the memory of a rank is faulty, or an exchange, an allreduce or an observer "
        "of the program's own does not give all ranks the same. Start again from a checkpoint.";
    return {first, std::move(text)};
}

}  // namespace ddp::detail
