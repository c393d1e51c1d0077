/// \file
/// ddprun: starts the ranks of a program on this machine and ends them together.
#include <cctype>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <ddp/core/version.hpp>

#include "ddprun/job.hpp"
#include "ddprun/options.hpp"
#include "ddprun/posix.hpp"
#include "ddprun/spawn.hpp"

namespace {

/// As a shell would have to read it.
std::string quoted(std::string const& word) {
    bool plain = !word.empty();
    for (char const c : word)
        plain = plain && (std::isalnum(static_cast<unsigned char>(c)) != 0 ||
                          std::string("_-./=:,+@%").find(c) != std::string::npos);
    if (plain) return word;
    std::string result = "'";
    for (char const c : word) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return result + "'";
}

void print_plan(ddprun::options const& with) {
    ddprun::surroundings around;
    around.port = with.master_port != 0 ? std::to_string(with.master_port) : "<free>";
    around.one_thread = std::getenv("OMP_NUM_THREADS") == nullptr;
    for (int local = 0; local < with.local_size; ++local) {
        for (auto const& [name, value] : ddprun::variables_of(with, around, local))
            std::cout << name << '=' << quoted(value) << ' ';
        if (with.rank_of(local) == 0) std::cout << "DDP_LISTEN_FD='<listening>' ";
        for (std::size_t i = 0; i < with.command.size(); ++i)
            std::cout << quoted(with.command[i]) << (i + 1 < with.command.size() ? " " : "\n");
    }
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
        ddprun::options const with = ddprun::parse(std::vector<std::string>(argv + 1, argv + argc));
        if (with.help) {
            std::cout << ddprun::usage;
        } else if (with.version) {
            std::cout << "ddprun " << ddp::version_major << '.' << ddp::version_minor << '.' << ddp::version_patch
                      << '\n';
        } else if (with.dry_run) {
            print_plan(with);
        } else {
            return ddprun::job(with).run();
        }
        return EXIT_SUCCESS;
    } catch (ddprun::usage_problem const& problem) {
        std::cerr << "ddprun: " << problem.what() << "\nddprun --help shows what there is.\n";
        return ddprun::exit_usage;
    } catch (ddprun::launch_error const& problem) {
        std::cerr << "ddprun: " << problem.what() << '\n';
        return problem.exit_code();
    } catch (std::exception const& problem) {
        std::cerr << "ddprun: " << problem.what() << '\n';
        return ddprun::exit_launcher;
    }
}
