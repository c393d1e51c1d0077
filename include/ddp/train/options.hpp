/// \file
/// How a trainer trains: the choices that are values, not types.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>

#include <ddp/optim/clip.hpp>
#include <ddp/optim/schedule.hpp>
#include <ddp/train/ready_reports.hpp>

namespace ddp {

/// Who steps what: everybody everything; or each rank its slice of every bucket, after which new values travel instead
/// of gradients. The same bits; sharded divides optimizer state and its arithmetic by the number of ranks.
enum class update : std::uint8_t { replicated, sharded };

/// The same on all ranks, which is checked.
struct training_options {
    ddp::update update = ddp::update::replicated;
    std::optional<clipping> clip = {};  ///< of the mean gradient: clip_by_global_norm or clip_by_value
    ddp::schedule schedule = {};        ///< factor of the optimizer's learning rate, by update
    ddp::unused unused = ddp::unused::error;
    std::size_t buckets_in_flight = 4;  ///< bounds the memory of the reductions under way
    /// Bytes of values that are stepped at once, at most. After each quarter of it the network is looked after, so that
    /// heartbeats go out, and new values travel while others are stepped. The same bits for any; may differ between ranks.
    std::size_t step_piece_bytes = std::size_t{1} << 20;

    // Which kind of clipping there is; null if it is another, or none.
    [[nodiscard]] clip_by_global_norm const* norm_clip() const noexcept {
        return clip ? std::get_if<clip_by_global_norm>(&*clip) : nullptr;
    }
    [[nodiscard]] clip_by_value const* value_clip() const noexcept {
        return clip ? std::get_if<clip_by_value>(&*clip) : nullptr;
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
    static constexpr std::array<std::string_view, 5> hash_names = {
        "training_options.update", "training_options.clip", "training_options.schedule", "training_options.unused",
        "training_options.buckets_in_flight"};
    [[nodiscard]] std::array<std::uint64_t, 5> hashes() const {
        return {static_cast<std::uint64_t>(update),
                clip ? std::visit([](auto const& bound) { return bound.hash(); }, *clip) : 0, schedule.hash(),
                static_cast<std::uint64_t>(unused), std::uint64_t{buckets_in_flight}};
    }
};

}  // namespace ddp
