/// \file
/// Checksum: the policy by which framed checks payloads that cross a wire.
#pragma once

#include <concepts>
#include <cstdint>

#include <ddp/core/bytes.hpp>

namespace ddp {

/// Fed piece by piece; equal bytes give equal values however they were cut. Models: no_checksum, xxh3_checksum.
template <class C>
concept Checksum = std::default_initializable<C> && requires(C& c, const_bytes piece) {
    { c.reset() } noexcept;
    { c.update(piece) } noexcept;
    { c.value() } noexcept -> std::same_as<std::uint64_t>;
};

/// Checks nothing: for streams that stay on one host. Asked to check a peer's payloads it would find nothing, so framed
/// refuses the combination.
struct no_checksum {
    void reset() noexcept {}
    void update(const_bytes) noexcept {}
    [[nodiscard]] std::uint64_t value() noexcept { return 0; }
};
static_assert(Checksum<no_checksum>);

}  // namespace ddp
