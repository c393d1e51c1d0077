/// \file
/// stop_signals: turns SIGTERM and SIGUSR1 into a flag that a training loop can query.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <atomic>
#include <csignal>
#include <mutex>

namespace ddp {

/// The exit code of a program that has saved its training and should be started again: EX_TEMPFAIL of sysexits.h.
inline constexpr int exit_to_be_resumed = 75;

/// While an object of this class exists, SIGTERM and SIGUSR1 do not end the process but set a flag:
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
        struct ::sigaction ours{};
        ours.sa_handler = handler;
        ours.sa_flags = SA_RESTART;
        ::sigemptyset(&ours.sa_mask);
        ::sigaction(SIGTERM, &ours, &before_[0]);
        ::sigaction(SIGUSR1, &ours, &before_[1]);
    }
    stop_signals(stop_signals const&) = delete;
    stop_signals& operator=(stop_signals const&) = delete;
    ~stop_signals() {
        std::lock_guard const guard(lock_);
        if (--users_ != 0) return;
        put_back(SIGTERM, before_[0]);
        put_back(SIGUSR1, before_[1]);
    }

    /// Whether this process has received one of these signals since the first object was made. Cost: one read of memory.
    [[nodiscard]] bool received() const noexcept { return received_.load(std::memory_order_relaxed); }

private:
    static void handler(int /*signo*/) { received_.store(true, std::memory_order_relaxed); }
    /// Restores the handler, unless the program has installed another one meanwhile.
    static void put_back(int signo, struct ::sigaction const& before) noexcept {
        struct ::sigaction now{};
        if (::sigaction(signo, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == handler)
            ::sigaction(signo, &before, nullptr);
    }

    static_assert(std::atomic<bool>::is_always_lock_free);
    static inline std::atomic<bool> received_{false};
    static inline std::mutex lock_;
    static inline int users_ = 0;
    static inline struct ::sigaction before_[2]{};
};

}  // namespace ddp
