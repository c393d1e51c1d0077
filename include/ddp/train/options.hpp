/// \file
/// How a trainer trains: the choices that are values, not types.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <ddp/core/digest.hpp>
#include <ddp/optim/clip.hpp>
#include <ddp/optim/schedule.hpp>
#include <ddp/train/ready_reports.hpp>

namespace ddp {

/// Who steps what. `replicated`: every rank steps every value. `sharded`: each rank steps its slice of every bucket,
/// after which new values travel instead of gradients. The same bits either way; sharded divides optimizer state and
/// its arithmetic by the number of ranks, and values are complete on every rank after each step all the same.
/// `automatic`: sharded where the ranks see each other's memory, else replicated.
enum class update : std::uint8_t { replicated, sharded, automatic };

/// What becomes of a model's buffers (running statistics, counters), after rank 0's have gone to all when a trainer was made.
enum class buffers : std::uint8_t {
    from_rank_0,  ///< rank 0's go to all after each step
    averaged,     ///< after each step: the mean over ranks of those of float and double, rank 0's of others
    left_alone,   ///< each rank keeps its own until all call synchronise_buffers()
    /// Each rank keeps its own until evaluate(trainer, …) begins: rank 0's go to all then, and each continues from them.
    /// No collective in a step. In local_parallel as from_rank_0.
    from_rank_0_at_evaluation,
};

/// What becomes of a step whose mean gradient has NaN or an infinity in it, before any value is changed. All ranks decide alike.
enum class nonfinite : std::uint8_t {
    unchecked,  ///< nothing: values become NaN
    stop,       ///< nothing is changed, and every rank throws error (errc::nonfinite); training may go on
    skip,       ///< nothing is changed: no value, no moment, no counter of updates; finish_result::skipped says so
    warn        ///< the step is made
};

/// How a data_parallel trains: pass it anywhere after the communicator.
///
///     ddp::data_parallel trainer{model, ddp::adamw{}, comm,
///                                {.update = ddp::update::sharded, .clip = ddp::clip_by_global_norm{1.0}}};
///
/// The same on all ranks: where they differ (but for share_memory and step_piece_bytes), the trainer's constructor throws comm_error
/// (errc::model_differs).
struct training_options {
    ddp::update update = ddp::update::automatic;  ///< who keeps the optimizer's state
    std::optional<clipping> clip = {};            ///< of the mean gradient: clip_by_global_norm or clip_by_value
    ddp::schedule schedule = {};                  ///< factor of the optimizer's learning rate, by update
    ddp::unused unused = ddp::unused::error;      ///< a parameter that backward leaves out
    /// Parameters whose names fit one of these patterns (see name_fits) are frozen from the start: trainer.freeze(). They get buckets
    /// of their own, so that nothing of them travels (unless the model is `contiguous`: see freeze()).
    std::vector<std::string> frozen = {};
    /// NaN and infinities in the mean gradient. Where they are looked for, values are stepped after the last gradient has come, as
    /// with clipping by norm, and each rank reads its gradients once more. What is said names ranks, parameters and elements:
    /// the error of stop; with skip and warn a line of rank 0's on stderr, at the first, second, fourth, … such step.
    ddp::nonfinite nonfinite = ddp::nonfinite::unchecked;
    /// Uses memory that all ranks see where they share a host. DDP_SHARE_MEMORY=0 says no as well. Messages are used if any
    /// rank says no; the same bits.
    bool share_memory = true;
    /// With ranks on several hosts, those of each host still share memory, and only sums of theirs travel between hosts: see
    /// hosts_engine. The same on all ranks; the same bits. Only with share_memory.
    bool hierarchy = true;
    /// Every value is compared between ranks once in so many steps, a part of them in each, before a step changes any; with
    /// update::replicated the optimizer's state too, and what an exchange keeps for all ranks. E106 names the ranks that differ.
    /// Costs one pass over 1/256 of all that a step, and 8 bytes to each rank. 0: never. The same on all ranks.
    std::size_t agreement_steps = 256;
    ddp::buffers buffers = ddp::buffers::from_rank_0;  ///< of a model that has some: one small collective a step
    std::size_t buckets_in_flight = 4;                 ///< bounds the memory of the reductions under way
    /// Bytes of values that are stepped at once, at most. After each quarter of it the transport is driven, so that
    /// heartbeats go out, and new values travel while others are stepped. The same bits for any; may differ between ranks.
    std::size_t step_piece_bytes = std::size_t{1} << 20;

    // Which kind of clipping there is; null if it is another, or none.
    [[nodiscard]] clip_by_global_norm const* norm_clip() const noexcept {
        return clip ? std::get_if<clip_by_global_norm>(&*clip) : nullptr;
    }
    [[nodiscard]] clip_by_value const* value_clip() const noexcept {
        return clip ? std::get_if<clip_by_value>(&*clip) : nullptr;
    }

    /// Whether buffers are the same on all ranks after each step.
    [[nodiscard]] bool buffers_alike() const noexcept {
        return buffers == ddp::buffers::from_rank_0 || buffers == ddp::buffers::averaged;
    }
    /// Whether the norm of the mean gradient is asked for, before any value is stepped.
    [[nodiscard]] bool needs_norm() const noexcept {
        return norm_clip() != nullptr || nonfinite != ddp::nonfinite::unchecked;
    }

    /// Throws usage_error where clipping has a bound that means nothing, or nothing in elements of type E.
    template <class E>
    void validate() const {
        if (!clip) return;
        std::visit(
            [](auto const& bound) {
                bound.validate();
                if constexpr (requires { bound.template validate_for<E>(); }) bound.template validate_for<E>();
            },
            *clip);
    }
    /// Of what ranks must have alike, in the order of hash_names.
    static constexpr std::array<std::string_view, 8> hash_names = {"training_options.update",
                                                                   "training_options.clip",
                                                                   "training_options.schedule",
                                                                   "training_options.unused or frozen",
                                                                   "training_options.buckets_in_flight",
                                                                   "training_options.nonfinite",
                                                                   "training_options.agreement_steps",
                                                                   "training_options.buffers"};
    [[nodiscard]] std::array<std::uint64_t, 8> hashes() const {
        return {static_cast<std::uint64_t>(update),
                clip ? std::visit([](auto const& bound) { return bound.hash(); }, *clip) : 0,
                schedule.hash(),
                hash_of_unused(),
                std::uint64_t{buckets_in_flight},
                static_cast<std::uint64_t>(nonfinite),
                std::uint64_t{agreement_steps},
                static_cast<std::uint64_t>(buffers)};
    }

private:
    [[nodiscard]] std::uint64_t hash_of_unused() const {
        if (frozen.empty()) return static_cast<std::uint64_t>(unused);
        digest all;
        all.add(static_cast<std::uint64_t>(unused));
        for (std::string const& pattern : frozen) all.add(pattern);
        return all.value();
    }
};

}  // namespace ddp
