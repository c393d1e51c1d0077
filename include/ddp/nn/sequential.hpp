/// \file
/// sequential: layers one after the other, and a loss, as a Model.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/rank_sums.hpp>
#include <ddp/nn/layer.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/loss.hpp>

namespace ddp::nn {

namespace detail {

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
        if constexpr (requires { layer.parameters(); })
            return layer.parameters();
        else
            return {};
    }
    void initialize(std::uint64_t seed, std::uint64_t first) override {
        if constexpr (requires { layer.initialize(seed, first); }) layer.initialize(seed, first);
    }
    [[nodiscard]] std::size_t inputs() const override {
        if constexpr (requires { layer.inputs(); })
            return layer.inputs();
        else
            return 0;
    }
    [[nodiscard]] std::size_t outputs() const override {
        if constexpr (requires { layer.outputs(); })
            return layer.outputs();
        else
            return 0;
    }
    [[nodiscard]] bool output_is_free() const override {
        if constexpr (requires { L::output_is_free; })
            return L::output_is_free;
        else
            return false;
    }
    [[nodiscard]] std::vector<model_buffer> buffers() override {
        if constexpr (requires { layer.buffers(); })
            return layer.buffers();
        else
            return {};
    }
    [[nodiscard]] bool joins_ranks() const override {
        if constexpr (requires { layer.joins_ranks(); })
            return layer.joins_ranks();
        else
            return false;
    }
    [[nodiscard]] std::uint64_t hash() const override {
        if constexpr (requires { layer.hash(); })
            return layer.hash();
        else
            return 0;
    }

    L layer;
};

template <class... Parts>
using last_of = std::tuple_element_t<sizeof...(Parts) - 1, std::tuple<Parts...>>;

}  // namespace detail

/// What sequential reads of a batch; its loss reads the rest (labels, targets). Where layers draw (dropout), it also needs
/// `samples`: std::uint32_t numbers in the data set, one a row.
template <class B, class E>
concept BatchOf = requires(B const& batch) {
    { batch.inputs } -> std::convertible_to<std::span<E const>>;  // (rows, features), row-major
    { batch.rows } -> std::convertible_to<std::size_t>;
    { batch.features } -> std::convertible_to<std::size_t>;
};

/// A feed-forward network:
///
///     ddp::nn::sequential net{ddp::nn::linear(784, 128), ddp::nn::relu(), ddp::nn::linear(128, 10),
///                             ddp::nn::softmax_cross_entropy()};
///
/// Parameters are named by the layer's place, "0.weight", "0.bias", "2.weight", …, as PyTorch's Sequential does.
/// The batch's memory must stay as it is until backward has returned. Memory for results grows to the largest
/// batch seen; after that nothing is allocated but Eigen's packing buffers. Gradients of a layer are final, and
/// reported, once those of its input exist: its values may change from then on (ready_releases).
///
/// One thread at a time. The same batch gives the same bits, bound or not, at any alignment of the inputs. The same
/// samples in batches of other sizes give the same to rounding, as do processors with other caches: Eigen blocks its
/// sums by both.
template <Element E = float, class Loss = softmax_cross_entropy<E>>
class sequential {
public:
    using element = E;
    static constexpr bool ready_releases = true;

    /// Layers, then the loss. Values are initialised for seed 0. Throws usage_error if widths do not fit.
    template <class... Parts>
        requires(sizeof...(Parts) > 1 && std::same_as<detail::last_of<Parts...>, Loss>)
    explicit sequential(Parts... parts) : loss_(std::move(std::get<sizeof...(Parts) - 1>(std::tie(parts...)))) {
        auto const all = std::tie(parts...);
        [&]<std::size_t... I>(std::index_sequence<I...>) {
            (append(std::move(std::get<I>(all))), ...);
        }(std::make_index_sequence<sizeof...(Parts) - 1>());
        initialize(0);
    }

