/// \file
/// check_optimizer: tests what an optimizer must do beyond what its types show.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ddp/core/math.hpp>
#include <ddp/core/random.hpp>
#include <ddp/kernel/norm.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/optim/optimizer_model.hpp>

namespace ddp::testing {

namespace detail {

struct as_compiled {
    template <class O, class E>
    static void step(O const& optimizer, step_info const& info, std::span<E const> gradient, std::span<E> value,
                     slot_spans<E> slots) {
        optimizer.step(info, gradient, value, slots);
    }
    template <class O, class E>
    static void prepare(O const& optimizer, step_info const& info, std::span<E> gradient, std::span<E const> value,
                        slot_spans<E> slots) {
        optimizer.prepare(info, gradient, value, slots);
    }
};

// GCC inlines a step into these, but for what DDP_KERNEL marks: where a step's arithmetic is not marked, one of them fuses
// its products, the other does not.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define DDP_CAN_FORCE_CONTRACTION 1
struct fused {
    template <class O, class E>
    __attribute__((noinline, flatten, target("fma"), optimize("O2", "fp-contract=fast"))) static void step(
        O const& optimizer, step_info const& info, std::span<E const> gradient, std::span<E> value,
        slot_spans<E> slots) {
        optimizer.step(info, gradient, value, slots);
    }
    template <class O, class E>
    __attribute__((noinline, flatten, target("fma"), optimize("O2", "fp-contract=fast"))) static void prepare(
        O const& optimizer, step_info const& info, std::span<E> gradient, std::span<E const> value,
        slot_spans<E> slots) {
        optimizer.prepare(info, gradient, value, slots);
    }
};
struct rounded {
    template <class O, class E>
    __attribute__((noinline, flatten, target("fma"), optimize("O2", "fp-contract=off"))) static void step(
        O const& optimizer, step_info const& info, std::span<E const> gradient, std::span<E> value,
        slot_spans<E> slots) {
        optimizer.step(info, gradient, value, slots);
    }
    template <class O, class E>
    __attribute__((noinline, flatten, target("fma"), optimize("O2", "fp-contract=off"))) static void prepare(
        O const& optimizer, step_info const& info, std::span<E> gradient, std::span<E const> value,
        slot_spans<E> slots) {
        optimizer.prepare(info, gradient, value, slots);
    }
};
#else
#define DDP_CAN_FORCE_CONTRACTION 0
#endif

/// Of at most one statistics block.
template <Element E>
double norm_of(std::span<E const> all) {
    double square = 0;
    block_squares(all, std::span(&square, 1));
    return ddp::detail::square_root(square);
}

/// A few steps over the same random numbers, in pieces of `piece` elements, the last one first. Returns the values, then
/// the state: all that a step may change.
template <Element E, OptimizerFor<E> O, class How = as_compiled>
std::vector<E> stepped(O const& optimizer, std::size_t piece, step_info info, double gradients = 1, How = {}) {
    constexpr std::size_t count = 1037;
    random_stream const draws{3, random_use::user};
    std::vector<E> value(count), gradient(count), state(optimizer.slot_count() * count);
    for (std::size_t i = 0; i < count; ++i) value[i] = draws.at(i).symmetric<E>();
    for (info.step = 1; info.step <= 5; ++info.step) {
        for (std::size_t i = 0; i < count; ++i)
            gradient[i] = static_cast<E>(gradients) * draws.at(info.step * count + i).symmetric<E>();
        auto const for_each_piece = [&](auto const& f) {
            for (std::size_t end = count; end > 0;) {
                std::size_t const begin = end - std::min(end, piece), length = end - begin;
                std::vector<std::span<E>> slots;
                for (std::size_t k = 0; k < optimizer.slot_count(); ++k)
                    slots.push_back(std::span<E>(state).subspan(k * count + begin, length));
                f(begin, length, slot_spans<E>(slots));
                end = begin;
            }
        };
        if constexpr (ddp::detail::HasPrepare<O, E>) {
            for_each_piece([&](std::size_t begin, std::size_t length, slot_spans<E> slots) {
                How::prepare(optimizer, info, std::span<E>(gradient).subspan(begin, length),
                             std::span<E const>(value).subspan(begin, length), slots);
            });
            info.value_norm = norm_of<E>(value);
            info.gradient_norm = norm_of<E>(gradient);
        }
        for_each_piece([&](std::size_t begin, std::size_t length, slot_spans<E> slots) {
            How::step(optimizer, info, std::span<E const>(gradient).subspan(begin, length),
                      std::span<E>(value).subspan(begin, length), slots);
        });
    }
    value.insert(value.end(), state.begin(), state.end());
    return value;
}

}  // namespace detail

/// Checks an optimizer by comparing bits. Returns what is wrong; an empty list if nothing was found. It checks that
///
///  - a range gives the same bits when stepped in one piece and in several, in any order, so that nothing is remembered
///    outside the slots
///  - the step uses learning_rate and gradient_scale of step_info, on which schedules and clipping depend
///  - copies have the same hash and give the same bits
///  - its arithmetic is in DDP_KERNEL functions; this can be checked with GCC from -O1 on, on x86-64 processors with FMA
///
/// Whether hash() covers every hyper-parameter cannot be checked.
template <Element E = float, OptimizerFor<E> O>
[[nodiscard]] std::vector<std::string> check_optimizer(O const& optimizer) {
    std::vector<std::string> complaints;
    auto const expect = [&](bool good, std::string const& otherwise) {
        if (!good) complaints.push_back(otherwise);
    };
    step_info const info{.learning_rate = optimizer.learning_rate() != 0 ? optimizer.learning_rate() : 0.125};
    std::vector<E> const whole = detail::stepped<E>(optimizer, 1037, info);
    expect(whole == whole, "a step over finite numbers makes a NaN");
    for (std::size_t const piece : {std::size_t{1}, std::size_t{16}, std::size_t{37}, std::size_t{640}})
        expect(detail::stepped<E>(optimizer, piece, info) == whole,
               "pieces of " + std::to_string(piece) +
                   " elements give other bits than the whole range: step looks at neighbours, keeps something between "
                   "calls, or its arithmetic is not in a DDP_KERNEL function");

#if DDP_CAN_FORCE_CONTRACTION
    if (__builtin_cpu_supports("fma"))
        expect(
            detail::stepped<E>(optimizer, 1037, info, 1, detail::fused{}) ==
                detail::stepped<E>(optimizer, 1037, info, 1, detail::rounded{}),
            "step gives other bits where the compiler fuses a * b + c: its arithmetic is not in a DDP_KERNEL function");
#endif

    step_info faster = info, scaled = info;
    faster.learning_rate *= 2;
    scaled.gradient_scale = 0.25;  // a power of two: exact
    expect(detail::stepped<E>(optimizer, 1037, faster) != whole, "step does not use info.learning_rate");
    expect(detail::stepped<E>(optimizer, 1037, scaled) == detail::stepped<E>(optimizer, 1037, info, 0.25),
           "step does not multiply each gradient by info.gradient_scale before it does anything else with it (where "
           "there is a "
           "prepare(), info.gradient_norm is that of the gradients as it has left them: unscaled if it has not changed "
           "them)");

    O const copy = optimizer;
    expect(copy.hash() == optimizer.hash(), "a copy has another hash");
    expect(detail::stepped<E>(copy, 1037, info) == whole, "a copy steps to other bits");
    return complaints;
}

}  // namespace ddp::testing
