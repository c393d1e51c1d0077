/// \file
/// Kernels for matrices that are products of two thin ones: what power_sgd_exchange computes.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>

#include <ddp/kernel/kernel.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::detail::kernels {

/// left (rows x rank) = matrix (rows x columns) times the transpose of right (rank x columns). Column j of a row goes to lane
/// j mod 16; then the canonical tree over the lanes.
template <std::floating_point E>
DDP_KERNEL void times_thin(E const* matrix, E const* right, E* left, std::size_t rows, std::size_t columns,
                           std::size_t rank) {
    DDP_NO_CONTRACTION
    constexpr std::size_t lanes = 16;
    for (std::size_t i = 0; i < rows; ++i, matrix += columns)
        for (std::size_t k = 0; k < rank; ++k) {
            E const* const with = right + k * columns;
            E sums[lanes] = {};
            std::size_t j = 0;
            for (; j + lanes <= columns; j += lanes)
                for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += matrix[j + lane] * with[j + lane];
            for (std::size_t lane = 0; j + lane < columns; ++lane) sums[lane] += matrix[j + lane] * with[j + lane];
            for (std::size_t width = 1; width < lanes; width *= 2)
                for (std::size_t lane = 0; lane < lanes; lane += 2 * width) sums[lane] += sums[lane + width];
            left[i * rank + k] = sums[0];
        }
}
/// right (rank x columns) = transpose of left (rows x rank) times matrix, from the first row to the last.
template <std::floating_point E>
DDP_KERNEL void transposed_times(E const* matrix, E const* left, E* right, std::size_t rows, std::size_t columns,
                                 std::size_t rank) {
    DDP_NO_CONTRACTION
    for (std::size_t j = 0; j < rank * columns; ++j) right[j] = 0;
    for (std::size_t i = 0; i < rows; ++i, matrix += columns)
        for (std::size_t k = 0; k < rank; ++k) {
            E const factor = left[i * rank + k];
            E* const to = right + k * columns;
            DDP_INDEPENDENT
            for (std::size_t j = 0; j < columns; ++j) to[j] += factor * matrix[j];
        }
}
/// matrix = left times right, from the first column of left to the last.
template <std::floating_point E>
DDP_KERNEL void product_of_thin(E const* left, E const* right, E* matrix, std::size_t rows, std::size_t columns,
                                std::size_t rank) {
    DDP_NO_CONTRACTION
    for (std::size_t i = 0; i < rows; ++i, matrix += columns)
        for (std::size_t k = 0; k < rank; ++k) {
            E const factor = left[i * rank + k];
            E const* const from = right + k * columns;
            if (k == 0) {
                DDP_INDEPENDENT
                for (std::size_t j = 0; j < columns; ++j) matrix[j] = factor * from[j];
            } else {
                DDP_INDEPENDENT
                for (std::size_t j = 0; j < columns; ++j) matrix[j] += factor * from[j];
            }
        }
}
/// Makes the columns of left orthonormal: Gram-Schmidt in double, twice per column. A dependent one becomes 0.
template <std::floating_point E>
DDP_KERNEL void orthonormalise(E* left, std::size_t rows, std::size_t rank) {
    DDP_NO_CONTRACTION
    for (std::size_t k = 0; k < rank; ++k) {
        double before = 0;
        for (std::size_t i = 0; i < rows; ++i) {
            double const x = static_cast<double>(left[i * rank + k]);
            before += x * x;
        }
        double norm = before;
        for (int again = 0; again < 2; ++again) {
            for (std::size_t other = 0; other < k; ++other) {
                double along = 0;
                for (std::size_t i = 0; i < rows; ++i)
                    along += static_cast<double>(left[i * rank + k]) * static_cast<double>(left[i * rank + other]);
                for (std::size_t i = 0; i < rows; ++i)
                    left[i * rank + k] = static_cast<E>(static_cast<double>(left[i * rank + k]) -
                                                        along * static_cast<double>(left[i * rank + other]));
            }
            norm = 0;
            for (std::size_t i = 0; i < rows; ++i) {
                double const x = static_cast<double>(left[i * rank + k]);
                norm += x * x;
            }
            constexpr double lost = sizeof(E) == sizeof(float) ? 1e-12 : 1e-26;  // squares of the rounding of E
            double const factor = norm > lost * before ? 1 / std::sqrt(norm) : 0;
            for (std::size_t i = 0; i < rows; ++i)
                left[i * rank + k] = static_cast<E>(static_cast<double>(left[i * rank + k]) * factor);
            before = factor == 0 ? 0 : 1;
        }
    }
}

}  // namespace ddp::detail::kernels

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
