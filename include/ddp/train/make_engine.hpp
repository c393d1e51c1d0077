/// \file
/// make_engine: from a model's parameters and a trainer's policies to an arena and the engine that works in it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collective/share_memory.hpp>
#include <ddp/collective/until_all_know.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/version.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/train/agreement.hpp>
#include <ddp/train/arena.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/frozen.hpp>
#include <ddp/train/hosts_engine.hpp>
#include <ddp/train/memory_engine.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/policies.hpp>
#include <ddp/train/step_engine.hpp>
#include <ddp/transport/any.hpp>

namespace ddp::detail {

/// What a trainer's ranks compare about a model besides its parameters, and what the engine must know about it.
struct model_facts {
    std::uint64_t hash = 0;       // hash(), where the model has one
    std::string hash_words = {};  // hash_words(), likewise
    bool ready_releases = false;  // and is bound
    parameter_placement placed = parameter_placement::aligned;
    std::vector<model_buffer> buffers;
};

/// What ranks still have to agree on.
template <Transport T, Element E>
struct engine_made {
    ddp::update update;  // never automatic
    arena<E> memory;     // with the model's values
    bool shared;         // the other ranks of the host see it
    std::unique_ptr<step_engine<T, E>> engine;
    std::string buckets, exchange;  // in words
    agenda mine;                    // except for the optimizer
};

/// Collective. Takes `with.parts`. Nothing is sent for parameters i with frozen[i] != 0.
template <Transport T, Element E>
[[gnu::cold]] engine_made<T, E> make_engine(communicator<T>& comm, trainer_setup<T, E>& with, training_options options,
                                            std::span<parameter<E> const> parameters, model_facts const& model,
                                            std::span<std::uint8_t const> frozen) {
    std::vector<std::size_t> counts;
    for (parameter<E> const& p : parameters) counts.push_back(p.value.size());
    std::size_t const grain =
        step_engine<T, E>::slice_grain(options.needs_norm() || with.parts.optimizer->needs_norms());
    bucket_request const request{counts, sizeof(E), grain};
    bucket_plan const plan = model.placed == parameter_placement::contiguous
                                 ? with.buckets->plan(request)
                                 : plan_apart(*with.buckets, request, frozen);
    layout const where(counts, plan.order, sizeof(E), model.placed);
    std::shared_ptr<shared_memory> const shared =
        share_memory(comm, options.share_memory && with.parts.exchange->in_memory() ? arena<E>::bytes(where) : 0,
                     options.hierarchy ? sharing_among::hosts : sharing_among::one_host,
                     options.hierarchy ? "with training_options::hierarchy" : "without training_options::hierarchy");
    arena<E> memory = shared ? arena<E>(where, shared->mine()) : arena<E>(where);
    for (std::size_t i = 0; i < parameters.size(); ++i)
        std::copy(parameters[i].value.begin(), parameters[i].value.end(), memory.value(i).begin());
    if (options.update == update::automatic)
        options.update = shared || options.overlap_gather ? update::sharded : update::replicated;
    bucket_map map(plan, where, grain);

    std::string const exchange(with.parts.exchange->name());
    agenda mine;
    mine.hashes = {version_number,
                   model.hash,
                   static_cast<std::uint64_t>(model.placed) | std::uint64_t{model.ready_releases} << 1,
                   digest{}.add(exchange).add(with.parts.exchange->hash()).value(),
                   0,
                   map.hash(where)};
    std::string buckets = map.words(where);
    std::ranges::copy(options.hashes(), mine.hashes.begin() + agenda::names.size());
    step_subject<E> subject{where,
                            std::move(map),
                            parameters,
                            options,
                            model.ready_releases,
                            memory.gradients(),
                            memory.values(),
                            options.overlap_gather && !shared && comm.size() > 1};
    std::string words = with.parts.exchange->hash_words();
    std::unique_ptr<step_engine<T, E>> engine;
    comm.exclusively([&] {  // it joins the scheduler, which the communication thread may be driving
        auto const make = [&]<class Engine>(auto&&... memory_of_hosts) {
            engine = std::make_unique<Engine>(comm.tasks(), comm.members(), std::move(subject), std::move(with.parts),
                                              memory_of_hosts...);
        };
        if (shared && shared->here().size() != static_cast<std::size_t>(comm.size()))
            make.template operator()<hosts_engine<T, E>>(shared);
        else if (shared)
            make.template operator()<memory_engine<T, E>>(shared);
        else
            make.template operator()<step_engine<T, E>>();
        if (!options.frozen.empty()) engine->freeze(frozen);
    });
    return {options.update,
            std::move(memory),
            shared != nullptr,
            std::move(engine),
            std::move(buckets),
            std::move(words),
            mine};
}

/// Once ranks are known to have the same plan: throws, on every rank, if its exchange makes no sense for it.
template <Transport T, Element E>
void expect_no_refusal(communicator<T> const& comm, step_engine<T, E> const& engine) {
    std::string const why = engine.exchange_refusal();
    if (why.empty()) return;
    until_all_know(comm, "data_parallel");
    throw usage_error(why);
}

}  // namespace ddp::detail
