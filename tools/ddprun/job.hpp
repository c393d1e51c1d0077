/// \file
/// The running job: one loop over signals, clocks and the ranks' output.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ddp/checkpoint/stop_signals.hpp>

#include "cores.hpp"
#include "descendants.hpp"
#include "flight.hpp"
#include "flight_memory.hpp"
#include "guardian.hpp"
#include "listener.hpp"
#include "options.hpp"
#include "output.hpp"
#include "posix.hpp"
#include "rank.hpp"
#include "remote.hpp"
#include "report.hpp"
#include "secret.hpp"
#include "signals.hpp"
#include "spawn.hpp"
#include "verdict.hpp"

namespace ddprun {

/// What all attempts at one job share.
struct job_surroundings {
    options const& with;
    signal_source& signals;
    std::optional<orders> given = {};  ///< by a ddprun elsewhere
    std::string name = {};             ///< of the job, the same for each attempt; empty: none
};

/// One attempt. One use: construct, run().
class job {
public:
    job(job_surroundings const& all, int attempt)
        : with_(all.with),
          signals_(all.signals),
          given_(all.given ? &*all.given : nullptr),
          attempt_(given_ != nullptr ? given_->restarts : attempt),
          id_(given_ != nullptr ? given_->job_id : (all.name.empty() ? "" : all.name + "/" + std::to_string(attempt))),
          secret_(given_ != nullptr ? given_->secret : random_secret()),
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

    /// Somebody wanted the job to end: it is not to be started again.
    [[nodiscard]] bool interrupted() const noexcept { return passed_on_ != 0 || interrupts_ > 0 || abandoned_; }
    /// A rank failed, and neither ddprun nor what it writes to.
    [[nodiscard]] bool failed_by_itself() const noexcept { return culprit_; }

    void say(std::string const& text) { err_.line("", text); }

