// A small language model of the GPT kind, written by hand over the layers of ddp/nn: which token comes next?
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ddp/data/batch.hpp>
#include <ddp/model/model.hpp>
#include <ddp/nn/nn.hpp>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention.hpp"

struct transformer_shape {
    std::size_t vocabulary = 2;  // kinds of tokens
    std::size_t time = 64;       // tokens of a window, which is as far back as the model sees
    std::size_t width = 128;     // numbers a token is made of
    std::size_t heads = 4;       // of attention; they share the width
    std::size_t blocks = 2;
};

// Rows are tokens: a batch of k windows has k * time rows of one feature, the token's number, and its label is the
// token that follows. So the loss, and the batch's weight, count predictions. The last window may be shorter.
//
//     h = token + position
//     h += attention(norm(h)), then h += mlp(norm(h))      in every block
//     logits = linear(norm(h))
//
// Source: Radford et al., "Language models are unsupervised multitask learners", 2019 (GPT-2), without its tied
// weights.
template <ddp::Element E = float>
class transformer {
    using matrix_view = ddp::nn::matrix_view<E>;

public:
    using element = E;
    static constexpr bool ready_releases = true;  // a layer's values are not read again once its gradients are final

    explicit transformer(transformer_shape const& s)
        : time_(s.time),
          tokens_(s.vocabulary, s.width),
          positions_(s.time, s.width),
          norm_(s.width),
          head_(s.width, s.vocabulary) {
        for (std::size_t b = 0; b < s.blocks; ++b) blocks_.emplace_back(s);
        initialize(0);
    }

    // The same values on every rank and platform. Embeddings begin smaller than by themselves, or what the first blocks
    // add would hardly count beside them.
    transformer& initialize(std::uint64_t seed) {
        parameter_count_ = 0;
        each_layer([&](std::string const&, auto& layer) {
            layer.initialize(seed, parameter_count_);
            parameter_count_ += layer.parameters().size();
        });
        for (auto* const table : {&tokens_, &positions_})
            for (E& value : table->parameters()[0].value()) value *= E(0.1);
        return *this;
    }

    [[nodiscard]] std::vector<ddp::parameter<E>> parameters() {
        std::vector<ddp::parameter<E>> all;
        each_layer([&](std::string const& name, auto& layer) {
            for (auto& p : layer.parameters())
                all.push_back({name + "." + p.name(), p.shape(), p.value(), p.gradient()});
        });
        return all;
    }
    void bind(ddp::storage<E> memory) {
        std::size_t i = 0;
        each_layer([&](std::string const&, auto& layer) {
            for (auto& p : layer.parameters()) {
                p.seat(memory.values.at(i), memory.gradients.at(i));
                ++i;
            }
        });
        owner_ = std::move(memory.owner);
    }

    // (tokens, vocabulary): row t scores what may follow ids[t], by it and the ids before it in its window.
    ddp::nn::const_matrix_view<E> logits(std::span<E const> ids) {
        std::size_t const rows = ids.size();
        std::span<E> const place = places_.take(rows);
        for (std::size_t r = 0; r < rows; ++r) place[r] = static_cast<E>(r % time_);
        matrix_view h = tokens_.forward(ddp::nn::as_matrix(ids, rows, 1), {});
        h += positions_.forward(ddp::nn::as_matrix(std::span<E const>(place), rows, 1), {});
        for (block& b : blocks_) {
            h += through(h, b.norm1, b.qkv, b.attend, b.project);
            h += through(h, b.norm2, b.widen, b.bend, b.narrow);
        }
        return ddp::nn::read_only(through(h, norm_, head_));
    }

    // The mean loss over the batch; 0 for a batch of no rows.
    double forward(ddp::classification_batch<E> const& batch) {
        rows_ = batch.rows;
        auto const z = logits(batch.inputs);
        return rows_ == 0 ? 0 : loss_.forward(z, batch) / static_cast<double>(rows_);
    }

