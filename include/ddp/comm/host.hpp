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

/// A digest of this boot of this machine and of its network namespace: equal in processes that share memory and loopback.
[[nodiscard]] std::uint64_t this_host();

/// One of several hosts that this machine plays: equal in processes that give the same name on the same machine. An empty name:
/// what DDP_HOST names, and this_host() where it is not set.
[[nodiscard]] std::uint64_t host_named(std::string_view name);

/// Where this rank runs: what its transport says (`std::uint64_t host() const`, never 0), else this machine.
template <Transport T>
[[nodiscard]] std::uint64_t host_of(T const& transport) {
    if constexpr (requires { transport.host(); })
        return transport.host();
    else
        return this_host();
}

/// A number for the host of each rank, from what host_of says on each: 0 for that of rank 0, the others in the order of their
/// lowest ranks.
[[nodiscard]] std::vector<std::size_t> host_numbers(std::span<std::uint64_t const> hosts);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/host.ipp>
#endif