    /// Starts the ranks, sees them through, and returns the job's exit code.
    int run() {
        if (with_.hosts.empty())
            start();
        else
            start_hosts();
        while (!all_ended() || (any_open() && monotonic_clock::now() < drain_until_)) {
            keep_deadlines();
            turn();
        }
        if (story_due_ != monotonic_clock::time_point::max())
            tell_story();  // the ranks ended before they had answered, or after
        // Whoever still holds a pipe is a process that a rank has left behind.
        for (running_rank const& rank : ranks_)
            if (rank.group_lives) ::kill(-rank.pid, SIGKILL);
        end_descendants(guardian_.pid());
        for (running_rank& rank : ranks_) {
            rank.out.finish();
            rank.err.finish();
        }
        int code = conclude();
        // A pager may take its time, but not once the user has said twice that it is enough.
        deadline_ = interrupts_ > 1 ? monotonic_clock::now() + flush_for : monotonic_clock::time_point::max();
        while (!abandoned_ && !(out_.idle() && err_.idle()) && monotonic_clock::now() < deadline_) turn();
        for (sink const* to : {&out_, &err_})  // what was said last may be what the disk had no room for
            if (code == 0 && to->problem() != 0 && to->problem() != EPIPE) {
                say_lost("the ranks' output", to->problem());
                code = exit_launcher;
            }
        err_.pump();
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
    static constexpr std::chrono::seconds grace_to_save{10};  // where ranks may be writing checkpoints: they stop
    static constexpr std::chrono::milliseconds answer_within{700};  // for ranks to write after SIGUSR2
    static constexpr std::chrono::seconds reporting_for{1};         // for hosts to report that
    static constexpr std::chrono::seconds flush_for{1};             // for what was not read when the user gave up

    void say_lost(std::string const& what, int problem) {
        say("ddprun: " + what + " could not be written: " + std::strerror(problem));
    }

    void start() {
        surroundings around;
        std::optional<listener> listening;
        if (with_.rank_of(0) == 0) {
            listening = listen_on(with_.master_addr, with_.master_port, with_.nodes > 1);
            if (!listening && (with_.nodes == 1 || with_.master_port == 0))
                throw launch_error(exit_launcher, "--master-addr " + with_.master_addr +
                                                      " is not an address of this machine, where rank 0 is to run");
        }
        // Launchers on several machines cannot agree on a secret: the user gives one, in DDP_SECRET_FILE.
        bool const own_secret = given_ != nullptr || (with_.nodes == 1 && ::getenv("DDP_SECRET_FILE") == nullptr);
        unique_fd const secret = own_secret ? sealed(secret_) : unique_fd();
        around.port = std::to_string(listening ? listening->port : with_.master_port);
        around.listen_fd = listening ? listening->socket.get() : -1;
        around.secret_fd = secret.get();
        around.job_id = id_;
        around.restarts = attempt_;
        flights_.emplace(with_.flight_dir, attempt_, with_.rank_of(0), with_.local_size);
        if (!flights_->problem().empty()) say("ddprun: warning: --flight-dir: " + flights_->problem());
        around.flight_dir = flights_->path();
        around.marks = guardian_.marks();
        int const usable = usable_cores();
        std::vector<int> const cores = with_.bind ? cores_in_mask() : std::vector<int>();
        if (::getenv("OMP_NUM_THREADS") == nullptr) around.threads = std::max(usable / with_.local_size, 1);
        if (out_.terminal()) around.columns = columns(with_.prefix == prefix_mode::rank ? 4 : 0);
        if (with_.verbose) {
            say("ddprun: starting ranks " + std::to_string(with_.rank_of(0)) + " to " +
                std::to_string(with_.rank_of(with_.local_size - 1)) + " of " + std::to_string(with_.world_size()) +
                ", meeting at " + with_.master_addr + ":" + around.port +
                (listening ? " (rank 0 inherits the listening socket)" : ""));
            if (around.threads > 0)
                say("ddprun: OMP_NUM_THREADS=" + std::to_string(around.threads) +
                    " for all ranks; set it yourself to change that");
        }

        for (int local = 0; local < with_.local_size; ++local) {
            int const rank = with_.rank_of(local);
            bool const first = rank == 0;
            flight_memory flight;
            around.flight_fd = flight.fd();
            start_order order;
            order.command = with_.command;
            order.environment = environment_with(variables_of(with_, around, local), own_secret);
            if (first && given_ == nullptr && ::isatty(STDIN_FILENO) == 0) order.standard_input = STDIN_FILENO;
            if (first && around.listen_fd >= 0) order.inherited.push_back(around.listen_fd);
            if (around.secret_fd >= 0) order.inherited.push_back(around.secret_fd);
            if (around.flight_fd >= 0) order.inherited.push_back(around.flight_fd);
            order.cores = cores_of(cores, usable, local, with_.local_size);
            unique_fd out_file = log_file(rank, "out", 1), err_file = log_file(rank, "err", 2);
            started child = spawn_promptly(order, "rank " + std::to_string(rank));
            ranks_.emplace_back(rank, child.pid,
                                output_of_rank(std::move(child.out), out_, prefix_for(with_.prefix, rank, out_), first,
                                               (with_.shown & 1U) != 0, std::move(out_file)),
                                output_of_rank(std::move(child.err), err_, prefix_for(with_.prefix, rank, err_), first,
                                               (with_.shown & 2U) != 0, std::move(err_file)));
            flight.handed_down();
            ranks_.back().flight.emplace(std::move(flight));
            if (with_.verbose)
                say("ddprun: rank " + std::to_string(rank) + " is pid " + std::to_string(child.pid) +
                    cores_said(order));
        }
    }

    /// Starts a process that ends with this one. Says so if the system does not load its program within a time; nobody that
    /// follows is then waited for.
    [[nodiscard]] started spawn_promptly(start_order& order, std::string const& who) {
        order.patience = patience_;
        started child = spawn(order, signals_.before());
        guardian_.watch(child.pid);
        if (child.runs || patience_.count() == 0) return child;
        say("ddprun: warning: " + who + " (pid " + std::to_string(child.pid) +
            ") does not run yet: the system is still " + "loading '" + order.command.front() + "' after " +
            std::to_string(patience_.count()) +
            " ms. Does its file system answer? (Of others that do not run either, nothing is said.)");
        err_.pump();
        patience_ = std::chrono::milliseconds(0);
        return child;
    }

    [[nodiscard]] static std::string cores_said(start_order const& order) {
        std::string text;
        for (int const core : order.cores) text += (text.empty() ? " on core " : ", ") + std::to_string(core);
        if (order.cores.size() > 1) text.insert(8, "s");
        return text;
    }

    /// Nothing unless that stream is to be written there.
    [[nodiscard]] unique_fd log_file(int rank, std::string const& kind, unsigned stream) const {
        if (with_.log_dir.empty() || (with_.in_files & stream) == 0) return {};
        std::error_code problem;
        std::filesystem::create_directories(with_.log_dir, problem);
        std::string const path = with_.log_dir + "/rank-" + std::to_string(rank) +
                                 (attempt_ == 0 ? "" : ".restart-" + std::to_string(attempt_)) + "." + kind;
        unique_fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
        if (!file) throw_errno("--log-dir: cannot write " + path);
        return file;
    }

    /// A ddprun on each host, with its part of the ranks.
    void start_hosts() {
        orders each{.with = with_, .secret = secret_, .job_id = id_, .restarts = attempt_};
        secret_bytes const token = random_secret();  // not the job's, which programs know
        for (std::size_t i = 0; i < 8; ++i) each.token += hexadecimal(token[i]);
        each.with.nodes = static_cast<int>(with_.hosts.size());
        each.with.carried = carried_variables(with_);
        bool const asks = with_.launch_agent.empty();  // otherwise it does not matter
        std::vector<bool> here;
        for (host const& one : with_.hosts) here.push_back(asks && is_this_host(one.name));
        bool const all_here = std::find(here.begin(), here.end(), false) == here.end();
        if (with_.master_addr.empty()) {
            std::string const& first = with_.hosts.front().name;
            each.with.master_addr = all_here ? "127.0.0.1" : first.substr(first.find('@') + 1);
        }
        if (with_.master_port == 0) {  // one that kernels do not hand out: nobody can look from here what is free there
            secret_bytes const random = random_secret();  // other bytes than the secret's: the port is no secret
            each.with.master_port = static_cast<std::uint16_t>(15000 + (random[0] * 256 + random[1]) % 16000);
        }
        std::string const directory = std::filesystem::current_path().string();
        int first_rank = 0;
        for (std::size_t i = 0; i < with_.hosts.size(); ++i) {
            host const& one = with_.hosts[i];
            each.with.node_rank = static_cast<int>(i);
            each.with.first_rank = first_rank;
            each.with.local_size = one.slots;
            pipe_ends control = make_pipe();
            start_order order;
            order.command = agent_command(with_, one.name, here[i]);
            for (char** entry = environ; *entry != nullptr; ++entry) order.environment.emplace_back(*entry);
            order.standard_input = control.read.get();
            started child = spawn_promptly(order, "host " + one.name);
            ::fcntl(control.write.get(), F_SETFL, O_NONBLOCK);
            running_rank& part = ranks_.emplace_back(
                static_cast<int>(i), child.pid,
                output_of_rank(std::move(child.out), out_, "", false, true, unique_fd(), each.token),
                output_of_rank(std::move(child.err), err_, "", false, true, unique_fd(), each.token));
            part.host = one.name +
                        (one.slots == 1 ? " (rank " + std::to_string(first_rank)
                                        : " (ranks " + std::to_string(first_rank) + " to " +
                                              std::to_string(first_rank + one.slots - 1)) +
                        ")";
            part.control = std::move(control.write);
            part.unsent = write_orders(each, directory);
            send(part);
            if (with_.verbose) say("ddprun: host " + part.host + " is reached by pid " + std::to_string(child.pid));
            first_rank += one.slots;
        }
    }

    /// What a host has yet to be told, as far as its pipe takes it.
    static void send(running_rank& part) {
        while (part.control && !part.unsent.empty()) {
            ssize_t const n = ::write(part.control.get(), part.unsent.data(), part.unsent.size());
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 && errno == EAGAIN) return;
            if (n < 0) return part.control.reset();  // it is gone, which its end will tell
            part.unsent.erase(0, static_cast<std::size_t>(n));
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
        for (running_rank& rank : ranks_) {
            if (rank.host.empty() || signo == SIGKILL) {
                rank.control.reset();  // the end of its orders ends the ranks of a host
                if (rank.group_lives) ::kill(-rank.pid, signo);
            } else {
                rank.unsent.push_back(static_cast<char>(signo));
                send(rank);
            }
        }
    }

    /// What the ranks have answered to SIGUSR2.
    void tell_story() {
        story_due_ = monotonic_clock::time_point::max();
        if (given_ != nullptr) return report(questions_);
        if (std::string const story = story_of(reports_of(questions_), true); !story.empty())
            say(std::string("ddprun: SIGUSR2 was passed on; the ranks ") + (with_.hosts.empty() ? "here " : "") +
                "say:" + story + records_kept());
    }
    /// To the ddprun that gave the orders.
    void report(int question) {
        for (std::string const& line : report_lines::write(given_->token, question, reports_of(question))) say(line);
    }
    /// Whether every host on which ranks still run has reported what they answered.
    [[nodiscard]] bool hosts_have_answered() const {
        return !with_.hosts.empty() && std::ranges::all_of(ranks_, [&](running_rank const& host) {
            return host.end || !host.out.reports_of(questions_).empty() || !host.err.reports_of(questions_).empty();
        });
    }

    void keep_deadlines() {
        if (story_due_ != monotonic_clock::time_point::max() &&
            (monotonic_clock::now() >= story_due_ || hosts_have_answered()))
            tell_story();
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
        for (running_rank const& rank : ranks_)
            if (rank.control && !rank.unsent.empty()) polled.push_back({rank.control.get(), POLLOUT, 0});
        polled.push_back({given_ != nullptr && !orphaned_ ? STDIN_FILENO : -1, POLLIN, 0});
        if (::poll(polled.data(), polled.size(), patience()) < 0) return;  // EINTR: after a stop

        for (std::size_t i = 0; i < ranks_.size(); ++i) {
            if (polled[3 + 2 * i].revents != 0) ranks_[i].out.move_some();
            if (polled[4 + 2 * i].revents != 0) ranks_[i].err.move_some();
        }
        out_.pump();
        err_.pump();
        for (running_rank& rank : ranks_) send(rank);
        if (polled.back().revents != 0) hear();
        while (int const signo = signals_.next()) on_signal(signo);
    }

    /// What the ddprun that gave the orders says: signals for the ranks; when it ends, so do they.
    void hear() {
        char bytes[64];
        ssize_t const n = ::read(STDIN_FILENO, bytes, sizeof bytes);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
        if (n <= 0) {
            orphaned_ = true;
            if (!all_ended()) kill_all();
            return;
        }
        for (char const byte : std::string_view(bytes, static_cast<std::size_t>(n)))
            for (int const signo : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2})
                if (byte == signo) on_signal(signo);
    }

