/// \file
/// automatic_allreduce: recursive doubling for small data, the direct exchange for the rest; the bits are the same.
#pragma once

#include <cstddef>
#include <span>

#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/collective/algorithms/recursive_doubling_allreduce.hpp>

namespace ddp {

/// The default: chooses by size among the canonical algorithms, so that the choice is never seen in the result.
/// The limits are where the two were measured to meet on loopback (docs/performance.md); they follow from the size and the
/// number of ranks alone, so every rank chooses alike.
struct automatic_allreduce {
    static constexpr char const* name = "auto";
    static constexpr bool canonical = true;

    direct_allreduce direct = {};                          ///< for longer arrays
    recursive_doubling_allreduce doubling = {};            ///< for shorter ones
    std::size_t two_ranks_bytes = std::size_t{256} << 10;  ///< P = 2: exchanging everything wins up to here
    std::size_t few_ranks_bytes = std::size_t{16} << 10;   ///< P = 3 … 7
    std::size_t many_ranks_bytes = std::size_t{64} << 10;  ///< P >= 8: P(P-1) messages cost more

    [[nodiscard]] bool doubles(std::size_t bytes, int ranks) const noexcept {
        return bytes <= (ranks <= 2 ? two_ranks_bytes : ranks < 8 ? few_ranks_bytes : many_ranks_bytes);
    }
    [[nodiscard]] std::uint64_t hash() const noexcept {
        return policy_hash(name, direct.hash(), two_ranks_bytes, few_ranks_bytes, many_ranks_bytes);
    }
    [[nodiscard]] bool everywhere(std::size_t bytes, int ranks) const noexcept {
        return ranks == 1 || doubles(bytes, ranks);
    }

    template <Transport T, Number E>
    static task<> sum(automatic_allreduce self, lane<T> over, std::span<E> data) {
        return combine(self, over, data, ddp::sum{});
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> combine(automatic_allreduce self, lane<T> over, std::span<E> data, Op op) {
        if (self.doubles(data.size_bytes(), over.size()))
            return recursive_doubling_allreduce::combine(self.doubling, over, data, op);
        return direct_allreduce::combine(self.direct, over, data, op);
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> reduce(automatic_allreduce self, lane<T> over, reduction<E, Op> what) {
        if (self.doubles(what.data.size_bytes(), over.size()))
            return recursive_doubling_allreduce::reduce(self.doubling, over, what);
        return direct_allreduce::reduce(self.direct, over, what);
    }
    template <Transport T, Number E>
    static task<> all_gather(automatic_allreduce self, lane<T> over, std::span<E> data,
                             std::span<std::size_t const> cuts) {
        return direct_allreduce::all_gather(self.direct, over, data, cuts);
    }
};

namespace detail {
template <>
struct memory_rule<automatic_allreduce> {
    static constexpr bool applies(automatic_allreduce const& /*policy*/) noexcept { return true; }
};
}  // namespace detail

}  // namespace ddp
