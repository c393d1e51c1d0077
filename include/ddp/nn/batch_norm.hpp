/// \file
/// batch_norm: every channel with mean 0 and deviation 1 over the batch, then scaled and shifted.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/core/text.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/rank_sums.hpp>
#include <ddp/nn/image.hpp>
#include <ddp/nn/layer.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::nn {

namespace detail {

/// sum[c] += f of all elements of channel c; a row is `channels` runs of `plane` elements.
template <Element E, class F>
[[gnu::always_inline]] inline void add_channels(double* sum, std::size_t rows, std::size_t channels, std::size_t plane,
                                                F f) {
    DDP_NO_CONTRACTION
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t c = 0; c < channels; ++c) {
            std::size_t const first = (r * channels + c) * plane;
            double one = 0;
            for (std::size_t i = first; i < first + plane; ++i) one += f(i, c);
            sum[c] += one;
        }
}
template <Element E>
DDP_KERNEL void channel_sums(double* sum, E const* x, std::size_t rows, std::size_t channels, std::size_t plane) {
    DDP_NO_CONTRACTION
    add_channels<E>(sum, rows, channels, plane, [x](std::size_t i, std::size_t) { return static_cast<double>(x[i]); });
}
template <Element E>
DDP_KERNEL void channel_squares(double* sum, E const* x, double const* mean, std::size_t rows, std::size_t channels,
                                std::size_t plane) {
    DDP_NO_CONTRACTION
    add_channels<E>(sum, rows, channels, plane, [x, mean](std::size_t i, std::size_t c) {
        double const d = static_cast<double>(x[i]) - mean[c];
        return d * d;
    });
}
template <Element E>
DDP_KERNEL void channel_products(double* sum, E const* a, E const* b, std::size_t rows, std::size_t channels,
                                 std::size_t plane) {
    DDP_NO_CONTRACTION
    add_channels<E>(sum, rows, channels, plane, [a, b](std::size_t i, std::size_t) {
        return static_cast<double>(a[i]) * static_cast<double>(b[i]);
    });
}
/// n = (x - mean) * inverse, y = n * weight + bias, channel by channel. y and x may be the same.
template <Element E>
DDP_KERNEL void normalise_channels(E* n, E* y, E const* x, double const* mean, double const* inverse, E const* weight,
                                   E const* bias, std::size_t rows, std::size_t channels, std::size_t plane) {
    DDP_NO_CONTRACTION
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t c = 0; c < channels; ++c) {
            std::size_t const first = (r * channels + c) * plane;
            E const m = static_cast<E>(mean[c]), s = static_cast<E>(inverse[c]), w = weight[c], b = bias[c];
            DDP_INDEPENDENT
            for (std::size_t i = first; i < first + plane; ++i) {
                n[i] = (x[i] - m) * s;
                y[i] = n[i] * w + b;
            }
        }
}
/// d = factor * (d - mean - n * slope), channel by channel.
template <Element E>
DDP_KERNEL void normalise_channel_gradients(E* d, E const* n, double const* mean, double const* slope,
                                            double const* factor, std::size_t rows, std::size_t channels,
                                            std::size_t plane) {
    DDP_NO_CONTRACTION
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t c = 0; c < channels; ++c) {
            std::size_t const first = (r * channels + c) * plane;
            E const m = static_cast<E>(mean[c]), s = static_cast<E>(slope[c]), f = static_cast<E>(factor[c]);
            DDP_INDEPENDENT
            for (std::size_t i = first; i < first + plane; ++i) d[i] = f * (d[i] - m - n[i] * s);
        }
}
}  // namespace detail

/// The samples over which a batch_norm takes its statistics in training.
enum class batch_statistics : std::uint8_t {
    local,         ///< this rank's share of the batch: no communication; results depend on the number of ranks
    synchronised,  ///< the whole batch, as in one process: all ranks take part in each pass, even without samples
};

/// Options of batch_norm.
struct batch_norm_options {
    batch_statistics statistics = batch_statistics::local;  ///< over which samples
    double momentum = 0.1;  ///< weight of the new batch in the running statistics; in [0, 1]
    double epsilon = 1e-5;  ///< added to the variance; positive
};

