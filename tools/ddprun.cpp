/// \file
/// ddprun: starts the ranks of a program, here or on several machines, and ends them together.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <ddp/core/version.hpp>
#include <ddp/rendezvous/environment.hpp>

#include "ddprun/advice.hpp"
#include "ddprun/cores.hpp"
#include "ddprun/job.hpp"
#include "ddprun/options.hpp"
#include "ddprun/posix.hpp"
#include "ddprun/remote.hpp"
#include "ddprun/spawn.hpp"

namespace {

void print_plan(ddprun::options const& with) {
    if (!with.hosts.empty()) {
        int rank = 0;
        for (ddprun::host const& one : with.hosts) {
            std::cout << (one.slots == 1 ? "rank " : "ranks ") << rank;
            if (one.slots > 1) std::cout << " to " << rank + one.slots - 1;
            std::cout << ':';
            for (std::string const& word :
                 ddprun::agent_command(with, one.name, with.launch_agent.empty() && ddprun::is_this_host(one.name)))
                std::cout << ' ' << ddprun::quoted(word);
            std::cout << '\n';
            rank += one.slots;
        }
        return;
    }
    ddprun::surroundings around;
    around.port = with.master_port != 0 ? std::to_string(with.master_port) : "<free>";
    if (std::getenv("OMP_NUM_THREADS") == nullptr)
        around.threads = std::max(ddprun::usable_cores() / with.local_size, 1);
    for (int local = 0; local < with.local_size; ++local) {
        ddprun::variables all = ddprun::variables_of(with, around, local);
        for (std::string const& one : with.carried) {  // set by now, in the order of the command line
            std::string const name = one.substr(0, one.find('='));
            if (std::ranges::none_of(all, [&](auto const& known) { return known.first == name; }))
                if (auto const value = ddp::detail::environment_variable(name)) all.emplace_back(name, *value);
        }
        for (auto const& [name, value] : all) std::cout << name << '=' << ddprun::quoted(value) << ' ';
        if (with.rank_of(local) == 0) std::cout << "DDP_LISTEN_FD='<listening>' ";
        for (std::size_t i = 0; i < with.command.size(); ++i)
            std::cout << ddprun::quoted(with.command[i]) << (i + 1 < with.command.size() ? " " : "\n");
    }
}

/// Each is NAME=VALUE, or the NAME of one that is set already.
void set_variables(std::vector<std::string> const& all) {
    for (std::string const& one : all)
        if (std::size_t const end = one.find('='); end != std::string::npos)
            ::setenv(one.substr(0, end).c_str(), one.substr(end + 1).c_str(), 1);
}

void warn_of_unset(std::vector<std::string> const& carried) {
    for (std::string const& one : carried)
        if (one.find('=') == std::string::npos && std::getenv(one.c_str()) == nullptr)
            std::cerr << "ddprun: warning: -x " << one << ": no such variable is set here\n";
}

/// 0, unless what was printed could not be written.
int written() {
    std::cout.flush();
    if (std::cout) return EXIT_SUCCESS;
    std::cerr << "ddprun: the output could not be written\n";
    return ddprun::exit_launcher;
}

int run(std::vector<std::string> const& words) {
    if (words == std::vector<std::string>{"--agent"}) {
        try {
            ddprun::orders given = ddprun::read_orders();
            set_variables(std::exchange(given.with.carried, {}));
            return ddprun::run_job(given.with, given);
        } catch (ddprun::launch_error const& problem) {  // several hosts may say the same
            char host[256] = {};
            ::gethostname(host, sizeof host - 1);
            throw ddprun::launch_error(problem.exit_code(), std::string("on ") + host + ": " + problem.what());
        }
    }
    ddprun::options const with = ddprun::parse(words);
    if (!with.help.empty())
        std::cout << with.help;
    else if (with.version)
        std::cout << "ddprun " << ddp::version_major << '.' << ddp::version_minor << '.' << ddp::version_patch << '\n';
    else if (with.explain)
        std::cout << ddp::detail::explain_job(
                         [](std::string const& name) { return ddp::detail::environment_variable(name); })
                  << with.by_variables << ddprun::unknown_variables();
    else {
        if (with.hosts.empty()) set_variables(with.carried);
        warn_of_unset(with.carried);
        if (!with.dry_run) {
            if (std::string const outer = ddprun::outer_launcher(); with.nodes == 1 && !outer.empty())
                std::cerr << "ddprun: warning: another launcher has started this as one of several (" << outer
                          << "), and each ddprun among them starts a job of its own. For one job, start the program "
                             "without ddprun, or each ddprun with --nnodes and --node-rank\n";
            return ddprun::run_job(with, std::nullopt);
        }
        print_plan(with);
    }
    return written();
}

}  // namespace

int main(int argc, char** argv) {
    // A descriptor of ours under the number of a missing stdout would get the ranks' output.
    while (true) {
        int const fd = ::open("/dev/null", O_RDWR);
        if (fd > STDERR_FILENO) ::close(fd);
        if (fd < 0 || fd > STDERR_FILENO) break;
    }
    try {
        return run(std::vector<std::string>(argv + 1, argv + argc));
    } catch (ddprun::usage_problem const& problem) {
        std::cerr << "ddprun: " << problem.what() << "\nSee ddprun --help for options.\n";
        return ddprun::exit_usage;
    } catch (ddprun::launch_error const& problem) {
        std::cerr << "ddprun: " << problem.what() << '\n';
        return problem.exit_code();
    } catch (std::exception const& problem) {
        std::cerr << "ddprun: " << problem.what() << '\n';
        return ddprun::exit_launcher;
    }
}
