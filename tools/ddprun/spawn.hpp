/// \file
/// Starts one rank: its environment, its descriptors, its process group.
#pragma once

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guardian.hpp"
#include "options.hpp"
#include "posix.hpp"
#include "signals.hpp"

extern char** environ;

namespace ddprun {

using variables = std::vector<std::pair<std::string, std::string>>;

/// What all ranks share of the way they are started.
struct surroundings {
    std::string port;         ///< MASTER_PORT as text
    int listen_fd = -1;       ///< rank 0's, or -1
    int secret_fd = -1;       ///< every rank's, or -1
    int flight_fd = -1;       ///< the rank's own, or -1
    int columns = 0;          ///< of the terminal that rank 0's output reaches; 0: none
    int threads = 0;          ///< OMP_NUM_THREADS; 0: the user has set it
    std::string job_id = {};  ///< DDP_JOB_ID; empty: not set by us
    int restarts = 0;
    std::string flight_dir = {};  ///< DDP_FLIGHT_DIR; empty: none could be made
    std::string marks = {};       ///< DDPRUN_JOBS, by which the guardian finds what the ranks have started
};

[[nodiscard]] inline variables variables_of(options const& with, surroundings const& around, int local) {
    int const rank = with.rank_of(local);
    variables result{{"RANK", std::to_string(rank)},        {"WORLD_SIZE", std::to_string(with.world_size())},
                     {"LOCAL_RANK", std::to_string(local)}, {"LOCAL_WORLD_SIZE", std::to_string(with.local_size)},
                     {"MASTER_ADDR", with.master_addr},     {"MASTER_PORT", around.port}};
    if (around.threads > 0) result.emplace_back("OMP_NUM_THREADS", std::to_string(around.threads));
    if (around.secret_fd >= 0) result.emplace_back("DDP_SECRET_FD", std::to_string(around.secret_fd));
    if (around.flight_fd >= 0) result.emplace_back("DDP_FLIGHT_FD", std::to_string(around.flight_fd));
    if (!around.job_id.empty()) result.emplace_back("DDP_JOB_ID", around.job_id);
    if (!around.flight_dir.empty()) result.emplace_back("DDP_FLIGHT_DIR", around.flight_dir);
    if (!around.marks.empty()) result.emplace_back(marks_variable, around.marks);
    if (with.max_restarts > 0) result.emplace_back("DDP_RESTART_COUNT", std::to_string(around.restarts));
    if (rank == 0) {
        if (around.listen_fd >= 0) result.emplace_back("DDP_LISTEN_FD", std::to_string(around.listen_fd));
        if (around.columns > 0) {
            result.emplace_back("DDP_TTY", "1");
            result.emplace_back("COLUMNS", std::to_string(around.columns));
        }
    }
    return result;
}

/// Whether an outer launcher meant this variable for one of its ranks: ours would take it for theirs.
[[nodiscard]] inline bool is_anothers(std::string_view name, bool own_secret) {
    for (std::string_view const one :
         {"DDP_LISTEN_FD", "DDP_FLIGHT_FD", "DDP_TTY", "DDP_RANK", "DDP_WORLD_SIZE", "DDP_LOCAL_RANK",
          "DDP_LOCAL_WORLD_SIZE", "DDP_MASTER_ADDR", "DDP_MASTER_PORT", "DDP_RESTART_COUNT"})
        if (name == one) return true;
    return name.starts_with("TORCHELASTIC_") || (own_secret && name == "DDP_SECRET_FD");
}

/// ddprun's own environment with `mine` in it, and without what an outer launcher meant for one of its ranks.
[[nodiscard]] inline std::vector<std::string> environment_with(variables const& mine, bool own_secret) {
    std::vector<std::string> result;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        std::string_view const text = *entry;
        std::string_view const name = text.substr(0, text.find('='));
        bool keep = !is_anothers(name, own_secret);
        for (auto const& [key, value] : mine) keep = keep && key != name;
        if (keep) result.emplace_back(text);
    }
    for (auto const& [key, value] : mine) result.push_back(key + "=" + value);
    return result;
}

struct started {
    pid_t pid = -1;
    unique_fd out, err;  ///< read ends, non-blocking
    bool runs = false;   ///< the program; otherwise the system is still loading it
};