    /// Milliseconds until a deadline of ours, or -1.
    [[nodiscard]] int patience() const {
        monotonic_clock::time_point const until =
            std::min(story_due_, all_ended() && any_open() ? drain_until_ : deadline_);
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
            bool const here = with_.hosts.empty();  // ranks elsewhere go on
            if (here) signal_groups(SIGTSTP);
            ::raise(SIGSTOP);  // here until somebody says SIGCONT
            if (here) signal_groups(SIGCONT);
            return;
        }
        usr1_ = usr1_ || signo == SIGUSR1;
        if (signo == SIGUSR1 && given_ == nullptr) say("ddprun: SIGUSR1 passed on to all ranks");
        if (signo == SIGUSR2) {
            ++questions_;
            asked_at_ = monotonic_clock::now();
            story_due_ = asked_at_ + answer_within + (with_.hosts.empty() ? std::chrono::seconds(0) : reporting_for);
        }
        if (!with_.hosts.empty() && (signo == SIGUSR1 || signo == SIGUSR2)) return signal_groups(signo);
        if (signo == SIGUSR1 || signo == SIGUSR2) {  // their default is death: not for what a rank has started
            // SIGUSR2 is a question. A rank that is not within ddp::run, or is a shell that waits for it, has no handler and
            // would die of it. (One that leaves ddp::run between the look and the signal still does: microseconds.)
            for (running_rank& rank : ranks_) {
                if (rank.end) continue;
                if (signo == SIGUSR2) rank.asked = takes_signal(rank.pid, signo);
                if (signo == SIGUSR1 || rank.asked) ::kill(rank.pid, signo);
            }
            return;
        }
        if (signo == SIGINT && ++interrupts_ > 1) {
            if (given_ == nullptr) say("ddprun: second SIGINT: killing all ranks");
            return kill_all();
        }
        if (passed_on_ == 0) {
            passed_on_ = signo;
            if (given_ == nullptr)
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
                          .host = rank.host,
                          .pid = rank.pid,
                          .status = status,
                          .seconds = seconds.count(),
                          .batch = batch_,
                          .by_us = stage_ == stage::asked || stage_ == stage::killed,
                          .passed_on = passed_on_,
                          .after_usr1 = usr1_};
        if (rank.flight && flights_ && !flights_->path().empty()) rank.own_record = flights_->newest_of(rank.rank);
        if (!rank.own_record.empty() && rank.end->failed() && !read_flight(rank.own_record).failed)
            rank.flight->dump(rank.rank, with_.world_size(), flights_->path());
        if (!rank.end->failed() || stage_ != stage::running) return;
        stage_ = stage::grace;
        bool const saves = passed_on_ != 0 || rank.end->to_be_resumed();
        deadline_ = now + (saves ? std::max<std::chrono::milliseconds>(with_.grace, grace_to_save) : with_.grace);
    }

