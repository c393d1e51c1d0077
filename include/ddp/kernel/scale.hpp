/// \file
/// Kernels that scale what one pass wrote, or add it scaled to what earlier ones did.
#pragma once

#include <concepts>
#include <cstddef>

#include <ddp/kernel/kernel.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::detail::kernels {

/// to = factor * from, which may be in place.
template <std::floating_point E>
DDP_KERNEL void assign_times(E* to, E const* from, std::size_t count, E factor) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) to[i] = factor * from[i];
}
/// to = before + factor * from, each of which may be `to`.
template <std::floating_point E>
DDP_KERNEL void add_times(E* to, E const* before, E const* from, std::size_t count, E factor) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) to[i] = before[i] + factor * from[i];
}

}  // namespace ddp::detail::kernels

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
