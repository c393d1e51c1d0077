// Ranks as processes of one machine, forked: for programs that start their ranks themselves.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ddp/core/error.hpp>
#include <ddp/rendezvous/run.hpp>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "uds_transport.hpp"

namespace uds {

/// A new directory that only this user can enter, where a job's sockets are; removed with them.
class job_directory {
public:
    job_directory() : path_(std::filesystem::temp_directory_path() / "ddp.XXXXXX") {
        if (::mkdtemp(path_.data()) == nullptr) detail::fail(path_, errno);
    }
    job_directory(job_directory const&) = delete;
    job_directory& operator=(job_directory const&) = delete;
    ~job_directory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    [[nodiscard]] std::string const& path() const noexcept { return path_; }

private:
    std::string path_;
};

/// Forks `ranks` children, each of which ends with body(rank) as its exit code, and waits for them. Returns how each
/// ended: its exit code, or minus the signal. No thread may have been started before: a fork has only the thread that
/// called it.
template <class Body>
std::vector<int> fork_ranks(int ranks, Body const& body) {
    std::fflush(nullptr);  // or children write it again
    std::vector<::pid_t> children;
    for (int rank = 0; rank < ranks; ++rank) {
        ::pid_t const child = ::fork();
        if (child < 0) break;  // those that were started miss it, and say so after times.join
        if (child == 0) {
            int code = EXIT_FAILURE;
            try {
                code = body(rank);
            } catch (std::exception const& e) {
                std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
            }
            std::fflush(nullptr);
            ::_exit(code);  // what is the parent's to destroy is not the child's
        }
        children.push_back(child);
    }
    std::vector<int> ended(static_cast<std::size_t>(ranks), EXIT_FAILURE);
    for (std::size_t rank = 0; rank < children.size(); ++rank) {
        int status = 0;
        while (::waitpid(children[rank], &status, 0) < 0 && errno == EINTR) continue;
        ended[rank] = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    }
    return ended;
}

/// A way to start for ddp::run: run_options{.transport = "unix", .ranks = 4} makes four processes, and this one waits.
struct processes {
    static constexpr std::string_view name = "unix";
    [[nodiscard]] static bool detected() noexcept { return false; }  // nothing in the environment asks for it

    template <class Body>
    static void start(ddp::run_options const& options, Body& body) {
        int const ranks = std::max(1, options.ranks);
        job_directory const where;
        std::vector<int> const ended = fork_ranks(ranks, [&](int rank) {
            ddp::communicator<transport> comm(connect(where.path(), rank, ranks, options.times), options.times);
            try {
                body(comm);
            } catch (...) {
                comm.fail(std::current_exception());  // its peers throw what this rank threw
                throw;
            }
            return EXIT_SUCCESS;
        });
        for (std::size_t rank = 0; rank < ended.size(); ++rank)
            if (ended[rank] != EXIT_SUCCESS)
                throw ddp::error(ddp::errc::remote_exception,
                                 "rank " + std::to_string(rank) + " ended with " +
                                     (ended[rank] < 0 ? "signal " + std::to_string(-ended[rank])
                                                      : "exit code " + std::to_string(ended[rank])));
    }
};
static_assert(ddp::Launch<processes>);

}  // namespace uds
