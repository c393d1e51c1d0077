/// \file
/// host: which ranks share a machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// A number for this machine: a digest of its boot, equal in all of its containers.
[[nodiscard]] std::uint64_t this_machine();

/// A number for this host: a digest of the machine and of the network namespace, equal in processes that share memory and
/// loopback.
[[nodiscard]] std::uint64_t this_host();

/// A number for a named host, so that one machine can stand for several: equal in processes that give the same name on the
/// same machine. An empty name: the one in DDP_HOST, or this_host() if that is not set.
[[nodiscard]] std::uint64_t host_named(std::string_view name);

/// A number for the host of this rank: what its transport says (`std::uint64_t host() const`, never 0), or else this_host().
template <Transport T>
[[nodiscard]] std::uint64_t host_of(T const& transport) {
    if constexpr (requires { transport.host(); }) return transport.host();
    return this_host();
}

/// Numbers the hosts of all ranks, given what host_of says on each: 0 is that of rank 0, the others follow in the order of
/// their lowest ranks.
[[nodiscard]] std::vector<std::size_t> host_numbers(std::span<std::uint64_t const> hosts);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/host.ipp>
#endif
