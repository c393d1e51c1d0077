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

/// One distinct trainable parameter (tied ones are one). The spans have the same length, the product of `shape`; their
/// memory is dense and the model's, until it was bound; that of a model which cannot be bound stays where it is.
template <Element E>
struct parameter {
    std::string name;                       ///< unique within the model
    std::vector<std::size_t> shape;         ///< row-major, unless `strides` says otherwise
    std::span<E> value;                     ///< what is trained
    std::span<E> gradient;                  ///< what backward writes
    std::vector<std::size_t> strides = {};  ///< in elements; empty: row-major. Compared between ranks like the shape
};

/// State that is no parameter, such as running statistics or a counter: not trained, but part of what is kept.
struct model_buffer {
    std::string name;                ///< unique among the model's parameters and buffers
    element_type type;               ///< of an element
    std::vector<std::size_t> shape;  ///< row-major
    std::span<std::byte> bytes;      ///< the model's memory, as many as type and shape ask for
};

/// How one backward pass has to write gradients.
template <Element E>
struct pass {
    E scale = 1;              ///< times the gradient of the mean loss: the batch's weight makes sums over samples
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
    std::span<E> all_values = {};         ///< of a `contiguous` model: all parameters, one behind the other
    std::span<E> all_gradients = {};      ///< likewise
};

/// What a model computes in: float or double.
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
///                         is final: at most once a pass, as soon as possible, from any thread but one call at a time,
///                         before backward returns. ready never throws.
///                         A large gradient may be reported in ranges: ready(i, first, count) says that its elements
///                         [first, first + count) are final. The first range ends at the gradient's end, each further one
///                         where the last one began; ready(i) reports all that is left. Of a parameter that is reported
///                         down to element 0 there is nothing left to report.
///
/// Optional, each found on its own:
///  ready_releases         static constexpr bool: parameter i's value is not read again in a pass after ready(i), nor elements
///                         of it after ready(i, first, count)
///  bind(storage)          use this memory from now on: zero copy
///  contiguous             static constexpr bool: that memory is one array, parameters as they are listed, without gaps
///  forward(batch, needed)  forward that calls needed(i) before it reads value i: the trainer may still be waiting for it. See
///                         training_options::overlap_gather. What needed throws passes through
///  intact()               false if bound memory was lost; asked before each forward
///  stepped(i)             called after value i has changed, and for each value when a trainer is made. If it throws, that
///                         rank gets its exception, the others E206, and the step may be complete on some
///  buffers()              a vector of model_buffer, alike on all ranks; asked afresh each time: when a trainer is made, after
///                         each step, and when weights are saved or loaded
///  join_ranks(sums)       a std::shared_ptr<rank_sums> to add over all ranks with, in forward and backward
///  needs_all_ranks()      whether it does: then passes are made on ranks without samples too, as often as on others
///  joins_ranks()          whether passes in training need sums over all ranks, whatever the current mode: a local_parallel
///                         refuses such a model. Without it, needs_all_ranks() is asked
///  forward_absent()       forward where there is not even a batch; a backward follows. Needed for join()
///  hash()                 of settings besides the parameters, such as the seed of what is drawn: ranks compare it
///  hash_words()           a std::string: what hash() covers, in words, its parts separated by "; ". Where ranks differ, E102 shows
///                         the first part that does
///  begin_step(n)          step number n, from 0 and the same on every rank, comes next: before the step's first forward
///  training(bool)         mode
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

/// A model whose type of batches is not known yet: what the template parameter of a trainer must be. ModelFor asks for the rest.
template <class M>
concept Model = requires { typename M::element; } && Element<element_of<M>> &&
                requires(M& model, pass<element_of<M>> how, detail::ready_archetype const& ready) {
                    { model.parameters() } -> std::convertible_to<std::vector<parameter<element_of<M>>>>;
                    model.backward(how, ready);
                };

/// A model that works in memory it is given: without it gradients are copied out and values in, each step.
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
    if constexpr (requires { M::ready_releases; })
        return static_cast<bool>(M::ready_releases);
    else
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