    /// What the flight records of the ranks say, here and on the hosts. `question`: only those that have answered that one
    /// say something; 0: those of a failure.
    [[nodiscard]] flight_reports reports_of(int question) const {
        flight_reports all;
        for (running_rank const& rank : ranks_) {
            if (!rank.host.empty()) {
                for (output_of_rank const* stream : {&rank.out, &rank.err}) {
                    flight_reports const& theirs = stream->reports_of(question);
                    all.insert(theirs.begin(), theirs.end());
                }
                continue;
            }
            if (!flights_ || flights_->path().empty()) continue;
            flight_report& one = all[rank.rank];
            one.state = read_flight(question > 0 && rank.end ? rank.own_record : flights_->newest_of(rank.rank));
            // An answer to an earlier signal says nothing about now.
            if (question > 0 ? one.state.asked < std::chrono::nanoseconds(asked_at_.time_since_epoch()).count()
                             : !one.state.failed)
                one.state = {};
            one.asked = rank.end || rank.asked;
            if (!rank.end) {
                one.silent = one.asked ? "did not answer" : "was not asked: it had no handler for SIGUSR2";
                continue;
            }
            bool const ended_by_us = rank.end->by_us || (given_ != nullptr && rank.end->passed_on == SIGTERM);
            std::string const how = detail::how(*rank.end);
            one.silent = "wrote nothing: " + std::string(ended_by_us               ? "it was ended by ddprun"
                                                         : rank.end->signal() != 0 ? "it was " + how
                                                                                   : how);
            if (one.state.gone)
                one.state.ended = ended_by_us               ? "was ended by ddprun"
                                  : rank.end->signal() != 0 ? "was " + how
                                                            : "ended with " + how;
        }
        return all;
    }
    [[nodiscard]] std::string records_kept() const {
        if (with_.flight_dir.empty()) return "";
        return "\n        their flight records are in " +
               (flights_ ? flights_->path() : with_.flight_dir + " on each host");
    }

