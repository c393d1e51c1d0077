/// \file
/// Allreduce: what an algorithm must offer to work over any transport.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include <ddp/comm/lane.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/task.hpp>
#include <ddp/kernel/operation.hpp>
#include <ddp/model/model.hpp>

namespace ddp {

template <Element E>
inline constexpr char const* element_name = std::is_same_v<E, float> ? "float" : "double";

/// The argument of an algorithm's reduce: the data of one reduction. What it points to outlives the task.
template <Number E, class Op = sum>
struct reduction {
    std::span<E> data;                  ///< this rank's addend; slice r of rank r's copy becomes the sum
    std::span<std::size_t const> cuts;  ///< P + 1 positions in data; slice r is [cuts[r], cuts[r+1])
    event* go = nullptr;                ///< data may be read once this is set; null: at once
    E const* factor = nullptr;          ///< read after go; the sum is multiplied by it (null: it is not)
};

/// Sums equally long arrays of all ranks; every rank ends with the same bits.
///
///  sum(self, lane, data)   a coroutine that takes the policy by value: a member coroutine of a temporary would use a dangling
///                          `this`
///  name                    for messages and reports; a static constant, or a member where the choice is made at run time
///  canonical               likewise, bool: adds in the order of the canonical tree (docs/design.md, numbers)
///
/// Optional, each found on its own:
///  hash()                  a digest of options that matter for messages or sums: ranks compare it
///  check_group(group)      throws usage_error for ranks that the policy is not made for, before anything is sent
///  fitted_to(communicator)    the policy as it is used among these ranks: for one that chooses
///  name_used(bytes, ranks)    what ranks compare and messages show in place of `name`; with a third parameter, bool, which is
///                             true for a reduction to slices, if the choice then is another
template <class A, class T, class E>
concept AllreduceOver = Transport<T> && Number<E> && requires(A self, lane<T> over, std::span<E> data) {
    { A::sum(self, over, data) } -> std::same_as<task<>>;
    { self.name } -> std::convertible_to<char const*>;
    { self.canonical } -> std::convertible_to<bool>;
};

/// Refinement: also combines with operations other than the sum.
///
///  combine(self, lane, data, op)   as sum(), with `op` instead of addition
template <class A, class T, class E, class Op>
concept CombiningAllreduceOver =
    AllreduceOver<A, T, E> && OperationOn<Op, E> && requires(A self, lane<T> over, std::span<E> data, Op op) {
        { A::combine(self, over, data, op) } -> std::same_as<task<>>;
    };

/// Refinement: can stop half-way, which is what early posting and the sharded update need.
///
///  reduce(self, lane, what)      posts receives, into scratch, of what peers can send without this rank's data; awaits
///                                what.go, unless that is null; then reads and sends. Leaves slice r of the sum (times the
///                                factor) on rank r, or all of it on every rank if everywhere() says so
///  all_gather(self, lane, data, cuts)   brings every rank's slice to all
///  everywhere(bytes, ranks)      whether reduce leaves the whole sum everywhere for this size
///
/// An allreduce calls reduce and then all_gather on lanes of the same identity: where messages of the two could be mistaken for
/// each other, use another lane.phase() in each.
///
/// The operation is that of the reduction: SlicedAllreduceOver<A, T, E, minimum> takes a reduction<E, minimum>.
template <class A, class T, class E, class Op = sum>
concept SlicedAllreduceOver = AllreduceOver<A, T, E> && OperationOn<Op, E> &&
                              requires(A self, lane<T> over, reduction<E, Op> what, std::span<E> data,
                                       std::span<std::size_t const> cuts, std::size_t bytes, int ranks) {
                                  { A::reduce(self, over, what) } -> std::same_as<task<>>;
                                  { A::all_gather(self, over, data, cuts) } -> std::same_as<task<>>;
                                  { self.everywhere(bytes, ranks) } -> std::convertible_to<bool>;
                              };

/// Refinement: sums on the calling thread. Nothing else of the library makes progress meanwhile, and there is no deadline for
/// a rank that never makes the call. A trainer therefore calls it only in finish(), after every rank has said that it is
/// there; nothing overlaps.
///
///  sum_blocking(self, lane, data)   sums on the thread that drives; sum() does the same as a coroutine.
template <class A, class T, class E>
concept BlockingAllreduceOver =
    AllreduceOver<A, T, E> && requires(A self, lane<T> over, std::span<E> data) { A::sum_blocking(self, over, data); };

namespace detail {

/// The policy as it is used among these ranks.
template <class A, class C>
[[nodiscard]] A fitted(A const& policy, [[maybe_unused]] C const& comm) {
    if constexpr (requires {
                      { policy.fitted_to(comm) } -> std::same_as<A>;
                  })
        return policy.fitted_to(comm);
    else
        return policy;
}

/// The name that ranks compare and messages show of a policy that adds up this many bytes, with its choice if it makes one.
template <class A>
[[nodiscard]] char const* name_used(A const& policy, [[maybe_unused]] std::size_t bytes, [[maybe_unused]] int ranks,
                                    [[maybe_unused]] bool to_slices = false) noexcept {
    if constexpr (requires { policy.name_used(bytes, ranks, to_slices); })
        return policy.name_used(bytes, ranks, to_slices);
    else if constexpr (requires { policy.name_used(bytes, ranks); })
        return policy.name_used(bytes, ranks);
    else
        return policy.name;
}

/// What ranks compare besides the name: a digest of the options that matter for this many bytes; 0 for a policy without any.
template <class A>
[[nodiscard]] std::uint64_t hash_used(A const& policy, [[maybe_unused]] std::size_t bytes, [[maybe_unused]] int ranks) {
    if constexpr (requires { policy.hash_used(bytes, ranks); })
        return policy.hash_used(bytes, ranks);
    else
        return hash_of(policy);
}

/// Throws usage_error if the policy was made for other ranks than these.
template <class A>
void check_group([[maybe_unused]] A const& policy, [[maybe_unused]] group const& ranks) {
    if constexpr (requires { policy.check_group(ranks); }) policy.check_group(ranks);
}

/// Whether ranks that see each other's memory may add there instead of using this policy: only for the library's own types
/// that allow it, and for no types derived from them.
template <class Policy>
struct memory_rule {
    static constexpr bool applies(Policy const& /*policy*/) noexcept { return false; }
};

/// Slice boundaries that give every rank an equal share of `count` elements, on multiples of `grain` elements.
inline void even_cuts(std::size_t count, std::size_t grain, std::span<std::size_t> cuts) {
    std::size_t const parts = cuts.size() - 1;
    std::size_t const grains = (count + grain - 1) / grain;
    for (std::size_t p = 0; p <= parts; ++p) {
        std::size_t const at = (grains / parts * p + std::min(p, grains % parts)) * grain;
        cuts[p] = std::min(at, count);
    }
}

/// Slices one after the other: counts.size() + 1 positions, from 0 to the sum of counts, times `unit`.
inline std::vector<std::size_t> cuts_of(std::span<std::size_t const> counts, std::size_t unit) {
    std::vector<std::size_t> cuts(counts.size() + 1);
    for (std::size_t r = 0; r < counts.size(); ++r) cuts[r + 1] = cuts[r] + counts[r] * unit;
    return cuts;
}

/// even_cuts in pooled memory: 64-byte slices of an array of E.
template <Number E>
class slice_cuts {
public:
    slice_cuts(std::size_t count, int ranks) : memory_((static_cast<std::size_t>(ranks) + 1) * sizeof(std::size_t)) {
        even_cuts(count, 64 / sizeof(E), memory_.as<std::size_t>());
    }
    [[nodiscard]] std::span<std::size_t const> get() const noexcept { return memory_.as<std::size_t>(); }

private:
    scratch memory_;
};

/// Ranks that the canonical tree adds among themselves before it adds others: a power of two of them.
struct rank_block {
    int first, size;
};
/// The ranks fall into blocks, one for each binary digit of their number, largest first (7: 4, 2, 1). The canonical tree
/// over them is block 0 + (block 1 + (block 2 + ...)). Returns the block of `rank`.
inline rank_block block_of(int rank, int ranks) noexcept {
    rank_block b{0, 0};
    while (rank >= b.first + b.size) {
        b.first += b.size;
        b.size = static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks - b.first)));
    }
    return b;
}

/// The task of a collective that has nothing to do.
inline task<> nothing() {
    co_return;
}

/// A digest of what all ranks of one collective must agree on.
inline std::uint64_t agree(std::string_view name, std::uint64_t count, std::string_view element,
                           std::string_view algorithm, std::uint64_t more = 0) noexcept {
    return quick_digest().add(name).add(count).add(element).add(algorithm).add(more).value() |
           1;  // 0 means "nothing entered"
}

}  // namespace detail
}  // namespace ddp
