/// \file
/// The concept of an optimizer: an aggregate of hyper-parameters that steps ranges of elements.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace ddp {

/// What an optimizer's step is given besides gradients, values and state.
struct step_info {
    std::uint64_t step = 1;       ///< number of the update, from 1
    double learning_rate = 0.0;   ///< base rate of the optimizer or group, times the factor of the schedule
    double gradient_scale = 1.0;  ///< factor of clipping: multiply each gradient by it first, in type E; 1: none
    std::size_t group = 0;        ///< the group of the parameters in this range, if the optimizer has groups
    double value_norm = 0.0;      ///< Euclidean norm of the whole parameter before the step, if prepare() is used
    double gradient_norm = 0.0;   ///< likewise of its whole gradient, as prepare() has left it; without gradient_scale
};

/// An optimizer's state for a range of elements: slots[k][i] belongs to value i. All of it is zero before the first step.
template <class E>
using slot_spans = std::span<std::span<E> const>;

namespace detail {
/// False for a step that needs an optimizer that is not const: the compiler's own words for that come late.
template <class O, class E>
concept StepIsConst =
    !requires(O& optimizer, step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> state) {
        optimizer.step(at, gradient, value, state);
    } || requires(O const& optimizer, step_info const& at, std::span<E const> gradient, std::span<E> value,
                  slot_spans<E> state) { optimizer.step(at, gradient, value, state); };
}  // namespace detail

/// An optimizer: computes new values from gradients, element by element. Any range of elements may be stepped separately,
/// on any rank and in any order, so a step must depend only on its arguments: not on neighbouring elements, counters of
/// its own or the clock.
///
///  slot_count()     the number of arrays of state, each with one number for each element
///  learning_rate()  the base learning rate
///  hash()           a digest of the name of the algorithm and of every hyper-parameter. Ranks compare it
///  step(info, gradient, value, slots)
///                   updates the values and the state of a range; all spans have the same length
///
/// Optional members; each is used where an optimizer has it:
///  hash_words()           returns std::string: the settings in words (policy_words), for the error if ranks differ
///  validate()             throws usage_error for hyper-parameters that make no sense; called when a trainer is made
///  groups_of(parameters)  returns std::vector<std::size_t>: the group of each parameter in the given
///                         `std::span<parameter<E> const>`; called once. Each range then lies in parameters of one group,
///                         which step_info::group names; neighbouring parameters of a group in a bucket are stepped in
///                         one call
///  learning_rate(group)   the base learning rate of this group, if groups differ in it
///  slot_names()           a range of slot_count() names: slots[k] is called so where state is listed or stored
///                         ("momentum"); without it "slot 0", "slot 1", …
///  slot_names(group)      the names of the slots that this group uses, if groups differ in them
///  name                   of the algorithm, without its hyper-parameters: a static constant or a function name() that
///                         returns text. Checkpoints keep it and reject any other. Without it, they compare only slots
///  name(group)            the same for this group, if groups differ in it
///  prepare(info, gradient, value, slots)
///                         for a step that needs norms of whole parameters (lamb, lars). Called once for each range
///                         before any range is stepped; gradient is std::span<E> and may be overwritten, value is const.
///                         The norms of value and gradient are then passed in step_info; they are summed in double by
///                         blocks. Each range then lies in one parameter, and values are stepped after backward has ended
///  needs_norms()          false if prepare() is not needed with the current hyper-parameters
///
/// Ranks compare the groups as they compare hash(). parameter_groups makes such an optimizer from several without groups.
///
/// The arithmetic belongs in plain functions marked DDP_KERNEL (kernel/kernel.hpp), so that a range has the same bits
/// whether it is stepped in one piece or in several.
template <class O, class E>
concept OptimizerFor = requires(O const& optimizer, step_info const& at, std::span<E const> gradient,
                                std::span<E> value, slot_spans<E> state) {
    { optimizer.slot_count() } -> std::convertible_to<std::size_t>;
    { optimizer.learning_rate() } -> std::convertible_to<double>;
    { optimizer.hash() } -> std::convertible_to<std::uint64_t>;
    requires detail::StepIsConst<O, E>;  // step() must be const
    optimizer.step(at, gradient, value, state);
};

/// Names of an optimizer's slots, for slot_names() over a fixed list of string literals.
using slot_words = std::span<char const* const>;

}  // namespace ddp
