/// \file
/// Learning-rate schedules: pure functions from a step's number to a factor of the base rate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/math.hpp>
#include <ddp/kernel/kernel.hpp>

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

namespace detail::kernels {

// Scalars, but kernels all the same: ranks compiled for different processors must get the same rate.

DDP_KERNEL inline double factor_at(linear_warmup const& warmup, std::uint64_t step) {
    DDP_NO_CONTRACTION
    double const done = static_cast<double>(step) / static_cast<double>(warmup.steps);
    return warmup.from + (1 - warmup.from) * done;
}
DDP_KERNEL inline double factor_at(constant_rate const&, std::uint64_t) {
    return 1;
}
DDP_KERNEL inline double factor_at(step_decay const& decay, std::uint64_t step) {
    return power(decay.factor, step / decay.every);
}
DDP_KERNEL inline double factor_at(cosine_decay const& decay, std::uint64_t step) {
    DDP_NO_CONTRACTION
    if (step >= decay.steps) return decay.floor;
    double const done = static_cast<double>(step) / static_cast<double>(decay.steps);
    return decay.floor + (1 - decay.floor) * (0.5 * (1 + cosine(done)));
}
DDP_KERNEL inline double factor_at(polynomial_decay const& decay, std::uint64_t step) {
    DDP_NO_CONTRACTION
    if (step >= decay.steps) return decay.floor;
    double const left = static_cast<double>(decay.steps - step) / static_cast<double>(decay.steps);
    return decay.floor + (1 - decay.floor) * power(left, decay.power);
}
DDP_KERNEL inline double factor_at(exponential_decay const& decay, std::uint64_t step) {
    return power(decay.factor, step);
}
DDP_KERNEL inline double factor_at(one_cycle const& cycle, std::uint64_t step) {
    DDP_NO_CONTRACTION
    double const at = static_cast<double>(step);
    double const last = static_cast<double>(cycle.steps - 1);
    double const over = cycle.rise * static_cast<double>(cycle.steps) - 1;
    double const top = over > 0 ? over : 0;
    if (at < top) return cycle.initial + (1 - cycle.initial) * (0.5 * (1 - cosine(at / top)));
    if (at == top) return 1;
    if (at >= last) return cycle.final;
    return cycle.final + (1 - cycle.final) * (0.5 * (1 + cosine((at - top) / (last - top))));
}

}  // namespace detail::kernels

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
    schedule(linear_warmup warmup, shape then) : warmup_(warmup), then_(then) {
        DDP_EXPECTS(detail::is_finite(warmup.from) && warmup.from >= 0,
                    "linear_warmup: from must be a finite number >= 0; 1/k when the rate was scaled by k");
        if (auto const* const decay = std::get_if<step_decay>(&then_)) {
            DDP_EXPECTS(decay->every > 0, "step_decay: every must be at least 1 step; use constant_rate for no decay");
            DDP_EXPECTS(detail::is_finite(decay->factor) && decay->factor >= 0,
                        "step_decay: factor must be a finite number >= 0; 0.1 is usual");
        }
        if (auto const* const decay = std::get_if<cosine_decay>(&then_)) {
            DDP_EXPECTS(decay->steps > 0, "cosine_decay: steps must be at least 1; give the number of training steps");
            DDP_EXPECTS(detail::is_finite(decay->floor) && decay->floor >= 0,
                        "cosine_decay: floor must be a finite number >= 0; 0 is usual");
        }
        if (auto const* const decay = std::get_if<polynomial_decay>(&then_)) {
            DDP_EXPECTS(decay->steps > 0,
                        "polynomial_decay: steps must be at least 1; give the number of training steps");
            DDP_EXPECTS(decay->power > 0, "polynomial_decay: power must be at least 1; use constant_rate for no decay");
            DDP_EXPECTS(detail::is_finite(decay->floor) && decay->floor >= 0,
                        "polynomial_decay: floor must be a finite number >= 0; 0 is usual");
        }
        if (auto const* const decay = std::get_if<exponential_decay>(&then_))
            DDP_EXPECTS(detail::is_finite(decay->factor) && decay->factor >= 0,
                        "exponential_decay: factor must be a finite number >= 0; a little below 1 is usual");
        if (auto const* const cycle = std::get_if<one_cycle>(&then_)) {
            DDP_EXPECTS(cycle->steps > 1, "one_cycle: steps must be at least 2; give the number of training steps");
            DDP_EXPECTS(detail::is_finite(cycle->initial) && cycle->initial >= 0,
                        "one_cycle: initial must be a finite number >= 0; 0.04 is usual");
            DDP_EXPECTS(detail::is_finite(cycle->final) && cycle->final >= 0,
                        "one_cycle: final must be a finite number >= 0; 4e-6 is usual");
            DDP_EXPECTS(cycle->rise >= 0 && cycle->rise <= 1, "one_cycle: rise must lie in [0, 1]; 0.3 is usual");
        }
    }

    /// The factor of the base learning rate for step `step`, counted from 0: for the step_info of that step,
    /// learning_rate = optimizer.learning_rate() * factor(info.step - 1).
    [[nodiscard]] double factor(std::uint64_t step) const {
        if (step < warmup_.steps) return detail::kernels::factor_at(warmup_, step);
        return std::visit([&](auto const& then) { return detail::kernels::factor_at(then, step - warmup_.steps); },
                          then_);
    }

    [[nodiscard]] std::uint64_t hash() const noexcept {
        digest all;
        all.add("schedule").add(warmup_.steps).add(bytes_of(warmup_.from)).add(std::uint64_t{then_.index()});
        if (auto const* const decay = std::get_if<step_decay>(&then_))
            all.add(decay->every).add(bytes_of(decay->factor));
        if (auto const* const decay = std::get_if<cosine_decay>(&then_))
            all.add(decay->steps).add(bytes_of(decay->floor));
        if (auto const* const decay = std::get_if<polynomial_decay>(&then_))
            all.add(decay->steps).add(decay->power).add(bytes_of(decay->floor));
        if (auto const* const decay = std::get_if<exponential_decay>(&then_)) all.add(bytes_of(decay->factor));
        if (auto const* const cycle = std::get_if<one_cycle>(&then_))
            all.add(cycle->steps).add(bytes_of(cycle->initial)).add(bytes_of(cycle->final)).add(bytes_of(cycle->rise));
        return all.value();
    }

private:
    linear_warmup warmup_;
    shape then_;
};

}  // namespace ddp
