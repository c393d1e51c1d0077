/// \file
/// step_parts: the policies of a training step.
#pragma once

#include <memory>

#include <ddp/comm/transport.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/optimizer_model.hpp>
#include <ddp/train/step_observer.hpp>

namespace ddp {

/// The policies of a step: the objects that do its parts.
template <Transport T, Element E>
struct step_parts {
    std::unique_ptr<detail::optimizer_model<E>> optimizer;
    std::unique_ptr<detail::exchange_model<T, E>> exchange;
    std::unique_ptr<detail::step_observer> observer = nullptr;  // null: no observer
};

}  // namespace ddp
