/// \file
/// What comm/blind_ranks.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ddp/comm/blind_ranks.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL std::string named_ranks(std::set<int> const& ranks) {
    std::vector<std::string> parts;
    std::size_t left = ranks.size();
    for (auto at = ranks.begin(); at != ranks.end();) {
        int const first = *at;
        int last = first;
        std::size_t count = 0;
        for (; at != ranks.end() && *at == first + static_cast<int>(count); ++at, ++count) last = *at;
        if (parts.size() == 7 && left > count) break;
        left -= count;
        if (count < 3)
            for (int r = first; r <= last; ++r) parts.push_back(concat({r}));
        else
            parts.push_back(concat({first, " to ", last}));
    }
    if (left != 0) parts.push_back(concat({left, " more"}));
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
        std::map<int, std::size_t> count;
        for (auto const& [a, b] : left) ++count[a], ++count[b];
        int const centre = std::max_element(count.begin(), count.end(), [](auto const& a, auto const& b) {
                               return a.second < b.second;
                           })->first;
        std::set<int> others;
        for (auto const& [a, b] : left)
            if (a == centre || b == centre) others.insert(a == centre ? b : a);
        std::set<int> all = others;
        all.insert(centre);
        auto const inside = [&](auto const& pair) { return all.contains(pair.first) && all.contains(pair.second); };
        auto const found = static_cast<std::size_t>(std::count_if(left.begin(), left.end(), inside));
        bool const any_two = found == all.size() * (all.size() - 1) / 2;
        text += text.empty() ? "" : "; ";
        text +=
            any_two
                ? concat({named_ranks(all), " are on one host and do not see each other's memory"})
                : concat({"rank ", centre, ", on one host with ", named_ranks(others), ", shares no memory with them"});
        auto const knows = std::find_if(all.begin(), all.end(), [&](int rank) {
            auto const at = reasons.find(rank);
            return at != reasons.end() && !at->second.empty();
        });
        text += knows != all.end() ? concat({" (rank ", *knows, ": ", reasons.at(*knows), ")"})
                                   : " (none came: does a sandbox, such as seccomp or AppArmor, forbid it?)";
        std::erase_if(left, [&](auto const& pair) {
            return any_two ? inside(pair) : pair.first == centre || pair.second == centre;
        });
    }
    return text;
}

}  // namespace ddp::detail