namespace detail {

inline launch_error exec_failure(std::string const& program, int code) {
    std::string text = "cannot run '" + program + "': " + std::strerror(code);
    bool const is_path = program.find('/') != std::string::npos;
    struct stat info;
    bool const is_here = ::stat(program.c_str(), &info) == 0;
    if (code == ENOENT && is_path && is_here)
        text += ". It is there, but what its first line (#!) or its ELF header asks for is not.";
    else if (code == ENOENT && !is_path)
        text += is_here ? " in PATH. Did you mean ./" + program + "?" : " in PATH";
    else if (code == EACCES && is_here && S_ISDIR(info.st_mode))
        text += ". It is a directory.";
    else if (code == EACCES && is_here)
        text += ". Does it lack execute permission (chmod +x)?";
    bool const missing = code == ENOENT || code == ENOTDIR;
    return {missing ? exit_not_found : exit_not_executable, text};
}

}  // namespace detail

/// One process to start.
struct start_order {
    std::vector<std::string> command, environment;
    int standard_input = -1;                   ///< -1: nothing
    std::vector<int> inherited;                ///< descriptors that it gets under their numbers
    std::vector<int> cores;                    ///< it may run there only; none: everywhere
    std::chrono::milliseconds patience{2000};  ///< for the system to load the program
};

/// Returns once it runs: a program that cannot be run is a launch_error, not a rank that failed. Where the program's file system
/// does not answer, exec() waits for as long: then the process is returned as one that does not run yet (`runs`). Should exec()
/// fail later, it says why on its stderr, and ends with the launch_error's exit code.
///
/// Each rank leads a process group of its own. So a Ctrl-C at the terminal reaches ddprun alone, which passes it on
/// once; and what a rank has started can be ended with it. The price: no rank can read from the terminal.
[[nodiscard]] inline started spawn(start_order const& order, signal_state const& outer) {
    std::vector<char*> argv, envp;
    for (auto const& word : order.command) argv.push_back(const_cast<char*>(word.c_str()));
    for (auto const& entry : order.environment) envp.push_back(const_cast<char*>(entry.c_str()));
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (int const core : order.cores) CPU_SET(static_cast<std::size_t>(core), &cores);

    pipe_ends out = make_pipe(), err = make_pipe(), status = make_pipe();
    unique_fd const nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!nothing) throw_errno("/dev/null");
    pid_t const launcher = ::getpid();
    pid_t const pid = ::fork();
    if (pid < 0) throw_errno("cannot start a process (ulimit -u?)");
    if (pid == 0) {
        ::setpgid(0, 0);
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        // A write into the status pipe is to fail once the launcher reads no longer.
        status.read.reset();
        if (::getppid() != launcher) ::_exit(exit_launcher);  // it died before prctl: nobody would kill us
        // The mask is a wish: where a container forbids it, the rank runs everywhere.
        if (!order.cores.empty()) ::sched_setaffinity(0, sizeof cores, &cores);
        if (order.standard_input != STDIN_FILENO)
            ::dup2(order.standard_input < 0 ? nothing.get() : order.standard_input, STDIN_FILENO);
        ::dup2(out.write.get(), STDOUT_FILENO);
        ::dup2(err.write.get(), STDERR_FILENO);
        for (int const fd : order.inherited) ::fcntl(fd, F_SETFD, 0);
        ::sigaction(SIGPIPE, &outer.pipe, nullptr);
        ::sigaction(SIGXFSZ, &outer.file_size, nullptr);
        ::sigprocmask(SIG_SETMASK, &outer.mask, nullptr);
        ::execvpe(argv[0], argv.data(), envp.data());
        int const code = errno;
        ::signal(SIGPIPE, SIG_IGN);  // nobody may be reading by now
        if (::write(status.write.get(), &code, sizeof code) != sizeof code)
            ::dprintf(STDERR_FILENO, "ddprun: %s\n", detail::exec_failure(order.command.front(), code).what());
        ::_exit(detail::exec_failure(order.command.front(), code).exit_code());
    }
    ::setpgid(pid, pid);  // both do: whoever comes first
    out.write.reset();
    err.write.reset();
    status.write.reset();

    int code = 0;
    ssize_t n = 0;
    pollfd said{status.read.get(), POLLIN, 0};
    bool const runs = ::poll(&said, 1, static_cast<int>(order.patience.count())) > 0;
    while (runs && (n = ::read(status.read.get(), &code, sizeof code)) < 0 && errno == EINTR) {
    }
    if (n == sizeof code) {
        ::waitpid(pid, nullptr, 0);
        throw detail::exec_failure(order.command.front(), code);
    }
    ::fcntl(out.read.get(), F_SETFL, O_NONBLOCK);
    ::fcntl(err.read.get(), F_SETFL, O_NONBLOCK);
    return {pid, std::move(out.read), std::move(err.read), runs};
}

}  // namespace ddprun
