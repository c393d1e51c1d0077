/// \file
/// What a trainer tells its observer, on the thread that drives the communication: hooks are short, and call nothing on the
/// communicator. What one throws fails the step on every rank.
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include <ddp/core/observe.hpp>

namespace ddp {

/// Where the time of the steps went, on the thread that calls them.
struct step_times {
    std::uint64_t steps = 0;             ///< calls of step()
    std::chrono::nanoseconds total{};    ///< in step(); loops of one's own are not counted
    std::chrono::nanoseconds waited{};   ///< in step() or finish(): waiting for communication after backward had ended
    std::chrono::nanoseconds stepped{};  ///< likewise, in the optimizer; no part of waited
};

/// Bucket `bucket` holds the mean gradient (all of it, or this rank's slice with a sharded update). In shared memory this
/// rank's slice may have been stepped by then.
struct bucket_reduced {
    std::uint64_t step = 0;              ///< number of the step, from 1: calls of step(), join() or finish()
    std::size_t bucket = 0;              ///< in the arena's order: the last is reduced first
    std::size_t bytes = 0;               ///< of the whole bucket
    std::chrono::nanoseconds elapsed{};  ///< since the bucket was full on this rank
};

/// All values are new.
struct step_finished {
    std::uint64_t step = 0;      ///< number of the step, from 1: calls of step(), join() or finish()
    std::uint64_t weight = 0;    ///< samples of all ranks
    double gradient_norm = 0.0;  ///< of the mean gradient before clipping; 0 where nobody asked for it
};

/// Any of the hooks, so that a misspelt one does not compile; null_observer has none, by name.
template <class Obs>
concept TrainingObserver = requires(Obs& observer, bucket_reduced const& event) {
    observer.on(event);
} || requires(Obs& observer, step_finished const& event) { observer.on(event); } || std::same_as<Obs, null_observer>;

}  // namespace ddp
