/// \file
/// stale_synchronous: ranks that step without waiting, and apply the steps of the others a few steps later.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/request.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/kernel/combine.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/strategy/strategy.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp {

namespace detail::kernels {

/// own = values - before; sum = weight own.
template <Element E>
DDP_KERNEL void what_a_step_did(E const* values, E const* before, E* own, E* sum, std::size_t count, E weight) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        own[i] = values[i] - before[i];
        sum[i] = weight * own[i];
    }
}
/// base = base + inverse sum.
template <Element E>
DDP_KERNEL void take_mean_step(E* base, E const* sum, std::size_t count, E inverse) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) base[i] = base[i] + inverse * sum[i];
}

}  // namespace detail::kernels

/// Ranks never hold the same bits: each has its own last `staleness` steps, and the mean of all ranks' steps before those.
/// trainer.synchronise() ends what is under way and gives every rank the mean of all steps.
///
/// After a step a rank starts the sum of what all ranks' steps have changed, and continues; it waits for the sum that
/// it started `staleness` steps before. So messages may take that many steps, and no rank is ever further ahead of
/// another than that. A sum takes effect exactly `staleness` steps later, however early it is ready: the same run gives
/// the same bits again. The end of a rank's data and request_stop() take effect that many steps later too.
///
/// Cost    of a step: an automatic_allreduce of n + 3 elements, of which n are all trained values as local_sgd sends them, while
///         the next steps run, on the communicator's thread where the transport allows one; staleness + 4 passes. Where
///         direct_allreduce is chosen, a rank sends the slices of all other ranks once and its own P-1 times: 2(P-1)/P of the
///         n + 3 elements where slices are equal. Memory for 2 staleness + 4 arrays of the model's size.
/// Sums    d = x - x before the step; c = c + (the sum of weight d, in the canonical order) times 1 / (the sum of weights),
///         weights being samples; x = c + the rank's own d of the steps since, the oldest first.
/// Source  Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013, without a
///         server; as every sum is used after exactly this many steps, also Zhou et al., "DaSGD", 2020.
struct stale_synchronous {
    static constexpr char const* name = "stale_synchronous";
    static constexpr bool agrees = false;

    std::uint64_t staleness = 1;  ///< steps from the start of a sum to its use; 1 to 1,024

    [[nodiscard]] std::uint64_t hash() const { return policy_hash(name, staleness); }
    [[nodiscard]] std::string hash_words() const { return policy_words(name, {{"staleness", staleness}}); }
    void validate() const {
        DDP_EXPECTS(staleness >= 1 && staleness <= 1024,
                    "stale_synchronous: staleness is " + std::to_string(staleness) +
                        "; it lies between 1 and 1024 (with 0 ranks would wait for each other in each step, as with "
                        "local_sgd{.period = 1})");
    }
    [[nodiscard]] bool due(std::uint64_t /*step*/) const noexcept { return true; }

    /// One step of this rank, and its sum over all ranks.
    template <Element E>
    struct exchange {
        std::vector<E> own;
        std::span<E> sum;   // and the weight, who is done, who wants to stop
        request under_way;  // the last member: it ends before its data are destroyed
    };
    template <Element E>
    struct state {
        detail::kept_array<E> base;  // the start, and the mean of all steps whose sums have been used
        std::vector<E> before;       // this rank's values after the last step
        std::vector<exchange<E>> ring;
        std::uint64_t begun = 0, ended = 0;
        std::uint64_t round = 0;  // value of `begun` when all ranks were last done; older sums predate it

        void for_each_state(state_visitor visit) { base.show(visit); }
    };
    template <Element E>
    [[nodiscard]] state<E> prepare(strategy_plan<E> const& plan) const {
        state<E> all{{plan, "stale_base", true}, {plan.values.begin(), plan.values.end()}, {}};
        for (std::uint64_t k = 0; k <= staleness; ++k)
            all.ring.push_back({std::vector<E>(plan.values.size()), plan.array(plan.values.size() + 3), {}});
        return all;
    }

    template <Transport T, Element E>
    passed pass(state<E>& kept, passing<T, E> const& with) const {
        std::size_t const n = with.values.size();
        if (kept.begun == kept.ended) std::ranges::copy(kept.base.all(), kept.before.begin());
        exchange<E>& now = kept.ring[kept.begun++ % kept.ring.size()];
        detail::kernels::what_a_step_did(with.values.data(), kept.before.data(), now.own.data(), now.sum.data(), n,
                                         static_cast<E>(with.weight));
        now.sum[n] = static_cast<E>(with.weight);
        now.sum[n + 1] = with.done ? E(1) : E(0);
        now.sum[n + 2] = with.stop ? E(1) : E(0);
        now.under_way = start_allreduce(with.comm, now.sum);
        passed late;
        if (kept.begun - kept.ended > staleness) {
            std::uint64_t const at = kept.ended;
            std::span<E const> const said = end_oldest(kept);
            late.done = at >= kept.round && said[1] == static_cast<E>(with.comm.size());
            if (late.done) kept.round = kept.begun;
            late.stop = said[2] != 0;
        }
        std::ranges::copy(kept.base.all(), with.values.begin());
        for (std::uint64_t k = kept.ended; k < kept.begun; ++k)
            combine<sum>(with.values, with.values, kept.ring[k % kept.ring.size()].own);
        std::ranges::copy(with.values, kept.before.begin());
        return late;
    }
    template <Transport T, Element E>
    void drain(state<E>& kept, meeting<T, E> const& last) const {
        while (kept.ended != kept.begun) (void)end_oldest(kept);
        std::ranges::copy(kept.base.all(), last.values.begin());
    }

private:
    /// The weights of all ranks, how many are done, how many want to stop.
    template <Element E>
    static std::span<E const> end_oldest(state<E>& kept) {
        exchange<E>& old = kept.ring[kept.ended % kept.ring.size()];
        old.under_way.wait();
        ++kept.ended;
        std::size_t const n = old.own.size();
        if (old.sum[n] > 0)
            detail::kernels::take_mean_step(kept.base.all().data(), old.sum.data(), n, E(1) / old.sum[n]);
        return old.sum.subspan(n);
    }
};

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
