/// \file
/// What optim/any_optimizer.hpp declares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include <ddp/optim/any_optimizer.hpp>

namespace ddp {

DDP_DECL std::size_t any_optimizer::slot_count() const noexcept {
    return std::visit([](auto const& held) { return held.slot_count(); }, held_);
}
DDP_DECL slot_words any_optimizer::slot_names() const noexcept {
    return std::visit([](auto const& held) { return held.slot_names(); }, held_);
}
DDP_DECL double any_optimizer::learning_rate() const noexcept {
    return std::visit([](auto const& held) { return held.learning_rate(); }, held_);
}
DDP_DECL std::uint64_t any_optimizer::hash() const noexcept {
    return std::visit([](auto const& held) { return held.hash(); }, held_);
}
DDP_DECL std::string any_optimizer::hash_words() const {
    return std::visit([](auto const& held) { return held.hash_words(); }, held_);
}
DDP_DECL char const* any_optimizer::name() const noexcept {
    return std::visit([](auto const& held) { return held.name; }, held_);
}
DDP_DECL void any_optimizer::validate() const {
    std::visit([](auto const& held) { held.validate(); }, held_);
}
DDP_DECL bool any_optimizer::needs_norms() const noexcept {
    return std::visit([](auto const& held) { return detail::needs_norms<float>(held); }, held_);
}

}  // namespace ddp
