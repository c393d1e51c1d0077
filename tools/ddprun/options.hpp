/// \file
/// ddprun's command line.
#pragma once

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <sched.h>

namespace ddprun {

/// A command line that makes no sense. The text says what was expected.
class usage_problem : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class prefix_mode {
    rank,    ///< every line starts with "[rank] "
    others,  ///< the same, but for rank 0, whose output is shown as it is
    none,
};

struct options {
    int local_size = 0;  ///< ranks started here
    int nodes = 1;
    int node_rank = 0;
    std::string master_addr = "127.0.0.1";
    std::uint16_t master_port = 0;  ///< 0: any free one
    prefix_mode prefix = prefix_mode::rank;
    std::chrono::milliseconds grace{2000};
    bool verbose = false;
    bool dry_run = false;
    bool help = false;
    bool version = false;
    std::vector<std::string> command;

    [[nodiscard]] int world_size() const noexcept { return nodes * local_size; }
    [[nodiscard]] int rank_of(int local) const noexcept { return node_rank * local_size + local; }
};

inline constexpr std::string_view usage =
    "Usage: ddprun [-n N] [options] [--] program [arguments]\n"
    "Starts N ranks of a program, shows what they print, ends all when one fails.\n"
    "\n"
    "  -n N, --nproc-per-node N  ranks on this machine; auto: one a core, at least 2\n"
    "  --prefix rank|others|none mark lines with the rank; all but rank 0's; none\n"
    "  --grace SECONDS           how long the others may go on when a rank has failed\n"
    "                            (2); then SIGTERM, one second later SIGKILL\n"
    "  -v, --verbose             say what is started and how\n"
    "  --dry-run                 print each rank's environment and command only\n"
    "  -h, --help; --version\n"
    "\n"
    "Several machines: the same command on each, with, on machine K of M,\n"
    "  --nnodes M --node-rank K --master-addr ADDRESS-OF-MACHINE-0 --master-port P\n"
    "One machine (--standalone, the default) needs none of these.\n"
    "\n"
    "Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,\n"
    "MASTER_PORT, and OMP_NUM_THREADS=1 unless that is set. Rank 0 also gets\n"
    "DDP_LISTEN_FD, a socket that listens on MASTER_PORT already; DDP_TTY=1 and\n"
    "COLUMNS if stdout is a terminal; and stdin, unless that is a terminal.\n"
    "SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 are passed on to all ranks;\n"
    "a second SIGINT kills them. Nothing that a rank has started outlives the job.\n"
    "\n"
    "Exit status: of the rank that failed first (128 + N for signal N), 0 if none\n"
    "did; 2 bad options; 125 ddprun's own trouble; 126, 127 program cannot be run.\n";

/// The cores this process may use, container quota included.
[[nodiscard]] inline int usable_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    int cores = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    std::ifstream quota("/sys/fs/cgroup/cpu.max");  // "max 100000" or "<microseconds> <per microseconds>"
    double allowed = 0, period = 0;
    if (quota >> allowed >> period && period > 0) cores = std::min(cores, static_cast<int>(allowed / period + 0.5));
    return std::max(cores, 1);
}

namespace detail {

inline int parse_integer(std::string_view option, std::string_view text, int least, int most) {
    int value = 0;
    auto const [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc{} || end != text.data() + text.size() || value < least || value > most)
        throw usage_problem(std::string(option) + " takes an integer from " + std::to_string(least) + " to " +
                            std::to_string(most) + ", not '" + std::string(text) + "'");
    return value;
}

inline std::chrono::milliseconds parse_seconds(std::string_view option, std::string_view text) {
    double value = 0;
    auto const [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc{} || end != text.data() + text.size() || !(value >= 0 && value <= 3600))
        throw usage_problem(std::string(option) + " takes seconds from 0 to 3600, not '" + std::string(text) + "'");
    return std::chrono::milliseconds(static_cast<int>(value * 1000));
}

inline prefix_mode parse_prefix(std::string_view text) {
    if (text == "rank") return prefix_mode::rank;
    if (text == "others") return prefix_mode::others;
    if (text == "none") return prefix_mode::none;
    throw usage_problem("--prefix takes rank, others or none, not '" + std::string(text) + "'");
}

}  // namespace detail

