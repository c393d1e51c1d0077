/// \file
/// dropout: leaves out units at random while training, the same ones whatever the number of ranks.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/random.hpp>
#include <ddp/core/text.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/nn/layer.hpp>
#include <ddp/nn/products.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::nn {

namespace detail {

/// Four elements a draw: 0 where its word is below `threshold`, `kept` elsewhere.
template <Element E>
DDP_KERNEL void draw_mask(E* mask, std::size_t count, random_stream draws, std::uint64_t first, std::uint32_t threshold,
                          E kept) {
    std::size_t const whole = count / 4;
    for (std::size_t b = 0; b < whole; ++b) {
        std::array<std::uint32_t, 4> const words = draws.at(first + b).words();
        for (std::size_t k = 0; k < 4; ++k) mask[4 * b + k] = words[k] < threshold ? E{0} : kept;
    }
    std::array<std::uint32_t, 4> const words = draws.at(first + whole).words();
    for (std::size_t i = 4 * whole; i < count; ++i) mask[i] = words[i % 4] < threshold ? E{0} : kept;
}

}  // namespace detail

/// In training, sets each unit to 0 with probability `p` and multiplies it by 1 / (1 - p) otherwise; does nothing in
/// evaluation.
///
/// Which units are dropped is a function of (seed, layer, step, number of the sample in the data set, element): word
/// element % 4 of random_stream{seed, random_use::dropout, layer << 36 | step}.at(sample << 32 | element / 4). The
/// element is dropped if the word is below p * 2^32, rounded down. The choice does not depend on the rank or on the
/// position in the batch. The seed is the model's, the step number the trainer's
/// (begin_step), and the numbers of the samples are those of the batch (`samples`, which batch_loader fills in).
///
/// If a sample has several rows (pixels, tokens), these count as one row.
///
/// Cost    a quarter of a Philox call (about 1 ns) for each element, and one multiplication each in forward and backward.
/// Throws  usage_error in training if p > 0 and the batch does not say which samples it holds; from the constructor if p
///         is not in [0, 1).
/// Source  Srivastava, Hinton, Krizhevsky, Sutskever and Salakhutdinov, "Dropout: a simple way to prevent neural networks
///         from overfitting", JMLR 15, 2014; scaled in training ("inverted"), so that nothing is left to do in
///         evaluation.
template <Element E = float>
class dropout {
public:
    using element = E;
    static constexpr bool output_is_free = true;

    explicit dropout(double p = 0.5) : p_(p) {
        DDP_EXPECTS(p >= 0 && p < 1, "dropout(" + std::to_string(p) + "): a probability of leaving out is in [0, 1)");
        threshold_ = static_cast<std::uint32_t>(std::min(p * 0x1p32, 0x1p32 - 1));
    }
    /// Ranks compare it: all of them must drop the same units.
    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash("dropout", p_); }
    [[nodiscard]] std::string hash_words() const {
        return ddp::detail::concat({"dropout(", ddp::detail::decimal(p_), ")"});
    }

    matrix_view<E> forward(const_matrix_view<E> x, forward_mode mode) {
        matrix_view<E> y = y_.take(rows_of(x), columns_of(x));
        if (draw(rows_of(x), columns_of(x), mode))
            detail::multiply(y.data(), x.data(), mask_.data(), mask_.size());
        else
            std::copy_n(x.data(), x.size(), y.data());
        return y;
    }
    matrix_view<E> forward_in_place(matrix_view<E> y, forward_mode mode) {
        if (draw(rows_of(y), columns_of(y), mode))
            detail::multiply(y.data(), std::as_const(y).data(), mask_.data(), mask_.size());
        return y;
    }
    matrix_view<E> backward(matrix_view<E> dy, backward_mode) {
        if (!mask_.empty()) detail::multiply(dy.data(), std::as_const(dy).data(), mask_.data(), mask_.size());
        return dy;
    }

private:
    /// Whether there is a mask now.
    bool draw(std::size_t rows, std::size_t columns, forward_mode const& mode) {
        mask_ = {};
        if (!mode.training || p_ == 0 || rows * columns == 0) return false;
        std::size_t const samples = mode.samples.size();
        DDP_EXPECTS(samples > 0,
                    "dropout: the batch does not say which samples it holds, and what is left out depends on that. "
                    "Give the batch `samples`, the number of each in the data set (batch_loader does); or call "
                    "model.training(false) if the model is not being trained");
        DDP_EXPECTS(rows % samples == 0, "dropout: " + std::to_string(rows) +
                                             " rows are not a whole number for each of " + std::to_string(samples) +
                                             " samples; give `samples` one number a sample");
        std::size_t const each = rows / samples * columns;
        random_stream const draws{mode.seed, random_use::dropout, std::uint64_t{mode.layer} << 36 | mode.step};
        std::span<E> const mask = memory_.take(rows * columns);
        for (std::size_t s = 0; s < samples; ++s)
            detail::draw_mask(mask.data() + s * each, each, draws, std::uint64_t{mode.samples[s]} << 32, threshold_,
                              static_cast<E>(1 / (1 - p_)));
        mask_ = mask;
        return true;
    }

    double p_;
    std::uint32_t threshold_ = 0;  // p * 2^32
    std::span<E const> mask_;  // (rows, columns) of 0 and 1 / (1 - p), of the last forward; empty: nothing is left out
    buffer<E> memory_, y_;
};
static_assert(LayerOf<dropout<float>, float>);

}  // namespace ddp::nn

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
