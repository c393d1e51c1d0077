/// \file
/// The running job: one loop over signals, clocks and the ranks' output.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "descendants.hpp"
#include "guardian.hpp"
#include "listener.hpp"
#include "options.hpp"
#include "output.hpp"
#include "posix.hpp"
#include "rank.hpp"
#include "signals.hpp"
#include "spawn.hpp"
#include "verdict.hpp"

namespace ddprun {

/// One use: construct, run().
class job {
public:
    explicit job(options const& with)
        : with_(with),
          out_(STDOUT_FILENO),
          own_err_(STDERR_FILENO),
          err_(same_place(STDOUT_FILENO, STDERR_FILENO) ? out_ : own_err_) {
        ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    }
    job(job const&) = delete;
    job& operator=(job const&) = delete;
    ~job() {
        for (running_rank const& rank : ranks_)
            if (rank.group_lives) ::kill(-rank.pid, SIGKILL);
        end_descendants(guardian_.pid());
        out_.pump();
        err_.pump();
    }

    /// Starts the ranks, sees them through, and returns the job's exit code.
    int run() {
        start();
        while (!all_ended() || (any_open() && monotonic_clock::now() < drain_until_)) {
            keep_deadlines();
            turn();
        }
        // Whoever still holds a pipe is a process that a rank has left behind.
        for (running_rank const& rank : ranks_)
            if (rank.group_lives) ::kill(-rank.pid, SIGKILL);
        end_descendants(guardian_.pid());
        for (running_rank& rank : ranks_) {
            rank.out.finish();
            rank.err.finish();
        }
        int const code = conclude();
        // A pager may take its time, but not once the user has said twice that it is enough.
        deadline_ = interrupts_ > 1 ? monotonic_clock::now() + flush_for : monotonic_clock::time_point::max();
        while (!abandoned_ && !(out_.idle() && err_.idle()) && monotonic_clock::now() < deadline_) turn();
        return code;
    }

private:
    using monotonic_clock = std::chrono::steady_clock;

    enum class stage {
        running,
        grace,   ///< one rank has failed: the others may end by themselves until deadline_
        asked,   ///< SIGTERM was sent
        killed,  ///< SIGKILL was sent
    };

    static constexpr std::chrono::seconds asked_for{1};       // between SIGTERM and SIGKILL
    static constexpr std::chrono::seconds dying_for{10};      // after SIGKILL
    static constexpr std::chrono::seconds drain_for{1};       // for output of what ranks that have ended left behind
    static constexpr std::chrono::seconds grace_to_save{10};  // after a signal passed on: ranks write checkpoints then
    static constexpr std::chrono::seconds flush_for{1};       // for what was not read when the user gave up

    void say(std::string const& text) { err_.line("", text); }

    void start() {
        surroundings around;
        std::optional<listener> listening;
        if (with_.node_rank == 0) {
            listening = listen_on(with_.master_addr, with_.master_port);
            if (!listening && (with_.nodes == 1 || with_.master_port == 0))
                throw launch_error(exit_launcher, "--master-addr " + with_.master_addr +
                                                      " is not an address of this machine, where rank 0 is to run");
        }
        around.port = std::to_string(listening ? listening->port : with_.master_port);
        around.listen_fd = listening ? listening->socket.get() : -1;
        around.one_thread = ::getenv("OMP_NUM_THREADS") == nullptr;
        if (out_.terminal()) around.columns = columns(with_.prefix == prefix_mode::rank ? 4 : 0);
        if (with_.verbose) {
            say("ddprun: starting ranks " + std::to_string(with_.rank_of(0)) + " to " +
                std::to_string(with_.rank_of(with_.local_size - 1)) + " of " + std::to_string(with_.world_size()) +
                ", meeting at " + with_.master_addr + ":" + around.port +
                (listening ? " (rank 0 inherits the listening socket)" : ""));
            if (around.one_thread) say("ddprun: OMP_NUM_THREADS=1 for all ranks; set it yourself to change that");
        }

        for (int local = 0; local < with_.local_size; ++local) {
            int const rank = with_.rank_of(local);
            bool const first = rank == 0;
            auto const environment = environment_with(variables_of(with_, around, local));
            started child = spawn(with_.command, environment, first && ::isatty(STDIN_FILENO) == 0,
                                  first ? around.listen_fd : -1, signals_.before());
            guardian_.watch(child.pid);
            ranks_.emplace_back(
                rank, child.pid,
                output_of_rank(std::move(child.out), out_, prefix_for(with_.prefix, rank, out_), first),
                output_of_rank(std::move(child.err), err_, prefix_for(with_.prefix, rank, err_), first));
            if (with_.verbose) say("ddprun: rank " + std::to_string(rank) + " is pid " + std::to_string(child.pid));
        }
    }