    template <class Ready>
    void backward(ddp::pass<E> how, Ready const& ready) {
        way_back<Ready> back{{.accumulate = how.accumulate}, ready, parameter_count_};
        matrix_view dh = back(rows_ == 0 ? matrix_view(nullptr, 0, static_cast<Eigen::Index>(head_.outputs()))
                                         : loss_.backward(how.scale / static_cast<E>(rows_)),
                              head_, norm_);
        for (std::size_t i = blocks_.size(); i-- > 0;) {
            block& b = blocks_[i];
            dh += back(copy_of(dh), b.narrow, b.bend, b.widen, b.norm2);
            dh += back(copy_of(dh), b.project, b.attend, b.qkv, b.norm1);
        }
        back.mode.input_gradient = false;
        back(copy_of(dh), positions_);
        back(dh, tokens_);
    }

    [[nodiscard]] ddp::nn::evaluation evaluate(ddp::classification_batch<E> const& batch) {
        if (batch.rows == 0) return {};
        auto const z = logits(batch.inputs);
        return {.loss_sum = loss_.forward(z, batch), .correct = loss_.correct(z, batch), .weight = batch.rows};
    }

private:
    struct block {
        explicit block(transformer_shape const& s)
            : norm1(s.width),
              qkv(s.width, 3 * s.width),
              attend(s.width, s.heads, s.time),
              project(s.width, s.width),
              norm2(s.width),
              widen(s.width, 4 * s.width),
              narrow(4 * s.width, s.width) {}

        ddp::nn::layer_norm<E> norm1;
        ddp::nn::linear<E> qkv;
        causal_attention<E> attend;
        ddp::nn::linear<E> project;
        ddp::nn::layer_norm<E> norm2;
        ddp::nn::linear<E> widen;
        ddp::nn::gelu<E> bend;
        ddp::nn::linear<E> narrow;
    };

    // Every layer that has parameters, in the order of forward, with its name.
    template <class F>
    void each_layer(F const& f) {
        f("tokens", tokens_);
        f("positions", positions_);
        for (std::size_t i = 0; i < blocks_.size(); ++i) {
            block& b = blocks_[i];
            std::string const name = "blocks." + std::to_string(i) + ".";
            f(name + "norm1", b.norm1);
            f(name + "qkv", b.qkv);
            f(name + "project", b.project);
            f(name + "norm2", b.norm2);
            f(name + "widen", b.widen);
            f(name + "narrow", b.narrow);
        }
        f("norm", norm_);
        f("head", head_);
    }

    template <class Layer, class... Then>
    static matrix_view through(matrix_view x, Layer& layer, Then&... then) {
        matrix_view const y = layer.forward(ddp::nn::read_only(x), {});
        if constexpr (sizeof...(then) == 0)
            return y;
        else
            return through(y, then...);
    }

    // Back through layers, the last one first. Their parameters are reported in falling order.
    template <class Ready>
    struct way_back {
        ddp::nn::backward_mode mode;
        Ready const& ready;
        std::size_t end;  // one past the parameters that are still to come

        template <class Layer, class... Before>
        matrix_view operator()(matrix_view d, Layer& layer, Before&... before) {
            matrix_view const dx = layer.backward(d, mode);
            if constexpr (requires { layer.parameters(); })
                for (std::size_t left = layer.parameters().size(); left > 0; --left) ready(--end);
            if constexpr (sizeof...(before) == 0)
                return dx;
            else
                return (*this)(dx, before...);
        }
    };
    // What a layer may overwrite, while the sum goes on past it.
    matrix_view copy_of(matrix_view const& d) {
        matrix_view copy = copy_.take(ddp::nn::rows_of(d), ddp::nn::columns_of(d));
        std::copy_n(d.data(), d.size(), copy.data());
        return copy;
    }

    std::shared_ptr<void> owner_;  // of the memory that is bound
    std::size_t time_;
    ddp::nn::embedding<E> tokens_, positions_;
    std::vector<block> blocks_;
    ddp::nn::layer_norm<E> norm_;
    ddp::nn::linear<E> head_;
    ddp::nn::softmax_cross_entropy<E> loss_;
    std::size_t parameter_count_ = 0;
    std::size_t rows_ = 0;  // of the last forward
    ddp::nn::buffer<E> places_, copy_;
};
static_assert(ddp::ModelFor<transformer<float>, ddp::classification_batch<float>>);
static_assert(ddp::BindableModel<transformer<float>>);
