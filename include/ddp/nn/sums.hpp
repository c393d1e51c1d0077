/// \file
/// Sums over the rows and columns of activations, each in an order of its own that no compiler or alignment changes.
#pragma once

#include <cstddef>

#include <ddp/core/separate.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/model/model.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::nn::detail {

/// sum[c] (+)= in[0][c] + in[1][c] + …, rows in order.
template <Element E>
DDP_KERNEL void sum_rows(E* sum, E const* in, std::size_t rows, std::size_t columns, bool accumulate) {
    DDP_NO_CONTRACTION
    std::size_t r = 0;
    if (!accumulate) {
        for (std::size_t c = 0; c < columns; ++c) sum[c] = rows == 0 ? E{0} : in[c];
        r = 1;
    }
    for (; r < rows; ++r) {
        E const* const row = in + r * columns;
        DDP_INDEPENDENT
        for (std::size_t c = 0; c < columns; ++c) sum[c] += row[c];
    }
}

/// Sixteen sums, of every sixteenth addend, folded in halves: what a vector processor can do, in one order for all.
template <Element E>
struct lane_sum {
    static constexpr std::size_t lanes = 16;

    /// The sum of a[i], or of a[i] * b[i] where b is given.
    DDP_KERNEL static E of(E const* a, std::size_t count) {
        DDP_NO_CONTRACTION
        E sum[lanes] = {};
        std::size_t i = 0;
        for (; i + lanes <= count; i += lanes)
            for (std::size_t l = 0; l < lanes; ++l) sum[l] += a[i + l];
        for (std::size_t l = 0; i < count; ++i, ++l) sum[l] += a[i];
        return fold(sum);
    }
    DDP_KERNEL static E of(E const* a, E const* b, std::size_t count) {
        DDP_NO_CONTRACTION
        E sum[lanes] = {};
        std::size_t i = 0;
        for (; i + lanes <= count; i += lanes)
            for (std::size_t l = 0; l < lanes; ++l) sum[l] += a[i + l] * b[i + l];
        for (std::size_t l = 0; i < count; ++i, ++l) sum[l] += a[i] * b[i];
        return fold(sum);
    }

private:
    static E fold(E* sum) {
        for (std::size_t half = lanes / 2; half > 0; half /= 2)
            for (std::size_t l = 0; l < half; ++l) sum[l] += sum[l + half];
        return sum[0];
    }
};

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE void sum_rows(float*, float const*, std::size_t, std::size_t, bool);
DDP_INSTANTIATE void sum_rows(double*, double const*, std::size_t, std::size_t, bool);
#endif

}  // namespace ddp::nn::detail

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
