/// \file
/// What comm/host.hpp declares.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

#include <ddp/comm/host.hpp>
#include <ddp/core/digest.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL std::uint64_t this_machine() {
    digest identity;
    std::array<char, 64> boot{};
    if (std::FILE* const file = std::fopen("/proc/sys/kernel/random/boot_id", "r")) {
        std::size_t const got = std::fread(boot.data(), 1, boot.size(), file);
        std::fclose(file);
        identity.add(std::string_view(boot.data(), got));
    } else if (::gethostname(boot.data(), boot.size() - 1) == 0) {
        identity.add(std::string_view(boot.data()));
    }
    return identity.value();
}

[[gnu::cold]] DDP_DECL std::uint64_t this_host() {
    digest identity;
    identity.add(this_machine());
    struct ::stat status{};
    if (::stat("/proc/self/ns/net", &status) == 0) identity.add(static_cast<std::uint64_t>(status.st_ino));
    return identity.value();
}

[[gnu::cold]] DDP_DECL std::uint64_t host_named(std::string_view name) {
    if (char const* const named = std::getenv("DDP_HOST"); name.empty() && named != nullptr) name = named;
    std::uint64_t const machine = this_host();
    return name.empty() ? machine : digest{}.add(name).add(machine).value();
}

DDP_DECL std::vector<std::size_t> host_numbers(std::span<std::uint64_t const> hosts) {
    std::vector<std::uint64_t> known;
    std::vector<std::size_t> numbers;
    for (std::uint64_t const one : hosts) {
        auto const at = std::find(known.begin(), known.end(), one);
        numbers.push_back(static_cast<std::size_t>(at - known.begin()));
        if (at == known.end()) known.push_back(one);
    }
    return numbers;
}

}  // namespace ddp
