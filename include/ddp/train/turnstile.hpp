/// \file
/// turnstile: lets one coroutine at a time through, in the order in which they came.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <ddp/comm/operation.hpp>
#include <ddp/core/task.hpp>

namespace ddp::detail {

/// For a fixed number of coroutines, each of which comes at most once between two resets. Allocates in the constructor.
class turnstile {
public:
    turnstile(scheduler_base& on, std::size_t coroutines) : open_(coroutines), waiting_(coroutines) {
        for (std::optional<event>& one : open_) one.emplace(on);
    }
    /// Call it before the first coroutine enters, and after all have left or were unwound.
    void reset() noexcept {
        for (std::optional<event>& one : open_) one->reset();
        first_ = last_ = 0;
        taken_ = false;
    }
    /// Awaits the turn of coroutine `i`; leave() comes next.
    [[nodiscard]] event& enter(std::size_t i) noexcept {
        if (taken_)
            waiting_[last_++] = i;
        else
            open_[i]->set();
        taken_ = true;
        return *open_[i];
    }
    void leave() noexcept {
        taken_ = first_ != last_;
        if (taken_) open_[waiting_[first_++]]->set();
    }

private:
    std::vector<std::optional<event>> open_;
    std::vector<std::size_t> waiting_;
    std::size_t first_ = 0, last_ = 0;
    bool taken_ = false;
};

}  // namespace ddp::detail
