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

/// Somebody's dense memory as a row-major matrix.
template <Element E>
using matrix_view = Eigen::Map<matrix<E>>;

/// The same, read-only.
template <Element E>
using const_matrix_view = Eigen::Map<matrix<E> const>;

/// Dense memory as a matrix of (rows, columns).
template <class E>
[[nodiscard]] matrix_view<E> as_matrix(std::span<E> memory, std::size_t rows, std::size_t columns) {
    return {memory.data(), static_cast<Eigen::Index>(rows), static_cast<Eigen::Index>(columns)};
}
template <class E>
[[nodiscard]] const_matrix_view<E> as_matrix(std::span<E const> memory, std::size_t rows, std::size_t columns) {
    return {memory.data(), static_cast<Eigen::Index>(rows), static_cast<Eigen::Index>(columns)};
}

/// The same memory, read-only.
template <class E>
[[nodiscard]] const_matrix_view<E> read_only(matrix_view<E> const& m) {
    return {m.data(), m.rows(), m.cols()};
}

/// Samples (or pixels, or tokens).
[[nodiscard]] inline std::size_t rows_of(auto const& m) noexcept {
    return static_cast<std::size_t>(m.rows());
}
/// Numbers a row.
[[nodiscard]] inline std::size_t columns_of(auto const& m) noexcept {
    return static_cast<std::size_t>(m.cols());
}

/// Memory that grows to the largest size it was asked for and then stays. On a 64-byte boundary, as the library's
/// arenas are: vector kernels may give other bits at other alignments. (An Eigen matrix would allocate anew at every
/// change of size.)
template <Element E>
class buffer {
public:
    /// `count` elements of unspecified content. Ends the validity of what was handed out before.
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

/// One parameter of a layer: lives in memory of its own, values and gradients +0, until it is seated elsewhere. Throws
/// usage_error, with its size, if there is no memory for it.
template <Element E>
class trainable {
public:
    trainable(std::string name, std::vector<std::size_t> shape);

    [[nodiscard]] std::string const& name() const noexcept { return name_; }
    [[nodiscard]] std::vector<std::size_t> const& shape() const noexcept { return shape_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] std::span<E> value() const noexcept { return value_; }
    [[nodiscard]] std::span<E> gradient() const noexcept { return gradient_; }

    /// Uses this memory from now on, as it is, and gives up its own. Both spans have size() elements.
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

/// Fills parameters with numbers that are uniform in [-bound, bound), from random_stream{seed,
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

/// How a forward pass runs. What most layers ignore is added here, so that their signatures stay.
struct forward_mode {
    bool training = true;                         ///< false: evaluation
    std::uint64_t seed = 0;                       ///< of everything that is drawn in training
    std::uint64_t step = 0;                       ///< the training step's number, the same on every rank
    std::size_t layer = 0;                        ///< this layer's place in the model
    std::span<std::uint32_t const> samples = {};  ///< of each sample of the batch, its number in the data set; or empty
    rank_sums* ranks = nullptr;                   ///< of all ranks that train the model; null: there is no other
};

/// What a backward pass wants.
struct backward_mode {
    bool input_gradient = true;  ///< nobody needs the gradient of the batch: false for the first layer with parameters
    bool accumulate = false;     ///< add to the parameters' gradients instead of assigning them
    rank_sums* ranks = nullptr;  ///< as forward's
    /// Not null, for layers with `reports_slices`: large gradients are wanted as their rows become final.
    slice_reports* slices = nullptr;
};

/// A differentiable function of matrices.
///
///  forward(x, mode)    -> y. x stays where it is, unchanged, until after backward; rows may differ from call to call.
///  backward(dy, mode)  gradients of the parameters at the last forward's x, and -> dx (an empty view if nobody wants
///                      it). May overwrite dy. Reads parameter values before it writes gradients, so that a value may
///                      change once backward has returned. May be called again after the same forward.
///
/// Optional, each found on its own:
///  parameters()             -> std::span<trainable<E>>, always the same
///  initialize(seed, first)  fills the values, from random_stream{seed, random_use::initial_values, first + i} for
///                           parameter i: the same on every rank and platform
///  inputs(), outputs()      columns of x and y, where they are fixed; without them y has the columns of x
///  forward_in_place(y, mode)  forward whose result takes the place of its argument, for layers whose backward does not
///                           need x. Called instead of forward where the layer before has
///  buffers()                -> std::vector<model_buffer>: state that is not trained
///  joins_ranks()            -> bool: in training, forward and backward call mode.ranks, on all ranks alike; they are called
///                           with no rows on ranks without samples
///  hash()                   of settings besides the parameters that ranks must have alike; 0: none
///  reports_slices           static constexpr bool: backward looks at mode.slices
///  output_is_free           static constexpr bool: y is this layer's own memory and backward does not read it, so the
///                           next layer may overwrite it
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
