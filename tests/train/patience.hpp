/// \file
/// How long tests wait, and how much they try, under sanitizers and on busy machines.
#pragma once

#include <chrono>
#include <cstddef>

#include <ddp/comm/timing.hpp>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define DDP_TEST_SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DDP_TEST_SANITIZED
#endif

namespace ddp::test {

#if defined(DDP_TEST_SANITIZED)
inline constexpr std::size_t fewer = 9;  // of a matrix of combinations, only every n-th
#else
inline constexpr std::size_t fewer = 1;
#endif

/// Short times, but a deadline that no slow machine reaches: for tests in which nobody is late.
[[nodiscard]] inline timing patient() {
    timing times = timing::for_tests();
    times.dead = std::chrono::seconds(20);
    times.collective = std::chrono::seconds(60);
    return times;
}

}  // namespace ddp::test
