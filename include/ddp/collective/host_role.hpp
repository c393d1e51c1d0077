/// \file
/// host_role: what one rank does when the ranks of each host add up among themselves and hosts exchange the sums.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <ddp/collective/host_trees.hpp>

namespace ddp {

/// Each rank owns a slice of the data. On every other host its counterpart adds up that host's subtrees of the canonical tree
/// for this slice, and sends the sums to the owner, who joins them.
struct host_role {
    /// `hosts`: see host_trees.
    host_role(std::span<std::size_t const> hosts, std::size_t rank)
        : trees(hosts), me(rank), here(trees.host_of(rank)), carried(trees.stands_for(rank)) {
        for (std::size_t h = 0; h < trees.hosts(); ++h)
            if (h != here) counterparts.push_back(trees.counterpart(me, h));
        std::span<std::size_t const> const ranks = trees.ranks_of(here);
        for (host_trees::subtree const& one : trees.subtrees()) {
            senders.push_back(one.host == here ? me : trees.counterpart(me, one.host));
            if (one.host != here) continue;
            ours.push_back(one);
            firsts.push_back(
                static_cast<std::size_t>(std::lower_bound(ranks.begin(), ranks.end(), one.begin) - ranks.begin()));
        }
    }

    /// Sums of subtrees that come from other hosts, for each element of this rank's slice.
    [[nodiscard]] std::size_t foreign_trees() const noexcept { return senders.size() - ours.size(); }

    host_trees trees;
    std::size_t me, here;                   ///< the rank, and the number of its host
    std::vector<std::size_t> carried;       ///< ranks of other hosts for whose slices it stands here
    std::vector<std::size_t> counterparts;  ///< the ranks that stand for it on the other hosts
    std::vector<std::size_t> senders;       ///< of each subtree's sum for its slice; itself for those of its host
    std::vector<host_trees::subtree> ours;  ///< the subtrees of its host; their ranks follow each other there too
    std::vector<std::size_t> firsts;        ///< places of their first ranks among the ranks of the host
};

}  // namespace ddp
