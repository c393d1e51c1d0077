/// \file
/// Element-wise products of activations, in place or not.
#pragma once

#include <cstddef>

#include <ddp/kernel/kernel.hpp>
#include <ddp/model/model.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::nn::detail {

/// y[i] = x[i] * factor[i]. y and x may be the same.
template <Element E>
DDP_KERNEL void multiply(E* y, E const* x, E const* factor, std::size_t count) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) y[i] = x[i] * factor[i];
}

/// sum[i] += x[i] * factor[i].
template <Element E>
DDP_KERNEL void add_products(E* sum, E const* x, E const* factor, std::size_t count) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) sum[i] += x[i] * factor[i];
}

}  // namespace ddp::nn::detail

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
