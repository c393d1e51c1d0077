/// \file
/// What comm/blind_ranks.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/comm/blind_ranks.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL std::string named_ranks(std::span<int const> ranks) {
    std::vector<std::string> parts;
    std::size_t named = 0;
    while (named < ranks.size() && parts.size() < 8) {
        int const first = ranks[named];
        std::size_t count = 1;
        while (named + count < ranks.size() && ranks[named + count] == first + static_cast<int>(count)) ++count;
        if (count < 3) count = 1;
        if (parts.size() == 7 && named + count < ranks.size()) break;
        parts.push_back(count == 1 ? concat({first}) : concat({first, " to ", ranks[named + count - 1]}));
        named += count;
    }
    if (named != ranks.size()) parts.push_back(concat({ranks.size() - named, " more"}));
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (std::size_t i = 0; i < parts.size(); ++i)
        text += concat({i == 0 ? "" : i + 1 == parts.size() ? " and " : ", ", parts[i]});
    return text;
}

[[gnu::cold]] DDP_DECL std::string blind_ranks::text() const {
    std::string text;
    std::vector<std::pair<int, int>> left = pairs;
    for (int clauses = 0; !left.empty(); ++clauses) {
        if (clauses == 3)
            return text + concat({"; and so ", left.size(), left.size() == 1 ? " pair" : " pairs", " more"});
        // The rank in most of the pairs, with all that it shares nothing with.
        std::vector<int> members;
        for (auto const& [a, b] : left) members.insert(members.end(), {a, b});
        std::sort(members.begin(), members.end());
        int centre = 0;
        std::ptrdiff_t most = 0;
        for (auto at = members.begin(); at != members.end();) {
            auto const next = std::upper_bound(at, members.end(), *at);
            if (next - at > most) centre = *at, most = next - at;
            at = next;
        }
        std::vector<int> others;
        for (auto const& [a, b] : left)
            if (a == centre || b == centre) others.push_back(a == centre ? b : a);
        std::sort(others.begin(), others.end());
        std::vector<int> all = others;
        all.insert(std::upper_bound(all.begin(), all.end(), centre), centre);
        auto const inside = [&](auto const& pair) {
            return std::binary_search(all.begin(), all.end(), pair.first) &&
                   std::binary_search(all.begin(), all.end(), pair.second);
        };
        auto const found = static_cast<std::size_t>(std::count_if(left.begin(), left.end(), inside));
        bool const any_two = found == all.size() * (all.size() - 1) / 2;
        text += text.empty() ? "" : "; ";
        text +=
            any_two
                ? concat({named_ranks(all), " are on one host and do not see each other's memory"})
                : concat({"rank ", centre, ", on one host with ", named_ranks(others), ", shares no memory with them"});
        auto const knows = std::find_if(reasons.begin(), reasons.end(), [&](auto const& reason) {
            return !reason.second.empty() && std::binary_search(all.begin(), all.end(), reason.first);
        });
        text += knows != reasons.end() ? concat({" (rank ", knows->first, ": ", knows->second, ")"})
                                       : " (none came: does a sandbox, such as seccomp or AppArmor, forbid it?)";
        std::erase_if(left, [&](auto const& pair) {
            return any_two ? inside(pair) : pair.first == centre || pair.second == centre;
        });
    }
    return text;
}

}  // namespace ddp::detail
