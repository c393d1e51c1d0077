/// \file
/// What the optimizer tests share: a range with its state, and ways to step it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <ddp/optim/optimizer.hpp>

#include "kernel/mixed_values.hpp"

namespace test {

template <class E>
struct stepped_range {
    std::vector<E> value;
    std::vector<std::vector<E>> slots;

    stepped_range(std::vector<E> initial, std::size_t slot_count)
        : value(std::move(initial)), slots(slot_count, std::vector<E>(value.size())) {}

    /// Steps [begin, begin + count).
    template <class O>
    void step(O const& optimizer, ddp::step_info const& at, std::vector<E> const& gradient, std::size_t begin,
              std::size_t count) {
        std::vector<std::span<E>> state;
        for (auto& slot : slots) state.push_back(std::span(slot).subspan(begin, count));
        optimizer.step(at, std::span<E const>(gradient).subspan(begin, count),
                       std::span<E>(value).subspan(begin, count), ddp::slot_spans<E>(state));
    }
    template <class O>
    void step(O const& optimizer, ddp::step_info const& at, std::vector<E> const& gradient) {
        step(optimizer, at, gradient, 0, value.size());
    }
};

/// The largest |a - b| / (1 + |b|).
template <class E>
double distance(std::vector<E> const& a, std::vector<double> const& b) {
    double worst = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
        worst = std::max(worst, std::abs(static_cast<double>(a[i]) - b[i]) / (1 + std::abs(b[i])));
    return worst;
}

}  // namespace test