    /// Says who failed first, last of all. Returns the job's exit code.
    int conclude() {
        int lost = 0;
        for (sink const* to : {&out_, &err_})
            if (lost == 0 && to->problem() != EPIPE) lost = to->problem();
        if (lost != 0) say_lost("the ranks' output", lost);
        std::vector<ending> endings;
        for (running_rank& rank : ranks_) {
            rank.end->last_words = rank.err.words().text();
            rank.end->accuses_a_peer = rank.err.words().accuse_a_peer(rank.rank);
            endings.push_back(*rank.end);
            for (output_of_rank const* stream : {&rank.out, &rank.err})
                if (stream->file_problem() != 0) {
                    lost = stream->file_problem();
                    say_lost("the output of rank " + std::to_string(rank.rank) + " in --log-dir " + with_.log_dir,
                             lost);
                }
        }
        if (given_ != nullptr) report(0);
        if (std::ranges::all_of(endings,
                                &ending::to_be_resumed)) {  // nobody failed, and there is nothing to start again now
            if (given_ == nullptr)
                say("ddprun: the job has stopped and can be resumed: " +
                    std::string(endings.size() > 1 ? "all ranks" : "its rank") + " ended with exit code " +
                    std::to_string(ddp::exit_to_be_resumed));
            return ddp::exit_to_be_resumed;
        }
        if (ending const* const culprit = first_culprit(endings)) {
            culprit_ = true;
            std::string const story =
                culprit->passed_on == 0 && given_ == nullptr ? story_of(reports_of(0), false) : "";
            if (given_ == nullptr || culprit->passed_on == 0)
                say(describe(*culprit, endings) +
                    (story.empty() ? "" : "\n        what the ranks were doing:" + story + records_kept()));
            return culprit->exit_code();
        }
        if (stage_ == stage::killed) return 128 + SIGINT;  // at the user's wish, before any rank had failed
        return lost != 0 ? exit_launcher : 0;
    }

