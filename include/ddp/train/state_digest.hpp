/// \file
/// digest_of_state: whether two trainings would continue alike, as one number a rank.
#pragma once

#include <concepts>
#include <cstdint>

#include <ddp/core/bytes.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/model/state_slice.hpp>
#include <ddp/train/buffers.hpp>

namespace ddp {

/// Returns a digest of all numbers that `trainer`, a data_parallel or local_parallel, keeps on this rank from step to step:
/// how many steps it has completed, values, the model's buffers, and what for_each_state() visits (the optimizer's state, what
/// an exchange has left out, what a strategy keeps). On one rank, two trainings of a program have the same digest if they
/// continue with the same bits. Between the meetings of a local_parallel it leaves out how many samples the ranks have had since
/// the last one, and the sums that gossip and stale_synchronous have under way: compare where between_steps() is true. Ranks of
/// one training differ in it if each holds a part of the optimizer's state (update::sharded), or keeps something of its own;
/// compare those by replicas_identical(). Local. Cost: one pass over all of it. Throws usage_error while a step is under way.
template <class Trainer>
    requires requires(Trainer& trainer, state_visitor visit) {
        { trainer.completed_steps() } -> std::convertible_to<std::uint64_t>;
        { trainer.digest_of_values() } -> std::convertible_to<std::uint64_t>;
        trainer.for_each_state(visit);
    }
[[nodiscard]] std::uint64_t digest_of_state(Trainer& trainer) {
    digest all;
    trainer.for_each_state(
        [&](state_slice const& s) { all.add(s.of).add(s.name).add(std::uint64_t{s.begin}).add(const_bytes(s.bytes)); });
    all.add(std::uint64_t{trainer.completed_steps()}).add(std::uint64_t{trainer.digest_of_values()});
    if constexpr (requires { trainer.model().buffers(); }) all.add(detail::digest_of(trainer.model().buffers()));
    return all.value();
}

}  // namespace ddp
