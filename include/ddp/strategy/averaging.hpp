/// \file
/// local_sgd, hierarchical_averaging: ranks train independently, and average their values at intervals.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collective/until_all_know.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/small_gather.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/strategy/strategy.hpp>

namespace ddp {

namespace detail {

/// Collective over the trainer's ranks: throws usage_error on all of them unless every rank of the group that a rank passes
/// passes that group too, so that the groups divide the trainer's ranks.
template <Transport T>
void expect_division(char const* strategy, communicator<T> const& trainer, communicator<T> const& inner) {
    struct claim {
        std::uint64_t group = 0, size = 0;
    };
    static_assert(std::has_unique_object_representations_v<claim>);  // it travels: no padding
    std::vector<claim> all(static_cast<std::size_t>(trainer.size()));
    group const& mine = inner.members();
    all[static_cast<std::size_t>(trainer.rank())] = {digest{}.add(std::uint64_t{mine.id()}).add(mine.members()).value(),
                                                     static_cast<std::uint64_t>(mine.size())};
    operation_info what;
    what.name = "groups of a strategy";
    if (trainer.size() > 1) trainer.run([&] { return all_gather_small(trainer.enter(what), std::span<claim>(all)); });
    for (std::size_t r = 0; r < all.size(); ++r) {
        auto const passed = std::count_if(all.begin(), all.end(), [&](claim const& one) {
            return one.group == all[r].group && one.size == all[r].size;
        });
        if (static_cast<std::uint64_t>(passed) == all[r].size) continue;
        until_all_know(trainer, what.name);
        throw usage_error(std::string(strategy) + ": inner of rank " +
                          std::to_string(trainer.members().world_rank(static_cast<int>(r))) + " is a group of " +
                          std::to_string(all[r].size) + ", and the trainer's ranks that pass it are " +
                          std::to_string(passed) +
                          ". The groups divide the trainer's ranks: all members of a group pass it, and none of them "
                          "is outside the trainer. Make it from the trainer's communicator: comm.host() or "
                          "comm.split(...)");
    }
}

}  // namespace detail

/// Ranks hold the same bits right after a meeting, and other ones in between: after every `period` local steps each
/// continues with the mean of all ranks' values, weighted by the samples that each has trained on since the last
/// meeting.
///
/// The first warm_up_steps steps end with a meeting each (post-local SGD); then periods are counted from there. With plain
/// SGD or SGD with momentum, a step that ends with a meeting is a step of data-parallel training, up to rounding. Each rank
/// keeps its own optimizer state: it is not averaged.
///
/// Cost    a meeting: an all-gather of 40 bytes per rank, and an automatic_allreduce of all trained values, S bytes, of which
///         each parameter takes whole lines of 64. P-1 times 40 bytes are sent per rank, and where direct_allreduce is chosen,
///         the slices of all other ranks once and its own P-1 times: 2S(P-1)/P where slices of S are equal. What other
///         algorithms send stands with them: automatic_allreduce::choice(bytes, P) names the one. Buffers: see local_parallel.
/// Source  Zinkevich et al., NIPS 2010; Stich, ICLR 2019; warm-up: Lin, Stich, Patel and Jaggi, "Don't use large
///         mini-batches, use local SGD", ICLR 2020. Weights as in McMahan et al., AISTATS 2017. PyTorch's
///         PeriodicModelAverager takes the plain mean, and averages for the first time after step warmup_steps + 1.
struct local_sgd {
    static constexpr char const* name = "local_sgd";
    static constexpr bool agrees = true;

    std::uint64_t period = 8;         ///< local steps from one meeting to the next; at least 1
    std::uint64_t warm_up_steps = 0;  ///< the number of first steps that each end with a meeting

    [[nodiscard]] std::uint64_t hash() const { return policy_hash(name, period, warm_up_steps); }
    [[nodiscard]] std::string hash_words() const {
        return policy_words(name, {{"period", period}, {"warm_up_steps", warm_up_steps}});
    }
    void validate() const { DDP_EXPECTS(period >= 1, "local_sgd: period is 0; use 1 to meet after every step"); }
    [[nodiscard]] bool due(std::uint64_t step) const noexcept {
        return step <= warm_up_steps || (step - warm_up_steps) % period == 0;
    }
    template <Element E>
    [[nodiscard]] no_strategy_state prepare(strategy_plan<E> const& /*plan*/) const noexcept {
        return {};
    }
    template <Transport T, Element E>
    void meet(no_strategy_state& /*state*/, meeting<T, E> const& with) const {
        detail::average(with, with.values);
    }
};

/// Ranks hold the same bits right after a meeting of all, those of a group right after each of its meetings: every
/// `inner_period` steps the ranks of a group (for example, of a host) average their values, every `period` steps all
/// ranks do.
///
///     ddp::hierarchical_averaging const strategy{.inner = comm.host(), .inner_period = 4, .period = 32};
///
/// The groups divide the trainer's ranks: each rank passes the communicator of its own group.
///
/// Cost    as local_sgd's, within the group or among all ranks.
/// Throws  usage_error when a trainer is made: inner_period 0; period not a multiple of it; a group with a rank that is
///         outside the trainer or does not pass it (on all ranks).
/// Source  Lin et al., ICLR 2020, section 5; PyTorch's HierarchicalModelAverager.
template <Transport T = any_transport>
struct hierarchical_averaging {
    static constexpr char const* name = "hierarchical_averaging";
    static constexpr bool agrees = true;

    communicator<T> inner;           ///< this rank's group
    std::uint64_t inner_period = 4;  ///< local steps between its meetings; at least 1
    std::uint64_t period = 32;       ///< likewise of all ranks; a multiple of inner_period

    [[nodiscard]] std::uint64_t hash() const { return policy_hash(name, inner_period, period); }
    [[nodiscard]] std::string hash_words() const {
        return policy_words(name, {{"inner_period", inner_period}, {"period", period}});
    }
    void validate() const {
        DDP_EXPECTS(inner_period >= 1 && period >= inner_period && period % inner_period == 0,
                    "hierarchical_averaging: inner_period is " + std::to_string(inner_period) + " and period " +
                        std::to_string(period) + "; period must be a multiple of inner_period, and both at least 1");
    }
    void validate(communicator<T> const& trainer) const { detail::expect_division(name, trainer, inner); }
    [[nodiscard]] bool due(std::uint64_t step) const noexcept { return step % inner_period == 0; }
    [[nodiscard]] communicator<T> const* group(std::uint64_t step) const noexcept {
        return step % period == 0 ? nullptr : &inner;
    }
    template <Element E>
    [[nodiscard]] no_strategy_state prepare(strategy_plan<E> const& /*plan*/) const noexcept {
        return {};
    }
    template <Element E>
    void meet(no_strategy_state& /*state*/, meeting<T, E> const& with) const {
        detail::average(with, with.values);
    }
};

}  // namespace ddp
