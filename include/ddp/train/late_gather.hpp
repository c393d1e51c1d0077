/// \file
/// late_gather: new values are sent after their step has returned, during the next forward pass.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ddp/comm/scheduler_base.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/task.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/frozen_buckets.hpp>
#include <ddp/train/step_roots.hpp>

namespace ddp::detail {

/// The communication side gathers all buckets, in the order of the forward pass; the compute side waits for the
/// parameters that it needs.
class late_gather {
public:
    /// What moves the values.
    class gather_source {
    public:
        /// Sends every rank's new slice of bucket b to all ranks. Runs in slot b of the roots.
        virtual task<> gather(std::size_t b) = 0;

    protected:
        ~gather_source() = default;
    };

    /// What is referred to outlives this.
    late_gather(scheduler_base& on, bucket_map const& buckets, frozen_buckets const& frozen, step_roots& roots,
                gather_source& values);

    // The communication side

    /// A step begins: no values have arrived. One coroutine still runs, which calls start() when the step is over, or
    /// ends.
    void begin() noexcept;
    void start();
    /// Ends when the values of parameter i are here.
    task<> made_current(std::size_t i);
    [[nodiscard]] step_roots::stage& left() noexcept { return left_; }
    [[nodiscard]] step_roots::stage const& left() const noexcept { return left_; }

    // The compute side, between two steps

    /// Whether the values of parameter i are here.
    [[nodiscard]] bool current(std::size_t i) const noexcept {
        return std::ranges::all_of(buckets_.touches(i), [this](std::size_t b) {
            return frozen_.silent()[b] != 0 || here_[b].load(std::memory_order_acquire) != 0;
        });
    }

private:
    task<> one(std::size_t b);

    bucket_map const& buckets_;
    frozen_buckets const& frozen_;
    step_roots& roots_;
    gather_source& values_;
    std::vector<std::atomic<std::uint8_t>> here_;  // by bucket
    std::vector<std::optional<event>> came_;
    step_roots::stage left_;
};

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/late_gather.ipp>
#endif