    /// New values, drawn for (seed, parameter, element): the same on every rank and platform. Call it before training,
    /// with the same seed everywhere: what is drawn later, by dropout, depends on it too.
    sequential& initialize(std::uint64_t seed) {
        mode_.seed = seed;
        std::uint64_t first = 0;
        for (auto const& layer : layers_) {
            layer->initialize(seed, first);
            first += layer->parameters().size();
        }
        return *this;
    }

    [[nodiscard]] std::vector<parameter<E>> parameters() {
        std::vector<parameter<E>> all;
        for (std::size_t l = 0; l < layers_.size(); ++l)
            for (trainable<E>& p : layers_[l]->parameters())
                all.push_back({std::to_string(l) + "." + p.name(), p.shape(), p.value(), p.gradient()});
        return all;
    }

    /// State that is not trained, by the layer's place as parameters are: "1.running_mean".
    [[nodiscard]] std::vector<model_buffer> buffers() {
        std::vector<model_buffer> all;
        for (std::size_t l = 0; l < layers_.size(); ++l)
            for (model_buffer& b : layers_[l]->buffers()) {
                b.name = std::to_string(l) + "." + b.name;
                all.push_back(std::move(b));
            }
        return all;
    }
    /// Where layers need sums over all ranks, this is where they get them. The trainer calls it.
    void join_ranks(std::shared_ptr<rank_sums> ranks) noexcept { ranks_ = std::move(ranks); }
    /// Whether all ranks have to take part in each pass of training, with samples or without.
    [[nodiscard]] bool needs_all_ranks() const noexcept {
        return ranks_ != nullptr && mode_.training &&
               std::any_of(layers_.begin(), layers_.end(), [](auto const& layer) { return layer->joins_ranks(); });
    }

