/// \file
/// Learning-rate schedules: pure functions from a step's number to a factor of the base rate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include <ddp/core/contract.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// The linear scaling rule: a k times larger batch takes a k times larger learning rate, after a warm-up.
/// Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
[[nodiscard]] inline double linear_scaling(double base_lr, std::size_t base_batch, std::size_t batch) {
    DDP_EXPECTS(base_batch > 0 && batch > 0, "linear_scaling: both batch sizes must be at least 1");
    return base_lr * (static_cast<double>(batch) / static_cast<double>(base_batch));
}

/// Grows from `from` to 1 in equal increments over `steps` steps: from + (1 - from) step / steps, with step 0 the
/// first, so that the first step has the factor `from` and step number `steps` is the first at full rate. With the
/// linear scaling rule by k, from = 1/k starts at the small batch's rate (Goyal et al., 2017).
struct linear_warmup {
    std::uint64_t steps = 0;  ///< steps below the full rate; 0: no warm-up
    double from = 0.1;        ///< factor of step 0; finite, >= 0
};

/// Always 1: no schedule.
struct constant_rate {};

/// factor^floor(step / every): 1 for the first `every` steps, then times `factor` after every `every` of them.
struct step_decay {
    std::uint64_t every = 1000;  ///< steps; at least 1
    double factor = 0.1;         ///< finite, >= 0
};

/// floor + (1 - floor) (1 + cos(pi step / steps)) / 2: half a cosine, 1 at step 0, `floor` from step number `steps` on
/// (so the last of `steps` steps is still a little above). Source: Loshchilov and Hutter, "SGDR: stochastic gradient
/// descent with warm restarts", ICLR 2017, without restarts.
struct cosine_decay {
    std::uint64_t steps = 1000;  ///< steps from 1 down to `floor`; at least 1
    double floor = 0.0;          ///< the factor at the end; finite, >= 0
};

/// floor + (1 - floor) (1 - step / steps)^power: 1 at step 0, `floor` from step number `steps` on; a straight line for
/// power 1. Powers are whole numbers: no C library's pow gives every rank the same bits. Source: torch's PolynomialLR
/// (floor 0).
struct polynomial_decay {
    std::uint64_t steps = 1000;  ///< steps from 1 down to `floor`; at least 1
    std::uint64_t power = 1;     ///< at least 1
    double floor = 0.0;          ///< the factor at the end; finite, >= 0
};

/// factor^step: times `factor` after every step. Relative error at most about step * 1e-16. Source: torch's
/// ExponentialLR.
struct exponential_decay {
    double factor = 0.999;  ///< finite, >= 0
};

/// One rise and one fall, each half a cosine: `initial` at step 0, 1 at the top, which is step rise * steps - 1 (where
/// that is below 0: step 0), `final` from step number steps - 1 on. The optimizer's own rate is the highest one.
/// Source: Smith and Topin, "Super-convergence", 2018, in the form of torch's OneCycleLR with its cosines and two phases
/// (its max_lr is the optimizer's rate, pct_start is `rise`, div_factor is 1 / initial, final_div_factor initial /
/// final), without its cycle of momentum.
struct one_cycle {
    std::uint64_t steps = 1000;  ///< of the whole training; at least 2
    double initial = 0.04;       ///< the factor of step 0; finite, >= 0
    double final = 4e-6;         ///< the factor of step number steps - 1 and of all later ones; finite, >= 0
    double rise = 0.3;           ///< the part of the steps that rise; in [0, 1]
};

/// A schedule chosen at run time: perhaps a warm-up, then one of the shapes, which counts its steps from the warm-up's
/// end. Plain data; the same on every rank (hash() says so).
///
///     ddp::schedule{ddp::linear_warmup{.steps = 100, .from = 0.25}, ddp::cosine_decay{.steps = 900}}
class schedule {
public:
    using shape = std::variant<constant_rate, step_decay, cosine_decay, polynomial_decay, exponential_decay, one_cycle>;

    schedule() = default;
    schedule(constant_rate then) : schedule(linear_warmup{}, then) {}
    schedule(step_decay then) : schedule(linear_warmup{}, then) {}
    schedule(cosine_decay then) : schedule(linear_warmup{}, then) {}
    schedule(polynomial_decay then) : schedule(linear_warmup{}, then) {}
    schedule(exponential_decay then) : schedule(linear_warmup{}, then) {}
    schedule(one_cycle then) : schedule(linear_warmup{}, then) {}
    schedule(linear_warmup warmup) : schedule(warmup, constant_rate{}) {}

    /// After `warmup` the shape counts from 0 again: its step 0 is step number warmup.steps. Throws usage_error for
    /// numbers that make no schedule.
    schedule(linear_warmup warmup, shape then);

    /// The factor of the base learning rate for step `step`, counted from 0: for the step_info of that step,
    /// learning_rate = optimizer.learning_rate() * factor(info.step - 1).
    [[nodiscard]] double factor(std::uint64_t step) const;

    [[nodiscard]] std::uint64_t hash() const noexcept;

private:
    linear_warmup warmup_;
    shape then_;
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/optim/impl/schedule.ipp>
#endif
