/// \file
/// A small process that ends what the ranks have started should ddprun itself be killed.
///
/// The kernel kills the ranks then (PR_SET_PDEATHSIG), but not what they have started: behind a shell script as program
/// the training itself would go on for ever. The guardian kills the ranks' process groups, then what has left them (setsid,
/// timeout): the ranks inherit a mark in their environment, by which it finds such processes in /proc.
#pragma once

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "descendants.hpp"
#include "posix.hpp"
#include "secret.hpp"

namespace ddprun {

/// The variable with the marks of the jobs of which a process is a part: of this ddprun's, and of those around it.
inline constexpr char const* marks_variable = "DDPRUN_JOBS";

/// The processes, other than this one, in whose environment `mark` was when they were started, as far as that can be read,
/// and which the job has left behind: whose parent is one of them, or the one that processes get whose parent has ended. (A
/// batch system or a daemon may hand a job's environment to processes of its own: those have other parents.)
[[nodiscard]] inline std::vector<pid_t> left_with(std::string const& mark) {
    std::vector<std::pair<pid_t, pid_t>> marked;  // with their parents
    pid_t const reaper = ::getppid();             // as this process was ddprun's child too
    DIR* const directory = ::opendir("/proc");
    if (directory == nullptr) return {};
    std::string text;
    while (dirent const* const entry = ::readdir(directory)) {
        if (std::isdigit(static_cast<unsigned char>(entry->d_name[0])) == 0) continue;
        pid_t const pid = static_cast<pid_t>(std::atol(entry->d_name));
        if (pid == ::getpid()) continue;
        unique_fd const file(
            ::open((std::string("/proc/") + entry->d_name + "/environ").c_str(), O_RDONLY | O_CLOEXEC));
        if (!file) continue;
        text.clear();
        char part[4096];
        ssize_t n;
        while ((n = ::read(file.get(), part, sizeof part)) > 0) text.append(part, static_cast<std::size_t>(n));
        if (text.find(mark) != std::string::npos) marked.emplace_back(pid, parent_of(entry->d_name));
    }
    ::closedir(directory);
    std::vector<pid_t> found;
    for (auto const& [pid, parent] : marked)
        if (parent == reaper ||
            std::any_of(marked.begin(), marked.end(), [&](auto const& other) { return other.first == parent; }))
            found.push_back(pid);
    return found;
}

class guardian {
public:
    /// Call before anything is opened or started: the guardian must not hold what others wait to see closed.
    guardian() {
        secret_bytes const random = random_secret();
        for (std::size_t i = 0; i < 16; ++i) mark_ += hexadecimal(random[i]);
        pipe_ends ends = make_pipe();
        pid_ = ::fork();
        if (pid_ < 0) throw_errno("cannot start a process");
        if (pid_ == 0) {
            ends.write.reset();  // or it would never see the end of the orders
            watch_over(ends.read.get(), mark_);
        }
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
    /// For all ranks, as marks_variable: this job's mark behind those of the jobs around it, whose guardians look for theirs.
    [[nodiscard]] std::string marks() const {
        char const* const outer = std::getenv(marks_variable);
        return outer == nullptr || *outer == '\0' ? mark_ : std::string(outer) + ":" + mark_;
    }
    void watch(pid_t group) noexcept { tell(group); }
    void forget(pid_t group) noexcept { tell(-group); }  // its number may soon be another's

private:
    // Less than PIPE_BUF: written whole. A guardian that is gone is no reason to stop (SIGPIPE is ignored).
    void tell(pid_t order) noexcept { [[maybe_unused]] ssize_t const n = ::write(orders_.get(), &order, sizeof order); }

    [[noreturn]] static void watch_over(int orders, std::string const& mark) {
        sigset_t all;
        ::sigfillset(&all);
        ::sigprocmask(SIG_SETMASK, &all, nullptr);
        ::setpgid(0, 0);  // a kill of ddprun's whole group must spare the guardian
        ::prctl(PR_SET_NAME, "ddprun-guardian");
        int const nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
        for (int fd : {0, 1, 2}) ::dup2(nothing, fd);
        if (orders != 3) ::dup2(orders, 3);
        if (::close_range(4, ~0U, 0) != 0)  // before Linux 5.9, or where a sandbox does not know it
            for (int fd = 4; fd < 1024; ++fd) ::close(fd);
        if (::chdir("/") != 0) ::_exit(1);

        std::vector<pid_t> groups;
        pid_t order = 0;
        for (;;) {
            ssize_t const n = ::read(3, &order, sizeof order);
            if (n < 0 && errno == EINTR) continue;
            if (n != sizeof order) break;
            if (order > 0) groups.push_back(order);
            if (order < 0) groups.erase(std::remove(groups.begin(), groups.end(), -order), groups.end());
            if (order == 0) ::_exit(0);  // ddprun itself has ended everything
        }
        for (pid_t const group : groups) ::kill(-group, SIGKILL);
        end_marked(mark);
        ::_exit(0);
    }

    /// Until three scans find none, as a process in the middle of an exec has no environment, and processes get another
    /// parent while ddprun ends; for about a second at most.
    static void end_marked(std::string const& mark) {
        for (int scan = 0, clean = 0; scan < 100 && clean < 3; ++scan) {
            std::vector<pid_t> const found = left_with(mark);
            for (pid_t const pid : found) ::kill(pid, SIGKILL);
            clean = found.empty() ? clean + 1 : 0;
            ::poll(nullptr, 0, 10);
        }
    }

    std::string mark_;
    pid_t pid_ = -1;
    unique_fd orders_;
};

}  // namespace ddprun
