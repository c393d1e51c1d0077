/// \file
/// What every transport has to carry, over communicators whose ranks are processes or threads: all collectives, the
/// overlap of a step, and trainings whose bits are those of inproc.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include <ddp/comm/communicator.hpp>

#include "support/collective_checks.hpp"

namespace ddp::test {

/// Every collective against its oracle, in float and double; every operation on every type of number.
failures check_all_collectives(communicator<>& comm);

/// A few steps by every canonical recipe; the digest of everything, and what is wrong.
std::pair<std::uint64_t, std::string> train_every_way(communicator<>& comm);
/// The same on threads of this process, once a rank count.
std::uint64_t inproc_bits(int ranks);

/// The same in two groups at once, the even ranks and the odd ones, each numbered from the last; what differs from inproc.
failures train_in_groups(communicator<>& comm);

/// Whether buckets are reduced during backward, for the algorithms that differ in how they begin.
failures check_overlap(communicator<>& comm);

}  // namespace ddp::test
