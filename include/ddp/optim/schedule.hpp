/// \file
/// Learning-rate schedules: pure functions from a step's number to a factor of the base rate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>

#include <ddp/core/contract.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// The learning rate for a batch of `batch` samples by the linear scaling rule, base_lr * batch / base_batch: a batch
/// that is k times as large uses a learning rate that is k times as large, after a warm-up. Throws usage_error if
/// one of the sizes is 0. Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
[[nodiscard]] inline double linear_scaling(double base_lr, std::size_t base_batch, std::size_t batch) {
    DDP_EXPECTS(base_batch > 0 && batch > 0, "linear_scaling: both batch sizes must be at least 1");
    return base_lr * (static_cast<double>(batch) / static_cast<double>(base_batch));
}

/// Grows linearly from `from` to 1 over `steps` steps: from + (1 - from) step / steps. The first step (number 0) has the
/// factor `from`, and step number `steps` is the first with factor 1. When the linear scaling rule increases a rate by k,
/// from = 1/k starts with the rate of the small batch (Goyal et al., 2017).
struct linear_warmup {
    std::uint64_t steps = 0;  ///< number of steps before factor 1; 0: no warm-up
    double from = 0.1;        ///< factor of step 0; finite, >= 0
};

/// Always 1: the learning rate is constant.
struct constant_rate {};

/// factor^floor(step / every): 1 in the first `every` steps, then multiplied by `factor` after every `every` steps.
struct step_decay {
    std::uint64_t every = 1000;  ///< number of steps between two changes; at least 1
    double factor = 0.1;         ///< what the rate is multiplied by; finite, >= 0
};

/// floor + (1 - floor) (1 + cos(pi step / steps)) / 2: half a period of a cosine, with 1 at step 0 and `floor` from step
/// number `steps` on (so the last of `steps` steps is slightly above it). Source: Loshchilov and Hutter, "SGDR:
/// stochastic gradient descent with warm restarts", ICLR 2017, without restarts.
struct cosine_decay {
    std::uint64_t steps = 1000;  ///< number of steps from 1 to `floor`; at least 1
    double floor = 0.0;          ///< the last factor; finite, >= 0
};

/// floor + (1 - floor) (1 - step / steps)^power: 1 at step 0, `floor` from step number `steps` on; linear for power 1.
/// Powers are whole numbers, because the pow of C libraries does not give the same bits on all processors. Source:
/// torch's PolynomialLR (with floor 0).
struct polynomial_decay {
    std::uint64_t steps = 1000;  ///< number of steps from 1 to `floor`; at least 1
    std::uint64_t power = 1;     ///< exponent; at least 1
    double floor = 0.0;          ///< the last factor; finite, >= 0
};

/// factor^step: multiplied by `factor` after every step. Relative error at most about step * 1e-16. Source: torch's
/// ExponentialLR.
struct exponential_decay {
    double factor = 0.999;  ///< what the rate is multiplied by; finite, >= 0
};

/// One increase and one decrease, each half a period of a cosine: `initial` at step 0; 1 at the maximum, which is at step
/// rise * steps - 1 (or 0 if that is negative); `final` from step number steps - 1 on. The optimizer's own rate is
/// therefore the largest. Source: Smith and Topin, "Super-convergence", 2018, in the form of torch's OneCycleLR with
/// cosines and two phases (its max_lr is the optimizer's rate, pct_start is `rise`, div_factor is 1 / initial,
/// final_div_factor is initial / final), without its cycle of momentum. It has its own increase: do
/// not combine it with a linear_warmup, after which it would begin with `initial`.
struct one_cycle {
    std::uint64_t steps = 1000;  ///< number of steps in the training; at least 2
    double initial = 0.04;       ///< the factor of step 0; finite, >= 0
    double final = 4e-6;         ///< the factor of step number steps - 1 and of all later ones; finite, >= 0
    double rise = 0.3;           ///< fraction of the steps in which the rate increases; in [0, 1]
};

/// A schedule that is chosen at run time: optionally a warm-up, then one of the shapes, which counts its steps from the
/// end of the warm-up. Must be the same on every rank; trainers compare its hash.
///
///     ddp::schedule const rate{ddp::linear_warmup{.steps = 100, .from = 0.25}, ddp::cosine_decay{.steps = 900}};
class schedule {
public:
    using shape = std::variant<constant_rate, step_decay, cosine_decay, polynomial_decay, exponential_decay, one_cycle>;

    schedule() = default;
    /// Without a warm-up. Throw as below.
    schedule(constant_rate then) : schedule(linear_warmup{}, then) {}
    schedule(step_decay then) : schedule(linear_warmup{}, then) {}
    schedule(cosine_decay then) : schedule(linear_warmup{}, then) {}
    schedule(polynomial_decay then) : schedule(linear_warmup{}, then) {}
    schedule(exponential_decay then) : schedule(linear_warmup{}, then) {}
    schedule(one_cycle then) : schedule(linear_warmup{}, then) {}
    schedule(linear_warmup warmup) : schedule(warmup, constant_rate{}) {}

    /// After `warmup`, the shape counts from 0: its step 0 is step number warmup.steps. Throws usage_error for fields out
    /// of their ranges.
    schedule(linear_warmup warmup, shape then);

    /// The factor of the base learning rate in step number `step`, from 0. A trainer sets step_info::learning_rate of
    /// update number n, from 1, to the optimizer's rate times factor(n - 1).
    [[nodiscard]] double factor(std::uint64_t step) const;

    [[nodiscard]] std::uint64_t hash() const noexcept;

    /// The name of the shape, such as "cosine_decay".
    [[nodiscard]] char const* name() const noexcept;
    /// All settings, for messages: "cosine_decay(steps 900, floor 0) after linear_warmup(steps 100, from 0.25)".
    [[nodiscard]] std::string hash_words() const;

private:
    linear_warmup warmup_;
    shape then_;
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/optim/impl/schedule.ipp>
#endif