/// Computes (x - mean) / sqrt(variance + epsilon) * weight + bias. In training, mean and variance (divided by n) are
/// those of each channel over the batch, where a channel is a feature, or a plane of an image. In evaluation, they are
/// the running statistics, whose variance is divided by n - 1.
///
///     ddp::nn::batch_norm(128);  // for rows of 128 features
///     ddp::nn::batch_norm({.channels = 16, .height = 14, .width = 14},
///                         {.statistics = ddp::nn::batch_statistics::synchronised});
///
/// Parameters "weight" and "bias" (channels), initially 1 and 0; buffers "running_mean" and "running_var" (channels),
/// initially 0 and 1, and "num_batches_tracked": all as in PyTorch. training_options::buffers says how ranks keep buffers
/// the same.
///
/// With batch_statistics::synchronised, each training pass adds over all ranks: in 2 collectives in forward and 1
/// in backward, each with 2 numbers per channel. Forward and backward must be called equally often on all ranks; the
/// trainer also calls them on ranks without samples.
/// Cost    about six passes over x. Memory: the normalised x.
/// Sums    in double: the pixels of a plane in order, then rows in order; over ranks in the canonical order.
/// Throws  usage_error if x has another number of columns, and in training if a channel has only one number in the whole
///         batch, which has no variance.
/// Source  Ioffe and Szegedy, "Batch normalization", ICML 2015.
template <Element E = float>
class batch_norm {
public:
    using element = E;
    static constexpr bool output_is_free = true;

    explicit batch_norm(std::size_t features, batch_norm_options options = {})
        : batch_norm(image_shape{.channels = features}, options) {}
    explicit batch_norm(image_shape over, batch_norm_options options = {})
        : over_(over),
          options_(options),
          parameters_{trainable<E>("weight", {over.channels}), trainable<E>("bias", {over.channels})},
          running_mean_(over.channels),
          running_var_(over.channels, E{1}),
          sums_(2 * over.channels + 1),
          mean_(over.channels),
          inverse_(over.channels) {
        DDP_EXPECTS(over.size() > 0, "batch_norm: give it a positive number of features, or of channels and pixels");
        DDP_EXPECTS(options.epsilon > 0,
                    "batch_norm: epsilon keeps channels of equal numbers finite; pass a positive one");
        DDP_EXPECTS(options.momentum >= 0 && options.momentum <= 1,
                    "batch_norm: momentum is the new batch's part of the running statistics, in [0, 1]");
        initialize(0, 0);
    }

    [[nodiscard]] std::size_t inputs() const noexcept { return over_.size(); }
    [[nodiscard]] std::size_t outputs() const noexcept { return over_.size(); }
    [[nodiscard]] std::span<trainable<E>> parameters() noexcept { return parameters_; }
    void initialize(std::uint64_t, std::uint64_t) {
        std::fill(parameters_[0].value().begin(), parameters_[0].value().end(), E{1});
        std::fill(parameters_[1].value().begin(), parameters_[1].value().end(), E{0});
        std::fill(running_mean_.begin(), running_mean_.end(), E{0});
        std::fill(running_var_.begin(), running_var_.end(), E{1});
        batches_ = 0;
    }
    [[nodiscard]] std::vector<model_buffer> buffers() {
        element_type const type = element_type_of<E>();
        return {{"running_mean", type, {over_.channels}, as_mutable_bytes(std::span<E>(running_mean_))},
                {"running_var", type, {over_.channels}, as_mutable_bytes(std::span<E>(running_var_))},
                {"num_batches_tracked", element_type::i64, {}, bytes_of(batches_)}};
    }
    [[nodiscard]] bool joins_ranks() const noexcept { return options_.statistics == batch_statistics::synchronised; }
    static constexpr bool draws = false;
    /// Ranks compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept {
        return policy_hash("batch_norm", options_.statistics, options_.momentum, options_.epsilon);
    }
    [[nodiscard]] std::string hash_words() const {
        return ddp::detail::concat({"batch_norm(", joins_ranks() ? "synchronised" : "local", ", momentum ",
                                    ddp::detail::decimal(options_.momentum), ", epsilon ",
                                    ddp::detail::decimal(options_.epsilon), ")"});
    }

    matrix_view<E> forward(const_matrix_view<E> x, forward_mode mode) {
        matrix_view<E> y = y_.take(rows_of(x), columns_of(x));
        return normalised(y, x, mode);
    }
    matrix_view<E> forward_in_place(matrix_view<E> y, forward_mode mode) { return normalised(y, read_only(y), mode); }

    matrix_view<E> backward(matrix_view<E> dy, backward_mode mode) {
        std::size_t const channels = over_.channels, plane = over_.plane();
        std::span<double> const sums = std::span(sums_).first(2 * channels);  // of dy, and of dy n
        std::fill(sums.begin(), sums.end(), 0.0);
        E* const d = dy.data();
        E const* const n = normal_.take(rows_ * over_.size()).data();
        detail::channel_sums(sums.data(), d, rows_, channels, plane);
        detail::channel_products(sums.data() + channels, d, n, rows_, channels, plane);
        std::span<E> const dw = parameters_[0].gradient(), db = parameters_[1].gradient();
        for (std::size_t c = 0; c < channels; ++c) {
            dw[c] = static_cast<E>(sums[channels + c] + (mode.accumulate ? static_cast<double>(dw[c]) : 0.0));
            db[c] = static_cast<E>(sums[c] + (mode.accumulate ? static_cast<double>(db[c]) : 0.0));
        }
        if (!mode.input_gradient) return dy;
        if (joined_) mode.ranks->add(sums);
        std::span<E const> const weight = parameters_[0].value();
        for (std::size_t c = 0; c < channels; ++c) {
            for (double* const one : {&sums[c], &sums[channels + c]})
                *one = trained_ && count_ != 0 ? *one / count_ : 0;
            factor_.take(channels)[c] = static_cast<double>(weight[c]) * inverse_[c];
        }
        detail::normalise_channel_gradients(d, n, sums.data(), sums.data() + channels, factor_.take(channels).data(),
                                            rows_, channels, plane);
        return dy;
    }

