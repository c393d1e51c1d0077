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

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/data/string_map.hpp>
#include <ddp/optim/clip.hpp>
#include <ddp/optim/schedule.hpp>
#include <ddp/train/ready_reports.hpp>

namespace ddp {

/// Which rank steps which values. `replicated`: every rank steps every value. `sharded`: each rank steps its slice of
/// every bucket, after which new values are sent instead of gradients. The same bits either way; sharded divides
/// optimizer state and its arithmetic by the number of ranks, and values are still complete on every rank after each
/// step. `automatic`: sharded where the ranks see each other's memory, else replicated.
enum class update : std::uint8_t { replicated, sharded, automatic };

/// How a model's buffers (running statistics, counters) are treated. When a trainer is made, all ranks get rank 0's.
enum class buffers : std::uint8_t {
    /// After each step all ranks get rank 0's, or those of the lowest rank that had samples if rank 0 had none.
    from_rank_0,
    /// After each step those of float and double become the mean over the ranks that had samples; others as from_rank_0. In
    /// local_parallel the mean is over all ranks.
    averaged,
    left_alone,  ///< each rank keeps its own until all call synchronise_buffers()
    /// Each rank keeps its own until evaluate(trainer, …) begins: all then get rank 0's, and continue from them.
    /// No collective in a step. In local_parallel as from_rank_0.
    from_rank_0_at_evaluation,
};

/// What happens to a step whose mean gradient contains a NaN or an infinity, before any value is changed. All ranks
/// decide the same. With stop and skip each step copies the model's buffers (running statistics), to restore them.
enum class nonfinite : std::uint8_t {
    unchecked,  ///< nothing: values become NaN
    stop,       ///< nothing is changed, and every rank throws error (errc::nonfinite); training may continue
    skip,       ///< nothing is changed: no value, buffer, state or counter of updates; finish_result::skipped says so
    warn        ///< the step is made
};

/// Options of data_parallel, which may be passed in any place after the communicator:
///
///     ddp::data_parallel trainer{
///         model, ddp::adamw{}, comm, {.update = ddp::update::sharded, .clip = ddp::clip_by_global_norm{1.0}}};
///
/// The same on all ranks, except for share_memory and step_piece_bytes: otherwise the constructor of the trainer throws
/// comm_error (errc::model_differs, which names the option; errc::mismatch for `hierarchy`).
struct training_options {
    ddp::update update = ddp::update::automatic;  ///< how the work of the optimizer is divided
    std::optional<clipping> clip = {};        ///< clipping of the mean gradient: clip_by_global_norm or clip_by_value
    ddp::schedule schedule = {};              ///< factor of the learning rate, as a function of the step
    ddp::unused unused = ddp::unused::error;  ///< what to do about a parameter that backward leaves out
    /// Parameters whose names match one of these patterns (see name_fits) are frozen from the start, as by
    /// trainer.freeze(). The trainer's constructor throws usage_error if one matches no name. They get buckets of their
    /// own, so that nothing is sent for them (unless the model is `contiguous`: then as with freeze()).
    std::vector<std::string> frozen = {};
    /// What to do about NaN and infinities in the mean gradient. Unless they are unchecked, values are stepped after the
    /// last gradient has been reduced, as when clipping by norm, and each rank reads its gradients once more. The message
    /// names ranks, parameters and elements: it is the text of the error with stop, and a line on rank 0's stderr, at the
    /// first, second, fourth, … such step, with skip and warn. With update::replicated, ranks also compare the norm of the
    /// mean gradient, and all throw error (errc::replicas_differ) if it differs.
    ddp::nonfinite nonfinite = ddp::nonfinite::unchecked;
    /// Ranks of one host share the memory of values and gradients. DDP_SHARE_MEMORY=0 turns it off too. Messages are used
    /// if it is off on any rank; does not change any bits.
    bool share_memory = true;
    /// With ranks on several hosts: those of each host still share memory, and only their sums are sent between hosts. The same
    /// on all ranks; does not change any bits. Only with share_memory.
    bool hierarchy = true;
    /// Every value is compared between ranks once in this number of steps, a part of the values in each step, before
    /// the step changes any; with update::replicated also the state of the optimizer, and always what an exchange keeps
    /// for all ranks. E106 names the ranks that differ. With update::replicated a difference is found within that many
    /// steps. With update::sharded it is found only if it is in the part that the next step compares: that step then
    /// replaces all ranks' values by those of the slice's owner, wrong ones too. 1 finds every difference between
    /// values. Each step reads 1/agreement_steps of all this and sends 8 bytes to each rank. 0: never
    /// (but for whether norms are finite, see nonfinite).
    std::size_t agreement_steps = 256;
    ddp::buffers buffers = ddp::buffers::from_rank_0;  ///< how buffers are kept the same: one small collective per step
    std::size_t buckets_in_flight = 4;  ///< the most buckets that are reduced at the same time, which limits memory
    /// For updates that send values after a step (update::sharded, which `automatic` then selects, where no ranks share memory;
    /// no effect elsewhere): finish() returns once this rank has stepped its own slices, and those of other ranks arrive during
    /// the next forward pass, in the order of the parameters. A model with forward(batch, needed), such as sequential,
    /// waits for each parameter when it needs it; for any other model the trainer waits before forward. Does not change
    /// any bits. Until then, some values in the memory of the model are old: read them through trainer.model(), or call
    /// trainer.settle() first.
    bool overlap_gather = false;
    /// Largest number of bytes of values that are stepped in one piece. After each quarter of it the transport is driven,
    /// so that heartbeats are sent, and new values are sent while others are stepped. Does not change any bits; may
    /// differ between ranks.
    std::size_t step_piece_bytes = std::size_t{1} << 20;

