/// \file
/// What optim/schedule.hpp declares.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/math.hpp>
#include <ddp/core/text.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/optim/schedule.hpp>

namespace ddp {

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

DDP_DECL schedule::schedule(linear_warmup warmup, shape then) : warmup_(warmup), then_(then) {
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
        DDP_EXPECTS(decay->steps > 0, "polynomial_decay: steps must be at least 1; give the number of training steps");
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

DDP_DECL double schedule::factor(std::uint64_t step) const {
    if (step < warmup_.steps) return detail::kernels::factor_at(warmup_, step);
    return std::visit([&](auto const& then) { return detail::kernels::factor_at(then, step - warmup_.steps); }, then_);
}

DDP_DECL std::uint64_t schedule::hash() const noexcept {
    auto const with = [&](auto... settings) {
        return policy_hash("schedule", warmup_.steps, warmup_.from, then_.index(), settings...);
    };
    if (auto const* const s = std::get_if<step_decay>(&then_)) return with(s->every, s->factor);
    if (auto const* const s = std::get_if<cosine_decay>(&then_)) return with(s->steps, s->floor);
    if (auto const* const s = std::get_if<polynomial_decay>(&then_)) return with(s->steps, s->power, s->floor);
    if (auto const* const s = std::get_if<exponential_decay>(&then_)) return with(s->factor);
    if (auto const* const s = std::get_if<one_cycle>(&then_)) return with(s->steps, s->initial, s->final, s->rise);
    return with();
}
DDP_DECL char const* schedule::name() const noexcept {
    constexpr char const* names[] = {"constant_rate",    "step_decay",        "cosine_decay",
                                     "polynomial_decay", "exponential_decay", "one_cycle"};
    return names[then_.index()];
}
[[gnu::cold]] DDP_DECL std::string schedule::hash_words() const {
    using detail::concat, detail::decimal;
    struct settings {
        static std::string of(constant_rate const&) { return ""; }
        static std::string of(step_decay const& s) {
            return concat({"(every ", s.every, ", factor ", decimal(s.factor), ")"});
        }
        static std::string of(cosine_decay const& s) {
            return concat({"(steps ", s.steps, ", floor ", decimal(s.floor), ")"});
        }
        static std::string of(polynomial_decay const& s) {
            return concat({"(steps ", s.steps, ", power ", s.power, ", floor ", decimal(s.floor), ")"});
        }
        static std::string of(exponential_decay const& s) { return concat({"(factor ", decimal(s.factor), ")"}); }
        static std::string of(one_cycle const& s) {
            return concat({"(steps ", s.steps, ", initial ", decimal(s.initial), ", final ", decimal(s.final),
                           ", rise ", decimal(s.rise), ")"});
        }
    };
    std::string all = name() + std::visit([](auto const& then) { return settings::of(then); }, then_);
    if (warmup_.steps > 0)
        all += concat({" after linear_warmup(steps ", warmup_.steps, ", from ", decimal(warmup_.from), ")"});
    return all;
}

}  // namespace ddp
