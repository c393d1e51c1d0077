/// \file
/// split: how the ranks of a group agree on groups among them, and on message contexts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/comm/group.hpp>
#include <ddp/comm/small_gather.hpp>

namespace ddp::detail {

/// What one rank contributes when its group is divided.
struct split_entry {
    std::uint64_t color = 0;
    std::int64_t key = 0;
    std::uint32_t next_context = 0;  // the least context id that is free on this rank
    std::uint32_t reserved = 0;
};
static_assert(std::has_unique_object_representations_v<split_entry>);  // it travels: no padding

/// Divides the group of a lane: ranks of one color form a group, in the order of (key, rank). `*result` is this rank's.
///
/// Identity  the c-th color, in ascending order, gets the c-th id from the largest that is the next free one on any rank.
/// Cost      all_gather_small of 24 bytes per rank, and a sort of P entries; nothing of it remains.
template <Transport T>
task<> split(lane<T> over, std::uint64_t color, std::int64_t key, std::unique_ptr<group>* result) {
    std::vector<split_entry> said(static_cast<std::size_t>(over.size()));
    said[static_cast<std::size_t>(over.rank())] = {color, key, over.on->next_context(), 0};
    if (over.size() > 1) co_await all_gather_small(over, std::span<split_entry>(said));

    std::uint32_t base = 0;
    std::vector<std::uint64_t> colors;
    std::vector<std::pair<std::int64_t, int>> mine;  // (key, rank in the divided group)
    for (std::size_t r = 0; r < said.size(); ++r) {
        base = std::max(base, said[r].next_context);
        colors.push_back(said[r].color);
        if (said[r].color == color) mine.emplace_back(said[r].key, static_cast<int>(r));
    }
    std::sort(colors.begin(), colors.end());
    colors.erase(std::unique(colors.begin(), colors.end()), colors.end());
    std::sort(mine.begin(), mine.end());
    auto const place = std::lower_bound(colors.begin(), colors.end(), color) - colors.begin();
    over.on->take_contexts_below(base + static_cast<std::uint32_t>(colors.size()));

    std::vector<int> members;
    int rank = 0;
    for (auto const& [ignored, r] : mine) {
        if (r == over.rank()) rank = static_cast<int>(members.size());
        members.push_back(over.of->world_rank(r));
    }
    *result = std::make_unique<group>(*over.on, base + static_cast<std::uint32_t>(place), std::move(members), rank);
}

}  // namespace ddp::detail
