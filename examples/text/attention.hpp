// Causal self-attention as a layer: every token looks at itself and the tokens before it in its window.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <ddp/core/contract.hpp>
#include <ddp/nn/layer.hpp>
#include <string>
#include <type_traits>

// (tokens, 3 * width) -> (tokens, width). Rows are tokens, in windows of `time` that know nothing of each other; the
// last window may be shorter. A row holds query, key and value side by side, each of them `heads` vectors of width /
// heads, so a linear layer makes them in one product. For each head:
//
//     weights = softmax over the past of (query . key / sqrt(width / heads)),   result = weights * values
//
// Cost: 4 time * width flops a token forward, twice that backward, in products of (time, width / heads) matrices that
// Eigen reads where they lie. Memory: the weights, heads * time numbers a token.
// Source: Vaswani et al., "Attention is all you need", NeurIPS 2017.
template <ddp::Element E = float>
class causal_attention {
public:
    using element = E;
    static constexpr bool output_is_free = true;

    causal_attention(std::size_t width, std::size_t heads, std::size_t time)
        : width_(width), heads_(heads), time_(time) {
        DDP_EXPECTS(heads > 0 && width > 0 && width % heads == 0,
                    "causal_attention: a width of " + std::to_string(width) + " does not divide among " +
                        std::to_string(heads) + " heads; make it a multiple of them");
        DDP_EXPECTS(time > 0, "causal_attention: windows of no tokens have nothing to attend to");
    }

    [[nodiscard]] std::size_t inputs() const noexcept { return 3 * width_; }
    [[nodiscard]] std::size_t outputs() const noexcept { return width_; }

    ddp::nn::matrix_view<E> forward(ddp::nn::const_matrix_view<E> x, ddp::nn::forward_mode) {
        DDP_EXPECTS(ddp::nn::columns_of(x) == inputs(), "causal_attention: rows hold query, key and value, " +
                                                            std::to_string(inputs()) + " numbers, not " +
                                                            std::to_string(ddp::nn::columns_of(x)));
        x_ = x.data();
        rows_ = ddp::nn::rows_of(x);
        auto y = y_.take(rows_, width_);
        E const scale = E{1} / std::sqrt(static_cast<E>(width_ / heads_));
        each_head([&](head const& at) {
            auto p = weights(at);
            p.noalias() = scale * part(x_, at, 0) * part(x_, at, 1).transpose();
            for (Eigen::Index t = 0; t < p.rows(); ++t) {
                auto past = p.row(t).head(t + 1);
                past = (past.array() - past.maxCoeff()).exp();
                past /= past.sum();
                p.row(t).tail(p.cols() - t - 1).setZero();
            }
            result(y.data(), at).noalias() = p * part(x_, at, 2);
        });
        return y;
    }

    ddp::nn::matrix_view<E> backward(ddp::nn::matrix_view<E> dy, ddp::nn::backward_mode) {
        auto dx = dx_.take(rows_, inputs());
        E const scale = E{1} / std::sqrt(static_cast<E>(width_ / heads_));
        each_head([&](head const& at) {
            auto const p = weights(at);
            auto const d = result(dy.data(), at);
            auto slope = slope_.take(at.tokens, at.tokens);  // by the weights, then by what softmax was given
            slope.noalias() = d * part(x_, at, 2).transpose();
            for (Eigen::Index t = 0; t < p.rows(); ++t)
                slope.row(t).array() = p.row(t).array() * (slope.row(t).array() - slope.row(t).dot(p.row(t)));
            part(dx.data(), at, 0).noalias() = scale * slope * part(x_, at, 1);
            part(dx.data(), at, 1).noalias() = scale * slope.transpose() * part(x_, at, 0);
            part(dx.data(), at, 2).noalias() = p.transpose() * d;
        });
        return dx;
    }

private:
    template <class M>
    using strided = Eigen::Map<M, Eigen::Unaligned, Eigen::OuterStride<>>;

    struct head {
        std::size_t row, tokens;  // of the window
        std::size_t number;       // of the head
    };
    template <class F>
    void each_head(F const& f) const {
        for (std::size_t row = 0; row < rows_; row += time_)
            for (std::size_t number = 0; number < heads_; ++number) f(head{row, std::min(time_, rows_ - row), number});
    }

    // (tokens, width / heads) of one head: of the queries (which = 0), keys (1) or values (2); and of the results.
    template <class T>
    auto part(T* base, head const& at, std::size_t which) const {
        return piece(base + at.row * inputs() + which * width_, at, inputs());
    }
    template <class T>
    auto result(T* base, head const& at) const {
        return piece(base + at.row * width_, at, width_);
    }
    template <class T>
    auto piece(T* window, head const& at, std::size_t stride) const {
        using M = std::conditional_t<std::is_const_v<T>, ddp::nn::matrix<E> const, ddp::nn::matrix<E>>;
        std::size_t const width = width_ / heads_;
        return strided<M>(window + at.number * width, static_cast<Eigen::Index>(at.tokens),
                          static_cast<Eigen::Index>(width), Eigen::OuterStride<>(static_cast<Eigen::Index>(stride)));
    }
    // (tokens, tokens) of one head, of the last forward; 0 above the diagonal.
    ddp::nn::matrix_view<E> weights(head const& at) {
        auto const all = weights_.take(rows_ * heads_ * time_);
        return ddp::nn::as_matrix(all.subspan((at.row * heads_ + at.number * at.tokens) * time_, at.tokens * at.tokens),
                                  at.tokens, at.tokens);
    }

    std::size_t width_, heads_, time_;
    E const* x_ = nullptr;  // (rows_, 3 * width), of the last forward
    std::size_t rows_ = 0;
    ddp::nn::buffer<E> weights_, slope_, y_, dx_;
};
static_assert(ddp::nn::LayerOf<causal_attention<float>, float>);
