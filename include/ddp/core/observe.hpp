/// \file
/// Observers: any type with any of the on(event) hooks; a hook that is absent costs nothing.
#pragma once

#include <ddp/core/language.hpp>  // first

namespace ddp {

/// Observes nothing. The default, and the only observer that may handle no event.
struct null_observer {};

/// Calls `observer.on(event)` where the observer has such a hook.
template <class Obs, class Event>
void notify(Obs& observer, Event const& event) {
    if constexpr (requires { observer.on(event); }) observer.on(event);
}

}  // namespace ddp
