/// \file
/// step_ticket: what ranks exchange at the start of a step, and its totals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <ddp/model/layout.hpp>

namespace ddp {

/// One rank's data at the start of a step. The sum of gradients is divided by the sum of weights.
struct step_ticket {
    std::uint64_t weight = 0;  // samples this rank's gradient sums over
    std::uint32_t done = 0;    // 1: this rank is out of data
    std::uint32_t stop = 0;    // 1: this rank wants training to stop
    double loss = 0;           // of the step before: this rank's mean loss times its samples
    std::uint64_t digest = 0;  // of the part of values and state that is compared in this step
};
static_assert(sizeof(step_ticket) == sizeof(step_ticket::weight) + sizeof(step_ticket::done) +
                                         sizeof(step_ticket::stop) + sizeof(step_ticket::loss) +
                                         sizeof(step_ticket::digest),
              "it travels: no padding");

namespace detail {

/// The same on all ranks.
struct step_totals {
    std::uint64_t weight = 0;
    int first_with_samples = 0, with_samples = 0;  // the lowest rank that has samples; how many have some
    bool everybody_done = true;
    bool stop = false;
    bool alike = true;  // all digests are equal
    double losses = 0;
};

/// Order of summation: by rank.
[[nodiscard]] inline step_totals total(std::span<step_ticket const> by_rank) noexcept {
    step_totals all;
    for (step_ticket const& one : by_rank) {
        all.losses += one.loss;
        all.weight += one.weight;
        if (one.weight != 0 && all.with_samples++ == 0)
            all.first_with_samples = static_cast<int>(&one - by_rank.data());
        all.everybody_done = all.everybody_done && one.done != 0;
        all.stop = all.stop || one.stop != 0;
        all.alike = all.alike && one.digest == by_rank.front().digest;
    }
    return all;
}

/// The elements, of an arena of n, that are compared in step `step`, which counts from 1: all of them in `steps` steps.
[[nodiscard]] inline arena_range compared_in(std::uint64_t step, std::uint64_t steps, std::uint64_t n) noexcept {
    std::uint64_t const k = (step - 1) % steps;
    return {static_cast<std::size_t>(n / steps * k + n % steps * k / steps),
            static_cast<std::size_t>(n / steps * (k + 1) + n % steps * (k + 1) / steps)};
}

}  // namespace detail
}  // namespace ddp
