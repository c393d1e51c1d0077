/// \file
/// cores: how many processor cores the ranks of one host may use.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include <ddp/core/separate.hpp>

namespace ddp::detail {

/// Cores of one machine, by their numbers below 1,024.
struct core_set {
    static constexpr int most = 1024;
    std::array<std::uint64_t, most / 64> words{};

    void add(int core) noexcept { words[static_cast<std::size_t>(core / 64)] |= std::uint64_t{1} << (core % 64); }
    void add(core_set const& others) noexcept {
        for (std::size_t i = 0; i < words.size(); ++i) words[i] |= others.words[i];
    }
    [[nodiscard]] bool has(int core) const noexcept {
        return (words[static_cast<std::size_t>(core / 64)] >> (core % 64) & 1) != 0;
    }
    [[nodiscard]] int count() const noexcept {
        int sum = 0;
        for (std::uint64_t const word : words) sum += std::popcount(word);
        return sum;
    }
    /// Hexadecimal, the lowest 64 cores first, without the words that are zero at the end.
    [[nodiscard]] std::string text() const;
    /// Reads what text() wrote; of any other text, as much as can be read.
    [[nodiscard]] static core_set parse(std::string const& text);
};

/// The cores that this process may run on: its affinity mask, as taskset, launchers and container runtimes set it. If the
/// system does not say, as many as are online.
[[nodiscard]] core_set cores_of_process();

/// How many cores the control groups of this process allow all processes in them; 0: no limit. `root` is put before /proc and
/// /sys.
[[nodiscard]] double core_quota(std::string const& root = {});

/// How many of these cores can be busy at once, by the control groups' quota; at least 1.
[[nodiscard]] int usable_cores(core_set const& cores, double quota) noexcept;

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/cores.ipp>
#endif
