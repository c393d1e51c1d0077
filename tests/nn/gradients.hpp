/// \file
/// Numerical gradients: central differences beside what backward says.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/core/random.hpp>
#include <ddp/nn/layer.hpp>

namespace ddp::test {

/// `count` numbers in [-1, 1), none closer to 0 than 1e-3: away from the kink of a rectifier.
template <class E>
std::vector<E> random_numbers(std::size_t count, std::uint64_t part) {
    random_stream const draws{17, random_use::user, part};
    std::vector<E> numbers(count);
    for (std::size_t i = 0; i < count; ++i) {
        numbers[i] = draws.at(i).template symmetric<E>();
        if (std::abs(numbers[i]) < E(1e-3)) numbers[i] = E(1e-3);
    }
    return numbers;
}

/// (f(at + h) - f(at - h)) / 2h for one number that f depends on.
template <class F>
double slope(double& at, F const& f) {
    double const before = at, h = 1e-5;
    at = before + h;
    double const above = f();
    at = before - h;
    double const below = f();
    at = before;
    return (above - below) / (2 * h);
}

/// The largest difference, over x and all parameters, between slopes of sum(c * layer(x)), c random, and backward.
template <nn::LayerOf<double> L>
double worst_gradient_error(L& layer, std::size_t rows, std::size_t columns, nn::forward_mode mode = {}) {
    std::vector<double> x = random_numbers<double>(rows * columns, 1);
    auto const forward = [&] { return layer.forward(nn::as_matrix(std::span<double const>(x), rows, columns), mode); };
    std::vector<double> const c = random_numbers<double>(static_cast<std::size_t>(forward().size()), 2);
    auto const value = [&] {
        auto const y = forward();
        double sum = 0;
        for (std::size_t i = 0; i < c.size(); ++i) sum += c[i] * y.data()[i];
        return sum;
    };

    std::vector<double> dy = c;
    auto const y = forward();
    auto const dx = layer.backward(nn::as_matrix(std::span<double>(dy), nn::rows_of(y), nn::columns_of(y)), {});
    std::vector<double> const by_input(dx.data(), dx.data() + dx.size());
    if (by_input.size() != x.size()) return HUGE_VAL;

    double worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, std::abs(slope(x[i], value) - by_input[i]));
    if constexpr (requires { layer.parameters(); })
        for (auto& p : layer.parameters())
            for (std::size_t i = 0; i < p.size(); ++i)
                worst = std::max(worst, std::abs(slope(p.value()[i], value) - p.gradient()[i]));
    return worst;
}

/// y of one forward, and gradients of the parameters and dx of a backward, one behind the other.
template <class L, class E = typename L::element>
std::vector<E> pass_through(L& layer, std::vector<E> const& x, std::size_t rows, nn::backward_mode back = {},
                            nn::forward_mode forth = {}) {
    auto const y = layer.forward(nn::as_matrix(std::span<E const>(x), rows, x.size() / rows), forth);
    std::vector<E> all(y.data(), y.data() + y.size());
    nn::buffer<E> memory;
    auto dy = memory.take(rows, nn::columns_of(y));
    auto const c = random_numbers<E>(all.size(), 2);
    std::copy(c.begin(), c.end(), dy.data());
    auto const dx = layer.backward(dy, back);
    if constexpr (requires { layer.parameters(); })
        for (auto const& p : layer.parameters()) all.insert(all.end(), p.gradient().begin(), p.gradient().end());
    all.insert(all.end(), dx.data(), dx.data() + dx.size());
    return all;
}

/// A layer that is called in place, on memory of ours.
template <class L>
struct placed {
    using element = typename L::element;
    L& of;
    nn::buffer<element> memory = {};

    nn::matrix_view<element> forward(nn::const_matrix_view<element> x, nn::forward_mode mode) {
        auto mine = memory.take(nn::rows_of(x), nn::columns_of(x));
        std::copy_n(x.data(), x.size(), mine.data());
        auto const y = of.forward_in_place(mine, mode);
        return y.data() == mine.data() ? y : nn::matrix_view<element>{nullptr, 0, 0};
    }
    nn::matrix_view<element> backward(nn::matrix_view<element> dy, nn::backward_mode mode) {
        return of.backward(dy, mode);
    }
    auto parameters()
        requires requires(L& layer) { layer.parameters(); }
    {
        return of.parameters();
    }
};

/// Whether a layer's result, put in place of its argument, and all gradients are the bits they are elsewhere.
template <class L, class E = typename L::element>
bool same_in_place(L& layer, std::size_t rows, std::size_t columns, nn::forward_mode forth = {}) {
    auto const x = random_numbers<E>(rows * columns, 1);
    auto const apart = pass_through(layer, x, rows, {}, forth);
    placed<L> in_place{layer};
    return pass_through(in_place, x, rows, {}, forth) == apart;
}

/// What a usage_error says, or "".
template <class F>
std::string usage_complaint(F const& f) {
    try {
        f();
    } catch (usage_error const& error) {
        return error.what();
    }
    return {};
}

}  // namespace ddp::test
