/// \file
/// Losses: what is minimised, and its gradient by the model's output.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/data/batch.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/nn/layer.hpp>

namespace ddp::nn {

/// The result of an evaluation: sums, so that results of batches and ranks may be added in any grouping.
struct evaluation {
    double loss_sum = 0;               ///< sum of the losses of the samples
    std::uint64_t correct = 0;         ///< samples whose label has the largest output; 0 if there are no labels
    std::uint64_t weight = 0;          ///< samples
    std::uint64_t correct_in_top = 0;  ///< samples whose label is among the `top` largest outputs (see the loss)

    evaluation& operator+=(evaluation const& other) noexcept {
        loss_sum += other.loss_sum;
        correct += other.correct;
        weight += other.weight;
        correct_in_top += other.correct_in_top;
        return *this;
    }
    [[nodiscard]] double loss() const noexcept { return weight == 0 ? 0 : loss_sum / static_cast<double>(weight); }
    [[nodiscard]] double accuracy() const noexcept {
        return weight == 0 ? 0 : static_cast<double>(correct) / static_cast<double>(weight);
    }
    [[nodiscard]] double top_accuracy() const noexcept {
        return weight == 0 ? 0 : static_cast<double>(correct_in_top) / static_cast<double>(weight);
    }
};

/// A loss of the model outputs z (rows, outputs), given a batch that holds the correct answers.
///
///  forward(z, batch)         returns the sum of the losses of the samples, added in double, and keeps what backward
///                            needs. There is at least one row
///  backward(factor)          returns the gradient of factor * that sum with respect to z, in a buffer of the loss's own
///                            that the caller may overwrite
///  correct(z, batch)         returns the number of samples that are predicted correctly
///  correct_in_top(z, batch)  optional: returns the number of samples whose correct answer is among the first few
template <class L, class Batch>
concept LossFor =
    requires(L& loss, const_matrix_view<typename L::element> z, Batch const& batch, typename L::element factor) {
        { loss.forward(z, batch) } -> std::same_as<double>;
        { loss.backward(factor) } -> std::same_as<matrix_view<typename L::element>>;
        { loss.correct(z, batch) } -> std::same_as<std::uint64_t>;
    };

/// The cross-entropy `-log softmax(z)[label]`, for classification. Takes any batch with integer `labels`, one for each
/// row.
///
/// Evaluation counts the rows whose label has the largest output, and those whose label is among the `top` largest; of
/// equal outputs the one with the lower index ranks first, and a NaN ranks before all numbers.
///
/// Cost    two passes over z, one exponential for each element. Memory: two arrays of the size of z.
/// Sums    in double: over the outputs of a row in order, then over the rows in order.
/// Throws  usage_error for a label outside [0, outputs), naming its position and value.
template <Element E = float>
class softmax_cross_entropy {
public:
    using element = E;

    explicit softmax_cross_entropy(std::size_t top = 5) : top_(top) {
        DDP_EXPECTS(top > 0, "softmax_cross_entropy: no label is among the 0 largest outputs; pass 1 or more");
    }

    template <class Batch>
        requires requires(Batch const& batch) { std::span(batch.labels); }
    double forward(const_matrix_view<E> z, Batch const& batch) {
        std::size_t const rows = rows_of(z), classes = columns_of(z);
        keep_labels(std::span(batch.labels), rows, classes);
        matrix_view<E> p = p_.take(rows, classes);
        std::span<E> const inverse = inverse_.take(rows);
        double sum = 0;
        // Less the row's largest: the exponentials cannot overflow, and one of them is 1.
        for (std::size_t r = 0; r < rows; ++r) {
            E const* const from = z.data() + r * classes;
            E const largest = *std::max_element(from, from + classes);
            E* const to = p.data() + r * classes;
            for (std::size_t c = 0; c < classes; ++c) to[c] = from[c] - largest;
            sum -= static_cast<double>(to[labels_[r]]);
        }
        p.array() = p.array().exp();
        for (std::size_t r = 0; r < rows; ++r) {
            double total = 0;
            for (std::size_t c = 0; c < classes; ++c) total += static_cast<double>(p.data()[r * classes + c]);
            sum += std::log(total);
            inverse[r] = static_cast<E>(1.0 / total);
        }
        return sum;
    }

    matrix_view<E> backward(E factor) {
        std::size_t const rows = labels_.size(), classes = classes_;
        matrix_view<E> dz = dz_.take(rows, classes);
        std::span<E const> const p = p_.take(rows * classes), inverse = inverse_.take(rows);
        for (std::size_t r = 0; r < rows; ++r) {
            E const share = factor * inverse[r];
            E* const to = dz.data() + r * classes;
            for (std::size_t c = 0; c < classes; ++c) to[c] = share * p[r * classes + c];
            to[labels_[r]] -= factor;
        }
        return dz;
    }

