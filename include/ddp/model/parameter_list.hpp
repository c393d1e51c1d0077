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
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/text.hpp>
#include <ddp/model/model.hpp>

namespace ddp::detail {

/// Throws usage_error unless names are unique, sizes are those of the shapes, and no memory is shared.
template <Element E>
void expect_distinct(std::span<parameter<E> const> all) {
    DDP_EXPECTS(!all.empty(), "the model has no parameters to train: parameters() returned none");
    std::vector<parameter<E> const*> sorted;
    for (parameter<E> const& p : all) {
        std::size_t count = 1;
        for (std::size_t const extent : p.shape) count *= extent;
        DDP_EXPECTS(
            p.value.size() == count && p.gradient.size() == count,
            concat({"parameter '", p.name, "': value and gradient must have as many elements as its shape says"}));
        sorted.push_back(&p);
    }
    // Neighbours in some order must not collide: in that of the names, then in that of memory.
    auto const refuse = [&](function_ref<bool(parameter<E> const&, parameter<E> const&)> before,
                            function_ref<bool(parameter<E> const&, parameter<E> const&)> collide, bool names) {
        std::sort(sorted.begin(), sorted.end(), [&](auto const* a, auto const* b) { return before(*a, *b); });
        for (std::size_t i = 1; i < sorted.size(); ++i)
            if (collide(*sorted[i - 1], *sorted[i])) {
                std::string const &one = sorted[i - 1]->name, &other = sorted[i]->name;
                throw usage_error(concat({names ? "parameter '" : "parameters '", one,
                                          names ? std::string_view("' is listed twice") : "' and '",
                                          names ? std::string_view() : other, names ? "" : "' share memory",
                                          "; list tied parameters once, and give each parameter a name of its own"}));
            }
    };
    // compare_three_way orders unrelated pointers too, and <compare> costs nothing; std::less wants <functional>.
    auto const less = [](E const* a, E const* b) { return std::compare_three_way{}(a, b) < 0; };
    auto const overlap = [&](std::span<E const> a, std::span<E const> b) {
        return !a.empty() && !b.empty() && less(b.data(), a.data() + a.size());
    };
    using P = parameter<E>;
    refuse([](P const& a, P const& b) { return a.name < b.name; },
           [](P const& a, P const& b) { return a.name == b.name; }, true);
    refuse([&](P const& a, P const& b) { return less(a.value.data(), b.value.data()); },
           [&](P const& a, P const& b) { return overlap(a.value, b.value); }, false);
    refuse([&](P const& a, P const& b) { return less(a.gradient.data(), b.gradient.data()); },
           [&](P const& a, P const& b) { return overlap(a.gradient, b.gradient); }, false);
}

/// Throws usage_error unless there are parameters, each as large as its shape, with names and memory of their own.
/// Cost: O(n log n) in the number of parameters.
template <Model M>
[[nodiscard]] std::vector<parameter<element_of<M>>> list_parameters(M& model) {
    std::vector<parameter<element_of<M>>> all = model.parameters();
    expect_distinct(std::span<parameter<element_of<M>> const>(all));
    return all;
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE void expect_distinct(std::span<parameter<float> const>);
DDP_INSTANTIATE void expect_distinct(std::span<parameter<double> const>);
#endif

}  // namespace ddp::detail
