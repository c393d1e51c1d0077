/// \file
/// classification_batch, regression_batch: the samples of one step, as views of memory that they do not own.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <cstddef>
#include <cstdint>
#include <span>

namespace ddp {

/// `rows` samples of `features` numbers each, and the class of each sample; views of memory that the batch does not
/// own. There may be no rows, because the share of a rank in a small batch may be empty; `features` is set even then.
template <class E>
struct classification_batch {
    std::span<E const> inputs = {};              ///< (rows, features), row-major
    std::span<std::uint32_t const> labels = {};  ///< (rows)
    std::size_t rows = 0;                        ///< samples
    std::size_t features = 0;                    ///< numbers in each sample
    /// (rows), or empty: the number of each sample in the data set, for models that draw random numbers.
    std::span<std::uint32_t const> samples = {};

    /// The number of samples, which is also the weight of the batch in the mean over ranks.
    [[nodiscard]] std::size_t size() const noexcept { return rows; }
};

/// `rows` samples of `features` numbers each, and the numbers that the model should return for them; views of memory that
/// the batch does not own. There may be no rows.
template <class E>
struct regression_batch {
    std::span<E const> inputs = {};   ///< (rows, features), row-major
    std::span<E const> targets = {};  ///< (rows, outputs), row-major
    std::size_t rows = 0;             ///< samples
    std::size_t features = 0;         ///< numbers in each sample
    /// (rows), or empty: the number of each sample in the data set, for models that draw random numbers.
    std::span<std::uint32_t const> samples = {};

    /// The number of samples, which is also the weight of the batch in the mean over ranks.
    [[nodiscard]] std::size_t size() const noexcept { return rows; }
};

}  // namespace ddp
