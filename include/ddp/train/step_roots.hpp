/// \file
/// step_roots: the coroutines of a step, one per slot, and a call when the last one of a stage has ended.
#pragma once

#include <cstddef>
#include <exception>
#include <vector>

#include <ddp/comm/scheduler_base.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/task.hpp>

namespace ddp::detail {

/// An exception from any of the coroutines fails the job.
class step_roots {
public:
    /// A part of the step: `left` of its coroutines have not ended.
    struct stage {
        std::size_t left = 0;
    };

    /// The owner of the coroutines.
    class roots_owner {
    public:
        /// The last coroutine of the stage has ended. Not called once the job has failed.
        virtual void over(stage const& ended) = 0;

    protected:
        ~roots_owner() = default;
    };

    step_roots(scheduler_base& on, std::size_t slots, roots_owner& of) : on_(on), owner_(of), roots_(slots) {}

    /// The previous coroutine of the slot must have ended. `of` counts the new one already.
    void start(std::size_t slot, task<> body, stage& of);

private:
    task<> root(task<> body, stage& of);

    scheduler_base& on_;
    roots_owner& owner_;
    std::vector<task<>> roots_;
};

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/step_roots.ipp>
#endif
