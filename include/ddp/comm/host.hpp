/// \file
/// host: which ranks share a machine.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <string_view>

#include <ddp/comm/transport.hpp>
#include <ddp/core/digest.hpp>

namespace ddp {

/// A digest of this boot of this machine and of its network namespace: equal in processes that share memory and loopback.
[[nodiscard]] inline std::uint64_t this_host() {
    digest identity;
    std::array<char, 64> boot{};
    if (std::FILE* const file = std::fopen("/proc/sys/kernel/random/boot_id", "r")) {
        std::size_t const got = std::fread(boot.data(), 1, boot.size(), file);
        std::fclose(file);
        identity.add(std::string_view(boot.data(), got));
    } else if (::gethostname(boot.data(), boot.size() - 1) == 0) {
        identity.add(std::string_view(boot.data()));
    }
    struct ::stat status{};
    if (::stat("/proc/self/ns/net", &status) == 0) identity.add(static_cast<std::uint64_t>(status.st_ino));
    return identity.value();
}

/// Where this rank runs: what its transport says (`std::uint64_t host() const`, never 0), else this machine.
template <Transport T>
[[nodiscard]] std::uint64_t host_of(T const& transport) {
    if constexpr (requires { transport.host(); })
        return transport.host();
    else
        return this_host();
}

}  // namespace ddp
