/// \file
/// What a layer is, and the memory its results and parameters live in.
///
/// Activations are matrices, rows = samples (or pixels, or tokens), row-major and dense. A layer owns the buffers of
/// its results and hands out views; they stay valid until its next call.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/core/random.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/rank_sums.hpp>
#include <ddp/nn/slice_reports.hpp>

// With -march=native and AVX-512, -Wall finds fault with Eigen's and GCC's own headers, at a user's cost.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wunused-variable"
#endif
#include <Eigen/Core>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace ddp::nn {

/// A matrix with memory of its own, row-major.
template <Element E>
using matrix = Eigen::Matrix<E, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// A row-major matrix over dense memory that it does not own.
template <Element E>
using matrix_view = Eigen::Map<matrix<E>>;

/// A read-only row-major matrix over dense memory that it does not own.
template <Element E>
using const_matrix_view = Eigen::Map<matrix<E> const>;

/// A view of dense memory as a row-major matrix of (rows, columns). The memory must hold rows * columns elements; this is
/// not checked.
template <class E>
[[nodiscard]] matrix_view<E> as_matrix(std::span<E> memory, std::size_t rows, std::size_t columns) {
    return {memory.data(), static_cast<Eigen::Index>(rows), static_cast<Eigen::Index>(columns)};
}
template <class E>
[[nodiscard]] const_matrix_view<E> as_matrix(std::span<E const> memory, std::size_t rows, std::size_t columns) {
    return {memory.data(), static_cast<Eigen::Index>(rows), static_cast<Eigen::Index>(columns)};
}

/// A read-only view of the memory that `m` shows.
template <class E>
[[nodiscard]] const_matrix_view<E> read_only(matrix_view<E> const& m) {
    return {m.data(), m.rows(), m.cols()};
}

/// The number of rows of a matrix or view: samples (or pixels, or tokens).
[[nodiscard]] inline std::size_t rows_of(auto const& m) noexcept {
    return static_cast<std::size_t>(m.rows());
}
/// The number of columns of a matrix or view: numbers per sample.
[[nodiscard]] inline std::size_t columns_of(auto const& m) noexcept {
    return static_cast<std::size_t>(m.cols());
}

/// Memory that grows to the largest size requested so far and never shrinks. It begins on a 64-byte boundary, like the
/// library's arenas, because vector kernels may give other bits at other alignments. (An Eigen matrix would allocate anew
/// whenever its size changes.)
template <Element E>
class buffer {
public:
    /// `count` elements (or rows * columns, as a matrix) with unspecified content. Invalidates what earlier calls
    /// returned. Allocates only if all earlier calls asked for less.
    [[nodiscard]] std::span<E> take(std::size_t count) {
        if (count > capacity_) {
            memory_.reset();
            capacity_ = 0;
            memory_.reset(static_cast<E*>(::operator new(count * sizeof(E), alignment)));
            capacity_ = count;
        }
        return {memory_.get(), count};
    }
    [[nodiscard]] matrix_view<E> take(std::size_t rows, std::size_t columns) {
        return as_matrix(take(rows * columns), rows, columns);
    }

private:
    static constexpr std::align_val_t alignment{64};
    struct release {
        void operator()(E* memory) const noexcept { ::operator delete(memory, alignment); }
    };
    std::unique_ptr<E, release> memory_;
    std::size_t capacity_ = 0;
};

namespace detail {

[[noreturn, gnu::cold]] void no_memory_for(std::string const& name, std::span<std::size_t const> shape,
                                           std::size_t element_bytes);

/// Elements of a parameter of this shape. Throws usage_error if they cannot be addressed, or if values and gradients are
/// more than all of this machine's memory: a system that overcommits would end the process at the first write instead.
[[nodiscard]] std::size_t elements_of(std::string const& name, std::span<std::size_t const> shape,
                                      std::size_t element_bytes);

}  // namespace detail

/// One parameter of a layer, with value and gradient. It owns memory for both, filled with +0, until seat() makes it use
/// other memory. Can be moved and not copied: keep several in a std::array, because a std::vector cannot be made from a list
/// of them. The constructor throws usage_error, naming the size, if there is not enough memory.
template <Element E>
class trainable {
public:
    trainable(std::string name, std::vector<std::size_t> shape);

    [[nodiscard]] std::string const& name() const noexcept { return name_; }
    [[nodiscard]] std::vector<std::size_t> const& shape() const noexcept { return shape_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] std::span<E> value() const noexcept { return value_; }
    [[nodiscard]] std::span<E> gradient() const noexcept { return gradient_; }

    /// From now on uses this memory, without changing what it holds, and frees its own. Both spans have size() elements.
    void seat(std::span<E> value, std::span<E> gradient) noexcept {
        value_ = value;
        gradient_ = gradient;
        own_value_ = {};
        own_gradient_ = {};
    }

private:
    std::string name_;
    std::vector<std::size_t> shape_;
    std::size_t size_;
    buffer<E> own_value_, own_gradient_;
    std::span<E> value_, gradient_;
};

