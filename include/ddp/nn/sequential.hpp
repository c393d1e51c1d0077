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
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/rank_sums.hpp>
#include <ddp/nn/layer.hpp>
#include <ddp/nn/layer_chain.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/loss.hpp>

namespace ddp::nn {

namespace detail {

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
            (layers_.append(detail::hold<E>(std::move(std::get<I>(all)))), ...);
        }(std::make_index_sequence<sizeof...(Parts) - 1>());
        initialize(0);
    }

    /// New values, drawn for (seed, parameter, element): the same on every rank and platform. Call it before training,
    /// with the same seed everywhere: what is drawn later, by dropout, depends on it too.
    sequential& initialize(std::uint64_t seed) {
        layers_.initialize(seed);
        return *this;
    }

    [[nodiscard]] std::vector<parameter<E>> parameters() { return layers_.parameters(); }

    /// State that is not trained, by the layer's place as parameters are: "1.running_mean".
    [[nodiscard]] std::vector<model_buffer> buffers() { return layers_.buffers(); }
    /// Where layers need sums over all ranks, this is where they get them. The trainer calls it.
    void join_ranks(std::shared_ptr<rank_sums> ranks) noexcept { layers_.join_ranks(std::move(ranks)); }
    /// Whether all ranks have to take part in each pass of training, with samples or without.
    [[nodiscard]] bool needs_all_ranks() const noexcept { return layers_.needs_all_ranks(); }

    /// Works in `memory` from now on; what stands there are the values. Throws usage_error, and changes nothing, unless
    /// it has a span of the right length for each parameter.
    void bind(storage<E> memory) { layers_.bind(std::move(memory)); }

    /// Whether forward tells its layers that they are being trained (the default) or used.
    void training(bool on) noexcept { layers_.mode.training = on; }
    [[nodiscard]] bool training() const noexcept { return layers_.mode.training; }

    /// From now on backward computes and reports large gradients in slices of about so many bytes, where layers can (linear):
    /// their reduction then starts while the rest of the same gradient is computed. The same bits for any. 0, the default:
    /// each gradient as a whole. For models with large weights over a network; slices smaller than a bucket gain nothing.
    sequential& report_slices(std::size_t bytes) noexcept {
        slice_bytes_ = bytes;
        return *this;
    }

    /// What ranks must have alike besides parameters: the seed and the settings of layers that draw.
    [[nodiscard]] std::uint64_t hash() const { return layers_.hash(); }

    /// Step `number` comes next; from 0 until somebody says so. What layers draw depends on it. The trainer calls it.
    void begin_step(std::uint64_t number) noexcept { layers_.mode.step = number; }

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
        double const loss = loss_.forward(outputs(batch, layers_.mode_of_pass()), batch) / static_cast<double>(rows_);
        ran_ = true;
        return loss;
    }
    /// The same without samples, and without a batch.
    void forward_absent() {
        ran_ = false;
        rows_ = 0;
        layers_.forward_absent();
        ran_ = true;
    }

    /// Gradients of the last forward, last layer first. Of a batch of no rows they are +0. May be repeated.
    template <std::invocable<std::size_t> Ready>
    void backward(pass<E> how, Ready const& ready) {
        DDP_EXPECTS(ran_, "backward: there is no forward pass to go back through; call forward(batch) first");
        bool const in_slices = slice_bytes_ != 0 && std::invocable<Ready const&, std::size_t, std::size_t, std::size_t>;
        std::optional<matrix_view<E>> d;  // assigning a view would copy what it shows
        if (rows_ > 0) d.emplace(loss_.backward(how.scale / static_cast<E>(rows_)));
        std::size_t end = layers_.parameter_count();  // one past this layer's parameters; 0: no layer below has any
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
                                                    .ranks = layers_.ranks(),
                                                    .slices = in_slices ? &slices : nullptr}));
            else if (needs_all_ranks() && layers_[l]->joins_ranks())
                static_cast<void>(layers_[l]->backward(
                    as_matrix(std::span<E>(), 0, layers_[l]->outputs()),
                    {.input_gradient = first > 0, .accumulate = how.accumulate, .ranks = layers_.ranks()}));
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
        if (batch.rows == 0) return as_matrix(std::span<E const>(), 0, layers_.width());
        return outputs(batch, {.training = false});
    }

private:
    template <class Batch>
    const_matrix_view<E> outputs(Batch const& batch, forward_mode mode) {
        if constexpr (requires { std::span<std::uint32_t const>(batch.samples); }) mode.samples = batch.samples;
        return layers_.forward(batch.inputs, batch.rows, batch.features, mode);
    }

    detail::layer_chain<E> layers_;
    Loss loss_;
    std::size_t rows_ = 0;  // of the last forward
    bool ran_ = false;      // there was one
    std::size_t slice_bytes_ = 0;
};

template <class... Parts>
    requires(sizeof...(Parts) > 1)
sequential(Parts...) -> sequential<typename detail::last_of<Parts...>::element, detail::last_of<Parts...>>;

static_assert(ModelFor<sequential<float>, classification_batch<float>> && BindableModel<sequential<float>>);
static_assert(ModelFor<sequential<double, mean_squared_error<double>>, regression_batch<double>>);

}  // namespace ddp::nn