    /// The clipping by norm; null if there is none.
    [[nodiscard]] clip_by_global_norm const* norm_clip() const noexcept {
        return clip ? std::get_if<clip_by_global_norm>(&*clip) : nullptr;
    }
    /// The clipping by value; null if there is none.
    [[nodiscard]] clip_by_value const* value_clip() const noexcept {
        return clip ? std::get_if<clip_by_value>(&*clip) : nullptr;
    }

    /// Whether buffers are the same on all ranks after each step.
    [[nodiscard]] bool buffers_alike() const noexcept {
        return buffers == ddp::buffers::from_rank_0 || buffers == ddp::buffers::averaged;
    }
    /// Whether the norm of the mean gradient is computed before any value is stepped.
    [[nodiscard]] bool needs_norm() const noexcept {
        return norm_clip() != nullptr || nonfinite != ddp::nonfinite::unchecked;
    }

    /// Whether a step may turn out to change nothing.
    [[nodiscard]] bool may_skip() const noexcept {
        return nonfinite == ddp::nonfinite::stop || nonfinite == ddp::nonfinite::skip;
    }

    /// Throws usage_error for overlap_gather with update::replicated, for buckets_in_flight = 0, and for a bound of clipping
    /// that is not a finite number > 0, or that elements of type E cannot represent (1e-50 in float).
    template <class E>
    void validate() const {
        DDP_EXPECTS(!overlap_gather || update != ddp::update::replicated,
                    "training_options.overlap_gather: with update::replicated no values travel after a step; choose "
                    "update::sharded, or leave update automatic");
        DDP_EXPECTS(buckets_in_flight > 0,
                    "training_options.buckets_in_flight is 0: no bucket could ever be exchanged; 4 is the default");
        if (!clip) return;
        std::visit(
            [](auto const& bound) {
                bound.validate();
                if constexpr (requires { bound.template validate_for<E>(); }) bound.template validate_for<E>();
            },
            *clip);
    }
    /// What the elements of hashes() are digests of, without the name of the options.
    static constexpr std::array<std::string_view, 8> hash_names = {
        "update or overlap_gather", "clip",      "schedule",        "unused or frozen",
        "buckets_in_flight",        "nonfinite", "agreement_steps", "buffers"};
    /// Digests of the options that ranks must have alike, in the order of hash_names.
    [[nodiscard]] std::array<std::uint64_t, 8> hashes() const {
        return {static_cast<std::uint64_t>(update) | (overlap_gather ? 256u : 0u),
                clip ? std::visit([](auto const& bound) { return bound.hash(); }, *clip) : 0,
                schedule.hash(),
                hash_of_unused(),
                std::uint64_t{buckets_in_flight},
                static_cast<std::uint64_t>(nonfinite),
                std::uint64_t{agreement_steps},
                static_cast<std::uint64_t>(buffers)};
    }
    /// The values that hashes() are digests of, as text for messages.
    [[nodiscard]] std::array<std::string, 8> hash_words() const;
    /// The settings `clip`, `schedule`, `nonfinite` and `buffers` in words, by these names.
    [[nodiscard]] string_map settings_in_words() const;

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

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/options.ipp>
#endif
