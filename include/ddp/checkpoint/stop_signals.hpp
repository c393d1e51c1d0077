/// \file
/// stop_signals: turns SIGTERM, SIGUSR1 and the first SIGINT into a flag that a training loop can query.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <mutex>

namespace ddp {

/// The exit code of a program that has saved its training and should be started again: EX_TEMPFAIL of sysexits.h.
inline constexpr int exit_to_be_resumed = 75;

/// While an object of this class exists, SIGTERM, SIGUSR1 and the first SIGINT (Ctrl-C) do not end the process but set a
/// flag; a second SIGINT, half a second later or more, has the effect that it had before: as a rule, it ends the process. A SIGINT
/// that was ignored (nohup) stays ignored:
///
///     ddp::stop_signals const signals;
///     while (auto const batch = batches.next()) {
///         if (signals.received()) trainer.request_stop();
///         if (trainer.step(load(*batch)).stop) {
///             kept.save(trainer, batches);
///             return ddp::exit_to_be_resumed;
///         }
///     }
///
/// It is enough if one rank receives a signal: all ranks stop after the same step. Several objects, for example of
/// ranks that are threads, share the handlers and the flag: the first one clears the flag and installs the handlers,
/// and the last one restores the previous handlers. Interrupted system calls are restarted (SA_RESTART). Batch systems
/// announce the end of a job with these signals: Slurm with `--signal=USR1@120`, Kubernetes with SIGTERM.
class stop_signals {
public:
    stop_signals() {
        std::lock_guard const guard(lock_);
        if (users_++ != 0) return;
        received_.store(false);
        interrupted_ns_.store(0);
        struct ::sigaction ours{};
        ours.sa_handler = handler;
        ours.sa_flags = SA_RESTART;
        ::sigemptyset(&ours.sa_mask);
        for (std::size_t k = 0; k < signals.size(); ++k) {
            ::sigaction(signals[k], nullptr, &before_[k]);
            bool const ignored = (before_[k].sa_flags & SA_SIGINFO) == 0 && before_[k].sa_handler == SIG_IGN;
            if (signals[k] != SIGINT || !ignored)
                ::sigaction(signals[k], &ours, nullptr);  // nohup, a shell's &: stays so
        }
    }
    stop_signals(stop_signals const&) = delete;
    stop_signals& operator=(stop_signals const&) = delete;
    ~stop_signals() {
        std::lock_guard const guard(lock_);
        if (--users_ != 0) return;
        for (std::size_t k = 0; k < signals.size(); ++k) put_back(signals[k], before_[k]);
    }

    /// Whether this process has received one of these signals since the first object was made. Cost: one read of memory.
    [[nodiscard]] bool received() const noexcept { return received_.load(std::memory_order_relaxed); }

private:
    static void handler(int signo) {
        received_.store(true, std::memory_order_relaxed);
        if (signo != SIGINT) return;
        ::timespec now{};
        ::clock_gettime(CLOCK_MONOTONIC, &now);
        std::int64_t const ns = std::int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
        std::int64_t first = 0;
        if (interrupted_ns_.compare_exchange_strong(first, ns) || ns - first < 500'000'000) return;
        ::sigaction(SIGINT, &before_[2], nullptr);
        ::raise(SIGINT);  // when this returns
    }
    /// Restores the handler, unless the program has installed another one meanwhile.
    static void put_back(int signo, struct ::sigaction const& before) noexcept {
        struct ::sigaction now{};
        if (::sigaction(signo, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == handler)
            ::sigaction(signo, &before, nullptr);
    }

    static_assert(std::atomic<bool>::is_always_lock_free);
    static inline std::atomic<bool> received_{false};
    static inline std::atomic<std::int64_t> interrupted_ns_{0};
    static_assert(std::atomic<std::int64_t>::is_always_lock_free);
    static inline std::mutex lock_;
    static inline int users_ = 0;
    static constexpr std::array<int, 3> signals = {SIGTERM, SIGUSR1, SIGINT};
    static inline std::array<struct ::sigaction, signals.size()> before_{};
};

}  // namespace ddp
