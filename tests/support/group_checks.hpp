/// \file
/// Groups of every shape, over any communicator: each check is called on every rank and returns what is wrong on this one.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <ddp/comm/communicator.hpp>

#include "support/collective_checks.hpp"

namespace ddp::test {

/// Every collective in contiguous, strided and reversed groups, in groups of one, of all, and in a group of a group.
failures check_groups(communicator<> const& comm);

/// A grid: sums along rows and columns at the same time, in both orders, equal those done by hand.
failures check_grid(communicator<> const& comm, int columns);

/// Rank `r` is on the host `places[r]`: hosts are groups, the ranks of one place on every host are as well, and both work.
failures check_hosts(communicator<> const& comm, std::vector<std::uint64_t> const& places);

/// Handles on the job and its groups are destroyed in an order of their own; those that are left still work.
failures check_any_order(communicator<> const& comm);

/// Two groups of all ranks, in which the last rank calls its barriers in the other order: a circle of waits. What is wrong
/// with the error that this rank gets, which `text` receives.
failures check_opposite_order(communicator<> const& comm, std::string& text);

/// Rank 0 waits for 1 in one group, 1 for 2 in another, and rank 2 is `late`; more ranks wait for rank 0. As above.
failures check_chain_across_groups(communicator<> const& comm, std::chrono::milliseconds late, std::string& text);

/// Of three ranks or more: in the group of all but rank 0, the last rank sums another number of elements. As above.
failures check_mismatch_in_group(communicator<> const& comm, std::string& text);

}  // namespace ddp::test
