/// \file
/// driving_turns: which thread drives a job, a caller or the communication thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>  // and std::mutex, which its interface needs: <mutex> is 400 lines more
#include <cstdint>
#include <thread>

#include <ddp/comm/timing.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>

namespace ddp::detail {

/// One thread drives at a time. Callers go first: the communication thread drives while no caller does, and may then be asleep
/// in the transport; `wake` ends that sleep.
class driving_turns {
public:
    /// Whether this thread drives: a hook is being run.
    [[nodiscard]] bool mine() const noexcept { return driver_.load() == std::this_thread::get_id(); }

    // A caller's

    void take(function_ref<void()> wake);
    void give_back() noexcept;
    /// Calls `turn` if no thread drives. It must not throw.
    void try_drive(function_ref<void()> turn) noexcept;
    /// A call drives now: most calls are followed by another.
    void count_call() noexcept { calls_.fetch_add(1, std::memory_order_relaxed); }

    // Any thread's

    /// Tells the thread that drives that there is mail. Never blocks for long.
    void poke(function_ref<void()> wake) noexcept;
    void stop(function_ref<void()> wake) noexcept {
        stop_.store(true);
        poke(wake);
    }

    // The communication thread's

    [[nodiscard]] bool stopped() const noexcept { return stop_.load(); }
    /// Some caller drives, or wants to.
    [[nodiscard]] bool wanted() const noexcept { return callers_.load() > 0; }
    [[nodiscard]] std::unique_lock<std::mutex> hold() { return std::unique_lock(token_); }
    /// Calls `turn`, which does not sleep. The token is held.
    void drive_briefly(function_ref<void()> turn);
    /// Calls `turn`, which may sleep in the transport, unless a caller wants to drive. The token is held.
    void drive(function_ref<void()> turn);
    /// Releases the token while callers drive, and until none has driven for 5 ms or there is mail.
    void park(std::unique_lock<std::mutex>& token);
    /// Waits for this time, or until stop().
    void rest(std::chrono::nanoseconds pause);

private:
    std::mutex token_;  // held by the thread that drives
    std::atomic<std::thread::id> driver_{};
    std::atomic<int> callers_{0};          // threads that hold the token or want it
    std::atomic<std::uint64_t> calls_{0};  // that have driven, so far
    std::atomic<bool> driving_{false};     // the communication thread may be asleep in the transport
    std::atomic<bool> stop_{false};
    std::mutex park_;
    std::condition_variable parked_;
    bool poked_ = false;
};

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/driving_turns.ipp>
#endif
