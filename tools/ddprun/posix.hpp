/// \file
/// The operating system's small things: owned descriptors, errors with an exit code, signal names.
#pragma once

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

namespace ddprun {

/// The job could not be started or kept; `exit_code` is what ddprun returns: 125 to 127 as in env(1) and timeout(1).
class launch_error : public std::runtime_error {
public:
    launch_error(int exit_code, std::string const& text) : std::runtime_error(text), exit_code_(exit_code) {}
    [[nodiscard]] int exit_code() const noexcept { return exit_code_; }

private:
    int exit_code_;
};

inline constexpr int exit_usage = 2;
inline constexpr int exit_launcher = 125;        ///< ddprun's own trouble: no descriptors, port in use
inline constexpr int exit_not_executable = 126;  ///< the program was found and could not be run
inline constexpr int exit_not_found = 127;

[[noreturn]] inline void throw_errno(std::string const& what) {
    throw launch_error(exit_launcher, what + ": " + std::strerror(errno));
}

class unique_fd {
public:
    unique_fd() = default;
    explicit unique_fd(int fd) noexcept : fd_(fd) {}
    unique_fd(unique_fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    unique_fd& operator=(unique_fd&& other) noexcept {
        if (this != &other) {
            reset();
            fd_ = std::exchange(other.fd_, -1);
        }
        return *this;
    }
    ~unique_fd() { reset(); }

    [[nodiscard]] int get() const noexcept { return fd_; }
    explicit operator bool() const noexcept { return fd_ >= 0; }
    void reset() noexcept {
        if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    }

private:
    int fd_ = -1;
};

struct pipe_ends {
    unique_fd read, write;
};

[[nodiscard]] inline pipe_ends make_pipe() {
    int fds[2];
    if (::pipe2(fds, O_CLOEXEC) != 0) throw_errno("no more pipes (ulimit -n allows too few open files?)");
    return {unique_fd(fds[0]), unique_fd(fds[1])};
}

/// Whether a process handles a signal or blocks it (to wait for it), so that the signal does not end it. True if /proc
/// does not say. A shell blocks all signals for some microseconds now and then: what is blocked at every look counts.
[[nodiscard]] inline bool takes_signal(pid_t pid, int signo) {
    for (int look = 0; look < 5; ++look) {
        if (look > 0) ::poll(nullptr, 0, 1);
        std::ifstream file("/proc/" + std::to_string(pid) + "/status");
        std::uint64_t blocked = 0, caught = 0;
        bool known = false;
        for (std::string line; std::getline(file, line);)
            if (line.starts_with("SigBlk:\t") || line.starts_with("SigCgt:\t")) {
                std::uint64_t& mask = line.starts_with("SigBlk") ? blocked : caught;
                std::from_chars(line.data() + 8, line.data() + line.size(), mask, 16);
                known = true;
            }
        if (!known || (caught >> (signo - 1) & 1) != 0) return true;
        if ((blocked >> (signo - 1) & 1) == 0) return false;
    }
    return true;
}

[[nodiscard]] inline std::string signal_name(int signo) {
    switch (signo) {
        case SIGHUP: return "SIGHUP";
        case SIGINT: return "SIGINT";
        case SIGQUIT: return "SIGQUIT";
        case SIGILL: return "SIGILL";
        case SIGTRAP: return "SIGTRAP";
        case SIGABRT: return "SIGABRT";
        case SIGBUS: return "SIGBUS";
        case SIGFPE: return "SIGFPE";
        case SIGKILL: return "SIGKILL";
        case SIGUSR1: return "SIGUSR1";
        case SIGUSR2: return "SIGUSR2";
        case SIGSEGV: return "SIGSEGV";
        case SIGPIPE: return "SIGPIPE";
        case SIGALRM: return "SIGALRM";
        case SIGTERM: return "SIGTERM";
        case SIGXCPU: return "SIGXCPU";
        case SIGXFSZ: return "SIGXFSZ";
        case SIGSYS: return "SIGSYS";
        default: return "signal " + std::to_string(signo);
    }
}

}  // namespace ddprun
