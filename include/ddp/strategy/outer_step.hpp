/// \file
/// diloco, slow_momentum: the changes of the ranks' own steps are the gradient of an outer optimizer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/text.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/strategy/strategy.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp {

namespace detail {

namespace kernels {

/// moved = anchor - mean; momentum = beta momentum + moved / rate; step = look_ahead ? moved / rate + beta momentum : momentum;
/// anchor = anchor - rate lr step; values = anchor.
template <Element E>
DDP_KERNEL void outer_step(E* anchor, E* momentum, E* values, std::size_t count, E lr, E beta, E rate,
                           bool look_ahead) {
    DDP_NO_CONTRACTION
    E const along = look_ahead ? beta : E(1), own = look_ahead ? E(1) : E(0);
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E const moved = (anchor[i] - values[i]) / rate;
        momentum[i] = beta * momentum[i] + moved;
        anchor[i] = anchor[i] - rate * lr * (own * moved + along * momentum[i]);
        values[i] = anchor[i];
    }
}

}  // namespace kernels

/// The values of all ranks after their last meeting, and the momentum of their changes: the same bits on all ranks.
template <Element E>
struct outer_state {
    kept_array<E> anchor, momentum;
    void for_each_state(state_visitor visit) {
        anchor.show(visit);
        momentum.show(visit);
    }
};
inline void expect_outer(char const* name, std::uint64_t period, double lr, double momentum) {
    DDP_EXPECTS(period >= 1, std::string(name) + ": period is 0; use 1 to meet after every step");
    DDP_EXPECTS(lr > 0 && lr < 1e6, std::string(name) + ": the outer learning rate is " + detail::decimal(lr) +
                                        "; it has to be positive (1 goes to the mean)");
    DDP_EXPECTS(momentum >= 0 && momentum < 1,
                std::string(name) + ": the outer momentum is " + detail::decimal(momentum) + "; it lies in [0, 1)");
}

}  // namespace detail

/// Ranks hold the same bits right after a meeting, and different ones in between: every `period` local steps, the values after the last
/// meeting minus the mean of all ranks' values are the gradient of a step of SGD with Nesterov's momentum, and all ranks continue from
/// there.
///
/// The inner optimizer is the trainer's (AdamW in the paper), and each rank keeps its own state of it.
///
/// Cost    as local_sgd's, and one pass over three arrays; memory for two arrays of the model's size.
/// Sums    mean as local_sgd's; m = mu m + d, x = x - lr (d + mu m), each operation rounded.
/// Source  Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023, algorithm 1; the
///         outer step is PyTorch's SGD with nesterov=True.
struct diloco {
    static constexpr char const* name = "diloco";
    static constexpr bool agrees = true;

    std::uint64_t period = 64;    ///< local steps from one meeting to the next (500 in the paper); at least 1
    double outer_lr = 0.7;        ///< of the outer optimizer; positive, below 10^6
    double outer_momentum = 0.9;  ///< likewise; in [0, 1)

    [[nodiscard]] std::uint64_t hash() const { return policy_hash(name, period, outer_lr, outer_momentum); }
    [[nodiscard]] std::string hash_words() const {
        return policy_words(name, {{"period", period}, {"outer_lr", outer_lr}, {"outer_momentum", outer_momentum}});
    }
    void validate() const { detail::expect_outer(name, period, outer_lr, outer_momentum); }
    [[nodiscard]] bool due(std::uint64_t step) const noexcept { return step % period == 0; }
    template <Element E>
    [[nodiscard]] detail::outer_state<E> prepare(strategy_plan<E> const& plan) const {
        return {{plan, "outer_anchor", true}, {plan, "outer_momentum", false}};
    }
    template <Transport T, Element E>
    void meet(detail::outer_state<E>& state, meeting<T, E> const& with) const {
        detail::average(with, with.values);
        detail::kernels::outer_step(state.anchor.all().data(), state.momentum.all().data(), with.values.data(),
                                    with.values.size(), static_cast<E>(outer_lr), static_cast<E>(outer_momentum), E(1),
                                    true);
    }
};

/// Ranks hold the same bits right after a meeting, and different ones in between: as diloco, with heavy-ball momentum, in units of the
/// inner learning rate, so that a schedule does not change what the momentum means.
///
/// Each rank keeps its own state of the inner optimizer ("maintain" in the paper).
///
/// Cost    as diloco's.
/// Sums    mean as local_sgd's; u = beta u + (x - mean) / f, x = x - lr f u, with f the schedule's factor of the last step.
///         If f is 0, as at the end of a decay to 0, x = mean, and u stays as it is.
/// Source  Wang, Tantia, Ballas and Rabbat, "SlowMo", ICLR 2020, algorithm 1, where u is in units of the whole learning
///         rate; FairScale's and torchdistX's SlowMo, with their defaults.
struct slow_momentum {
    static constexpr char const* name = "slow_momentum";
    static constexpr bool agrees = true;

    std::uint64_t period = 48;  ///< local steps from one meeting to the next; at least 1
    double lr = 1;  ///< "slow learning rate": 1 moves to the mean, and further along the momentum; positive, below 10^6
    double momentum = 0.5;  ///< "slow momentum factor"; in [0, 1)

    [[nodiscard]] std::uint64_t hash() const { return policy_hash(name, period, lr, momentum); }
    [[nodiscard]] std::string hash_words() const {
        return policy_words(name, {{"period", period}, {"lr", lr}, {"momentum", momentum}});
    }
    void validate() const { detail::expect_outer(name, period, lr, momentum); }
    [[nodiscard]] bool due(std::uint64_t step) const noexcept { return step % period == 0; }
    template <Element E>
    [[nodiscard]] detail::outer_state<E> prepare(strategy_plan<E> const& plan) const {
        return {{plan, "slow_anchor", true}, {plan, "slow_momentum", false}};
    }
    template <Transport T, Element E>
    void meet(detail::outer_state<E>& state, meeting<T, E> const& with) const {
        detail::average(with, with.values);
        E const rate = static_cast<E>(with.rate_factor);
        if (rate > 0)
            detail::kernels::outer_step(state.anchor.all().data(), state.momentum.all().data(), with.values.data(),
                                        with.values.size(), static_cast<E>(lr), static_cast<E>(momentum), rate, false);
        else
            std::ranges::copy(with.values, state.anchor.all().begin());
    }
};

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