    /// Of the terminal, less what the prefix takes.
    [[nodiscard]] static int columns(int prefix_width) {
        winsize size{};
        int const width = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
        return std::max(width - prefix_width, 20);
    }

    [[nodiscard]] bool all_ended() const {
        for (running_rank const& rank : ranks_)
            if (!rank.end) return false;
        return true;
    }
    [[nodiscard]] bool any_open() const {
        for (running_rank const& rank : ranks_)
            if (rank.out.open() || rank.err.open()) return true;
        return false;
    }

    /// Signals the groups of all ranks, whatever is left of them.
    void signal_groups(int signo) {
        for (running_rank const& rank : ranks_)
            if (rank.group_lives) ::kill(-rank.pid, signo);
    }

    void keep_deadlines() {
        if (all_ended() || monotonic_clock::now() < deadline_) return;
        if (stage_ == stage::grace) {
            stage_ = stage::asked;
            deadline_ = monotonic_clock::now() + asked_for;
            signal_groups(SIGTERM);
            signal_groups(SIGCONT);  // one that is stopped would never hear of it
        } else if (stage_ == stage::asked) {
            kill_all();
        } else if (stage_ == stage::killed) {
            // In the middle of a call to a disk, driver or server that does not answer.
            for (running_rank& rank : ranks_)
                if (!rank.end) {
                    say("ddprun: rank " + std::to_string(rank.rank) + " (pid " + std::to_string(rank.pid) +
                        ") cannot be killed now, and is left behind");
                    ended(rank, SIGKILL);
                }
            drain_until_ = monotonic_clock::now();
        }
    }

    void kill_all() {
        stage_ = stage::killed;
        deadline_ = monotonic_clock::now() + dying_for;
        signal_groups(SIGKILL);
    }

    /// Waits for something to happen, and deals with it.
    void turn() {
        std::vector<pollfd> polled{{signals_.fd(), POLLIN, 0},
                                   {out_.idle() ? -1 : out_.fd(), POLLOUT, 0},
                                   {err_.idle() ? -1 : err_.fd(), POLLOUT, 0}};
        for (running_rank const& rank : ranks_) {
            polled.push_back({rank.out.wanted_fd(), POLLIN, 0});
            polled.push_back({rank.err.wanted_fd(), POLLIN, 0});
        }
        if (::poll(polled.data(), polled.size(), patience()) < 0) return;  // EINTR: after a stop

        for (std::size_t i = 0; i < ranks_.size(); ++i) {
            if (polled[3 + 2 * i].revents != 0) ranks_[i].out.move_some();
            if (polled[4 + 2 * i].revents != 0) ranks_[i].err.move_some();
        }
        out_.pump();
        err_.pump();
        while (int const signo = signals_.next()) on_signal(signo);
    }

    /// Milliseconds until a deadline of ours, or -1.
    [[nodiscard]] int patience() const {
        monotonic_clock::time_point const until = all_ended() && any_open() ? drain_until_ : deadline_;
        if (until == monotonic_clock::time_point::max()) return -1;
        auto const left = std::chrono::ceil<std::chrono::milliseconds>(until - monotonic_clock::now()).count();
        return static_cast<int>(std::max<decltype(left)>(left, 0));
    }

