/// \file
/// Optimizer: an aggregate of hyper-parameters with one verb over element ranges.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace ddp {

/// What a step knows besides the elements.
struct step_info {
    std::uint64_t step = 1;       ///< counts updates from 1
    double learning_rate = 0.0;   ///< the optimizer's lr (or its group's) times the schedule's factor
    double gradient_scale = 1.0;  ///< the clip factor; multiply each gradient by it, in E, first. 1: no clipping
    std::size_t group = 0;        ///< of the parameters in this range, where the optimizer has groups
    double value_norm = 0.0;      ///< of the whole parameter before the step, where the optimizer has prepare()
    double gradient_norm = 0.0;   ///< of what prepare() has left of the whole parameter's gradient, likewise
};

/// An optimizer's state for a range: slots[k] runs beside the values. In the library's arena, zero at the start.
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

/// Changes values by gradients, element by element: any range of elements may be stepped on its own, on any rank, in any
/// order, so it must not look at neighbours, counters of its own or the clock. hash() covers every hyper-parameter:
/// ranks compare it.
///
///  slot_count()                         how many arrays of state an element has
///  learning_rate()                      the base learning rate
///  hash()                               a digest of the algorithm's name and every hyper-parameter
///  step(info, gradient, value, slots)   all spans have the same length
///
/// Optional, each found on its own:
///  validate()                throws usage_error for hyper-parameters that make no sense; asked when a trainer is made
///  groups_of(parameters)     std::span<parameter<E> const> -> std::vector<std::size_t>, the group of each parameter,
///                            in their order; asked once. A step's range then lies in parameters of one group, which
///                            step_info::group names; those side by side in a bucket come in one call
///  learning_rate(group)      the group's base learning rate, where groups differ in it
///  slot_names()              a range of slot_count() words, what slots[k] is called where state is listed or kept
///                            ("momentum"); without it "slot 0", "slot 1", …
///  slot_names(group)         the same for the slots that this group uses, where groups differ in it
///  prepare(info, gradient, value, slots)
///                            for a step that needs norms of whole parameters (lamb, lars): called once for each range,
///                            before any is stepped; gradient is std::span<E> and may be rewritten, value is const. The norms of
///                            value and gradient, summed in double by blocks, then stand in the step's info, and a step's range
///                            lies in one parameter. Values are stepped after backward then
///  needs_norms()             false for an optimizer whose prepare() is not needed this time
///
/// Ranks compare the groups as they compare hash(). parameter_groups makes such an optimizer of several plain ones.
///
/// The arithmetic belongs into plain noinline functions marked DDP_KERNEL (see kernel/kernel.hpp): the same bits whether a
/// range is stepped in one piece or in many.
template <class O, class E>
concept OptimizerFor = requires(O const& optimizer, step_info const& at, std::span<E const> gradient,
                                std::span<E> value, slot_spans<E> state) {
    { optimizer.slot_count() } -> std::convertible_to<std::size_t>;
    { optimizer.learning_rate() } -> std::convertible_to<double>;
    { optimizer.hash() } -> std::convertible_to<std::uint64_t>;
    requires detail::StepIsConst<O, E>;
    optimizer.step(at, gradient, value, state);
};

/// What an optimizer's slots are called; for a fixed list of literals.
using slot_words = std::span<char const* const>;

}  // namespace ddp
