/// \file
/// same_secret: compares secret bytes.
#pragma once

#include <ddp/core/language.hpp>

#include <array>
#include <cstddef>

namespace ddp::detail {

/// Whether two secrets of N elements are equal, in a time that does not depend on where they differ.
template <class E, std::size_t N>
[[nodiscard]] bool same_secret(std::array<E, N> const& a, std::array<E, N> const& b) noexcept {
    E volatile differs{};
    for (std::size_t i = 0; i < N; ++i) differs = differs | (a[i] ^ b[i]);
    return differs == E{};
}

}  // namespace ddp::detail
