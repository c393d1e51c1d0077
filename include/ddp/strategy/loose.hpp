/// \file
/// elastic_averaging, gossip: strategies under which ranks never hold the same values.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/point_to_point.hpp>
#include <ddp/collective/request.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/kernel/combine.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/strategy/strategy.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp {

namespace detail::kernels {

/// pull = alpha (values - centre); values = values - pull.
template <Element E>
DDP_KERNEL void elastic_pull(E* values, E const* centre, E* pull, std::size_t count, E alpha) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        pull[i] = alpha * (values[i] - centre[i]);
        values[i] = values[i] - pull[i];
    }
}

}  // namespace detail::kernels

/// Ranks never hold the same bits: every `period` local steps, the values of each rank are pulled towards a common
/// centre, and the centre towards the mean of all. The centre is the same on all ranks; trainer.synchronise() gives
/// every rank the mean of the values.
///
/// Cost    as local_sgd's, and two passes; memory for two arrays of the model's size.
/// Sums    d = alpha (x - c); x = x - d; c = c + the sum of all d, in the canonical order.
/// Throws  usage_error where a trainer is made: period 0; alpha below 0, or above 1 / P: the centre would overshoot,
///         and above twice that, the iteration diverges.
/// Source  Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", NIPS 2015, the synchronous form:
///         alpha is their learning rate times rho, P alpha their beta (0.9 in their experiments).
struct elastic_averaging {
    static constexpr char const* name = "elastic_averaging";
    static constexpr bool agrees = false;

    std::uint64_t period = 8;  ///< local steps from one meeting to the next; at least 1
    double alpha = 0;          ///< how far each is pulled: at most 1 / P; 0 means 0.9 / P

    [[nodiscard]] std::uint64_t hash() const { return policy_hash(name, period, alpha); }
    [[nodiscard]] std::string hash_words() const { return policy_words(name, {{"period", period}, {"alpha", alpha}}); }
    void validate() const {
        DDP_EXPECTS(period >= 1, "elastic_averaging: period is 0; use 1 to meet after every step");
        DDP_EXPECTS(alpha >= 0 && alpha <= 1, "elastic_averaging: alpha is " + detail::decimal(alpha) +
                                                  "; it lies between 0 and 1, and with 0 is 0.9 / ranks");
    }
    void validate(int ranks) const {
        DDP_EXPECTS(pulled_by(ranks) * ranks <= 1 + 1e-9,
                    "elastic_averaging: alpha is " + detail::decimal(alpha) + " with " + std::to_string(ranks) +
                        " ranks; above 1 / ranks the centre overshoots. Leave it at 0 for 0.9 / ranks");
    }
    [[nodiscard]] bool due(std::uint64_t step) const noexcept { return step % period == 0; }

    template <Element E>
    struct state {
        detail::kept_array<E> centre;
        std::span<E> pull;
        void for_each_state(state_visitor visit) { centre.show(visit); }
    };
    template <Element E>
    [[nodiscard]] state<E> prepare(strategy_plan<E> const& plan) const {
        return {{plan, "elastic_centre", true}, plan.array(plan.values.size())};
    }
    template <Transport T, Element E>
    void meet(state<E>& kept, meeting<T, E> const& with) const {
        detail::kernels::elastic_pull(with.values.data(), kept.centre.all().data(), kept.pull.data(),
                                      with.values.size(), static_cast<E>(pulled_by(with.comm.size())));
        allreduce(with.comm, kept.pull);
        combine<sum>(kept.centre.all(), kept.centre.all(), kept.pull);
    }

private:
    [[nodiscard]] double pulled_by(int ranks) const noexcept { return alpha > 0 ? alpha : 0.9 / ranks; }
};

/// Which ranks exchange values in gossip.
enum class gossip_graph : std::uint8_t {
    ring,        ///< both neighbours: each rank continues with the mean of three values (of two if there are two ranks)
    exponential  ///< in meeting k the rank 2^(k mod log2 P) further on: the mean of two
};

/// Ranks never hold the same bits: every `period` local steps each exchanges values with its neighbours only, and
/// continues with the mean of theirs and its own. Differences die out over several meetings; trainer.synchronise()
/// gives every rank the mean of all.
///
/// A meeting waits for the neighbours of that meeting only. So a rank is ahead of another by at most as many meetings
/// as there are steps between them in the graph, which is at most reach(). All ranks learn reach() meetings later that
/// all are out of data, or that one wants to stop, from a sum that is ready by then. Even if shares differ, the plain
/// mean is taken: the mean over all ranks stays what it was.
///
/// Cost    S bytes sent per rank and meeting (ring of three ranks or more: 2 S), whatever the number of ranks, besides
///         an automatic_allreduce of 4 numbers that no rank waits for: log2 P messages of 4 numbers where it chooses
///         recursive_doubling_allreduce and P is a power of two (otherwise see there); where it chooses
///         direct_allreduce, one to rank 0 and one back to each. Memory for one or two arrays of the model's size.
/// Sums    ring: (own + (left + right)) times 1/3; exponential: (own + other) times 1/2.
/// Throws  usage_error where a trainer is made: period 0. In a meeting, ddp::error (errc::mismatch) if ranks have counted
///         different numbers of steps (unless they differ by a multiple of about 4,000 / sqrt P), or what the rank that found
///         this first has told the others.
/// Source  Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NIPS 2017 (ring); Assran et al., "Stochastic
///         gradient push", ICML 2019 (one-peer exponential graph).
struct gossip {
    static constexpr char const* name = "gossip";
    static constexpr bool agrees = false;

