/// \file
/// Products of matrices by Eigen, in the four forms that layers need.
#pragma once

#include <ddp/core/separate.hpp>
#include <ddp/nn/layer.hpp>

namespace ddp::nn::detail {

// Functions of their own rather than expressions in the layers: Eigen's kernels are most of what a layer costs to compile.
// With DDP_SEPARATE_COMPILATION those of float and double are compiled in src/ddp.cpp.

/// y = a b. Cost: 2 rows(a) columns(a) columns(b) flops; Eigen allocates packing buffers, below 128 KiB on the stack.
template <Element E>
[[gnu::noinline]] void product(matrix_view<E> y, const_matrix_view<E> a, const_matrix_view<E> b) {
    y.noalias() = a * b;
}
/// y += a b.
template <Element E>
[[gnu::noinline]] void add_product(matrix_view<E> y, const_matrix_view<E> a, const_matrix_view<E> b) {
    y.noalias() += a * b;
}
/// y += a b^T.
template <Element E>
[[gnu::noinline]] void add_product_nt(matrix_view<E> y, const_matrix_view<E> a, const_matrix_view<E> b) {
    y.noalias() += a * b.transpose();
}
/// y = a^T b.
template <Element E>
[[gnu::noinline]] void product_tn(matrix_view<E> y, const_matrix_view<E> a, const_matrix_view<E> b) {
    y.noalias() = a.transpose() * b;
}
/// y += a^T b.
template <Element E>
[[gnu::noinline]] void add_product_tn(matrix_view<E> y, const_matrix_view<E> a, const_matrix_view<E> b) {
    y.noalias() += a.transpose() * b;
}

/// Rows [first, end) of y = a^T b, with the bits that the whole product has there: see slice_reports.
template <Element E>
[[gnu::noinline]] void product_tn_rows(matrix_view<E> y, const_matrix_view<E> a, const_matrix_view<E> b,
                                       Eigen::Index first, Eigen::Index end) {
    y.middleRows(first, end - first).noalias() = a.middleCols(first, end - first).transpose() * b;
}
/// Rows [first, end) of y += a^T b, likewise.
template <Element E>
[[gnu::noinline]] void add_product_tn_rows(matrix_view<E> y, const_matrix_view<E> a, const_matrix_view<E> b,
                                           Eigen::Index first, Eigen::Index end) {
    y.middleRows(first, end - first).noalias() += a.middleCols(first, end - first).transpose() * b;
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE void product(matrix_view<float>, const_matrix_view<float>, const_matrix_view<float>);
DDP_INSTANTIATE void product(matrix_view<double>, const_matrix_view<double>, const_matrix_view<double>);
DDP_INSTANTIATE void add_product(matrix_view<float>, const_matrix_view<float>, const_matrix_view<float>);
DDP_INSTANTIATE void add_product(matrix_view<double>, const_matrix_view<double>, const_matrix_view<double>);
DDP_INSTANTIATE void add_product_nt(matrix_view<float>, const_matrix_view<float>, const_matrix_view<float>);
DDP_INSTANTIATE void add_product_nt(matrix_view<double>, const_matrix_view<double>, const_matrix_view<double>);
DDP_INSTANTIATE void product_tn(matrix_view<float>, const_matrix_view<float>, const_matrix_view<float>);
DDP_INSTANTIATE void product_tn(matrix_view<double>, const_matrix_view<double>, const_matrix_view<double>);
DDP_INSTANTIATE void add_product_tn(matrix_view<float>, const_matrix_view<float>, const_matrix_view<float>);
DDP_INSTANTIATE void add_product_tn(matrix_view<double>, const_matrix_view<double>, const_matrix_view<double>);
DDP_INSTANTIATE void product_tn_rows(matrix_view<float>, const_matrix_view<float>, const_matrix_view<float>,
                                     Eigen::Index, Eigen::Index);
DDP_INSTANTIATE void product_tn_rows(matrix_view<double>, const_matrix_view<double>, const_matrix_view<double>,
                                     Eigen::Index, Eigen::Index);
DDP_INSTANTIATE void add_product_tn_rows(matrix_view<float>, const_matrix_view<float>, const_matrix_view<float>,
                                         Eigen::Index, Eigen::Index);
DDP_INSTANTIATE void add_product_tn_rows(matrix_view<double>, const_matrix_view<double>, const_matrix_view<double>,
                                         Eigen::Index, Eigen::Index);
#endif

}  // namespace ddp::nn::detail
