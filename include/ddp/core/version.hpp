/// \file
/// The library's version, the one place it is written down.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <cstdint>

namespace ddp {

/// The library's version: major.minor.patch.
inline constexpr int version_major = 0;
inline constexpr int version_minor = 1;  ///< See version_major.
inline constexpr int version_patch = 0;  ///< See version_major.

/// What ranks compare before they communicate: programs built against different versions are refused.
inline constexpr std::uint32_t version_number =
    std::uint32_t{version_major} * 10000 + std::uint32_t{version_minor} * 100 + std::uint32_t{version_patch};

}  // namespace ddp

#if defined(__FAST_MATH__)
#error "ddp promises the same bits on every rank; -ffast-math breaks that. Compile without it."
#endif
