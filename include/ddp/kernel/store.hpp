/// \file
/// store: copies into memory that is read later, by another rank or thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include <ddp/core/contract.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/kernel/operation.hpp>

namespace ddp {

namespace detail::kernels {

#if defined(__x86_64__)
/// Non-temporal stores, 16 bytes at a time; `to` is on a 16-byte boundary.
DDP_KERNEL inline void stream_lines(std::byte* to, std::byte const* from, std::size_t bytes) {
    using block [[gnu::vector_size(16)]] = long long;
    for (std::size_t i = 0; i < bytes; i += 16) {
        block one;
        std::memcpy(&one, from + i, 16);
#if defined(__clang__)
        __builtin_nontemporal_store(one, reinterpret_cast<block*>(to + i));
#else
        __builtin_ia32_movntdq(reinterpret_cast<block*>(to + i), one);
#endif
    }
}
#endif

}  // namespace detail::kernels

namespace detail {

/// What stream() does, for bytes.
inline void stream_bytes(std::span<std::byte> to, std::span<std::byte const> from) {
    DDP_EXPECTS(to.size() == from.size(), "stream: both spans must have one length");
    std::byte* const out = to.data();
    std::byte const* const in = from.data();
    std::size_t head = 0, body = 0;
#if defined(__x86_64__)
    head = std::min(to.size(), (16 - reinterpret_cast<std::uintptr_t>(out) % 16) % 16);
    body = (to.size() - head) / 16 * 16;
    kernels::stream_lines(out + head, in + head, body);
#endif
    if (head != 0) std::memcpy(out, in, head);
    if (head + body != to.size()) std::memcpy(out + head + body, in + head + body, to.size() - head - body);
}

}  // namespace detail

/// to = from, with non-temporal stores where the processor has them: for large data that is not read soon. Ordinary
/// stores fetch every line before they overwrite it, and evict others. Elsewhere a plain copy.
///
/// to, from  of the same length; no overlap. Call finish_streams() before signalling another thread or rank.
template <Number E>
void stream(std::span<E> to, std::span<std::type_identity_t<E> const> from) {
    detail::stream_bytes(std::as_writable_bytes(to), std::as_bytes(from));
}

/// Makes what stream() has stored visible to every rank before anything that this thread stores next.
inline void finish_streams() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#else
    __sync_synchronize();
#endif
}

}  // namespace ddp
