/// \file
/// automatic_allreduce: the cheapest of the canonical algorithms for the size of the data; the bits are the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/collective/algorithms/halving_doubling_allreduce.hpp>
#include <ddp/collective/algorithms/recursive_doubling_allreduce.hpp>
#include <ddp/collective/network_cost.hpp>
#include <ddp/core/digest.hpp>

namespace ddp {

/// The default algorithm: chooses the cheapest of direct_allreduce, recursive_doubling_allreduce and
/// halving_doubling_allreduce. All three add in the canonical tree over ranks and give the same bits, so results do not
/// depend on the choice.
///
///     ddp::automatic_allreduce fitted{.cost = ddp::measure_network(comm)};
///     std::puts(fitted.choice(1 << 20, comm.size()));  // such as "direct"
///
/// The choice depends only on the size of the data, the number of ranks and `cost`, so ranks with the same `cost` make the
/// same choice. If choices differ, every rank throws comm_error with both of them ("auto: direct"): DDP-E205, or DDP-E102 if
/// a trainer is being made. Without a `cost`, allreduce and reduce_scatter use the constants for the path that messages
/// between these ranks take (communicator::messages), and trainers use those for sockets:
/// `ddp::automatic_allreduce{}.fitted_to(comm).choice(1 << 20, comm.size())` returns the choice.
struct automatic_allreduce {
    static constexpr char const* name = "auto";
    static constexpr bool canonical = true;

    direct_allreduce direct = {};                ///< two steps, many messages
    recursive_doubling_allreduce doubling = {};  ///< for short arrays: few messages, everything in each
    halving_doubling_allreduce halving = {};     ///< for long arrays of 4, 8, 16, … ranks
    std::optional<network_cost> cost = {};       ///< estimates how long each would take

    /// The name of the algorithm that is used for an allreduce of `bytes` bytes among `ranks` ranks.
    [[nodiscard]] char const* choice(std::size_t bytes, int ranks) const noexcept {
        return name_used(bytes, ranks) + 6;  // behind "auto: "
    }
    /// The same for reduce_scatter and for a trainer's buckets, which are reduced to slices and gathered from them.
    [[nodiscard]] char const* choice_for_slices(std::size_t bytes, int ranks) const noexcept {
        return name_used(bytes, ranks, true) + 6;
    }
    /// The choice as messages show it and ranks compare it: "auto: direct".
    [[nodiscard]] char const* name_used(std::size_t bytes, int ranks, bool to_slices = false) const noexcept {
        return name_of(chosen(bytes, ranks, to_slices));
    }
    /// The choices and their options, as a digest. Ranks compare it.
    [[nodiscard]] std::uint64_t hash_used(std::size_t bytes, int ranks) const noexcept {
        by const sum = chosen(bytes, ranks), slices = chosen(bytes, ranks, true);
        return policy_hash(name, static_cast<int>(sum), static_cast<int>(slices),
                           sum == by::halving || slices == by::halving ? halving.hash() : 0,
                           sum == by::direct || slices == by::direct ? direct.hash() : 0);
    }
    /// A copy with the constants for messages between these ranks, if this one has no `cost` of its own.
    template <class Communicator>
    [[nodiscard]] automatic_allreduce fitted_to(Communicator const& comm) const {
        automatic_allreduce fitted = *this;
        if (!cost && comm.through_memory()) fitted.cost = network_cost::in_memory();
        return fitted;
    }
    [[nodiscard]] std::uint64_t hash() const noexcept {
        network_cost const used = cost.value_or(network_cost{});
        return policy_hash(name, direct.hash(), halving.hash(), used.message, used.post, used.byte, used.addition);
    }
    [[nodiscard]] std::string hash_words() const {
        network_cost const used = cost.value_or(network_cost{});
        return policy_words(name, {{"direct.chunk_bytes", direct.chunk_bytes},
                                   {"halving.chunk_bytes", halving.chunk_bytes},
                                   {"cost.message", used.message},
                                   {"cost.post", used.post},
                                   {"cost.byte", used.byte},
                                   {"cost.addition", used.addition}});
    }
    [[nodiscard]] bool everywhere(std::size_t bytes, int ranks) const noexcept {
        return chosen(bytes, ranks, true) == by::doubling;
    }

    template <Transport T, Number E>
    static task<> sum(automatic_allreduce self, lane<T> over, std::span<E> data) {
        return combine(self, over, data, ddp::sum{});
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> combine(automatic_allreduce self, lane<T> over, std::span<E> data, Op op) {
        switch (self.chosen(data.size_bytes(), over.size())) {
            case by::doubling: return recursive_doubling_allreduce::combine(self.doubling, over, data, op);
            case by::halving: return halving_doubling_allreduce::combine(self.halving, over, data, op);
            case by::direct: break;
        }
        return direct_allreduce::combine(self.direct, over, data, op);
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> reduce(automatic_allreduce self, lane<T> over, reduction<E, Op> what) {
        switch (self.chosen(what.data.size_bytes(), over.size(), true)) {
            case by::doubling: return recursive_doubling_allreduce::reduce(self.doubling, over, what);
            case by::halving: return halving_doubling_allreduce::reduce(self.halving, over, what);
            case by::direct: break;
        }
        return direct_allreduce::reduce(self.direct, over, what);
    }
    template <Transport T, Number E>
    static task<> all_gather(automatic_allreduce self, lane<T> over, std::span<E> data,
                             std::span<std::size_t const> cuts) {
        if (self.chosen(data.size_bytes(), over.size(), true) == by::halving)
            return halving_doubling_allreduce::all_gather(self.halving, over, data, cuts);
        return direct_allreduce::all_gather(self.direct, over, data, cuts);
    }

private:
    enum class by : std::uint8_t { doubling, direct, halving };
    [[nodiscard]] by chosen(std::size_t bytes, int ranks, bool to_slices = false) const noexcept {
        if (ranks < 2) return by::doubling;
        network_cost const used = cost.value_or(network_cost{});
        double const all = used.doubling(bytes, ranks), two = used.direct(bytes, ranks),
                     halves = to_slices ? used.halving_to_slices(bytes, ranks) : used.halving(bytes, ranks),
                     least = std::min({all, two, halves});
        return all == least ? by::doubling : two == least ? by::direct : by::halving;
    }
    [[nodiscard]] static char const* name_of(by which) noexcept {
        return which == by::doubling  ? "auto: recursive_doubling"
               : which == by::halving ? "auto: halving_doubling"
                                      : "auto: direct";
    }
};

namespace detail {
template <>
struct memory_rule<automatic_allreduce> {
    static constexpr bool applies(automatic_allreduce const& /*policy*/) noexcept { return true; }
};
}  // namespace detail

}  // namespace ddp