    void on_signal(int signo) {
        if (signo == SIGCHLD) return reap();
        if (all_ended()) {  // only output is left, and nobody to pass a signal on to
            if (signo == SIGTSTP) ::raise(SIGSTOP);
            if (signo == SIGUSR1 || signo == SIGUSR2 || signo == SIGTSTP) return;
            abandoned_ = true;
            drain_until_ = monotonic_clock::now();
            return;
        }
        if (signo == SIGTSTP) {
            signal_groups(SIGTSTP);
            ::raise(SIGSTOP);  // here until somebody says SIGCONT
            return signal_groups(SIGCONT);
        }
        if (signo == SIGUSR1 || signo == SIGUSR2) {  // their default is death: not for what a rank has started
            for (running_rank const& rank : ranks_)
                if (!rank.end) ::kill(rank.pid, signo);
            return;
        }
        if (signo == SIGINT && ++interrupts_ > 1) {
            say("ddprun: second SIGINT: killing all ranks");
            return kill_all();
        }
        if (passed_on_ == 0) {
            passed_on_ = signo;
            say("ddprun: " + signal_name(signo) + " passed on to all ranks" +
                (signo == SIGINT ? "; once more kills them" : ""));
        }
        signal_groups(signo);
    }

    void reap() {
        ++batch_;
        int status = 0;
        for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;)
            for (running_rank& rank : ranks_)
                if (rank.pid == pid && !rank.end) ended(rank, status);
        for (running_rank& rank : ranks_)  // the group outlives its leader, and its number may be another's after that
            if (rank.end && rank.group_lives && ::kill(-rank.pid, 0) != 0 && errno == ESRCH) {
                rank.group_lives = false;
                guardian_.forget(rank.pid);
            }
        if (all_ended()) drain_until_ = std::min(drain_until_, monotonic_clock::now() + drain_for);
    }

    void ended(running_rank& rank, int status) {
        auto const now = monotonic_clock::now();
        std::chrono::duration<double> const seconds = now - rank.since;
        rank.end = ending{.rank = rank.rank,
                          .pid = rank.pid,
                          .status = status,
                          .seconds = seconds.count(),
                          .batch = batch_,
                          .by_us = stage_ == stage::asked || stage_ == stage::killed,
                          .passed_on = passed_on_};
        if (!rank.end->failed() || stage_ != stage::running) return;
        stage_ = stage::grace;
        deadline_ =
            now + (passed_on_ != 0 ? std::max<std::chrono::milliseconds>(with_.grace, grace_to_save) : with_.grace);
    }

    /// Says who failed first, last of all. Returns the job's exit code.
    int conclude() {
        if (out_.problem() != 0 && out_.problem() != EPIPE)
            say(std::string("ddprun: the ranks' output could not be written: ") + std::strerror(out_.problem()));
        std::vector<ending> endings;
        for (running_rank& rank : ranks_) {
            rank.end->last_words = rank.err.words().text();
            rank.end->accuses_a_peer = rank.err.words().accuse_a_peer();
            endings.push_back(*rank.end);
        }
        if (ending const* const culprit = first_culprit(endings)) {
            say(describe(*culprit, endings));
            return culprit->exit_code();
        }
        if (stage_ == stage::killed) return 128 + SIGINT;  // at the user's wish, before any rank had failed
        return 0;
    }

    options const& with_;
    guardian guardian_;
    sink out_, own_err_;
    sink& err_;
    signal_source signals_;
    std::deque<running_rank> ranks_;  // their outputs' addresses are owners of lines: they never move
    stage stage_ = stage::running;
    monotonic_clock::time_point deadline_ = monotonic_clock::time_point::max();
    monotonic_clock::time_point drain_until_ = monotonic_clock::time_point::max();
    int batch_ = 0;
    int interrupts_ = 0;
    int passed_on_ = 0;
    bool abandoned_ = false;
};

}  // namespace ddprun
