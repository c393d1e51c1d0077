/// \file
/// batch_loader: copies the samples that a sampler selects into one contiguous batch of numbers.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/math.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/batch.hpp>
#include <ddp/data/classification.hpp>

namespace ddp {

/// How a byte becomes a number: (byte / 255 - mean) / deviation. The default maps to [0, 1].
struct normalisation {
    double mean = 0;       ///< of byte / 255; finite
    double deviation = 1;  ///< of byte / 255; positive
};

/// Copies samples of a data set into memory of its own, as numbers, with their labels and indices:
///
///     ddp::batch_loader<float> load{data, batches.largest_share()};
///     while (auto const indices = batches.next()) trainer.step(load(*indices));
///
/// Cost: one table look-up for each number. The constructor allocates memory for `reserve` samples; only a larger batch
/// allocates again.
template <std::floating_point E>
class batch_loader {
public:
    /// `data` must outlive the loader. Throws usage_error unless the mean is finite and the deviation is finite and
    /// positive.
    explicit batch_loader(classification_data const& data, std::size_t reserve = 0, normalisation norm = {})
        : data_(&data) {
        DDP_EXPECTS(detail::is_finite(norm.mean) && detail::is_finite(norm.deviation) && norm.deviation > 0,
                    "batch_loader: mean must be finite, and deviation finite and above 0; {0, 1} keeps [0, 1]");
        for (std::size_t b = 0; b < number_.size(); ++b)
            number_[b] = static_cast<E>((static_cast<double>(b) / 255.0 - norm.mean) / norm.deviation);
        inputs_.reserve(reserve * data.features);
        labels_.reserve(reserve);
        samples_.reserve(reserve);
    }
    batch_loader(classification_data const&&, std::size_t = 0, normalisation = {}) = delete;  // would dangle

    /// The samples with these indices, in this order: inputs (indices.size(), data.features), row-major. The views are
    /// valid until the next call. Throws usage_error for an index that is not in the data set.
    [[nodiscard]] classification_batch<E> operator()(std::span<std::uint32_t const> indices) {
        std::size_t const features = data_->features;
        inputs_.resize(indices.size() * features);
        labels_.resize(indices.size());
        samples_.assign(indices.begin(), indices.end());
        for (std::size_t row = 0; row < indices.size(); ++row) {
            std::size_t const sample = indices[row];
            DDP_EXPECTS(sample < data_->size(),
                        detail::concat({"batch_loader: there is no sample ", sample, "; the data set holds ",
                                        data_->size(), ", give the sampler that number"}));
            std::uint8_t const* const from = data_->inputs.data() + sample * features;
            E* const to = inputs_.data() + row * features;
            for (std::size_t f = 0; f < features; ++f) to[f] = number_[from[f]];
            labels_[row] = data_->labels[sample];
        }
        return {inputs_, labels_, indices.size(), features, samples_};
    }

private:
    classification_data const* data_;
    std::array<E, 256> number_{};         // of each byte: the division is done once, and rounds the same for all
    std::vector<E> inputs_;               // (rows, features), row-major
    std::vector<std::uint32_t> labels_;   // (rows)
    std::vector<std::uint32_t> samples_;  // (rows)
};

}  // namespace ddp