    gossip_graph graph = gossip_graph::exponential;  ///< which ranks are neighbours
    std::uint64_t period = 1;                        ///< local steps from one meeting to the next; at least 1

    [[nodiscard]] std::uint64_t hash() const { return policy_hash(name, graph, period); }
    [[nodiscard]] std::string hash_words() const {
        return policy_words(name, {{"graph", std::string_view(graph == gossip_graph::ring ? "ring" : "exponential")},
                                   {"period", period}});
    }
    void validate() const { DDP_EXPECTS(period >= 1, "gossip: period is 0; use 1 to meet after every step"); }
    [[nodiscard]] bool due(std::uint64_t step) const noexcept { return step % period == 0; }
    /// The number of meetings after which a rank's values have reached all `ranks` ranks: half of their number in a
    /// ring, otherwise log2 P, rounded up.
    [[nodiscard]] std::uint64_t reach(int ranks) const noexcept {
        return graph == gossip_graph::ring
                   ? static_cast<std::uint64_t>(ranks / 2)
                   : static_cast<std::uint64_t>(std::bit_width(static_cast<unsigned>(ranks - 1)));
    }

    /// What all ranks learn from one meeting, as a sum over ranks: how many are done, how many want to stop, the steps
    /// and their squares.
    template <Element E>
    struct told {
        std::span<E> sum = {};
        std::uint64_t step = 0;
        request under_way = {};  // the last member: it ends before its data are destroyed
    };
    template <Element E>
    struct state {
        std::span<E> from_left, from_right;  // scratch
        std::vector<told<E>> ring;
        std::uint64_t begun = 0, ended = 0;
        std::uint64_t round = 0;  // value of `begun` when all ranks were last done; older sums predate it
        void for_each_state(state_visitor /*visit*/) const noexcept {}
    };
    template <Element E>
    [[nodiscard]] state<E> prepare(strategy_plan<E> const& plan) const {
        bool const two = graph == gossip_graph::ring && plan.ranks > 2;
        state<E> all{plan.array(plan.values.size()), plan.array(two ? plan.values.size() : 0),
                     std::vector<told<E>>(static_cast<std::size_t>(reach(plan.ranks)) + 1)};
        for (told<E>& one : all.ring) one.sum = plan.array(4);
        return all;
    }
    template <Transport T, Element E>
    passed pass(state<E>& kept, passing<T, E> const& with) const {
        told<E>& now = kept.ring[kept.begun++ % kept.ring.size()];
        E const step = static_cast<E>(with.step % counted(with.comm.size()));
        std::ranges::copy(std::array<E, 4>{with.done ? E(1) : E(0), with.stop ? E(1) : E(0), step, step * step},
                          now.sum.begin());
        now.step = with.step;
        now.under_way = start_allreduce(with.comm, now.sum);
        mix(kept, with.comm, with.values, with.number);
        passed late;
        if (kept.begun - kept.ended == kept.ring.size()) late = end_oldest(kept, with.comm);
        late.met = true;
        return late;
    }
    template <Transport T, Element E>
    void drain(state<E>& kept, meeting<T, E> const& last) const {
        while (kept.ended != kept.begun) (void)end_oldest(kept, last.comm);
        detail::average(last, last.values);
    }

private:
    /// Steps are sent modulo this odd number, so that the sum of their squares is exact in float.
    static std::uint64_t counted(int ranks) noexcept {
        return static_cast<std::uint64_t>(std::sqrt(double{1 << 24} / ranks) - 1) | 1;
    }

    template <Transport T, Element E>
    static passed end_oldest(state<E>& kept, communicator<T> const& comm) {
        std::uint64_t const at = kept.ended++;
        told<E>& old = kept.ring[at % kept.ring.size()];
        old.under_way.wait();
        double const ranks = comm.size(), steps = static_cast<double>(old.sum[2]);
        if (ranks * static_cast<double>(old.sum[3]) != steps * steps)  // their variance is not 0
            throw error(errc::mismatch, "gossip: ranks meet after different numbers of local steps (" +
                                            std::to_string(old.step) + " on rank " +
                                            std::to_string(comm.members().world_rank(comm.rank())) +
                                            "). set_completed_steps() takes the same number on all ranks");
        bool const done = at >= kept.round && old.sum[0] == static_cast<E>(comm.size());
        if (done) kept.round = kept.begun;
        return {.done = done, .stop = old.sum[1] != 0};
    }
    template <Transport T, Element E>
    void mix(state<E>& kept, communicator<T> const& comm, std::span<E> values, std::uint64_t number) const {
        int const ranks = comm.size(), me = comm.rank();
        if (ranks == 1) return;
        if (graph == gossip_graph::ring && ranks > 2) {
            int const left = (me + ranks - 1) % ranks, right = (me + 1) % ranks;
            // Both at once: a rank that waits for one neighbour must not make the other one wait.
            request first = start_send_receive(comm, values, right, kept.from_left, left);
            send_receive(comm, values, left, kept.from_right, right);
            first.wait();
            combine<sum>(kept.from_left, kept.from_left, kept.from_right);
            combine<sum>(values, values, kept.from_left);
            scale(values, E(1) / E(3));
            return;
        }
        int hops = 0;  // 2^hops < P <= 2^(hops + 1)
        while (2 << hops < ranks) ++hops;
        int const far = 1 << static_cast<int>((number - 1) % static_cast<std::uint64_t>(hops + 1));
        send_receive(comm, values, (me + far) % ranks, kept.from_left, (me + ranks - far) % ranks);
        combine<sum>(values, values, kept.from_left);
        scale(values, E(0.5));
    }
};

}  // namespace ddp

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
