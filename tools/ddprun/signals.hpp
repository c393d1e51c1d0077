/// \file
/// The signals that ddprun hears of, as something to poll.
#pragma once

#include <csignal>

#include <sys/signalfd.h>
#include <unistd.h>

#include "posix.hpp"

namespace ddprun {

/// What ddprun found when it was started and the ranks shall find again.
struct signal_state {
    sigset_t mask;
    struct sigaction pipe, file_size;
};

class signal_source {
public:
    signal_source() {
        sigset_t set;
        ::sigemptyset(&set);
        for (int const signo : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP}) {
            struct sigaction before;
            ::sigaction(signo, nullptr, &before);
            if (signo == SIGCHLD)
                ::signal(signo, SIG_DFL);  // ignored, children would vanish unseen
            else if (before.sa_handler == SIG_IGN)
                continue;  // nohup, or the background of a shell: it stays ignored, here and in the ranks
            ::sigaddset(&set, signo);
        }
        ::sigprocmask(SIG_BLOCK, &set, &before_.mask);
        struct sigaction ignore = {};
        ignore.sa_handler = SIG_IGN;
        ::sigaction(SIGPIPE, &ignore, &before_.pipe);
        ::sigaction(SIGXFSZ, &ignore, &before_.file_size);  // `ulimit -f`: write() says so
        fd_ = unique_fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
        if (!fd_) throw_errno("signalfd");
    }

    signal_source(signal_source const&) = delete;
    signal_source& operator=(signal_source const&) = delete;

    [[nodiscard]] int fd() const noexcept { return fd_.get(); }
    [[nodiscard]] signal_state const& before() const noexcept { return before_; }

    /// The next one that has come, or 0.
    [[nodiscard]] int next() const noexcept {
        signalfd_siginfo info;
        return ::read(fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
    }

private:
    signal_state before_{};
    unique_fd fd_;
};

}  // namespace ddprun
