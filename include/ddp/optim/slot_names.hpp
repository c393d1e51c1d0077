/// \file
/// What the slots of an optimizer's state are called, also where it does not say.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ddp/core/contract.hpp>

namespace ddp::detail {

/// slot_count() names. Throws usage_error where the optimizer names another number.
template <class Opt>
[[nodiscard]] std::vector<std::string> slot_names_of(Opt const& optimizer) {
    std::size_t const count = optimizer.slot_count();
    std::vector<std::string> names;
    if constexpr (requires { optimizer.slot_names(); }) {
        for (auto const& name : optimizer.slot_names()) names.emplace_back(name);
        DDP_EXPECTS(names.size() == count,
                    "the optimizer's slot_names() must return one name per slot: slot_count() names");
    } else {
        for (std::size_t k = 0; k < count; ++k) names.push_back("slot " + std::to_string(k));
    }
    return names;
}
/// Of the slots that parameters of this group use.
template <class Opt>
[[nodiscard]] std::vector<std::string> slot_names_of(Opt const& optimizer, std::size_t group) {
    if constexpr (requires { optimizer.slot_names(group); }) {
        std::vector<std::string> names;
        for (auto const& name : optimizer.slot_names(group)) names.emplace_back(name);
        DDP_EXPECTS(names.size() <= optimizer.slot_count(),
                    "the optimizer's slot_names(group) must return no more names than slot_count()");
        return names;
    } else {
        return slot_names_of(optimizer);
    }
}

/// Of its algorithm; empty where the optimizer does not say.
template <class Opt>
[[nodiscard]] std::string name_of_optimizer(Opt const& optimizer) {
    if constexpr (requires { std::string(optimizer.name()); })
        return std::string(optimizer.name());
    else if constexpr (requires { std::string(optimizer.name); })
        return std::string(optimizer.name);
    else
        return {};
}
/// Of the algorithm of this group.
template <class Opt>
[[nodiscard]] std::string name_of_optimizer(Opt const& optimizer, std::size_t group) {
    if constexpr (requires { std::string(optimizer.name(group)); })
        return std::string(optimizer.name(group));
    else
        return name_of_optimizer(optimizer);
}

}  // namespace ddp::detail
