/// \file
/// The parameters of a model as it lists them, checked before anything is built on the list.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/model/model.hpp>

namespace ddp::detail {

/// Throws usage_error unless there are parameters, each as large as its shape, with names and memory of their own.
/// Cost: O(n log n) in the number of parameters.
template <Model M>
[[nodiscard]] std::vector<parameter<element_of<M>>> list_parameters(M& model) {
    using element = element_of<M>;
    std::vector<parameter<element>> all = model.parameters();
    DDP_EXPECTS(!all.empty(), "the model has no parameters to train: parameters() returned none");
    for (parameter<element> const& p : all) {
        std::size_t count = 1;
        for (std::size_t const extent : p.shape) count *= extent;
        DDP_EXPECTS(p.value.size() == count && p.gradient.size() == count,
                    "parameter '" + p.name + "': value and gradient must have as many elements as its shape says");
    }
    std::vector<parameter<element> const*> sorted;
    for (parameter<element> const& p : all) sorted.push_back(&p);
    // Neighbours in the order of `key` must not collide; checks names, then memory.
    // compare_three_way orders unrelated pointers too, and <compare> costs nothing; std::less wants <functional>.
    auto const refuse = [&](auto const& key, auto const& collide, auto const& say) {
        std::sort(sorted.begin(), sorted.end(),
                  [&](auto const* a, auto const* b) { return std::compare_three_way{}(key(*a), key(*b)) < 0; });
        for (std::size_t i = 1; i < sorted.size(); ++i)
            DDP_EXPECTS(!collide(*sorted[i - 1], *sorted[i]),
                        say(*sorted[i - 1], *sorted[i]) + ": tied parameters are one, and names are unique");
    };
    auto const overlap = [](std::span<element> a, std::span<element> b) {
        return !a.empty() && !b.empty() && std::compare_three_way{}(b.data(), a.data() + a.size()) < 0;
    };
    auto const share = [](auto const& a, auto const& b) {
        return "parameters '" + a.name + "' and '" + b.name + "' share memory";
    };
    refuse([](auto const& p) -> std::string const& { return p.name; },
           [](auto const& a, auto const& b) { return a.name == b.name; },
           [](auto const& a, auto const&) { return "parameter '" + a.name + "' is listed twice"; });
    refuse([](auto const& p) { return p.value.data(); },
           [&](auto const& a, auto const& b) { return overlap(a.value, b.value); }, share);
    refuse([](auto const& p) { return p.gradient.data(); },
           [&](auto const& a, auto const& b) { return overlap(a.gradient, b.gradient); }, share);
    return all;
}

}  // namespace ddp::detail
