/// \file
/// What may be passed to a trainer after the communicator. Arguments are told apart by their types, so that their order
/// does not matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/collective/concepts.hpp>
#include <ddp/comm/lane.hpp>
#include <ddp/core/observe.hpp>
#include <ddp/exchange/choice.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/optim/optimizer_model.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/events.hpp>
#include <ddp/train/frozen.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/step_engine.hpp>
#include <ddp/train/step_observer.hpp>

namespace ddp::detail {

enum class policy_kind : std::uint8_t { options, exchange, buckets, observer, unknown };

/// Recognises a kind by its minimal distinguishing member: the kind's concept reports later what is missing.
template <class P, class T, class E>
[[nodiscard]] consteval policy_kind kind_of_policy() {
    using policy = std::unwrap_reference_t<P>;
    if constexpr (std::is_same_v<policy, training_options>)
        return policy_kind::options;
    else if constexpr (is_exchange<policy, E>)
        return policy_kind::exchange;
    else if constexpr (requires(policy const& p, bucket_request const& request) { p.plan(request); })
        return policy_kind::buckets;
    else if constexpr (TrainingObserver<policy>)
        return policy_kind::observer;
    else if constexpr (
        requires { policy::canonical; } ||
        requires(policy const& p, lane<T> over, std::span<E> data) { policy::sum(p, over, data); })
        return policy_kind::exchange;  // an allreduce algorithm
    else
        return policy_kind::unknown;
}

template <policy_kind Kind, class T, class E, class... Policies>
inline constexpr std::size_t count_of_policy = (0 + ... + (kind_of_policy<Policies, T, E>() == Kind ? 1 : 0));

/// Whether all are known, each at most once.
template <class T, class E, class... Policies>
inline constexpr bool policies_are_known = count_of_policy<policy_kind::unknown, T, E, Policies...> == 0;
template <class T, class E, class... Policies>
inline constexpr bool policies_differ = count_of_policy<policy_kind::options, T, E, Policies...> <= 1 &&
                                        count_of_policy<policy_kind::exchange, T, E, Policies...> <= 1 &&
                                        count_of_policy<policy_kind::buckets, T, E, Policies...> <= 1 &&
                                        count_of_policy<policy_kind::observer, T, E, Policies...> <= 1;

/// The policy of this kind among those given, else the default.
template <policy_kind Kind, class T, class E, class Default, class... Policies>
struct policy_among;
template <policy_kind Kind, class T, class E, class Default, class First, class... Rest>
struct policy_among<Kind, T, E, Default, First, Rest...> {
    static constexpr bool is_first = kind_of_policy<First, T, E>() == Kind;
    using rest = policy_among<Kind, T, E, Default, Rest...>;
    using type = typename std::conditional_t<is_first, std::type_identity<First>, rest>::type;

    template <class Given>
    static type take(Given& given) {
        constexpr std::size_t at = std::tuple_size_v<Given> - sizeof...(Rest) - 1;
        if constexpr (is_first)
            return std::move(std::get<at>(given));
        else
            return rest::take(given);
    }
};
template <policy_kind Kind, class T, class E, class Default>
struct policy_among<Kind, T, E, Default> {
    using type = Default;
    template <class Given>
    static Default take(Given& /*given*/) {
        return {};
    }
};

template <class T, class E, class... Policies>
using exchange_given = typename policy_among<policy_kind::exchange, T, E, automatic_allreduce, Policies...>::type;
template <class T, class E, class... Policies>
using buckets_given = typename policy_among<policy_kind::buckets, T, E, size_capped_buckets, Policies...>::type;

/// What may be passed to a trainer. Each policy is held to the concept of its kind.
template <class M, class T, class Opt, class... Policies>
concept TrainerArguments =
    Model<M> && Transport<T> && OptimizerFor<Opt, element_of<M>> &&
    AllreduceOver<algorithm_among<exchange_given<T, element_of<M>, Policies...>, element_of<M>>, T, element_of<M>> &&
    ExchangeOver<exchange_among<exchange_given<T, element_of<M>, Policies...>, element_of<M>>, T, element_of<M>> &&
    BucketPolicy<buckets_given<T, element_of<M>, Policies...>>;

/// The arguments of a trainer, each in its place.
template <Transport T, Element E>
struct trainer_setup {
    training_options options;
    std::unique_ptr<planner> buckets;
    step_parts<T, E> parts;

    template <class Opt, class... Policies>
    trainer_setup(Opt optimizer, std::tuple<Policies...> given)
        : options(take<policy_kind::options, training_options>(given)),
          buckets(std::make_unique<planner_of<buckets_given<T, E, Policies...>>>(
              take<policy_kind::buckets, size_capped_buckets>(given))),
          parts{make_optimizer_model<E>(std::move(optimizer)),
                make_exchange_model<T, E>(take<policy_kind::exchange, automatic_allreduce>(given)),
                make_step_observer(take<policy_kind::observer, null_observer>(given))} {
        static_assert(
            policies_are_known<T, E, Policies...>,
            "ddp::data_parallel: after the communicator come training_options, an allreduce algorithm (such as "
            "ring_allreduce) or an exchange, a bucket policy (with plan(bucket_request)), an observer (with "
            "on(bucket_reduced), on(step_finished) or on(mean_gradient<E>)); one of the arguments is none of these. "
            "Strategies go to ddp::local_parallel");
        using observer = std::unwrap_reference_t<
            typename policy_among<policy_kind::observer, T, E, null_observer, Policies...>::type>;
        using other = std::conditional_t<std::is_same_v<E, float>, double, float>;
        static_assert(ChangesGradients<observer, E> || !ChangesGradients<observer, other>,
                      "ddp::data_parallel: the observer's on(mean_gradient<E>) takes another element type than the "
                      "model's parameters have: it would never be called");
        static_assert(policies_differ<T, E, Policies...>,
                      "ddp::data_parallel: two of the arguments after the communicator are of one kind; give it "
                      "training_options, an allreduce or exchange, a bucket policy and an observer once each");
    }

private:
    template <policy_kind Kind, class Default, class... Policies>
    [[nodiscard]] static auto take(std::tuple<Policies...>& given) {
        return policy_among<Kind, T, E, Default, Policies...>::take(given);
    }
};

}  // namespace ddp::detail
