/// \file
/// The few functions of the C library that most programs need here, by the compilers' own names: the standard header
/// brings special functions too, 4,000 lines for every program.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <concepts>

namespace ddp::detail {

[[nodiscard]] constexpr bool is_finite(std::floating_point auto x) noexcept {
    return __builtin_isfinite(x);
}
[[nodiscard]] inline double square_root(double x) noexcept {
    return __builtin_sqrt(x);
}
[[nodiscard]] inline float square_root(float x) noexcept {
    return __builtin_sqrtf(x);
}
[[nodiscard]] inline double logarithm(double x) noexcept {
    return __builtin_log(x);
}
[[nodiscard]] inline double cosine_of(double x) noexcept {
    return __builtin_cos(x);
}

}  // namespace ddp::detail
