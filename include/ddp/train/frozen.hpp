/// \file
/// Frozen parameters: which they are, and buckets of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/interface.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/parameter_groups.hpp>
#include <ddp/train/bucket.hpp>

namespace ddp::detail {

/// A bucket policy that is asked once.
struct planner : detail::interface {
    [[nodiscard]] virtual bucket_plan plan(bucket_request const& request) const = 0;
};
template <BucketPolicy B>
struct planner_of final : planner {
    explicit planner_of(B policy) : held(std::move(policy)) {}
    [[nodiscard]] bucket_plan plan(bucket_request const& request) const override { return held.plan(request); }
    B held;
};

/// Sets marks[i] of every parameter whose name matches. Returns whether there is one.
template <Element E>
bool mark_fitting(std::span<parameter<E> const> parameters, std::string_view pattern, std::uint8_t mark,
                  std::vector<std::uint8_t>& marks) {
    bool found = false;
    for (std::size_t i = 0; i < parameters.size(); ++i)
        if (name_fits(pattern, parameters[i].name)) {
            marks[i] = mark;
            found = true;
        }
    return found;
}

/// By parameter: 1 if its name matches one of the patterns. `setting` names their option in errors. Throws usage_error
/// for a pattern that matches no name.
template <Element E>
[[nodiscard]] std::vector<std::uint8_t> marks_of(std::span<parameter<E> const> parameters,
                                                 std::vector<std::string> const& patterns, char const* setting) {
    std::vector<std::uint8_t> marks(parameters.size());
    for (std::string const& pattern : patterns)
        DDP_EXPECTS(mark_fitting(parameters, pattern, 1, marks), std::string(setting) +
                                                                     ": no parameter's name matches '" + pattern +
                                                                     "'; '*' stands for any characters, '?' for one");
    return marks;
}

/// The policy's plan for the parameters that are not marked, which lie last in the arena, and another for those that
/// are, so that no bucket holds both. Buckets of marked ones are launched last. If none or all are marked, returns the
/// policy's own plan.
[[nodiscard]] bucket_plan plan_apart(planner const& buckets, bucket_request const& request,
                                     std::span<std::uint8_t const> marks);

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/frozen.ipp>
#endif
