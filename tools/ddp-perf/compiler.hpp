/// \file
/// The compiler that this program is built by, for results that say what they depend on; benchmarks/ print it too.
#pragma once

namespace ddp_perf {

#if defined(__clang__)
inline constexpr char const* compiler = "clang " __clang_version__;
#else
inline constexpr char const* compiler = "gcc " __VERSION__;
#endif

}  // namespace ddp_perf
