/// \file
/// Model: what a user brings to be trained.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/element_type.hpp>

namespace ddp {

/// Types that gradients and values may have.
template <class E>
concept Element = std::same_as<E, float> || std::same_as<E, double>;

/// One distinct trainable parameter (tied ones count as one). The spans have the same length, the product of `shape`.
/// Their memory is dense and belongs to the model until it is bound; if it cannot be bound, the memory does not move.
template <Element E>
struct parameter {
    std::string name;                       ///< unique within the model
    std::vector<std::size_t> shape;         ///< row-major, unless `strides` says otherwise
    std::span<E> value;                     ///< what is trained
    std::span<E> gradient;                  ///< what backward writes
    std::vector<std::size_t> strides = {};  ///< in elements; empty: row-major. Compared between ranks like the shape
};

/// State that is not a parameter, such as running statistics or a counter: not trained, but saved with the model.
struct model_buffer {
    std::string name;                ///< unique among the model's parameters and buffers
    element_type type;               ///< of an element
    std::vector<std::size_t> shape;  ///< row-major
    std::span<std::byte> bytes;      ///< the model's memory, as large as type and shape require
};

/// How one backward pass has to write gradients.
template <Element E>
struct pass {
    E scale = 1;              ///< factor of the gradient of the mean loss; the batch's weight gives sums over samples
    bool accumulate = false;  ///< add to the gradients instead of assigning them
};

/// The library's memory for one model, in the model's parameter order. Values are filled in already.
/// Each parameter begins on a 64-byte boundary, so there are gaps; for a `contiguous` model there are none.
/// Shared: a model that was bound may outlive its trainer.
template <Element E>
struct storage {
    std::shared_ptr<void> owner;          ///< keeps the memory alive: the model holds a copy
    std::vector<std::span<E>> values;     ///< values[i] is parameter i's value from now on
    std::vector<std::span<E>> gradients;  ///< gradients[i] is where backward writes
    std::span<E> all_values = {};         ///< for a `contiguous` model: all parameters, one after the other
    std::span<E> all_gradients = {};      ///< likewise
};

/// The type that a model computes in: float or double.
template <class M>
using element_of = typename M::element;

namespace detail {
/// Stands for the callable that backward is handed.
struct ready_archetype {
    void operator()(std::size_t) const noexcept {}
    void operator()(std::size_t, std::size_t, std::size_t) const noexcept {}
};
/// Stands for the callable that forward is handed.
struct needed_archetype {
    void operator()(std::size_t) const {}
};
/// The model says what a batch weighs, or the batch has a size.
template <class M, class Batch>
concept HasWeight = requires(M& model, Batch const& batch) {
    { model.weight(batch) } -> std::convertible_to<std::uint64_t>;
} || requires(Batch const& batch) {
    { batch.size() } -> std::convertible_to<std::uint64_t>;
};
}  // namespace detail

/// A differentiable model.
///
///  parameters()           in a stable order, the same on every rank.
///  forward(batch)         the mean loss over the batch; keeps what backward needs until the next forward.
///  backward(pass, ready)  writes (or adds) d(scale * mean loss)/d(parameter i) into gradient i and calls ready(i) once it
///                         is final: at most once per pass, as soon as possible, from any thread, one call at a time,
///                         before backward returns. ready never throws.
///                         A large gradient may be reported in ranges: ready(i, first, count) says that its elements
///                         [first, first + count) are final. The first range ends at the gradient's end, each further one
///                         where the previous one began; ready(i) reports the rest. Once a parameter has been reported
///                         down to element 0, nothing is left to report.
///
/// Optional, each detected separately:
///  ready_releases         static constexpr bool: parameter i's value is not read again in a pass after ready(i), nor are
///                         its elements in a range after ready(i, first, count)
///  bind(storage)          use this memory from now on: zero copy
///  contiguous             static constexpr bool: that memory is one array, parameters as they are listed, without gaps
///  forward(batch, needed)  forward that calls needed(i) before it reads value i: the trainer may still be waiting for it. See
///                         training_options::overlap_gather. Exceptions from needed pass through
///  intact()               false if bound memory was lost; asked before each forward
///  stepped(i)             called after value i has changed, and for each value when a trainer is made. If it throws, that
///                         rank gets the exception and the others E206; the step may be complete on some ranks
///  buffers()              a vector of model_buffer, alike on all ranks; asked afresh each time: when a trainer is made, after
///                         each step, and when weights are saved or loaded
///  join_ranks(sums)       receives a std::shared_ptr<rank_sums>, with which forward and backward add over all ranks
///  needs_all_ranks()      whether they do: then passes also run on ranks without samples, as often as on the others
///  joins_ranks()          whether passes in training need sums over all ranks, whatever the current mode: a local_parallel
///                         refuses such a model. If it is missing, needs_all_ranks() is called instead
///  forward_absent()       forward on a rank that has no batch at all; a backward follows. Needed for join()
///  hash()                 a digest of settings other than the parameters, such as a random seed: ranks compare it
///  hash_words()           a std::string: what hash() covers, in words, its parts separated by "; ". If ranks differ, E102 shows
///                         the first part that differs
///  begin_step(n)          called before the first forward of step n, which counts from 0 and is the same on every rank
///  training(bool)         selects training mode (true) or evaluation mode (false)
///  weight(batch)          samples (or tokens) in the batch; default batch.size(). Zero is legal
///  evaluate(batch)        metrics with their weights
template <class M, class Batch>
concept ModelFor =
    requires { typename M::element; } && Element<element_of<M>> &&
    requires(M& model, Batch const& batch, pass<element_of<M>> how, detail::ready_archetype const& ready) {
        { model.parameters() } -> std::convertible_to<std::vector<parameter<element_of<M>>>>;
        { model.forward(batch) } -> std::convertible_to<double>;
        model.backward(how, ready);
        requires detail::HasWeight<M, Batch>;  // the model needs weight(batch), or the batch size()
    };

/// A model whose batch type is not known yet: the requirement on the template parameter of a trainer. ModelFor adds the rest.
template <class M>
concept Model = requires { typename M::element; } && Element<element_of<M>> &&
                requires(M& model, pass<element_of<M>> how, detail::ready_archetype const& ready) {
                    { model.parameters() } -> std::convertible_to<std::vector<parameter<element_of<M>>>>;
                    model.backward(how, ready);
                };

/// A model that can work in memory it is given. For any other, each step copies gradients out and values in.
template <class M>
concept BindableModel = Model<M> && requires(M& model, storage<element_of<M>> memory) { model.bind(memory); };

/// A model that says which values its forward needs next.
template <class M, class Batch>
concept NeedingModel = requires(M& model, Batch const& batch, detail::needed_archetype const& needed) {
    { model.forward(batch, needed) } -> std::convertible_to<double>;
};

/// True if the model promises not to read parameter i again in a pass after ready(i).
template <class M>
inline constexpr bool ready_releases = [] {
    if constexpr (requires { M::ready_releases; }) return static_cast<bool>(M::ready_releases);
    return false;
}();

/// True if the model is bound to one array without gaps.
template <class M>
inline constexpr bool contiguous = [] {
    if constexpr (requires { M::contiguous; }) {
        static_assert(!M::contiguous || BindableModel<M>,
                      "a `contiguous` model needs bind(storage): only memory that the library binds is free of gaps");
        return static_cast<bool>(M::contiguous);
    } else {
        return false;
    }
}();

/// Samples of a batch, as the model counts them: model.weight(batch), or else batch.size().
template <class M, class Batch>
[[nodiscard]] std::uint64_t weight_of(M& model, Batch const& batch) {
    if constexpr (requires { model.weight(batch); })
        return static_cast<std::uint64_t>(model.weight(batch));
    else
        return static_cast<std::uint64_t>(batch.size());
}

}  // namespace ddp
