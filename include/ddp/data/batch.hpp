/// \file
/// classification_batch, regression_batch: what is trained on in one step, as views of somebody else's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ddp {

/// `rows` samples of `features` numbers each, and the class of every sample. Zero rows are legal: a rank's share of a
/// short batch may be empty, and its shape still says how many features there would have been.
template <class E>
struct classification_batch {
    std::span<E const> inputs;              ///< (rows, features), row-major
    std::span<std::uint32_t const> labels;  ///< (rows)
    std::size_t rows = 0;                   ///< samples
    std::size_t features = 0;               ///< numbers a sample
    /// (rows), or empty: their numbers in the data set, for models that draw.
    std::span<std::uint32_t const> samples = {};

    /// Samples, which is also the batch's weight in the mean over ranks.
    [[nodiscard]] std::size_t size() const noexcept { return rows; }
};

/// `rows` samples of `features` numbers each, and the numbers the model should answer with. Zero rows are legal.
template <class E>
struct regression_batch {
    std::span<E const> inputs;   ///< (rows, features), row-major
    std::span<E const> targets;  ///< (rows, outputs), row-major
    std::size_t rows = 0;        ///< samples
    std::size_t features = 0;    ///< numbers a sample
    /// (rows), or empty: their numbers in the data set, for layers that draw.
    std::span<std::uint32_t const> samples = {};

    /// Samples, which is also the batch's weight in the mean over ranks.
    [[nodiscard]] std::size_t size() const noexcept { return rows; }
};

}  // namespace ddp