private:
    matrix_view<E> normalised(matrix_view<E> y, const_matrix_view<E> x, forward_mode const& mode) {
        std::size_t const channels = over_.channels;
        DDP_EXPECTS(columns_of(x) == over_.size(), "batch_norm over " + to_string(over_) + " was given samples of " +
                                                       std::to_string(columns_of(x)) + " features: they must be " +
                                                       std::to_string(over_.size()));
        rows_ = rows_of(x);
        trained_ = mode.training;
        joined_ = trained_ && joins_ranks() && mode.ranks != nullptr;
        if (mode.training)
            measure(x, mode.ranks);
        else
            for (std::size_t c = 0; c < channels; ++c) {
                mean_[c] = static_cast<double>(running_mean_[c]);
                inverse_[c] = 1 / std::sqrt(static_cast<double>(running_var_[c]) + options_.epsilon);
            }
        detail::normalise_channels(normal_.take(rows_ * over_.size()).data(), y.data(), x.data(), mean_.data(),
                                   inverse_.data(), std::as_const(parameters_[0]).value().data(),
                                   std::as_const(parameters_[1]).value().data(), rows_, channels, over_.plane());
        return y;
    }
    /// Mean and deviation of the batch, and their part in the running ones.
    void measure(const_matrix_view<E> x, rank_sums* ranks) {
        std::size_t const channels = over_.channels, plane = over_.plane();
        std::span<double> const sums = std::span(sums_).first(channels + 1);
        std::fill(sums.begin(), sums.end(), 0.0);
        detail::channel_sums(sums.data(), x.data(), rows_, channels, plane);
        sums[channels] = static_cast<double>(rows_ * plane);
        if (joined_) ranks->add(sums);
        count_ = sums[channels];
        if (count_ == 0) return;  // no rank has a sample
        DDP_EXPECTS(
            count_ > 1,
            joined_ ? "batch_norm: each channel has one number in the whole batch, which has no deviation; train on "
                      "larger batches"
                    : "batch_norm: each channel has one number in this rank's share of the batch, which has no "
                      "deviation; train on larger batches, leave out short last ones (drop_last), or choose "
                      "batch_statistics::synchronised");
        for (std::size_t c = 0; c < channels; ++c) mean_[c] = sums[c] / count_;
        std::fill(sums.begin(), sums.end(), 0.0);
        detail::channel_squares(sums.data(), x.data(), mean_.data(), rows_, channels, plane);
        if (joined_) ranks->add(sums.first(channels));
        double const m = options_.momentum;
        for (std::size_t c = 0; c < channels; ++c) {
            inverse_[c] = 1 / std::sqrt(sums[c] / count_ + options_.epsilon);
            running_mean_[c] = static_cast<E>((1 - m) * static_cast<double>(running_mean_[c]) + m * mean_[c]);
            running_var_[c] =
                static_cast<E>((1 - m) * static_cast<double>(running_var_[c]) + m * (sums[c] / (count_ - 1)));
        }
        ++batches_;
    }

    image_shape over_;
    batch_norm_options options_;
    std::array<trainable<E>, 2> parameters_;
    std::vector<E> running_mean_, running_var_;
    std::int64_t batches_ = 0;
    std::vector<double> sums_, mean_, inverse_;
    buffer<double> factor_;
    buffer<E> normal_, y_;
    std::size_t rows_ = 0;
    double count_ = 0;      // numbers a channel that the statistics are of
    bool trained_ = false;  // the last forward was in training
    bool joined_ = false;   // the statistics are of all ranks
};
batch_norm(std::size_t) -> batch_norm<>;
batch_norm(std::size_t, batch_norm_options) -> batch_norm<>;
batch_norm(image_shape) -> batch_norm<>;
batch_norm(image_shape, batch_norm_options) -> batch_norm<>;
static_assert(LayerOf<batch_norm<float>, float>);

}  // namespace ddp::nn

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
