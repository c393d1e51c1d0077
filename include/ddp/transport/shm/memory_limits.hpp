/// \file
/// memory_limits: how much memory a process may still take before the system kills one for want of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/comm/control_groups.hpp>
#include <ddp/core/separate.hpp>

namespace ddp::detail {

/// What the host has left (MemAvailable), and the memory cgroups around this process, up to the topmost that it can see:
/// versions 1 and 2. Pages of a memfd, unlike address space, are refused by no call: beyond these limits the kernel kills.
class memory_limits {
public:
    struct room {
        std::uint64_t bytes;  ///< what is left under the tightest limit; the largest number where none is known
        std::string limit;    ///< that limit, for people
    };

    /// `root`: where /proc and the cgroups' file systems are.
    explicit memory_limits(std::string_view root = "");

    /// What is left now. Others take memory too, so it is worth asking again.
    [[nodiscard]] room left() const;

    /// How much of `missing` bytes may be taken before asking again: all of it if little, and the less, the less is left,
    /// so that ranks that allocate at the same time see each other: up to 200 of them take no more than there is.
    [[nodiscard]] static std::size_t step(room const& now, std::size_t missing) noexcept;

    /// Whether `missing` bytes and their page tables fit.
    [[nodiscard]] static bool fits(room const& now, std::size_t missing) noexcept {
        return now.bytes > missing && now.bytes - missing >= missing / 64;
    }

private:
    std::string root_;
    std::vector<control_group> groups_;
};

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/transport/shm/impl/memory_limits.ipp>
#endif