/// Options end at the first word that is none, or at "--". torchrun's underscores are welcome in long names.
[[nodiscard]] inline options parse(std::vector<std::string> const& words) {
    options result;
    bool standalone = false, port_given = false, address_given = false;
    std::size_t at = 0;
    for (; at < words.size(); ++at) {
        std::string_view const word = words[at];
        if (word == "--") {
            ++at;
            break;
        }
        if (word.size() < 2 || word[0] != '-') break;

        std::string name(word);
        std::optional<std::string> attached;
        if (auto const equals = name.find('='); name.starts_with("--") && equals != std::string::npos) {
            attached = name.substr(equals + 1);
            name.resize(equals);
        } else if (name.starts_with("-n") && name.size() > 2 && name[2] >= '0' && name[2] <= '9') {
            attached = name.substr(2);  // -n4
            name.resize(2);
        }
        std::replace(name.begin(), name.end(), '_', '-');
        auto const value = [&]() -> std::string {
            if (attached) return *attached;
            if (at + 1 >= words.size()) throw usage_problem(name + " needs a value");
            return words[++at];
        };

        bool flag = true;
        if (name == "-h" || name == "--help")
            result.help = true;
        else if (name == "--version")
            result.version = true;
        else if (name == "-v" || name == "--verbose")
            result.verbose = true;
        else if (name == "--dry-run")
            result.dry_run = true;
        else if (name == "--standalone")
            standalone = true;
        else
            flag = false;
        if (flag) {
            if (attached) throw usage_problem(name + " takes no value");
            continue;
        }

        if (name == "-n" || name == "-np" || name == "--nproc-per-node") {
            std::string const text = value();
            result.local_size = text == "auto" || text == "cpu" ? 0 : detail::parse_integer(name, text, 1, 4096);
        } else if (name == "--nnodes") {
            result.nodes = detail::parse_integer(name, value(), 1, 65536);
        } else if (name == "--node-rank") {
            result.node_rank = detail::parse_integer(name, value(), 0, 65535);
        } else if (name == "--master-addr") {
            result.master_addr = value();
            address_given = true;
            if (result.master_addr.empty()) throw usage_problem("--master-addr takes a host name or address");
        } else if (name == "--master-port") {
            result.master_port = static_cast<std::uint16_t>(detail::parse_integer(name, value(), 0, 65535));
            port_given = result.master_port != 0;
        } else if (name == "--prefix") {
            result.prefix = detail::parse_prefix(value());
        } else if (name == "--grace") {
            result.grace = detail::parse_seconds(name, value());
        } else {
            throw usage_problem("unknown option " + name + " (a program's own options come after its name)");
        }
    }
    result.command.assign(words.begin() + static_cast<std::ptrdiff_t>(at), words.end());
    if (result.help || result.version) return result;

    if (result.local_size == 0) {
        // Machines may differ in cores, and ranks are numbered by one count for all.
        if (result.nodes > 1) throw usage_problem("with --nnodes, say -n N: the same number of ranks on every machine");
        result.local_size = std::max(usable_cores(), 2);
    }
    if (standalone && result.nodes > 1) throw usage_problem("--standalone and --nnodes contradict each other");
    if (result.node_rank >= result.nodes)
        throw usage_problem("--node-rank " + std::to_string(result.node_rank) + " is not below --nnodes " +
                            std::to_string(result.nodes));
    if (result.nodes > 1 && !(address_given && port_given))
        throw usage_problem("with --nnodes, say --master-addr and --master-port, the same on every machine");
    if (result.command.empty() || result.command.front().empty()) throw usage_problem("no program to start");
    return result;
}

}  // namespace ddprun
