/// \file
/// What a trainer tells its observer, on the thread that drives the communication: hooks are short, and call nothing on
/// the communicator. If a hook throws, its rank gets that exception and the others E206; at the end of a step some of them
/// may have completed it. One hook may change what it receives: the mean gradient.
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <ddp/core/observe.hpp>

namespace ddp {

/// Where the time of the steps went, on the thread that calls them.
struct step_times {
    std::uint64_t steps = 0;           ///< calls of step() and join()
    std::chrono::nanoseconds total{};  ///< in step() and join(); loops of your own are not counted
    std::chrono::nanoseconds
        waited{};  ///< in step(), join() or finish(): waiting for communication after backward had ended
    std::chrono::nanoseconds stepped{};  ///< likewise, in the optimizer; not included in waited
};

/// Bucket `bucket` holds the mean gradient (all of it, or this rank's slice with a sharded update). In shared memory this
/// rank's slice may have been stepped by then.
struct bucket_reduced {
    std::uint64_t step = 0;              ///< number of the step, from 1: calls of step(), join() or backward()
    std::size_t bucket = 0;              ///< in the arena's order: the last is reduced first
    std::size_t bytes = 0;               ///< of all ranks' slices, less what is frozen at the bucket's ends
    std::chrono::nanoseconds elapsed{};  ///< since the bucket was full on this rank
};

/// All values have been updated.
struct step_finished {
    std::uint64_t step = 0;      ///< number of the step, from 1: calls of step(), join() or backward()
    std::uint64_t weight = 0;    ///< samples of all ranks
    double gradient_norm = 0.0;  ///< of the mean gradient before clipping; 0 if it was not computed
};

/// The mean gradient of elements [begin, begin + gradient.size()) of a parameter, before clipping and the update, which
/// see what the hook leaves in it: noise, masks, a penalty's gradient. Every rank calls the hook for the elements that
/// it steps: all of them, or with a sharded update its slice of each bucket, piece by piece in any order.
///
/// Bits     Ranks hold the same bits if the new value of an element depends only on this event's numbers, the element's
///          place (begin + k) and data that are the same on all ranks, and on no other element: pieces are cut
///          differently for other numbers of ranks, buckets and transports. Arithmetic belongs in a DDP_KERNEL
///          function; random numbers come from a random_stream, asked for begin + k.
/// Cost     of a trainer whose observer has the hook: where ranks share memory, adding and stepping in one pass becomes two.
template <class E>
struct mean_gradient {
    std::uint64_t step = 0;          ///< number of the step, from 1: calls of step(), join() or backward()
    std::uint64_t weight = 0;        ///< samples of all ranks
    std::size_t parameter = 0;       ///< as in parameters()
    std::size_t begin = 0;           ///< the first element's place in its parameter
    std::span<E> gradient = {};      ///< may be written
    std::span<E const> values = {};  ///< of the same elements, before the update
};

namespace detail {
template <class Obs, class E>
concept ChangesGradients = requires(Obs& observer, mean_gradient<E> const& event) { observer.on(event); };
}  // namespace detail

/// Has at least one of the hooks, so that a misspelt one does not compile; only null_observer may have none.
template <class Obs>
concept TrainingObserver =
    requires(Obs& observer, bucket_reduced const& event) { observer.on(event); } ||
    requires(Obs& observer, step_finished const& event) { observer.on(event); } ||
    detail::ChangesGradients<Obs, float> || detail::ChangesGradients<Obs, double> || std::same_as<Obs, null_observer>;

}  // namespace ddp