    options const& with_;
    signal_source& signals_;
    orders const* given_;  // null unless a ddprun elsewhere gave them
    int attempt_;
    std::string id_;
    secret_bytes secret_;
    guardian guardian_;
    sink out_, own_err_;
    sink& err_;
    std::deque<running_rank> ranks_;  // their outputs' addresses are owners of lines: they never move
    stage stage_ = stage::running;
    monotonic_clock::time_point deadline_ = monotonic_clock::time_point::max();
    monotonic_clock::time_point drain_until_ = monotonic_clock::time_point::max();
    std::optional<flight_directory> flights_;  // none where the ranks are elsewhere
    monotonic_clock::time_point asked_at_, story_due_ = monotonic_clock::time_point::max();
    int questions_ = 0;  // SIGUSR2
    int batch_ = 0;
    int interrupts_ = 0;
    std::chrono::milliseconds patience_{2000};  // for the system to load a program
    int passed_on_ = 0;
    bool usr1_ = false;  // passed on, which is no wish that the job end
    bool abandoned_ = false;
    bool culprit_ = false;
    bool orphaned_ = false;  // whoever gave the orders is gone
};

/// Runs the job, again after each failure as often as with.max_restarts says. Returns its exit code.
[[nodiscard]] inline int run_job(options const& with, std::optional<orders> const& given) {
    signal_source signals;
    job_surroundings all{with, signals, given};
    if (given) return job(all, 0).run();
    char const* const users = ::getenv("DDP_JOB_ID");
    if (users != nullptr) all.name = users;
    if (with.nodes > 1) {  // launchers on several machines count alike, and have no other name in common
        if (all.name.empty() && with.max_restarts > 0) all.name = "ddprun";
    } else {
        secret_bytes const random = random_secret();
        if (!all.name.empty()) all.name += '/';
        for (std::size_t i = 0; i < 8; ++i) all.name += "0123456789abcdef"[random[i] % 16];
    }
    for (int attempt = 0;; ++attempt) {
        job one(all, attempt);
        int const code = one.run();
        if (code == 0 || attempt == with.max_restarts || one.interrupted() || !one.failed_by_itself()) return code;
        std::cerr << "ddprun: starting all ranks again: restart " << attempt + 1 << " of " << with.max_restarts
                  << std::endl;
    }
}

}  // namespace ddprun
