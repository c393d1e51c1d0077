/// \file
/// step_subject: what an engine works on.
#pragma once

#include <span>

#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/options.hpp>

namespace ddp {

/// What an engine works on. Both arenas have where.size() elements and outlive it.
template <Element E>
struct step_subject {
    layout where;
    detail::bucket_map buckets;
    std::span<parameter<E> const> parameters;  // names and shapes; outlives the engine
    training_options options;
    bool ready_releases = false;  // values may be stepped as soon as their bucket is reduced
    std::span<E> gradients;
    std::span<E> values;
    bool gathers_late = false;  // with a sharded update: a step ends before new values are gathered
};

}  // namespace ddp
