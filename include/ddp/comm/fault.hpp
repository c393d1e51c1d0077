/// \file
/// fault: finds the rank at fault from the ranks' records. A pure function, so that every rank finds the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// The rule that named the culprit; it determines the wording of the verdict.
enum class fault_rule : std::uint8_t {
    published,      ///< a rank has published a verdict already
    threw,          ///< user code threw on the culprit
    broke,          ///< the culprit's transport reported an error
    named,          ///< a mismatch of a model, a gradient or a batch, as its record says
    settings,       ///< two ranks are in the same operation with other settings
    operations,     ///< two ranks are in different operations of one number
    message,        ///< a message of another length or operation
    left,           ///< the culprit ended cleanly while others still needed it
    closed,         ///< the culprit's connection closed while a rank waited for it
    stopped,        ///< the culprit was stopped for longer than timing.dead, and its connections were closed meanwhile
    gone,           ///< the culprit's connection closed while no rank waited for it
    silent,         ///< the culprit sends no heartbeats
    late,           ///< the culprit did not take part in time
    circle,         ///< ranks wait for each other
    broken_link,    ///< both ends are alive, their connection closed
    silent_link,    ///< both ends are alive, their connection carries nothing
    gave_up,        ///< a rank has published a record, and nothing says why
    without_reason  ///< no rank has published a record
};

/// What decides a failure: the rule, the record that it rests on, and the ranks concerned.
struct fault {
    fault_rule rule = fault_rule::without_reason;
    failure from = {};  ///< the record that decided
    int culprit = -1;   ///< -1 if it is not known
    errc code = errc::peer_closed;
    int other = -1;                ///< the second rank of a mismatch
    std::vector<int> circle = {};  ///< ranks that wait for one another, each for the next, the last for the first
};

/// Finds the fault in the reports of all ranks. `collective` is the deadline of one wait.
///
///  1. A verdict that a rank has published already is adopted (the least rank's).
///  2. Else the first kind present wins: threw, broke, mismatch, closed, silent; within it the least (operation, rank).
///     A rank that has published a record is alive: records that call it closed or silent do not count, except its own
///     that it was stopped, which counts after records of the kind closed. A mismatch of
///     models, gradients or batches is described by its record; for any other, the next rule says more.
///  3. Ranks that entered different things under one number of one group: a mismatch, whatever they wait for.
///  4. Else, if a rank that was called closed has published a record, the connection is at fault, not either end.
///  5. Deadlines alone: from the least waiting record follow the edges "waits for", which may cross groups, to a rank
///     that waits for no rank or has published no record; it is the culprit, not the neighbour that the others were
///     waiting for. A wait younger than half the deadline accuses no rank: a rank that has just arrived is late itself.
///     If the edges form a circle that crosses groups, groups were used in different orders; within one group a message
///     was lost, and it is not known which.
///  6. Else, if a rank that was called silent has published a record, the connection is at fault; also where waits are
///     old, but none has reached the deadline.
[[nodiscard]] fault find_fault(std::span<report const> reports, nanoseconds collective);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/fault.ipp>
#endif
