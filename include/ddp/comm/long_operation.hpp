/// \file
/// long_operation: a part of a rank's own code for which the other ranks wait longer than timing.collective.
#pragma once

#include <chrono>
#include <memory>

#include <ddp/comm/communicator.hpp>
#include <ddp/comm/driver.hpp>
#include <ddp/comm/flight_recorder.hpp>
#include <ddp/comm/scheduler_base.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/contract.hpp>

namespace ddp {

/// While it lives, but not longer than `limit`, the deadlines of the other ranks are extended: one rank evaluates, or writes a large
/// file, and the others are in the next collective already.
///
///     if (comm.rank() == 0) {
///         ddp::long_operation const scope(comm, "evaluation", std::chrono::minutes(20));
///         evaluate(model);
///     }
///     ddp::barrier(comm);
///
/// The others hear of it in this rank's heartbeats. As long as they do, each of their waits, in any group and for any rank, may last
/// for another timing.collective; at least half of that remains after the end. Everything else holds as before: a rank that dies in
/// the scope is noticed at once, one that stops after timing.dead, and a wait of timing.straggler is reported, with `what`. Scopes
/// may be nested, on one thread; the limit and the text of the innermost one count. Not for hooks: while one runs, no heartbeats are
/// sent.
///
/// `what` outlives the scope; at most 80 bytes of it are shown.
///
/// Cost    a heartbeat to each peer. Waits while another thread is in a blocking call of the communicator.
/// Limits  over MPI at THREAD_MULTIPLE only: below it there are no heartbeats while a program computes.
/// Throws  usage_error if `limit` is not between 1 ms and a week, or `what` is empty.
template <Transport T>
class [[nodiscard]] long_operation {
public:
    long_operation(communicator<T> const& comm, char const* what, nanoseconds limit) : driver_(comm.driver()) {
        DDP_EXPECTS(limit >= std::chrono::milliseconds{1} && limit <= std::chrono::hours{24 * 7},
                    "long_operation: the limit must be between 1 ms and a week; there is no 'never'");
        DDP_EXPECTS(what != nullptr && *what != '\0', "long_operation: say what it is, such as \"evaluation\"");
        driver_->exclusively_from_anywhere(
            [&] { before_ = driver_->tasks().occupy({what, driver_->transport().now() + limit}); });
        driver_->recorder().record(flight::mark, 0, 0, 0, "long_operation");
    }
    long_operation(long_operation const&) = delete;
    long_operation& operator=(long_operation const&) = delete;
    ~long_operation() {
        driver_->recorder().record(flight::mark, 0, 0, 0, "long_operation_ended");
        driver_->exclusively_from_anywhere([this] { driver_->tasks().occupy(before_); });
    }

private:
    std::shared_ptr<driver<T>> driver_;
    scheduler_base::occupation before_;
};

}  // namespace ddp
