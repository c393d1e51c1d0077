/// \file
/// Waits for MPI by polling at growing intervals, because MPI offers nothing to block on.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include <ddp/comm/transport.hpp>

namespace ddp::detail::mpi {

/// One thread pauses, and any thread may wake it. An event is noticed late by at most an eighth of the time waited for
/// it.
class waiter {
public:
    /// Whether there are more threads than cores on this host, so that others need the core.
    void share_core(bool yes) noexcept { crowded_ = yes; }

    void wake() {
        std::scoped_lock const lock(sleep_);
        woken_ = true;
        awake_.notify_one();
    }
    /// Whether another thread has woken this one since the last call.
    [[nodiscard]] bool take_wake() {
        std::scoped_lock const lock(sleep_);
        return std::exchange(woken_, false);
    }

    /// `since` is when something last moved. Spins while an answer may come soon (yields at once if the core is
    /// shared), then sleeps an eighth of the time idled, `longest` at most.
    void pause(time_point until, time_point since, nanoseconds longest) {
        using std::chrono::microseconds;
        time_point const at = monotonic_clock::now();
        nanoseconds const idle = at - since;
        if (idle < microseconds(200)) {
            if (crowded_ || idle > microseconds(50)) std::this_thread::yield();
            return;
        }
        nanoseconds const step = std::min(longest, std::max<nanoseconds>(microseconds(20), idle / 8));
        std::unique_lock lock(sleep_);
        if (!woken_) awake_.wait_until(lock, std::min(until, at + step));
    }

private:
    bool crowded_ = false;
    std::mutex sleep_;
    std::condition_variable awake_;
    bool woken_ = false;
};

}  // namespace ddp::detail::mpi
