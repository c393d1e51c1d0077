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
/// What ranks have compared: values and the optimizer's state, also what an exchange keeps, or norms of the mean gradient.
enum class difference : std::uint8_t { values, exchange, gradients };

/// Which ranks differ from the majority, or that there is none. `digests`: one a rank, not all equal; `ranks`: what each is
/// called; `names`: the parameters, first and last, of which some elements were compared before step `step`.
[[nodiscard]] odd_ranks describe_difference(std::span<std::uint64_t const> digests, std::span<int const> ranks,
                                            std::uint64_t step, std::span<std::string_view const> names,
                                            difference what);

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/odd_ranks.ipp>
#endif
