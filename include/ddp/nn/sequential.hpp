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
#include <ddp/core/function_ref.hpp>
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

/// What sequential reads from a batch: `inputs` (rows, features), row-major. The loss reads the rest (labels, targets).
/// Layers that draw random numbers (dropout) also need `samples`: one std::uint32_t for each row, its number in the data
/// set.
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
/// Parameters are named after the position of their layer, "0.weight", "0.bias", "2.weight", …, as in PyTorch's
/// Sequential. The memory of the batch must not change until backward has returned. Memory for results grows to the
/// largest batch so far; after that, only Eigen's packing buffers are allocated. The gradients of a layer are reported as
/// final once the gradient of its input has been computed: its values may change from then on (ready_releases).
///
/// One thread at a time. It can be moved, not copied. The same batch gives the same bits, whether the model is bound or
/// not, and at any alignment of the inputs. The same samples in batches of other sizes give the same results up to
/// rounding, as do processors with other cache sizes, because Eigen blocks its sums according to both.
template <Element E = float, class Loss = softmax_cross_entropy<E>>
class sequential {
public:
    using element = E;
    static constexpr bool ready_releases = true;

    /// The layers in order, then the loss. Values are initialised with seed 0. Throws usage_error if the output width of
    /// a layer is not the input width of the next.
    template <class... Parts>
        requires(sizeof...(Parts) > 1 && std::same_as<detail::last_of<Parts...>, Loss>)
    explicit sequential(Parts... parts) : loss_(std::move(std::get<sizeof...(Parts) - 1>(std::tie(parts...)))) {
        static_assert(
            (std::same_as<typename Parts::element, E> && ...),
            "sequential: all layers and the loss have to be of one element type, all float or all double; write "
            "linear<double>(…), relu<double>(), … for double");
        auto const all = std::tie(parts...);
        [&]<std::size_t... I>(std::index_sequence<I...>) {
            (layers_.append(detail::hold<E>(std::move(std::get<I>(all)))), ...);
        }(std::make_index_sequence<sizeof...(Parts) - 1>());
        initialize(0);
    }

    /// Draws new values as a function of (seed, parameter, element): the same on every rank and platform. Call it before
    /// training, with the same seed on every rank: later random numbers, such as those of dropout, also depend on this
    /// seed.
    sequential& initialize(std::uint64_t seed) {
        layers_.initialize(seed);
        return *this;
    }

    [[nodiscard]] std::vector<parameter<E>> parameters() { return layers_.parameters(); }

    /// State that is not trained. Like parameters, buffers are named after the position of their layer: "1.running_mean".
    [[nodiscard]] std::vector<model_buffer> buffers() { return layers_.buffers(); }
    /// Gives layers that need sums over all ranks the object that computes them. Called by the trainer.
    void join_ranks(std::shared_ptr<rank_sums> ranks) noexcept { layers_.join_ranks(std::move(ranks)); }
    /// Whether all ranks must take part in each pass in training, with samples or without: from join_ranks() on, if a layer
    /// needs sums over all ranks.
    [[nodiscard]] bool needs_all_ranks() const noexcept { return layers_.needs_all_ranks(); }
    /// Whether a layer needs such sums in training, whatever the mode is now.
    [[nodiscard]] bool joins_ranks() const noexcept { return layers_.joins_ranks(); }

    /// From now on works in `memory`, which holds the values already. Throws usage_error, without changing anything,
    /// unless `memory` has a span of the right length for each parameter.
    void bind(storage<E> memory) { layers_.bind(std::move(memory)); }

    /// Chooses training mode (true, the default) or evaluation mode for the passes that follow.
    void training(bool on) noexcept { layers_.mode.training = on; }
    /// Whether the model is in training mode.
    [[nodiscard]] bool training() const noexcept { return layers_.mode.training; }

    /// From now on, backward computes and reports large gradients in slices of about `bytes` bytes, in layers that
    /// support this (linear): the reduction of a slice then starts while the rest of the same gradient is computed.
    /// Does not change any bits. 0, the default: each gradient as a whole. For models with large weights whose ranks
    /// are connected by a network; slices smaller than a bucket bring no advantage.
    sequential& report_slices(std::size_t bytes) noexcept {
        slice_bytes_ = bytes;
        return *this;
    }

    /// A digest of what must be the same on all ranks besides parameters: the hash() of every layer that has one, and the seed
    /// if one of these draws random numbers.
    [[nodiscard]] std::uint64_t hash() const { return layers_.hash(); }
    /// The same in words, for the error of ranks that differ: "layer 2: dropout(0.5); seed 7".
    [[nodiscard]] std::string hash_words() const { return layers_.hash_words(); }

    /// Sets the number of the next step, on which random numbers in layers depend; 0 before the first call. Called by the
    /// trainer.
    void begin_step(std::uint64_t number) noexcept { layers_.mode.step = number; }

    /// Returns the mean loss over the batch; 0 for a batch without rows.
    template <BatchOf<E> Batch>
        requires LossFor<Loss, Batch>
    double forward(Batch const& batch) {
        return forward(batch, [](std::size_t) {});
    }
    /// The same, but calls needed(i) before parameter i is read, in the order of the layers.
    template <BatchOf<E> Batch, std::invocable<std::size_t> Needed>
        requires LossFor<Loss, Batch>
    double forward(Batch const& batch, Needed const& needed) {
        if (batch.rows == 0) {
            forward_absent();
            return 0;
        }
        ran_ = false;
        rows_ = batch.rows;
        double const loss =
            loss_.forward(outputs(batch, layers_.mode_of_pass(), needed), batch) / static_cast<double>(rows_);
        ran_ = true;
        return loss;
    }
    /// The forward pass of a rank that has no batch at all. It matters only to layers that need sums over all ranks.
    void forward_absent() {
        ran_ = false;
        rows_ = 0;
        layers_.forward_absent();
        ran_ = true;
    }

    /// Computes the gradients for the last forward, from the last layer to the first, and reports each with ready(i).
    /// They are +0 for a batch without rows. May be repeated. Throws usage_error if there was no forward.
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

    /// Computes the loss and the number of correct answers in evaluation mode. A backward is possible only after another
    /// forward.
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

    /// Returns the output of the last layer for the inputs of the batch, in evaluation mode: (rows, outputs), row-major.
    /// With softmax_cross_entropy these are logits: the largest of a row is the predicted class. Labels and targets are
    /// not read and may be empty. The view is valid until the next call of the model. Allocates nothing once it has seen
    /// a batch of this size. A backward is possible only after another forward. Throws usage_error for inputs of another
    /// shape.
    template <BatchOf<E> Batch>
    [[nodiscard]] const_matrix_view<E> predict(Batch const& batch) {
        ran_ = false;
        if (batch.rows == 0) return as_matrix(std::span<E const>(), 0, layers_.width());
        return outputs(batch, {.training = false});
    }

private:
    template <class Batch>
    const_matrix_view<E> outputs(
        Batch const& batch, forward_mode mode, function_ref<void(std::size_t)> needed = [](std::size_t) {}) {
        if constexpr (requires { std::span<std::uint32_t const>(batch.samples); }) mode.samples = batch.samples;
        return layers_.forward(batch.inputs, batch.rows, batch.features, mode, needed);
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
