/// \file
/// Messages about a gradient that is not finite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/kernel/finite.hpp>
#include <ddp/model/layout.hpp>

namespace ddp::detail {

/// The first element of a rank's own gradient that is NaN or infinite; and the norm of the mean gradient on that rank.
struct nonfinite_place {
    std::uint64_t parameter = std::numeric_limits<std::uint64_t>::max();  // this: it has none
    std::uint64_t element = 0;
    double value = 0;
    std::uint64_t norm = std::numeric_limits<std::uint64_t>::max();  // bits; this: it is not finite
};
static_assert(sizeof(nonfinite_place) == sizeof(nonfinite_place::parameter) + sizeof(nonfinite_place::element) +
                                             sizeof(nonfinite_place::value) + sizeof(nonfinite_place::norm),
              "it travels: no padding");

/// Looks at gradients[from, to) of the arena `where`. Sets `first` to the first such element in the order of
/// parameters.
template <class E>
void find_nonfinite(layout const& where, std::span<E const> gradients, std::size_t from, std::size_t to,
                    nonfinite_place& first) noexcept {
    where.for_each_in(from, to, [&](std::size_t i, std::size_t a, std::size_t z) {
        std::size_t const at = a + first_nonfinite(gradients.subspan(a, z - a));
        if (at == z) return;
        nonfinite_place const here{i, at - where.begin(i), static_cast<double>(gradients[at]), first.norm};
        if (here.parameter < first.parameter || (here.parameter == first.parameter && here.element < first.element))
            first = here;
    });
}

/// Whose gradient, of which parameter, at which element: of the first three ranks, and how many more there are. `members` are the
/// ranks of the job that they are.
[[nodiscard]] std::string describe(std::span<nonfinite_place const> by_rank, std::span<int const> members,
                                   function_ref<std::string_view(std::size_t)> name_of);

/// A line on stderr. `so_far`: such steps, this one included.
void say_nonfinite(std::uint64_t step, bool skipped, std::uint64_t so_far, std::string const& what) noexcept;

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/nonfinite.ipp>
#endif
