/// \file
/// doorbell: lets other threads wake one that sleeps in poll().
#pragma once

#include <ddp/core/language.hpp>  // first

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <system_error>

namespace ddp {

/// Lets other threads wake its owner, which sleeps in poll() on descriptor(). A ring() is kept until the next answered(). It
/// costs a system call only if the owner sleeps. The constructor throws std::system_error if there is no descriptor.
class doorbell {
public:
    doorbell() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    doorbell(doorbell const&) = delete;
    doorbell& operator=(doorbell const&) = delete;
    ~doorbell() { ::close(fd_); }

    /// Wakes the owner. From any thread.
    void ring() noexcept {
        if (state_.exchange(rung) != asleep) return;
        std::uint64_t const one = 1;
        [[maybe_unused]] auto const written = ::write(fd_, &one, sizeof one);
    }

    // The owner's side.

    /// Whether there was a ring since the last call.
    [[nodiscard]] bool answered() noexcept {
        return state_.load(std::memory_order_relaxed) == rung && state_.exchange(awake) == rung;
    }
    /// To be called before sleeping. Returns false if there was a ring: then do not sleep.
    [[nodiscard]] bool fall_asleep() noexcept {
        int expected = awake;
        return state_.compare_exchange_strong(expected, asleep);
    }
    /// To be called after sleeping; `readable` is what poll() reported for the descriptor. A ring stays for answered().
    void wake_up(bool readable) noexcept {
        int expected = asleep;
        state_.compare_exchange_strong(expected, awake);
        if (!readable) return;  // a ring whose write is still under way ends the next sleep at once, and is read then
        std::uint64_t count = 0;
        [[maybe_unused]] auto const read = ::read(fd_, &count, sizeof count);
    }
    [[nodiscard]] int descriptor() const noexcept { return fd_; }

private:
    enum : int { awake, asleep, rung };
    int fd_;
    std::atomic<int> state_{awake};
};

}  // namespace ddp
