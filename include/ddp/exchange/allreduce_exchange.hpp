/// \file
/// allreduce_exchange: any allreduce algorithm as an exchange without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <ddp/collective/concepts.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/task.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/kernel/sum.hpp>

namespace ddp {

/// The sum of the ranks' gradients as the algorithm adds them, times the factor. Elements are sent in the model's own type.
///
/// A SlicedAllreduceOver posts early and, with update::sharded, stops after its reduce; one that can only sum does everything
/// at once, on every rank; a BlockingAllreduceOver sums in finish().
///
/// Cost    and order of summation: those of the algorithm.
/// Throws  usage_error when a trainer is made, if the algorithm was made for other ranks.
template <class A>
struct allreduce_exchange {
    A algorithm = {};                   ///< how the addends are summed
    char const* name = algorithm.name;  ///< for messages

    [[nodiscard]] std::uint64_t hash() const { return detail::hash_of(algorithm); }
    [[nodiscard]] std::string hash_words() const { return detail::hash_words_of(algorithm); }
    void check_group(group const& ranks) const { detail::check_group(algorithm, ranks); }
    template <Element E>
    [[nodiscard]] no_exchange_state prepare(exchange_plan<E> const& /*plan*/) const noexcept {
        return {};
    }
    template <Element E>
    [[nodiscard]] bool everywhere(exchange_plan<E> const& plan, std::size_t bucket) const {
        if constexpr (requires { algorithm.everywhere(std::size_t{}, int{}); })
            return algorithm.everywhere(plan.buckets[bucket].count * sizeof(E), plan.ranks);
        else
            return true;
    }

    template <Transport T, Element E>
        requires AllreduceOver<A, T, E>
    static task<> exchange(allreduce_exchange const& self, lane<T> over, no_exchange_state& /*state*/,
                           bucket_exchange<E> what) {
        if constexpr (SlicedAllreduceOver<A, T, E>)
            return A::reduce(self.algorithm, over, reduction<E>{what.data, what.cuts, what.go, what.factor});
        else
            return sum(self.algorithm, over, what);
    }
    template <Transport T, Element E>
        requires AllreduceOver<A, T, E>
    static task<> gather(allreduce_exchange const& self, lane<T> over, no_exchange_state& /*state*/,
                         bucket_exchange<E> what) {
        if constexpr (SlicedAllreduceOver<A, T, E>)
            return A::all_gather(self.algorithm, over, what.data, what.cuts);
        else
            return detail::nothing();
    }
    template <Transport T, Element E>
        requires BlockingAllreduceOver<A, T, E>
    static void exchange_blocking(allreduce_exchange const& self, lane<T> over, no_exchange_state& /*state*/,
                                  bucket_exchange<E> what) {
        A::sum_blocking(self.algorithm, over, what.data);
        scale(what.data, *what.factor);
    }

private:
    template <Transport T, Element E>
    static task<> sum(A algorithm, lane<T> over, bucket_exchange<E> what) {
        co_await *what.go;
        if constexpr (!BlockingAllreduceOver<A, T, E>) {
            co_await A::sum(algorithm, over, what.data);
            scale(what.data, *what.factor);
        }
    }
};

namespace detail {
template <class A>
struct memory_rule<allreduce_exchange<A>> {
    static bool applies(allreduce_exchange<A> const& policy) noexcept {
        return memory_rule<A>::applies(policy.algorithm);
    }
};
}  // namespace detail

}  // namespace ddp