    /// Works in `memory` from now on; what stands there are the values. Throws usage_error, and changes nothing, unless
    /// it has a span of the right length for each parameter.
    void bind(storage<E> memory) {
        std::vector<parameter<E>> const all = parameters();
        DDP_EXPECTS(memory.values.size() == all.size() && memory.gradients.size() == all.size(),
                    "bind: the model has " + std::to_string(all.size()) + " parameters, the storage " +
                        std::to_string(memory.values.size()) + " values and " +
                        std::to_string(memory.gradients.size()) + " gradients; lay it out by parameters()");
        for (std::size_t i = 0; i < all.size(); ++i)
            DDP_EXPECTS(
                memory.values[i].size() == all[i].value.size() && memory.gradients[i].size() == all[i].value.size(),
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

    /// Whether forward tells its layers that they are being trained (the default) or used.
    void training(bool on) noexcept { mode_.training = on; }
    [[nodiscard]] bool training() const noexcept { return mode_.training; }

    /// From now on backward computes and reports large gradients in slices of about so many bytes, where layers can (linear):
    /// their reduction then starts while the rest of the same gradient is computed. The same bits for any. 0, the default:
    /// each gradient as a whole. For models with large weights over a network; slices smaller than a bucket gain nothing.
    sequential& report_slices(std::size_t bytes) noexcept {
        slice_bytes_ = bytes;
        return *this;
    }

    /// What ranks must have alike besides parameters: the seed and the settings of layers that draw.
    [[nodiscard]] std::uint64_t hash() const {
        digest all;
        bool draws = false;
        for (std::size_t l = 0; l < layers_.size(); ++l)
            if (std::uint64_t const one = layers_[l]->hash(); one != 0) {
                all.add(std::uint64_t{l}).add(one);
                draws = true;
            }
        return draws ? all.add(mode_.seed).value() : 0;
    }

    /// Step `number` comes next; from 0 until somebody says so. What layers draw depends on it. The trainer calls it.
    void begin_step(std::uint64_t number) noexcept { mode_.step = number; }

    /// The mean loss over the batch; 0 for a batch of no rows.
    template <BatchOf<E> Batch>
        requires LossFor<Loss, Batch>
    double forward(Batch const& batch) {
        if (batch.rows == 0) {
            forward_absent();
            return 0;
        }
        ran_ = false;
        rows_ = batch.rows;
        double const loss = loss_.forward(outputs(batch, mode_of_pass()), batch) / static_cast<double>(rows_);
        ran_ = true;
        return loss;
    }
    /// The same without samples, and without a batch.
    void forward_absent() {
        ran_ = false;
        rows_ = 0;
        if (needs_all_ranks())
            for (std::size_t l = 0; l < layers_.size(); ++l)
                if (layers_[l]->joins_ranks()) {
                    forward_mode mode = mode_of_pass();
                    mode.layer = l;
                    static_cast<void>(
                        layers_[l]->forward(as_matrix(std::span<E const>(), 0, layers_[l]->inputs()), mode));
                }
        ran_ = true;
    }

    /// Gradients of the last forward, last layer first. Of a batch of no rows they are +0. May be repeated.
    template <std::invocable<std::size_t> Ready>
    void backward(pass<E> how, Ready const& ready) {
        DDP_EXPECTS(ran_, "backward: there is no forward pass to go back through; call forward(batch) first");
        bool const in_slices = slice_bytes_ != 0 && std::invocable<Ready const&, std::size_t, std::size_t, std::size_t>;
        std::optional<matrix_view<E>> d;  // assigning a view would copy what it shows
        if (rows_ > 0) d.emplace(loss_.backward(how.scale / static_cast<E>(rows_)));
        std::size_t end = parameter_count_;  // one past this layer's parameters; 0: no layer below has any
        for (std::size_t l = layers_.size(); l-- > 0 && end > 0;) {
            std::span<trainable<E>> const own = layers_[l]->parameters();
            std::size_t const first = end - own.size();
            auto const report = [&](std::size_t p, std::size_t from, std::size_t count) {
                if constexpr (std::invocable<Ready const&, std::size_t, std::size_t, std::size_t>)
                    ready(first + p, from, count);
            };
            slice_reports slices(slice_bytes_, report);
            if (rows_ > 0)
                d.emplace(layers_[l]->backward(*d, {.input_gradient = first > 0,
                                                    .accumulate = how.accumulate,
                                                    .ranks = ranks_.get(),
                                                    .slices = in_slices ? &slices : nullptr}));
            else if (needs_all_ranks() && layers_[l]->joins_ranks())
                static_cast<void>(layers_[l]->backward(
                    as_matrix(std::span<E>(), 0, layers_[l]->outputs()),
                    {.input_gradient = first > 0, .accumulate = how.accumulate, .ranks = ranks_.get()}));
            else if (!how.accumulate)
                for (trainable<E>& p : own) std::fill(p.gradient().begin(), p.gradient().end(), E{0});
            if (slices.used()) end = first;
            while (end > first) ready(--end);
        }
    }

    /// Loss and right answers of the batch, in evaluation mode. Ends what backward could go back through.
    template <BatchOf<E> Batch>
        requires LossFor<Loss, Batch>
    [[nodiscard]] evaluation evaluate(Batch const& batch) {
        ran_ = false;
        if (batch.rows == 0) return {};
        const_matrix_view<E> const z = outputs(batch, {.training = false});
        evaluation sums{.loss_sum = loss_.forward(z, batch), .correct = loss_.correct(z, batch), .weight = batch.rows};
        if constexpr (requires { loss_.correct_in_top(z, batch); })
            sums.correct_in_top = loss_.correct_in_top(z, batch);
        return sums;
    }

    /// What the last layer gives for the batch's inputs, in evaluation mode: (rows, outputs), row-major, one row a sample.
    /// With softmax_cross_entropy these are logits: the greatest of a row is the predicted class. Labels and targets are
    /// not read, and may be empty. The view stays valid until the model's next call. Allocates nothing once a batch of
    /// this size was seen. Ends what backward could go back through. Throws usage_error for inputs of another shape.
    template <BatchOf<E> Batch>
    [[nodiscard]] const_matrix_view<E> predict(Batch const& batch) {
        ran_ = false;
        if (batch.rows == 0) return as_matrix(std::span<E const>(), 0, width_);
        return outputs(batch, {.training = false});
    }

private:
    template <LayerOf<E> L>
    void append(L layer) {
        layers_.push_back(std::make_unique<detail::holder<E, L>>(std::move(layer)));
        detail::any_layer<E>& added = *layers_.back();
        DDP_EXPECTS(width_ == 0 || added.inputs() == 0 || added.inputs() == width_,
                    "sequential: layer " + std::to_string(layers_.size() - 1) + " takes " +
                        std::to_string(added.inputs()) + " features, the layers before it give " +
                        std::to_string(width_) + "; make them agree");
        if (width_ == 0) inputs_ = added.inputs();
        width_ = added.outputs() != 0 ? added.outputs() : std::max(width_, added.inputs());
        parameter_count_ += added.parameters().size();
    }

    [[nodiscard]] forward_mode mode_of_pass() const noexcept {
        forward_mode mode = mode_;
        mode.ranks = ranks_.get();
        return mode;
    }
    template <class Batch>
    const_matrix_view<E> outputs(Batch const& batch, forward_mode mode) {
        std::span<E const> const inputs(batch.inputs);
        DDP_EXPECTS(inputs_ == 0 || batch.features == inputs_,
                    "the batch has " + std::to_string(batch.features) + " features a sample, the model takes " +
                        std::to_string(inputs_) + "; give its first layer as many inputs as the data has features");
        DDP_EXPECTS(inputs.size() == batch.rows * batch.features,
                    "the batch says " + std::to_string(batch.rows) + " rows of " + std::to_string(batch.features) +
                        " features, but holds " + std::to_string(inputs.size()) + " numbers; it must hold the product");
        if constexpr (requires { std::span<std::uint32_t const>(batch.samples); }) mode.samples = batch.samples;
        DDP_EXPECTS(mode.samples.empty() || mode.samples.size() == batch.rows,
                    "the batch names " + std::to_string(mode.samples.size()) + " samples for " +
                        std::to_string(batch.rows) + " rows; name each, or none");
        mode.layer = 0;
        std::optional<matrix_view<E>> y;
        y.emplace(layers_.front()->forward(as_matrix(inputs, batch.rows, batch.features), mode));
        for (std::size_t l = mode.layer = 1; l < layers_.size(); mode.layer = ++l)
            y.emplace(layers_[l - 1]->output_is_free() ? layers_[l]->forward_in_place(*y, mode)
                                                       : layers_[l]->forward(read_only(*y), mode));
        return read_only(*y);
    }

    std::shared_ptr<void> owner_;  // of the memory that is bound
    std::vector<std::unique_ptr<detail::any_layer<E>>> layers_;
    Loss loss_;
    std::size_t inputs_ = 0;  // features of a sample, and of what the last layer gives; 0: any
    std::size_t width_ = 0;
    std::size_t parameter_count_ = 0;
    std::size_t rows_ = 0;  // of the last forward
    bool ran_ = false;      // there was one
    std::size_t slice_bytes_ = 0;
    std::shared_ptr<rank_sums> ranks_;
    forward_mode mode_;
};

template <class... Parts>
    requires(sizeof...(Parts) > 1)
sequential(Parts...) -> sequential<typename detail::last_of<Parts...>::element, detail::last_of<Parts...>>;

static_assert(ModelFor<sequential<float>, classification_batch<float>> && BindableModel<sequential<float>>);
static_assert(ModelFor<sequential<double, mean_squared_error<double>>, regression_batch<double>>);

}  // namespace ddp::nn
