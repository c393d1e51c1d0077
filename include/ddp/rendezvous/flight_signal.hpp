/// \file
/// flight_signal: while an object of it lives, SIGUSR2 writes the flight record of this process's rank.
#pragma once

#include <atomic>
#include <cerrno>
#include <csignal>
#include <thread>

#include <ddp/comm/flight_recorder.hpp>

namespace ddp::detail {

/// Launches of processes make one before the ranks connect. Does nothing if the program handles or ignores SIGUSR2
/// itself. The destructor restores the previous handler, unless the program has installed another one meanwhile.
///
/// The handler reads the ring and calls clock_gettime, open, write, ftruncate and close, nothing else: so it also works
/// for a rank that hangs in its own code.
class flight_signal {
public:
    /// Selects the rank whose record is written, for as long as this lives. One at a time.
    class target {
    public:
        explicit target(flight_recorder& of) noexcept : of_(of) {
            recorder_.store(&of);
            of.answers_signal.store(is_ours());
        }
        target(target const&) = delete;
        target& operator=(target const&) = delete;
        ~target() {
            of_.answers_signal.store(false);
            recorder_.store(nullptr);
            while (readers_.load() != 0) std::this_thread::yield();  // a handler on another thread
        }

    private:
        flight_recorder& of_;
    };

    flight_signal() noexcept {
        struct ::sigaction ours{};
        ours.sa_handler = handler;
        ours.sa_flags = SA_RESTART;
        ::sigemptyset(&ours.sa_mask);
        installed_ = ::sigaction(SIGUSR2, nullptr, &before_) == 0 && (before_.sa_flags & SA_SIGINFO) == 0 &&
                     before_.sa_handler == SIG_DFL && ::sigaction(SIGUSR2, &ours, nullptr) == 0;
    }
    flight_signal(flight_signal const&) = delete;
    flight_signal& operator=(flight_signal const&) = delete;
    ~flight_signal() {
        if (installed_ && is_ours()) ::sigaction(SIGUSR2, &before_, nullptr);
    }

private:
    static bool is_ours() noexcept {
        struct ::sigaction now{};
        return ::sigaction(SIGUSR2, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 &&
               now.sa_handler == handler;
    }
    static void handler(int /*signo*/) {
        int const kept = errno;
        readers_.fetch_add(1);
        if (flight_recorder* const one = recorder_.load()) one->dump_or_say("SIGUSR2");
        readers_.fetch_sub(1);
        errno = kept;
    }

    static inline std::atomic<flight_recorder*> recorder_{nullptr};
    static inline std::atomic<int> readers_{0};
    struct ::sigaction before_{};
    bool installed_ = false;
};

}  // namespace ddp::detail
