/// \file
/// Bucket policies: which stretches of the gradient are reduced together. Pure functions, agreed by hash.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/model/layout.hpp>

namespace ddp {

/// A boundary between buckets: before element `offset` of the parameter at `position` in the arena's order.
struct bucket_cut {
    std::size_t position = 0;  ///< of the parameter, in the order of the arena
    std::size_t offset = 0;    ///< elements of it that come before the cut
    friend auto operator<=>(bucket_cut const&, bucket_cut const&) = default;
};

/// What a policy decides. Plain data, so that the type of a trainer does not depend on its policy.
struct bucket_plan {
    /// The parameters as they lie in the arena: each of them exactly once, or empty for the order in which they are
    /// declared. With another list, or with any list but the declared order for a `contiguous` model, making a trainer
    /// throws usage_error.
    std::vector<std::size_t> order = {};
    std::vector<bucket_cut> cuts = {};  ///< inner boundaries, ascending: k cuts make k + 1 buckets, in arena order
    std::vector<std::size_t> launch =
        {};  ///< buckets in the order in which they are expected to fill; empty: last first
};

/// What a policy receives.
struct bucket_request {
    std::span<std::size_t const> counts;  ///< elements of each parameter, as declared
    std::size_t element_bytes = 4;        ///< 4 for float, 8 for double
    std::size_t grain = 16;               ///< cuts inside a parameter fall on multiples of this many elements
};

/// Makes a plan from the parameters. Pure: every rank computes the same plan, as its hash confirms.
template <class B>
concept BucketPolicy = requires(B const& policy, bucket_request const& request) {
    { policy.plan(request) } -> std::same_as<bucket_plan>;
};

/// Buckets of at most `cap_bytes` (gaps between parameters counted; never less than a grain), filled from the last
/// parameter backwards, as gradients become ready. The first to fill is small, so that communication starts early;
/// parameters larger than the cap are split.
/// Source: PyTorch DDP's first bucket and cap (Li et al., VLDB 2020); splitting as in ByteScheduler (SOSP 2019).
struct size_capped_buckets {
    std::size_t cap_bytes = std::size_t{4} << 20;    ///< of every bucket but the first to fill: 4 MiB
    std::size_t first_bytes = std::size_t{1} << 20;  ///< of the first to fill: 1 MiB

    [[nodiscard]] bucket_plan plan(bucket_request const& request) const;

private:
    /// What a parameter takes in the arena, where each begins at 64 bytes.
    static std::size_t padded(std::size_t count, bucket_request const& request) {
        std::size_t const alignment = 64 / request.element_bytes;
        return (count + alignment - 1) / alignment * alignment;
    }
    static std::size_t limit(std::size_t bytes, bucket_request const& request) {
        return std::max(request.grain, bytes / request.element_bytes / request.grain * request.grain);
    }
};

/// One bucket per parameter: the finest overlap, the most messages.
struct per_parameter_buckets {
    [[nodiscard]] bucket_plan plan(bucket_request const& request) const {
        bucket_plan result;
        for (std::size_t p = 1; p < request.counts.size(); ++p) result.cuts.push_back({p, 0});
        return result;
    }
};

/// Everything in one bucket, so that nothing overlaps with backward: for comparison with other policies.
struct single_bucket {
    [[nodiscard]] bucket_plan plan(bucket_request const& /*request*/) const { return {}; }
};
static_assert(BucketPolicy<size_capped_buckets> && BucketPolicy<per_parameter_buckets> && BucketPolicy<single_bucket>);

namespace detail {

/// A plan laid over its layout: bucket b is the arena's [begin(b), end(b)).
class bucket_map {
public:
    bucket_map() = default;
    bucket_map(bucket_plan const& plan, layout const& where, std::size_t grain);

    [[nodiscard]] std::size_t count() const noexcept { return bounds_.size() - 1; }
    [[nodiscard]] std::size_t begin(std::size_t b) const noexcept { return bounds_[b]; }
    [[nodiscard]] std::size_t end(std::size_t b) const noexcept { return bounds_[b + 1]; }
    [[nodiscard]] std::span<std::size_t const> launch() const noexcept { return launch_; }
    [[nodiscard]] std::size_t parameters() const noexcept { return touches_.size(); }
    /// The buckets that parameter i has elements in, in the arena's order, and how many parameters bucket b waits for.
    [[nodiscard]] std::span<std::size_t const> touches(std::size_t i) const noexcept { return touches_[i]; }
    [[nodiscard]] std::size_t members(std::size_t b) const noexcept { return members_[b]; }

    /// Covers the order of the parameters too: others of the same sizes would give the same bounds.
    [[nodiscard]] std::uint64_t hash(layout const& where) const noexcept {
        return digest()
            .add(std::span<std::size_t const>(bounds_))
            .add(std::span<std::size_t const>(launch_))
            .add(where.order())
            .value();
    }
    /// What that hash covers, for the error of ranks that differ: parts with "; " between them.
    [[nodiscard]] std::string words(layout const& where) const;

private:
    std::vector<std::size_t> bounds_ = {0};
    std::vector<std::size_t> launch_;
    std::vector<std::vector<std::size_t>> touches_;
    std::vector<std::size_t> members_;
};

}  // namespace detail
}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/bucket.ipp>
#endif
