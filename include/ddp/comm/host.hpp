/// \file
/// host: which ranks share a machine.
#pragma once

#include <cstdint>

#include <ddp/comm/transport.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// A digest of this boot of this machine and of its network namespace: equal in processes that share memory and loopback.
[[nodiscard]] std::uint64_t this_host();

/// Where this rank runs: what its transport says (`std::uint64_t host() const`, never 0), else this machine.
template <Transport T>
[[nodiscard]] std::uint64_t host_of(T const& transport) {
    if constexpr (requires { transport.host(); })
        return transport.host();
    else
        return this_host();
}

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/host.ipp>
#endif
