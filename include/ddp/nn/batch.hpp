/// \file
/// regression_batch: samples with target numbers, as views of somebody else's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ddp::nn {

/// `rows` samples of `features` numbers each, and the numbers the model should answer with. Zero rows are legal.
template <class E>
struct regression_batch {
    std::span<E const> inputs;   ///< (rows, features), row-major
    std::span<E const> targets;  ///< (rows, outputs), row-major
    std::size_t rows = 0;        ///< samples
    std::size_t features = 0;    ///< input numbers a sample
    /// (rows), or empty: their numbers in the data set, for layers that draw.
    std::span<std::uint32_t const> samples = {};

    [[nodiscard]] std::size_t size() const noexcept { return rows; }
};

}  // namespace ddp::nn
