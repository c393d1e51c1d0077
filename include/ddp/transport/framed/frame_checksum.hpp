/// \file
/// Checksum: the policy by which framed checks payloads that cross a wire.
#pragma once

#include <concepts>
#include <cstdint>

#include <ddp/core/bytes.hpp>

namespace ddp {

/// A checksum of bytes that arrive in pieces; its value does not depend on how they are cut. A new one has seen no
/// bytes, nor has one after reset(). Models: no_checksum, xxh3_checksum.
template <class C>
concept Checksum = std::default_initializable<C> && requires(C& c, const_bytes piece) {
    { c.reset() } noexcept;
    { c.update(piece) } noexcept;
    { c.value() } noexcept -> std::same_as<std::uint64_t>;
};

/// Checks nothing: for streams that stay on one host. With it, framed throws usage_error for a peer that is `checked`.
struct no_checksum {
    void reset() noexcept {}
    void update(const_bytes) noexcept {}
    [[nodiscard]] std::uint64_t value() noexcept { return 0; }
};
static_assert(Checksum<no_checksum>);

}  // namespace ddp
