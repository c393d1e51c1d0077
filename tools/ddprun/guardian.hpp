/// \file
/// A small process that ends the ranks' process groups should ddprun itself be killed.
///
/// The kernel kills the ranks then (PR_SET_PDEATHSIG), but not what they have started: behind a shell script as program
/// the training itself would go on for ever.
#pragma once

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <vector>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "posix.hpp"

namespace ddprun {

class guardian {
public:
    /// Call before anything is opened or started: the guardian must not hold what others wait to see closed.
    guardian() {
        pipe_ends ends = make_pipe();
        pid_ = ::fork();
        if (pid_ < 0) throw_errno("cannot start a process");
        if (pid_ == 0) watch_over(ends.read.get());
        orders_ = std::move(ends.write);
    }
    guardian(guardian const&) = delete;
    guardian& operator=(guardian const&) = delete;
    ~guardian() {
        tell(0);
        orders_.reset();
        while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
        }
    }

    [[nodiscard]] pid_t pid() const noexcept { return pid_; }
    void watch(pid_t group) noexcept { tell(group); }
    void forget(pid_t group) noexcept { tell(-group); }  // its number may soon be another's

private:
    // Less than PIPE_BUF: written whole. A guardian that is gone is no reason to stop (SIGPIPE is ignored).
    void tell(pid_t order) noexcept { [[maybe_unused]] ssize_t const n = ::write(orders_.get(), &order, sizeof order); }

    [[noreturn]] static void watch_over(int orders) {
        sigset_t all;
        ::sigfillset(&all);
        ::sigprocmask(SIG_SETMASK, &all, nullptr);
        ::setpgid(0, 0);  // a kill of ddprun's whole group must spare the guardian
        ::prctl(PR_SET_NAME, "ddprun-guardian");
        int const nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
        for (int fd : {0, 1, 2}) ::dup2(nothing, fd);
        if (orders != 3) ::dup2(orders, 3);
        ::close_range(4, ~0U, 0);
        if (::chdir("/") != 0) ::_exit(1);

        std::vector<pid_t> groups;
        pid_t order = 0;
        for (;;) {
            ssize_t const n = ::read(3, &order, sizeof order);
            if (n < 0 && errno == EINTR) continue;
            if (n != sizeof order) break;
            if (order > 0) groups.push_back(order);
            if (order < 0) groups.erase(std::remove(groups.begin(), groups.end(), -order), groups.end());
            if (order == 0) groups.clear();
        }
        for (pid_t const group : groups) ::kill(-group, SIGKILL);
        ::_exit(0);
    }

    pid_t pid_ = -1;
    unique_fd orders_;
};

}  // namespace ddprun
