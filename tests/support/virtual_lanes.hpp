/// \file
/// virtual_lane: what a communicator does when a collective is called, for ranks in virtual time.
#pragma once

#include <ddp/comm/group.hpp>
#include <ddp/comm/lane.hpp>
#include <ddp/comm/operation.hpp>
#include <ddp/comm/scheduler.hpp>
#include <ddp/sim/cluster.hpp>

namespace ddp::test {

using virtual_lane = lane<virtual_transport>;

/// Enters the group's next collective, which has no name of its own.
inline virtual_lane next(scheduler<virtual_transport>& on, group& of) {
    operation_info what;
    what.name = "test";
    what.id = {.group = of.id(), .channel = channel::user, .index = of.next_call()};
    what.fingerprint = 77;
    of.enter(what);
    return {on, of, what.id, of.history()};
}

}  // namespace ddp::test
