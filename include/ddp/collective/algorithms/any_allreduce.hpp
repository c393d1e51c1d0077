/// \file
/// any_allreduce: one of the library's allreduce algorithms, chosen at run time.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/collective/algorithms/halving_doubling_allreduce.hpp>
#include <ddp/collective/algorithms/hierarchical_allreduce.hpp>
#include <ddp/collective/algorithms/naive_allreduce.hpp>
#include <ddp/collective/algorithms/recursive_doubling_allreduce.hpp>
#include <ddp/collective/algorithms/ring_allreduce.hpp>
#include <ddp/collective/concepts.hpp>
#include <ddp/core/digest.hpp>

namespace ddp {

/// Holds one of the algorithms with its options, and behaves as that algorithm does. For command lines and for tests of all
/// algorithms: one trainer is compiled instead of seven. Costs one std::visit for each collective.
class any_allreduce {
public:
    char const* name;  ///< of the algorithm that it holds; read only
    bool canonical;    ///< whether that adds in the canonical tree over ranks; read only

    any_allreduce() : any_allreduce(automatic_allreduce{}) {}
    any_allreduce(automatic_allreduce const& held) : any_allreduce(held, 0) {}
    any_allreduce(direct_allreduce const& held) : any_allreduce(held, 0) {}
    any_allreduce(recursive_doubling_allreduce const& held) : any_allreduce(held, 0) {}
    any_allreduce(halving_doubling_allreduce const& held) : any_allreduce(held, 0) {}
    any_allreduce(ring_allreduce const& held) : any_allreduce(held, 0) {}
    any_allreduce(naive_allreduce const& held) : any_allreduce(held, 0) {}
    any_allreduce(hierarchical_allreduce const& held) : any_allreduce(held, 0) {}

    static constexpr char const* choices = "auto|direct|recursive_doubling|halving_doubling|ring|naive|hierarchical";

    /// The algorithm of that name, with its default options, for use with `comm`. Collective, because `hierarchical` has to
    /// know where the ranks are. Throws usage_error, which lists the choices, if no algorithm has that name.
    template <class Communicator>
    [[nodiscard]] static any_allreduce parse(std::string_view text, Communicator const& comm) {
        if (text == hierarchical_allreduce::name) return hierarchical_allreduce(comm);
        return parse(text);
    }
    /// The same without a communicator: any algorithm but `hierarchical`, for which it throws usage_error.
    [[nodiscard]] static any_allreduce parse(std::string_view text) {
        for (any_allreduce const& known :
             {any_allreduce(automatic_allreduce{}), any_allreduce(direct_allreduce{}),
              any_allreduce(recursive_doubling_allreduce{}), any_allreduce(halving_doubling_allreduce{}),
              any_allreduce(ring_allreduce{}), any_allreduce(naive_allreduce{})})
            if (text == known.name) return known;
        if (text == hierarchical_allreduce::name)
            throw usage_error("the allreduce algorithm 'hierarchical' is made for a communicator: pass it too");
        throw usage_error("there is no allreduce algorithm '" + std::string(text) + "'; choose one of " + choices);
    }

    /// See automatic_allreduce; the others stay as they are.
    template <class Communicator>
    [[nodiscard]] any_allreduce fitted_to(Communicator const& comm) const {
        auto const* const held = std::get_if<automatic_allreduce>(&held_);
        return held == nullptr ? *this : any_allreduce(held->fitted_to(comm));
    }
    /// See automatic_allreduce; the others have a name only.
    [[nodiscard]] char const* name_used(std::size_t bytes, int ranks, bool to_slices = false) const noexcept {
        auto const* const held = std::get_if<automatic_allreduce>(&held_);
        return held == nullptr ? name : held->name_used(bytes, ranks, to_slices);
    }
    [[nodiscard]] std::uint64_t hash_used(std::size_t bytes, int ranks) const {
        return std::visit([&](auto const& held) { return detail::hash_used(held, bytes, ranks); }, held_);
    }
    /// See hierarchical_allreduce; the others serve any group.
    void check_group(group const& ranks) const {
        std::visit([&](auto const& held) { detail::check_group(held, ranks); }, held_);
    }
    [[nodiscard]] bool everywhere(std::size_t bytes, int ranks) const {
        return std::visit([&](auto const& held) { return held.everywhere(bytes, ranks); }, held_);
    }
    [[nodiscard]] std::uint64_t hash() const {
        return std::visit([](auto const& held) { return detail::hash_of(held); }, held_);
    }
    [[nodiscard]] std::string hash_words() const {
        return std::visit([](auto const& held) { return detail::hash_words_of(held); }, held_);
    }
    template <Transport T, Number E>
    static task<> sum(any_allreduce const& self, lane<T> over, std::span<E> data) {
        return combine(self, over, data, ddp::sum{});
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> combine(any_allreduce const& self, lane<T> over, std::span<E> data, Op op) {
        return std::visit(
            [&](auto const& held) { return std::remove_cvref_t<decltype(held)>::combine(held, over, data, op); },
            self.held_);
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> reduce(any_allreduce const& self, lane<T> over, reduction<E, Op> what) {
        return std::visit(
            [&](auto const& held) { return std::remove_cvref_t<decltype(held)>::reduce(held, over, what); },
            self.held_);
    }
    template <Transport T, Number E>
    static task<> all_gather(any_allreduce const& self, lane<T> over, std::span<E> data,
                             std::span<std::size_t const> cuts) {
        return std::visit(
            [&](auto const& held) { return std::remove_cvref_t<decltype(held)>::all_gather(held, over, data, cuts); },
            self.held_);
    }

private:
    friend struct detail::memory_rule<any_allreduce>;
    template <class A>
    any_allreduce(A const& held, int) : name(A::name), canonical(A::canonical), held_(held) {}

    std::variant<automatic_allreduce, direct_allreduce, recursive_doubling_allreduce, halving_doubling_allreduce,
                 ring_allreduce, naive_allreduce, hierarchical_allreduce>
        held_;
};

namespace detail {
template <>
struct memory_rule<any_allreduce> {
    static bool applies(any_allreduce const& policy) noexcept {
        return std::holds_alternative<automatic_allreduce>(policy.held_);
    }
};
}  // namespace detail

}  // namespace ddp
