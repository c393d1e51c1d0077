/// \file
/// layer_chain: what sequential does with its layers, whatever they are and whatever the loss is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/text.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/rank_sums.hpp>
#include <ddp/nn/layer.hpp>

namespace ddp::nn::detail {

/// A layer of any type: what sequential is composed of, so that its own type, and everything instantiated over it, does
/// not grow with the network. A virtual call a layer costs nanoseconds, a layer microseconds and more.
template <Element E>
struct any_layer {
    virtual ~any_layer() = default;
    virtual matrix_view<E> forward(const_matrix_view<E> x, forward_mode mode) = 0;
    virtual matrix_view<E> forward_in_place(matrix_view<E> y, forward_mode mode) = 0;
    virtual matrix_view<E> backward(matrix_view<E> dy, backward_mode mode) = 0;
    virtual std::span<trainable<E>> parameters() = 0;
    virtual void initialize(std::uint64_t seed, std::uint64_t first) = 0;
    [[nodiscard]] virtual std::size_t inputs() const = 0;   // 0: any
    [[nodiscard]] virtual std::size_t outputs() const = 0;  // 0: as many as inputs
    [[nodiscard]] virtual bool output_is_free() const = 0;
    [[nodiscard]] virtual std::vector<model_buffer> buffers() = 0;
    [[nodiscard]] virtual bool joins_ranks() const = 0;
    [[nodiscard]] virtual std::uint64_t hash() const = 0;  // 0: nothing that ranks have to compare
    [[nodiscard]] virtual std::string hash_words() const = 0;
    [[nodiscard]] virtual bool draws() const = 0;  // the model's seed matters beyond the first values
};

template <Element E, LayerOf<E> L>
struct holder final : any_layer<E> {
    explicit holder(L l) : layer(std::move(l)) {}

    matrix_view<E> forward(const_matrix_view<E> x, forward_mode mode) override { return layer.forward(x, mode); }
    matrix_view<E> forward_in_place(matrix_view<E> y, forward_mode mode) override {
        if constexpr (requires { layer.forward_in_place(y, mode); })
            return layer.forward_in_place(y, mode);
        else
            return layer.forward(read_only(y), mode);
    }
    matrix_view<E> backward(matrix_view<E> dy, backward_mode mode) override {
        if constexpr (!requires { requires L::reports_slices; }) mode.slices = nullptr;  // nor do layers within it
        return layer.backward(dy, mode);
    }
    std::span<trainable<E>> parameters() override {
        if constexpr (requires { layer.parameters(); }) return layer.parameters();
        return {};
    }
    void initialize(std::uint64_t seed, std::uint64_t first) override {
        if constexpr (requires { layer.initialize(seed, first); }) layer.initialize(seed, first);
    }
    [[nodiscard]] std::size_t inputs() const override {
        if constexpr (requires { layer.inputs(); }) return layer.inputs();
        return 0;
    }
    [[nodiscard]] std::size_t outputs() const override {
        if constexpr (requires { layer.outputs(); }) return layer.outputs();
        return 0;
    }
    [[nodiscard]] bool output_is_free() const override {
        if constexpr (requires { L::output_is_free; }) return L::output_is_free;
        return false;
    }
    [[nodiscard]] std::vector<model_buffer> buffers() override {
        if constexpr (requires { layer.buffers(); }) return layer.buffers();
        return {};
    }
    [[nodiscard]] bool joins_ranks() const override {
        if constexpr (requires { layer.joins_ranks(); }) return layer.joins_ranks();
        return false;
    }
    [[nodiscard]] std::uint64_t hash() const override {
        if constexpr (requires { layer.hash(); }) return layer.hash();
        return 0;
    }
    [[nodiscard]] std::string hash_words() const override {
        if constexpr (requires { layer.hash_words(); })
            return layer.hash_words();
        else
            return "hash " + std::to_string(hash());
    }
    [[nodiscard]] bool draws() const override {
        if constexpr (requires { L::draws; })
            return L::draws;
        else
            return hash() != 0;
    }

    L layer;
};

template <class E, LayerOf<E> L>
[[nodiscard]] std::unique_ptr<any_layer<E>> hold(L layer) {
    return std::make_unique<holder<E, L>>(std::move(layer));
}

/// Layers one after the other. Parameters and buffers are named by their layer's place: "0.weight".
template <Element E>
class layer_chain {
public:
    /// Throws usage_error if widths do not fit.
    void append(std::unique_ptr<any_layer<E>> layer);

