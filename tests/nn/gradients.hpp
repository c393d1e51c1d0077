/// \file
/// Numerical gradients: central differences beside what backward says.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

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
double worst_gradient_error(L& layer, std::size_t rows, std::size_t columns) {
    std::vector<double> x = random_numbers<double>(rows * columns, 1);
    auto const forward = [&] { return layer.forward(nn::as_matrix(std::span<double const>(x), rows, columns), {}); };
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

}  // namespace ddp::test
