/// \file
/// Sums over ranks in the canonical order: the kernels of combine.hpp for the operation that training needs.
#pragma once

#include <span>
#include <type_traits>

#include <ddp/kernel/combine.hpp>

namespace ddp {

/// combine_tree_scaled for sums.
template <Number E>
void sum_tree_scaled(std::span<E> out, std::span<std::type_identity_t<E> const* const> sources,
                     std::type_identity_t<E> factor) {
    combine_tree_scaled<sum>(out, sources, factor);
}

/// combine_tree for sums.
template <Number E>
void sum_tree(std::span<E> out, std::span<std::type_identity_t<E> const* const> sources) {
    combine_tree<sum>(out, sources);
}

/// out = left + right, element by element. All have the same length; out may be exactly left, right or both.
template <Number E>
void add(std::span<E> out, std::span<std::type_identity_t<E> const> left,
         std::span<std::type_identity_t<E> const> right) {
    combine<sum>(out, left, right);
}

}  // namespace ddp