    [[nodiscard]] std::size_t size() const noexcept { return layers_.size(); }
    [[nodiscard]] std::unique_ptr<any_layer<E>> const& operator[](std::size_t l) const noexcept { return layers_[l]; }
    [[nodiscard]] std::size_t parameter_count() const noexcept { return parameter_count_; }
    /// Features that the last layer gives; 0: any.
    [[nodiscard]] std::size_t width() const noexcept { return width_; }

    void initialize(std::uint64_t seed);
    [[nodiscard]] std::vector<parameter<E>> parameters();
    [[nodiscard]] std::vector<model_buffer> buffers();
    void bind(storage<E> memory);
    [[nodiscard]] std::uint64_t hash() const;
    [[nodiscard]] std::string hash_words() const;

    void join_ranks(std::shared_ptr<rank_sums> ranks) noexcept { ranks_ = std::move(ranks); }
    [[nodiscard]] rank_sums* ranks() const noexcept { return ranks_.get(); }
    [[nodiscard]] bool needs_all_ranks() const noexcept;
    /// Whether a layer adds over all ranks in training, whatever the mode is now.
    [[nodiscard]] bool joins_ranks() const noexcept;
    [[nodiscard]] forward_mode mode_of_pass() const noexcept;

    /// What the last layer gives. Throws usage_error for inputs of another shape.
    [[nodiscard]] const_matrix_view<E> forward(std::span<E const> inputs, std::size_t rows, std::size_t features,
                                               forward_mode how) {
        return forward(inputs, rows, features, how, [](std::size_t) {});
    }
    /// Calls needed(i) before value i is read.
    [[nodiscard]] const_matrix_view<E> forward(std::span<E const> inputs, std::size_t rows, std::size_t features,
                                               forward_mode how, function_ref<void(std::size_t)> needed);
    /// Without samples: only what all ranks have to take part in.
    void forward_absent();

