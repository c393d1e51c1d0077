/// \file
/// embedding: a vector of numbers to be learnt for each token of a vocabulary.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <sstream>
#include <string>

#include <ddp/core/contract.hpp>
#include <ddp/core/random.hpp>
#include <ddp/nn/layer.hpp>

namespace ddp::nn {

/// Looks up one row of a table for each of a sample's `tokens` ids and places these rows side by side: (rows, tokens) ->
/// (rows, tokens * width).
///
/// Ids are passed in the inputs of the batch, as whole numbers below `vocabulary`; a float represents every whole number
/// up to 2^24. They have no gradient, so this layer must be the first of the model: after another
/// layer, forward works but backward throws.
///
/// Parameter "weight" (vocabulary, width), as in PyTorch. Its gradient is dense even if a batch uses few rows: all of it
/// is sent between ranks and stepped by the optimizer. There are no sparse gradients.
/// Initial values  standard normal, PyTorch's default.
/// Cost            forward copies `width` numbers for each id; backward sets the gradient to zero and adds as many.
/// Throws          usage_error for an id that is not in the vocabulary (naming value, row and vocabulary); if x does not
///                 have `tokens` columns; in backward, if a layer before this one needs a gradient.
template <Element E = float>
class embedding {
public:
    using element = E;
    static constexpr bool output_is_free = true;

    embedding(std::size_t vocabulary, std::size_t width, std::size_t tokens = 1)
        : vocabulary_(checked_vocabulary(vocabulary)),
          width_(checked(width)),
          tokens_(checked(tokens)),
          parameters_{trainable<E>("weight", {vocabulary, width})} {
        initialize(0, 0);
    }

    [[nodiscard]] std::size_t inputs() const noexcept { return tokens_; }
    [[nodiscard]] std::size_t outputs() const noexcept { return tokens_ * width_; }
    [[nodiscard]] std::span<trainable<E>> parameters() noexcept { return parameters_; }

    void initialize(std::uint64_t seed, std::uint64_t first) {
        random_stream const draws{seed, random_use::initial_values, first};
        std::span<E> const value = parameters_[0].value();
        for (std::size_t i = 0; i < value.size(); ++i) value[i] = draws.at(i).template normal<E>();
    }

    matrix_view<E> forward(const_matrix_view<E> x, forward_mode) {
        DDP_EXPECTS(columns_of(x) == tokens_, "embedding: samples have " + std::to_string(columns_of(x)) +
                                                  " ids, the layer was made for " + std::to_string(tokens_) +
                                                  "; pass that number as its third argument");
        ids_ = {x.data(), static_cast<std::size_t>(x.size())};
        for (std::size_t i = 0; i < ids_.size(); ++i) expect_id(i);
        matrix_view<E> y = y_.take(rows_of(x), outputs());
        for (std::size_t i = 0; i < ids_.size(); ++i)
            std::copy_n(parameters_[0].value().data() + id(i) * width_, width_, y.data() + i * width_);
        return y;
    }

    matrix_view<E> backward(matrix_view<E> dy, backward_mode mode) {
        DDP_EXPECTS(!mode.input_gradient,
                    "embedding: ids have no gradient, so no layer before this one can learn; make it the first");
        std::span<E> const dw = parameters_[0].gradient();
        if (!mode.accumulate) std::fill(dw.begin(), dw.end(), E{0});
        for (std::size_t i = 0; i < ids_.size(); ++i) {
            E* const to = dw.data() + id(i) * width_;
            E const* const from = dy.data() + i * width_;
            for (std::size_t c = 0; c < width_; ++c) to[c] += from[c];
        }
        return {nullptr, 0, static_cast<Eigen::Index>(tokens_)};
    }

private:
    static std::size_t checked(std::size_t n) {
        DDP_EXPECTS(n > 0, "embedding: vocabulary, width and tokens are positive numbers");
        return n;
    }
    static std::size_t checked_vocabulary(std::size_t n) {  // before there is memory for its table
        DDP_EXPECTS(n <= std::uint64_t{1} << std::numeric_limits<E>::digits,
                    "embedding: a vocabulary of " + std::to_string(n) +
                        " has ids that the batch's numbers cannot hold; use double");
        return checked(n);
    }
    [[nodiscard]] std::size_t id(std::size_t i) const noexcept { return static_cast<std::size_t>(ids_[i]); }
    void expect_id(std::size_t i) const {
        E const value = ids_[i];
        if (value >= E{0} && value < static_cast<E>(vocabulary_) && static_cast<E>(id(i)) == value) return;
        std::ostringstream says;
        says << "embedding: the id " << value << " at row " << i / tokens_ << ", position " << i % tokens_
             << " of the batch is not a whole number in [0, " << vocabulary_
             << "): make the vocabulary larger, or correct the data";
        throw usage_error(says.str());
    }

    std::size_t vocabulary_, width_, tokens_;
    std::array<trainable<E>, 1> parameters_;
    std::span<E const> ids_;  // of the last forward
    buffer<E> y_;
};
static_assert(LayerOf<embedding<float>, float>);

}  // namespace ddp::nn