    /// A row is right if its label's output is the largest, the first among equals, and none is NaN.
    template <class Batch>
    [[nodiscard]] std::uint64_t correct(const_matrix_view<E> z, Batch const& batch) const {
        return within(1, z, batch);
    }
    /// The same for the `top` largest: all rows but those of NaN labels, if there are no more classes than that.
    template <class Batch>
    [[nodiscard]] std::uint64_t correct_in_top(const_matrix_view<E> z, Batch const& batch) const {
        return within(top_, z, batch);
    }

private:
    /// Rows where fewer than `places` outputs come before the label's.
    template <class Batch>
    [[nodiscard]] std::uint64_t within(std::size_t places, const_matrix_view<E> z, Batch const& batch) const {
        std::size_t const rows = rows_of(z), classes = columns_of(z);
        std::uint64_t right = 0;
        for (std::size_t r = 0; r < rows; ++r) {
            E const* const row = z.data() + r * classes;
            auto const label = static_cast<std::size_t>(batch.labels[r]);
            E const own = row[label];
            std::size_t before = 0;
            for (std::size_t c = 0; c < label; ++c) before += row[c] < own ? 0 : 1;
            for (std::size_t c = label; c < classes; ++c) before += row[c] <= own ? 0 : 1;
            right += before < std::min(places, classes) ? 1 : 0;
        }
        return right;
    }
    template <class Label>
    void keep_labels(std::span<Label> labels, std::size_t rows, std::size_t classes) {
        static_assert(std::integral<std::remove_const_t<Label>>, "labels are class numbers");
        DDP_EXPECTS(labels.size() == rows, "softmax_cross_entropy: " + std::to_string(rows) + " samples have " +
                                               std::to_string(labels.size()) + " labels; give each sample one");
        for (std::size_t r = 0; r < rows; ++r)
            DDP_EXPECTS(std::cmp_greater_equal(labels[r], 0) && std::cmp_less(labels[r], classes),
                        "softmax_cross_entropy: label " + std::to_string(+labels[r]) + " at position " +
                            std::to_string(r) + " of the batch is outside [0, " + std::to_string(classes) +
                            "): give the last layer one output a class, or correct the data");
        labels_.resize(rows);
        for (std::size_t r = 0; r < rows; ++r) labels_[r] = static_cast<std::size_t>(labels[r]);
        classes_ = classes;
    }

    std::size_t top_;
    std::vector<std::size_t> labels_;  // (rows) of the last forward: the batch may be gone when backward runs
    std::size_t classes_ = 0;
    buffer<E> p_;        // (rows, classes) exp(z - largest of the row)
    buffer<E> inverse_;  // (rows) 1 / sum of the row of p
    buffer<E> dz_;       // (rows, classes)
};
static_assert(LossFor<softmax_cross_entropy<float>, classification_batch<float>>);

/// The mean over outputs of (z - target)^2, for regression, like PyTorch's MSELoss. Takes any batch with `targets` (rows,
/// outputs). Evaluation counts no correct answers.
/// Cost    one pass over z in each direction. Memory: two arrays of the size of z.
/// Sums    in double, over outputs and rows in order.
/// Throws  usage_error if the batch does not have rows * outputs targets.
template <Element E = float>
class mean_squared_error {
public:
    using element = E;

    template <class Batch>
        requires requires(Batch const& batch) { std::span<E const>(batch.targets); }
    double forward(const_matrix_view<E> z, Batch const& batch) {
        std::span<E const> const targets(batch.targets);
        rows_ = rows_of(z), outputs_ = columns_of(z);
        DDP_EXPECTS(targets.size() == rows_ * outputs_,
                    "mean_squared_error: " + std::to_string(rows_) + " samples of " + std::to_string(outputs_) +
                        " outputs have " + std::to_string(targets.size()) + " targets; give each output one");
        std::span<E> const difference = difference_.take(targets.size());
        double sum = 0;
        for (std::size_t i = 0; i < targets.size(); ++i) {
            difference[i] = z.data()[i] - targets[i];
            sum += static_cast<double>(difference[i]) * static_cast<double>(difference[i]);
        }
        return sum / static_cast<double>(outputs_);
    }

    matrix_view<E> backward(E factor) {
        matrix_view<E> dz = dz_.take(rows_, outputs_);
        std::span<E const> const difference = difference_.take(rows_ * outputs_);
        E const slope = E{2} * factor / static_cast<E>(outputs_);
        for (std::size_t i = 0; i < difference.size(); ++i) dz.data()[i] = slope * difference[i];
        return dz;
    }

    template <class Batch>
    [[nodiscard]] std::uint64_t correct(const_matrix_view<E>, Batch const&) const noexcept {
        return 0;
    }

private:
    std::size_t rows_ = 0, outputs_ = 0;
    buffer<E> difference_, dz_;  // (rows, outputs)
};
static_assert(LossFor<mean_squared_error<double>, regression_batch<double>>);

}  // namespace ddp::nn
