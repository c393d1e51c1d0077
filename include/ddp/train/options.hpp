/// \file
/// How a trainer trains: the choices that are values, not types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>

#include <ddp/core/digest.hpp>
#include <ddp/optim/clip.hpp>
#include <ddp/optim/schedule.hpp>

namespace ddp {

/// Who steps what: everybody everything; or each rank its slice of every bucket, after which new values travel instead
/// of gradients. The same bits; sharded divides optimizer state and its arithmetic by the number of ranks.
enum class update : std::uint8_t { replicated, sharded };

/// What to do about a parameter that backward does not report.
enum class unused : std::uint8_t {
    error,    ///< the step fails on all ranks, and the error names the parameter
    allowed,  ///< its gradient is +0 in an assigning pass, and stays what it is in an accumulating one
};

/// The same on all ranks, which is checked.
struct training_options {
    ddp::update update = ddp::update::replicated;
    std::optional<clipping> clip = {};  ///< of the mean gradient: clip_by_global_norm or clip_by_value
    schedule rate = {};                 ///< factor of the optimizer's learning rate, by update
    ddp::unused unused = ddp::unused::error;
    std::size_t buckets_in_flight = 4;  ///< bounds the memory of the reductions under way

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
    [[nodiscard]] std::uint64_t hash() const {
        digest all;
        all.add(static_cast<std::uint64_t>(update)).add(static_cast<std::uint64_t>(unused));
        all.add(rate.hash()).add(std::uint64_t{buckets_in_flight});
        all.add(clip ? std::visit([](auto const& bound) { return bound.hash(); }, *clip) : 0);
        return all.value();
    }
};

}  // namespace ddp
