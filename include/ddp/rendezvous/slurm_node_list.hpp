/// \file
/// slurm_node_list: the hosts that Slurm names in SLURM_STEP_NODELIST, such as node[01-03,07],gpu-[1-2]x.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <ddp/core/separate.hpp>

namespace ddp::detail {

/// The contents of a node list. It is never expanded: a list of a few characters may name a million hosts.
struct slurm_node_list {
    std::string first;        ///< where task 0 runs
    std::uint32_t count = 0;  ///< how many hosts

    /// Items are divided by commas; an item is made of characters of host names and of ranges in brackets. Returns
    /// nothing if the text has another form, is longer than 65,536 characters, or names more than 1,000,000 hosts.
    [[nodiscard]] static std::optional<slurm_node_list> parse(std::string_view text);
};

/// SLURM_STEP_TASKS_PER_NODE, such as 2(x3),1: three nodes with two tasks, then one with one.
struct slurm_task_counts {
    std::uint32_t here = 0;   ///< tasks on node `node`
    std::uint32_t tasks = 0;  ///< on all nodes
    std::uint32_t nodes = 0;

    /// Returns nothing if the text is malformed, names more than 1,000,000 tasks, or has no node `node`.
    [[nodiscard]] static std::optional<slurm_task_counts> parse(std::string_view text, std::uint32_t node);
};

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/slurm_node_list.ipp>
#endif
