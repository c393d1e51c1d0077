/// \file
/// choice: a trainer takes an allreduce algorithm or an exchange; this finds out which of the two was passed, and makes
/// an exchange of it.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include <ddp/collective/algorithms/any_allreduce.hpp>
#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/exchange/allreduce_exchange.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/transport/any.hpp>

namespace ddp::detail {

/// An exchange has prepare(plan); an algorithm has not.
template <class X, class E>
inline constexpr bool is_exchange = requires(X const& policy, exchange_plan<E> const& plan) { policy.prepare(plan); };

/// X is checked by the one concept that it is meant to satisfy, so that an error names what X lacks. For the other concept,
/// these stand in.
template <class X, class E>
using algorithm_among = std::conditional_t<is_exchange<X, E>, automatic_allreduce, X>;
template <class X, class E>
using exchange_among = std::conditional_t<is_exchange<X, E>, X, allreduce_exchange<automatic_allreduce>>;

template <Transport T, Element E, class X>
[[nodiscard]] std::unique_ptr<exchange_model<T, E>> make_exchange_model(X policy) {
    if constexpr (is_exchange<X, E>)
        return std::make_unique<exchange_model_of<T, E, X>>(std::move(policy));
    else
        return std::make_unique<exchange_model_of<T, E, allreduce_exchange<X>>>(
            allreduce_exchange<X>{std::move(policy)});
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE std::unique_ptr<exchange_model<any_transport, float>> make_exchange_model(automatic_allreduce);
DDP_INSTANTIATE std::unique_ptr<exchange_model<any_transport, double>> make_exchange_model(automatic_allreduce);
DDP_INSTANTIATE std::unique_ptr<exchange_model<any_transport, float>> make_exchange_model(any_allreduce);
DDP_INSTANTIATE std::unique_ptr<exchange_model<any_transport, double>> make_exchange_model(any_allreduce);
DDP_INSTANTIATE std::unique_ptr<exchange_model<any_transport, float>> make_exchange_model(direct_allreduce);
DDP_INSTANTIATE std::unique_ptr<exchange_model<any_transport, double>> make_exchange_model(direct_allreduce);
DDP_INSTANTIATE std::unique_ptr<exchange_model<any_transport, float>> make_exchange_model(ring_allreduce);
DDP_INSTANTIATE std::unique_ptr<exchange_model<any_transport, double>> make_exchange_model(ring_allreduce);
#endif

}  // namespace ddp::detail
