/// \file
/// The message if ranks turn out to hold different values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <ddp/core/separate.hpp>

namespace ddp::detail {

struct odd_ranks {
    int first = -1;    ///< the first that differs from the majority; -1: there is none
    std::string text;  ///< all of them
};
/// Which ranks differ from the majority, or that there is none. `digests`: one a rank, not all equal; `ranks`: what each is
/// called; `names`: the parameters, first and last, of which some elements were compared before step `step`; `exchange`: so was
/// what the exchange keeps.
[[nodiscard]] odd_ranks describe_difference(std::span<std::uint64_t const> digests, std::span<int const> ranks,
                                            std::uint64_t step, std::span<std::string_view const> names, bool exchange);

/// Likewise, of the norms of the mean gradient of step `step`, before it has changed anything.
[[nodiscard]] odd_ranks describe_norms(std::span<double const> norms, std::span<int const> ranks, std::uint64_t step);

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/odd_ranks.ipp>
#endif
