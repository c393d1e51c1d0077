/// \file
/// memory_limits: how much memory a process can still take before the system runs out and kills one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/comm/control_groups.hpp>
#include <ddp/core/separate.hpp>

namespace ddp::detail {

/// What is left of the host's memory (MemAvailable), and of the limits of the memory cgroups around this process (versions 1
/// and 2), up to the topmost that it can see. No call refuses pages of a memfd, unlike address space: beyond these limits, the
/// kernel kills a process.
class memory_limits {
public:
    struct room {
        std::uint64_t bytes;  ///< what is left under the tightest limit; the largest number if no limit is known
        std::string limit;    ///< a description of that limit
    };

    /// `root`: where /proc and the cgroups' file systems are.
    explicit memory_limits(std::string_view root = "");

    /// What is left now. Other processes take memory too, so ask again before each step.
    [[nodiscard]] room left() const;

    /// How much of `missing` bytes to take before asking again: all of it if that is little, otherwise 1/256 of what is
    /// left (at least 4 KiB, at most 16 MiB), because that many ranks may ask at the same time.
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
