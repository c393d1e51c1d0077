/// \file
/// stop_signals: SIGTERM and SIGUSR1 become a question that the training loop asks.
#pragma once

#include <atomic>
#include <csignal>
#include <mutex>

namespace ddp {

/// The exit code of a program that has kept its training and wants to be started again: EX_TEMPFAIL of sysexits.h.
inline constexpr int exit_to_be_resumed = 75;

/// While an object of it lives, SIGTERM and SIGUSR1 do nothing but set a flag of the process:
///
///     ddp::stop_signals const signals;
///     …
///     if (signals.received()) trainer.request_stop();
///     if (trainer.step(batch).stop) { kept.save(trainer, batches); return ddp::exit_to_be_resumed; }
///
/// It suffices that one rank receives a signal: all stop after the same step. Several objects, as of ranks that are threads,
/// share the handlers and the flag: the first clears the flag and installs, the last puts back what was there. System calls go
/// on (SA_RESTART). The signals are those by which batch systems announce the end: Slurm's --signal=USR1@120, Kubernetes'
/// SIGTERM.
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

    /// Whether this process has received one of them since the first object was made. Cost: a read of memory.
    [[nodiscard]] bool received() const noexcept { return received_.load(std::memory_order_relaxed); }

private:
    static void handler(int /*signo*/) { received_.store(true, std::memory_order_relaxed); }
    /// Unless the program has put something else there meanwhile.
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