template <Element E>
trainable<E>::trainable(std::string name, std::vector<std::size_t> shape)
    : name_(std::move(name)), shape_(std::move(shape)), size_(detail::elements_of(name_, shape_, sizeof(E))) {
    try {
        value_ = own_value_.take(size_);
        gradient_ = own_gradient_.take(size_);
    } catch (std::bad_alloc const&) {
        detail::no_memory_for(name_, shape_, sizeof(E));
    }
    std::fill(value_.begin(), value_.end(), E{0});
    std::fill(gradient_.begin(), gradient_.end(), E{0});
}

/// Fills the values of `parameters` with uniform random numbers in [-bound, bound), drawn from random_stream{seed,
/// random_use::initial_values, first + i} for parameter i: the same bits on every platform.
template <Element E>
void draw_uniform(std::span<trainable<E>> parameters, E bound, std::uint64_t seed, std::uint64_t first) {
    for (std::size_t p = 0; p < parameters.size(); ++p) {
        random_stream const draws{seed, random_use::initial_values, first + p};
        std::span<E> const value = parameters[p].value();
        for (std::size_t i = 0; i < value.size(); ++i) value[i] = bound * draws.at(i).template symmetric<E>();
    }
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class trainable<float>;
DDP_INSTANTIATE class trainable<double>;
DDP_INSTANTIATE void draw_uniform(std::span<trainable<float>>, float, std::uint64_t, std::uint64_t);
DDP_INSTANTIATE void draw_uniform(std::span<trainable<double>>, double, std::uint64_t, std::uint64_t);
#endif

/// How a forward pass runs. Settings that few layers need are fields here, so that the signature of forward stays the
/// same.
struct forward_mode {
    bool training = true;                         ///< false: evaluation
    std::uint64_t seed = 0;                       ///< for all random numbers that are drawn in training
    std::uint64_t step = 0;                       ///< the training step's number, the same on every rank
    std::size_t layer = 0;                        ///< the position of this layer in the model, from 0
    std::span<std::uint32_t const> samples = {};  ///< the number of each sample in the data set; or empty
    rank_sums* ranks = nullptr;  ///< adds over all ranks that train the model; null: there are no others
};

/// What a backward pass computes.
struct backward_mode {
    bool input_gradient = true;  ///< whether dx is needed: false in the first layer that has parameters
    bool accumulate = false;     ///< add to the parameters' gradients instead of assigning them
    rank_sums* ranks = nullptr;  ///< as in forward_mode
    /// Not null: a layer with `reports_slices` should report large gradients in slices, as soon as their rows are final.
    slice_reports* slices = nullptr;
};

/// A layer: a differentiable function of a matrix with one row for each sample.
///
///  forward(x, mode)    returns y. x stays valid and unchanged until backward has returned; the number of rows may differ
///                      from call to call.
///  backward(dy, mode)  writes (or adds) the gradients of the parameters for the last forward, and returns dx (an empty
///                      view where `mode.input_gradient` is false). May overwrite dy. Reads parameter values before it
///                      writes gradients, so values may change once backward has returned. May be called again after the
///                      same forward.
///
/// Optional members; each is used where a layer has it:
///  parameters()               returns `std::span<trainable<E>>`, the same one every time
///  initialize(seed, first)    sets initial values, drawn from random_stream{seed, random_use::initial_values, first + i}
///                             for parameter i: the same on every rank and platform
///  inputs(), outputs()        the number of columns of x and of y, if it is fixed; a layer without them accepts any x,
///                             and y has as many columns as x
///  forward_in_place(y, mode)  a forward that writes its result over its argument, for layers whose backward does not
///                             need x. Called instead of forward if the layer before has `output_is_free`
///  buffers()                  returns `std::vector<model_buffer>`: state that is not trained
///  joins_ranks()              returns bool: whether forward and backward call `mode.ranks` in training, equally often on
///                             all ranks. A rank without samples then calls them with no rows
///  hash()                     a digest of the layer's kind and of its settings other than parameters, which ranks and
///                             checkpoints compare. 0: nothing to compare
///  hash_words()               returns std::string: what hash() covers, in words, for the error message if ranks differ
///  draws                      static constexpr bool: false for a layer with a hash() that draws no random numbers. If any
///                             layer with a hash() does, the model's seed is compared as well
///  reports_slices             static constexpr bool: backward uses `mode.slices`
///  output_is_free             static constexpr bool: y is memory of this layer's own that its backward does not read, so
///                             the next layer may overwrite it
template <class L, class E>
concept LayerOf = std::same_as<typename L::element, E> && requires(L& layer, const_matrix_view<E> x, matrix_view<E> dy,
                                                                   forward_mode forth, backward_mode back) {
    { layer.forward(x, forth) } -> std::same_as<matrix_view<E>>;
    { layer.backward(dy, back) } -> std::same_as<matrix_view<E>>;
};

}  // namespace ddp::nn

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/nn/impl/layer.ipp>
#endif
