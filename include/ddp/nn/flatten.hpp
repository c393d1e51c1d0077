/// \file
/// flatten: a sample's planes as one row of numbers, which is what they are already.
#pragma once

#include <ddp/nn/layer.hpp>

namespace ddp::nn {

/// Does nothing, because samples are flat rows in this library. It exists for models that are written like a PyTorch
/// Sequential, where a flatten counts in the names of the parameters after it. Cost: none; its result is its
/// argument.
template <Element E = float>
struct flatten {
    using element = E;

    matrix_view<E> forward(const_matrix_view<E> x, forward_mode) {
        return {const_cast<E*>(x.data()), x.rows(), x.cols()};  // nobody writes there: the output is not free
    }
    matrix_view<E> forward_in_place(matrix_view<E> y, forward_mode) { return y; }
    matrix_view<E> backward(matrix_view<E> dy, backward_mode) { return dy; }
};

static_assert(LayerOf<flatten<float>, float>);

}  // namespace ddp::nn
