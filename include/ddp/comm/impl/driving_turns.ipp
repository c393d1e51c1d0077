/// \file
/// What comm/driving_turns.hpp declares.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>  // and std::mutex, which its interface needs: <mutex> is 400 lines more
#include <cstdint>
#include <thread>

#include <ddp/comm/driving_turns.hpp>

namespace ddp::detail {

DDP_DECL void driving_turns::take(function_ref<void()> wake) {
    callers_.fetch_add(1);
    if (driving_.load()) wake();
    token_.lock();
    driver_.store(std::this_thread::get_id());
}
DDP_DECL void driving_turns::give_back() noexcept {
    driver_.store({});
    token_.unlock();
    callers_.fetch_sub(1);
}
DDP_DECL void driving_turns::try_drive(function_ref<void()> turn) noexcept {
    if (std::unique_lock const token(token_, std::try_to_lock); token) drive_briefly(turn);
}
DDP_DECL void driving_turns::poke(function_ref<void()> wake) noexcept {
    {
        std::unique_lock const lock(park_);
        poked_ = true;
    }
    parked_.notify_one();
    if (driving_.load()) wake();
}
DDP_DECL void driving_turns::drive_briefly(function_ref<void()> turn) {
    driver_.store(std::this_thread::get_id());
    turn();
    driver_.store({});
}
DDP_DECL void driving_turns::drive(function_ref<void()> turn) {
    driving_.store(true);
    if (callers_.load() == 0 && !stop_.load())
        drive_briefly(turn);  // a caller that comes later sees driving_, and wakes this thread
    driving_.store(false);
}
DDP_DECL void driving_turns::park(std::unique_lock<std::mutex>& token) {
    token.unlock();
    {
        std::unique_lock lock(park_);
        for (bool stays = true; stays;) {
            std::uint64_t const before = calls_.load(std::memory_order_relaxed);
            parked_.wait_for(lock, std::chrono::milliseconds(5), [this] { return poked_ || stop_.load(); });
            bool const others_drive = !poked_ && calls_.load(std::memory_order_relaxed) != before;
            poked_ = false;
            stays = (callers_.load() > 0 || others_drive) && !stop_.load();
        }
    }
    token.lock();
}
DDP_DECL void driving_turns::rest(std::chrono::nanoseconds pause) {
    std::unique_lock lock(park_);
    parked_.wait_for(lock, pause, [this] { return stop_.load(); });
}

}  // namespace ddp::detail
