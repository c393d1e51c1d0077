/// \file
/// spin_pause: what a loop that waits for another core does in each turn.
#pragma once

#include <ddp/core/language.hpp>  // first

namespace ddp::detail {

inline void spin_pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace ddp::detail