    forward_mode mode;  ///< of the next pass in training

private:
    std::shared_ptr<void> owner_;  // of the memory that is bound
    std::vector<std::unique_ptr<any_layer<E>>> layers_;
    std::size_t inputs_ = 0;  // features of a sample, and of what the last layer gives; 0: any
    std::size_t width_ = 0;
    std::size_t parameter_count_ = 0;
    std::shared_ptr<rank_sums> ranks_;
};

template <Element E>
void layer_chain<E>::append(std::unique_ptr<any_layer<E>> layer) {
    layers_.push_back(std::move(layer));
    any_layer<E>& added = *layers_.back();
    DDP_EXPECTS(width_ == 0 || added.inputs() == 0 || added.inputs() == width_,
                "sequential: layer " + std::to_string(layers_.size() - 1) + " takes " + std::to_string(added.inputs()) +
                    " features, the layers before it give " + std::to_string(width_) + "; make them agree");
    if (width_ == 0) inputs_ = added.inputs();
    width_ = added.outputs() != 0 ? added.outputs() : std::max(width_, added.inputs());
    parameter_count_ += added.parameters().size();
}
template <Element E>
void layer_chain<E>::initialize(std::uint64_t seed) {
    mode.seed = seed;
    std::uint64_t first = 0;
    for (auto const& layer : layers_) {
        layer->initialize(seed, first);
        first += layer->parameters().size();
    }
}
template <Element E>
std::vector<parameter<E>> layer_chain<E>::parameters() {
    std::vector<parameter<E>> all;
    for (std::size_t l = 0; l < layers_.size(); ++l)
        for (trainable<E>& p : layers_[l]->parameters())
            all.push_back({std::to_string(l) + "." + p.name(), p.shape(), p.value(), p.gradient()});
    return all;
}
template <Element E>
std::vector<model_buffer> layer_chain<E>::buffers() {
    std::vector<model_buffer> all;
    for (std::size_t l = 0; l < layers_.size(); ++l)
        for (model_buffer& b : layers_[l]->buffers()) {
            b.name = std::to_string(l) + "." + b.name;
            all.push_back(std::move(b));
        }
    return all;
}
template <Element E>
void layer_chain<E>::bind(storage<E> memory) {
    std::vector<parameter<E>> const all = parameters();
    DDP_EXPECTS(memory.values.size() == all.size() && memory.gradients.size() == all.size(),
                "bind: the model has " + std::to_string(all.size()) + " parameters, the storage " +
                    std::to_string(memory.values.size()) + " values and " + std::to_string(memory.gradients.size()) +
                    " gradients; lay it out by parameters()");
    for (std::size_t i = 0; i < all.size(); ++i)
        DDP_EXPECTS(memory.values[i].size() == all[i].value.size() && memory.gradients[i].size() == all[i].value.size(),
                    "bind: parameter " + all[i].name + " has " + std::to_string(all[i].value.size()) +
                        " elements, its storage " + std::to_string(memory.values[i].size()) + " and " +
                        std::to_string(memory.gradients[i].size()) + "; lay it out by parameters()");
    std::size_t i = 0;
    for (auto const& layer : layers_)
        for (trainable<E>& p : layer->parameters()) {
            p.seat(memory.values[i], memory.gradients[i]);
            ++i;
        }
    owner_ = std::move(memory.owner);
}
template <Element E>
std::uint64_t layer_chain<E>::hash() const {
    digest all;
    bool any = false, draws = false;
    for (std::size_t l = 0; l < layers_.size(); ++l)
        if (std::uint64_t const one = layers_[l]->hash(); one != 0) {
            all.add(std::uint64_t{l}).add(one);
            any = true;
            draws = draws || layers_[l]->draws();
        }
    if (draws) all.add(mode.seed);
    return any ? all.value() : 0;
}
template <Element E>
std::string layer_chain<E>::hash_words() const {
    std::string all;
    bool draws = false;
    for (std::size_t l = 0; l < layers_.size(); ++l)
        if (layers_[l]->hash() != 0) {
            all += ddp::detail::concat({"layer ", l, ": ", layers_[l]->hash_words(), "; "});
            draws = draws || layers_[l]->draws();
        }
    if (draws) return all + "seed " + std::to_string(mode.seed);
    return all.substr(0, all.size() - std::min<std::size_t>(all.size(), 2));
}
template <Element E>
bool layer_chain<E>::needs_all_ranks() const noexcept {
    return ranks_ != nullptr && mode.training && joins_ranks();
}
template <Element E>
bool layer_chain<E>::joins_ranks() const noexcept {
    return std::any_of(layers_.begin(), layers_.end(), [](auto const& layer) { return layer->joins_ranks(); });
}
template <Element E>
forward_mode layer_chain<E>::mode_of_pass() const noexcept {
    forward_mode one = mode;
    one.ranks = ranks_.get();
    return one;
}
template <Element E>
const_matrix_view<E> layer_chain<E>::forward(std::span<E const> inputs, std::size_t rows, std::size_t features,
                                             forward_mode how, function_ref<void(std::size_t)> needed) {
    DDP_EXPECTS(inputs_ == 0 || features == inputs_,
                "the batch has " + std::to_string(features) + " features a sample, the model takes " +
                    std::to_string(inputs_) + "; give its first layer as many inputs as the data has features");
    DDP_EXPECTS(inputs.size() == rows * features,
                "the batch says " + std::to_string(rows) + " rows of " + std::to_string(features) +
                    " features, but holds " + std::to_string(inputs.size()) + " numbers; it must hold the product");
    DDP_EXPECTS(how.samples.empty() || how.samples.size() == rows,
                "the batch names " + std::to_string(how.samples.size()) + " samples for " + std::to_string(rows) +
                    " rows; name each, or none");
    std::size_t i = 0;
    auto const await_values = [&](std::size_t l) {
        for (std::size_t const end = i + layers_[l]->parameters().size(); i < end; ++i) needed(i);
    };
    how.layer = 0;
    await_values(0);
    std::optional<matrix_view<E>> y;  // assigning a view would copy what it shows
    y.emplace(layers_.front()->forward(as_matrix(inputs, rows, features), how));
    for (std::size_t l = how.layer = 1; l < layers_.size(); how.layer = ++l) {
        await_values(l);
        y.emplace(layers_[l - 1]->output_is_free() ? layers_[l]->forward_in_place(*y, how)
                                                   : layers_[l]->forward(read_only(*y), how));
    }
    return read_only(*y);
}
template <Element E>
void layer_chain<E>::forward_absent() {
    if (!needs_all_ranks()) return;
    for (std::size_t l = 0; l < layers_.size(); ++l)
        if (layers_[l]->joins_ranks()) {
            forward_mode how = mode_of_pass();
            how.layer = l;
            static_cast<void>(layers_[l]->forward(as_matrix(std::span<E const>(), 0, layers_[l]->inputs()), how));
        }
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class layer_chain<float>;
DDP_INSTANTIATE class layer_chain<double>;
#endif

}  // namespace ddp::nn::detail
