/// \file
/// blind_ranks: which ranks of one host do not see each other's memory, and why, for one line of the whole job.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <atomic>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/separate.hpp>

namespace ddp::detail {

/// Whether the job has been told that ranks do not see each other's memory, as far as this process knows. All ranks that
/// learn of it store true, whichever of them prints the line: what is found later is then not said again.
[[nodiscard]] inline std::atomic<bool>& blindness_said() noexcept {
    static std::atomic<bool> said = false;
    return said;
}

/// Ascending ranks: "rank 3", "ranks 0 and 2", "ranks 0 to 3, 6 and 9". At most eight parts, then how many more there are.
[[nodiscard]] std::string named_ranks(std::span<int const> ranks);

/// Pairs of ranks of one host, each pair once, and what single ranks know of the reason.
struct blind_ranks {
    std::vector<std::pair<int, int>> pairs = {};  ///< the lower rank first
    std::vector<std::pair<int, std::string>> reasons = {};

    /// "ranks 0 and 1 are on one host and do not see each other's memory (rank 1: …)", or "rank 1, on one host with ranks 0,
    /// 2 and 3, shares no memory with them (…)". Three such clauses at most, and how many pairs are left. Empty without pairs.
    [[nodiscard]] std::string text() const;
};

/// What ends the line.
inline constexpr char const* what_to_do_if_blind =
    ". Remove the cause, or set DDP_SHARE_MEMORY=0: then no ranks share memory, and this warning is not printed";

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/blind_ranks.ipp>
#endif
