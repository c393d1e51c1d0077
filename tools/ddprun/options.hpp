/// \file
/// ddprun's command line.
#pragma once

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "cores.hpp"
#include "hosts.hpp"

namespace ddprun {

enum class prefix_mode {
    rank,    ///< every line starts with "[rank] "
    others,  ///< the same, but for rank 0, whose output is shown as it is
    none,
};

struct options {
    int local_size = 0;  ///< ranks started here
    int nodes = 1;
    int node_rank = 0;
    int first_rank = -1;  ///< the number of the first rank here; -1: hosts have equally many
    int total = 0;        ///< ranks of the job; 0: as first_rank
    std::string master_addr = "127.0.0.1";
    std::uint16_t master_port = 0;  ///< 0: any free one
    prefix_mode prefix = prefix_mode::rank;
    std::chrono::milliseconds grace{2000};
    bool bind = true;                       ///< each rank to cores of its own
    int max_restarts = 0;                   ///< of the whole job
    std::string log_dir;                    ///< for a file each rank and stream; empty: none
    std::string flight_dir;                 ///< for the ranks' flight records; empty: a temporary one
    unsigned in_files = 3;                  ///< streams that go there: 1 stdout, 2 stderr, 3 both
    unsigned shown = 3;                     ///< streams that are shown
    std::vector<host> hosts;                ///< start there instead of here
    std::vector<std::string> launch_agent;  ///< starts a command on a host; empty: ssh, and nothing for this one
    std::vector<std::string> carried;       ///< variables for all ranks: NAME, which is set here, or NAME=VALUE
    bool agent = false;                     ///< one host of a job that a ddprun elsewhere runs
    bool verbose = false;
    bool dry_run = false;
    bool explain = false;
    std::string by_variables = {};  ///< for --explain: what PET_NNODES and the like have said
    bool version = false;
    std::string help;  ///< to print and do nothing else
    std::vector<std::string> command;

    [[nodiscard]] int world_size() const noexcept { return total != 0 ? total : nodes * local_size; }
    [[nodiscard]] int rank_of(int local) const noexcept {
        return (first_rank >= 0 ? first_rank : node_rank * local_size) + local;
    }
};

namespace detail {

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

/// A time of the library's, as the variable that says it to all ranks (ddp/rendezvous/run.hpp).
inline void carry_time(std::vector<std::string>& carried, std::string_view option, std::string const& variable,
                       std::string const& text) {
    if (text.empty()) return;
    double value = 0;
    auto const [end, code] = std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
    if (code != std::errc{} || end != text.data() + text.size() || !(value >= 0.01 && value <= 604800))
        throw usage_problem(std::string(option) + " takes seconds from 0.01 to 604800 (a week), not '" + text + "'");
    carried.push_back(variable + "=" + text);
}

/// "4", or torchrun's "4:4".
inline int parse_nodes(std::string_view text) {
    auto const colon = text.find(':');
    if (colon != std::string_view::npos && text.substr(0, colon) != text.substr(colon + 1))
        throw usage_problem("--nnodes takes one number, not the range '" + std::string(text) +
                            "': a job of ddprun has as many machines from its start to its end");
    return parse_integer("--nnodes", text.substr(0, colon), 1, 65536);
}

/// The command line as it stands, before anything is concluded from it.
struct command_line {
    std::string n, nproc, nnodes, node_rank, master_addr, master_port, prefix, grace, bind, max_restarts, log_dir,
        flight_dir, tee, redirects, hosts, hostfile, launch_agent, dead, heartbeat, suspect, collective, straggler,
        join, handshake, shutdown;
    std::vector<std::string> carried;
    bool standalone = false, no_python = false, verbose = false, dry_run = false, explain = false, version = false;
};

class help_page : public CLI::Formatter {
public:
    std::string make_usage(CLI::App const*, std::string) const override {
        return "Usage: ddprun [-n N] [options] [--] program [arguments]\n"
               "Starts N ranks of a program, shows what they print, ends all when one fails.\n";
    }
    std::string make_option_opts(CLI::Option const* option) const override {
        return option->get_items_expected_max() == 0 ? "" : " " + option->get_type_name();
    }
};

inline void declare(CLI::App& app, command_line& to) {
    auto const layout = std::make_shared<help_page>();
    layout->column_width(28);
    app.formatter(layout);
    app.set_help_flag("-h,--help", "print this");
    app.add_flag("--version", to.version, "print the version");

    std::string group = "Ranks";
    auto const takes = [&](char const* names, char const* what, std::string& value, char const* text,
                           char const* variable = "") {
        app.add_option(names, value, text)->type_name(what)->envname(variable)->group(group);
    };
    auto const flag = [&](char const* names, bool& value, char const* text) {
        app.add_flag(names, value, text)->group(group);
    };
    takes("-n,--np", "N", to.n, "ranks here (-H: in all); auto: one a core, >= 2");
    takes("--nproc-per-node", "N", to.nproc, "the same; with -H: on each host", "PET_NPROC_PER_NODE");
    takes("--bind", "cores|none", to.bind, "a rank on cores of its own, if there are enough");
    takes("--grace", "SECONDS", to.grace, "how long others may run after a failure (2)");
    takes("--dead", "SECONDS", to.dead, "how long a peer may send nothing (3)");
    takes("--heartbeat", "SECONDS", to.heartbeat, "interval between heartbeats (0.25)");
    takes("--suspect", "SECONDS", to.suspect, "when a silent peer is named on stderr (1)");
    takes("--collective", "SECONDS", to.collective, "how long a wait for a peer may take (120)");
    takes("--straggler", "SECONDS", to.straggler, "when a wait is reported on stderr (5)");
    takes("--join", "SECONDS", to.join, "how long the ranks may take to meet (30)");
    takes("--handshake", "SECONDS", to.handshake, "limit for a connection while they meet (3)");
    takes("--shutdown", "SECONDS", to.shutdown, "how long a rank that leaves waits for peers (5)");
    takes("--max-restarts,--restarts", "N", to.max_restarts, "how many times to restart all ranks (0)",
          "PET_MAX_RESTARTS");
    flag("--standalone", to.standalone, "one machine: the default");
    flag("--no-python", to.no_python, "accepted and ignored, as in torchrun's command lines");
    group = "Output";
    takes("--prefix", "WHICH", to.prefix, "[rank] before the lines of: rank (all), others, none");
    takes("--log-dir", "DIRECTORY", to.log_dir, "also into rank-R.out and rank-R.err there", "PET_LOG_DIR");
    takes("--flight-dir", "DIRECTORY", to.flight_dir, "keep the ranks' flight records there", "DDP_FLIGHT_DIR");
    takes("-t,--tee", "1|2|3", to.tee, "streams shown and written: 1 out, 2 err, 3 both", "PET_TEE");
    takes("-r,--redirects", "1|2|3", to.redirects, "streams written there only", "PET_REDIRECTS");
    flag("-v,--verbose", to.verbose, "say what is started and how");
    group = "Several machines: the same on each, K from 0 to M-1";
    takes("--nnodes", "M", to.nnodes, "M, how many machines there are", "PET_NNODES");
    takes("--node-rank", "K", to.node_rank, "K, which one this is", "PET_NODE_RANK");
    takes("--master-addr", "ADDRESS", to.master_addr, "an address of machine 0", "PET_MASTER_ADDR");
    takes("--master-port", "PORT", to.master_port, "a free port there", "PET_MASTER_PORT");
    group = "Several machines, all from here";
    takes("-H,--host", "LIST", to.hosts, "where to start ranks: NAME:SLOTS,NAME:SLOTS,...");
    takes("--hostfile", "FILE", to.hostfile, "the same: NAME slots=N, a line each");
    takes("--launch-agent", "COMMAND", to.launch_agent, "the command before HOST DDPRUN (ssh)");
    app.add_option("-x", to.carried, "a variable for all ranks; several -x add up")
        ->type_name("NAME[=VALUE]")
        ->group(group)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->expected(1);
    group = "Without starting anything";
    flag("--explain", to.explain, "the sources of this process's rank, and conflicts");
    flag("--dry-run", to.dry_run, "print each rank's environment and command");
    app.footer(
        "Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,\n"
        "MASTER_PORT, DDP_JOB_ID, DDP_FLIGHT_DIR, DDP_SECRET_FD (a secret of the job;\n"
        "not with --nnodes or DDP_SECRET_FILE) and, unless set, OMP_NUM_THREADS. Rank 0\n"
        "also gets DDP_LISTEN_FD, a socket that listens on MASTER_PORT; DDP_TTY=1 and\n"
        "COLUMNS if stdout is a terminal; and stdin, unless that is one. After a failure\n"
        "the others get SIGTERM when the grace is over, SIGKILL one second later.\n"
        "SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 are passed on to all ranks;\n"
        "a second SIGINT kills them; after SIGUSR2 what each rank is doing is printed\n"
        "(a rank that does not handle SIGUSR2 is not sent it). Nothing that a rank has\n"
        "started outlives the job. PET_NNODES and so on are read as by torchrun.\n"
        "\n"
        "Exit status: of the rank that failed first (128 + N for signal N), 0 if none\n"
        "did; 75 if all ranks ended with it: the job can be resumed, and is not started\n"
        "again; 2 bad options; 125 ddprun's trouble, lost output; 126, 127 no program.");
}

/// The options among `words`, each as one word "--name=value", up to the program or "--"; `at` is where that is. Its
/// own options are the program's, whatever they look like. torchrun's underscores are welcome in long names.
inline std::vector<std::string> own_words(CLI::App const& app, std::vector<std::string> const& words, std::size_t& at) {
    std::vector<std::string> own;
    for (at = 0; at < words.size(); ++at) {
        std::string const& word = words[at];
        if (word == "--") {
            ++at;
            break;
        }
        if (word.size() < 2 || word[0] != '-') break;

        std::string name = word;
        std::optional<std::string> value;
        bool const is_long = word.starts_with("--");
        if (auto const equals = name.find('='); is_long && equals != std::string::npos) {
            value = name.substr(equals + 1);
            name.resize(equals);
        } else if (!is_long && word != "-np" && name.size() > 2) {  // -n4
            value = name.substr(2);
            name.resize(2);
        }
        std::replace(name.begin(), name.end(), '_', '-');
        if (name == "-np") name = "-n";
        CLI::Option const* const option = app.get_option_no_throw(name);
        if (option == nullptr)
            throw usage_problem("unknown option " + (is_long ? name : word) +
                                " (a program's own options come after its name)");
        bool const is_flag = option->get_items_expected_max() == 0;
        if (is_flag && value) throw usage_problem(name + " takes no value");
        if (!is_flag && !value) {
            if (at + 1 >= words.size()) throw usage_problem(name + " needs a value");
            value = words[++at];
        }
        if (!is_flag && value->empty()) throw usage_problem(name + " needs a value");
        own.push_back(name);
        if (value) own.back() += (is_long ? "=" : "") + *value;
    }
    return own;
}

/// Ranks go to the hosts in order, as many to each as it has slots, or as the command line says (`nproc_given`): what the
/// environment says does not replace the slots of -H.
inline void place(options& result, command_line const& line, bool nproc_given) {
    if (nproc_given)
        for (host& one : result.hosts) one.slots = parse_integer("--nproc-per-node", line.nproc, 1, 4096);
    int slots = 0;
    for (host const& one : result.hosts) slots += one.slots;
    result.total = line.n.empty() ? slots : parse_integer("-n", line.n, 1, 65536);
    if (result.total > slots)
        throw usage_problem("-n " + line.n + ", but the hosts have " + std::to_string(slots) +
                            " slots: give more of them (-H NAME:SLOTS)");
    int left = result.total;
    std::vector<host> used;
    for (host const& one : result.hosts) {
        if (left == 0) break;
        used.push_back({one.name, std::min(one.slots, left)});
        left -= used.back().slots;
    }
    result.hosts = used;
}

/// Of --explain: which options come from the environment, and which variables the command line outdoes. `own`: as own_words.
inline std::string options_of_variables(CLI::App const& app, std::vector<std::string> const& own) {
    std::string taken, outdone;
    for (CLI::Option const* const option : app.get_options()) {
        std::string const& variable = option->get_envname();
        char const* const says = variable.empty() ? nullptr : std::getenv(variable.c_str());
        if (says == nullptr || *says == '\0') continue;
        bool const of_ranks = option->check_lname("nproc-per-node");  // -n and the slots of hosts say as much
        auto const given = std::ranges::find_if(own, [&](std::string const& word) {
            auto const names = [&](std::string const& name) { return word.starts_with("--" + name + "="); };
            auto const letter = [&](std::string const& name) {
                return !word.starts_with("--") && word.starts_with("-" + name);
            };
            return std::ranges::any_of(option->get_lnames(), names) ||
                   std::ranges::any_of(option->get_snames(), letter) ||
                   (of_ranks && (letter("n") || names("np") || letter("H") || names("host") || names("hostfile")));
        });
        if (given != own.end() && given->ends_with(std::string("=") + says)) continue;
        if (given != own.end())
            outdone += "conflict: the command line says " + shown(*given) + ", " + variable + "=" + shown(says) +
                       "; the command line is used\n";
        else
            taken += " --" + option->get_lnames().front() + "=" + shown(says) + " (" + variable + ")";
    }
    return (taken.empty() ? "" : "ddprun takes from the environment:" + taken + "\n") + outdone;
}

}  // namespace detail

/// Options end at the first word that is none, or at "--".
[[nodiscard]] inline options parse(std::vector<std::string> const& words) {
    CLI::App app;
    detail::command_line line;
    detail::declare(app, line);
    std::size_t at = 0;
    std::vector<std::string> own = detail::own_words(app, words, at);
    bool const nproc_given =
        std::ranges::any_of(own, [](std::string const& word) { return word.starts_with("--nproc-per-node="); });
    options result;
    result.by_variables = detail::options_of_variables(app, own);
    std::reverse(own.begin(), own.end());  // as CLI11 takes them
    try {
        app.parse(own);
    } catch (CLI::CallForHelp const&) {
        result.help = app.help();
        for (std::size_t gap; (gap = result.help.find("\n\n\n")) != std::string::npos;) result.help.erase(gap, 1);
        return result;
    } catch (CLI::ParseError const& e) {
        throw usage_problem(e.what());
    }
    result.command.assign(words.begin() + static_cast<std::ptrdiff_t>(at), words.end());
    result.verbose = line.verbose;
    result.dry_run = line.dry_run;
    result.version = line.version;
    result.explain = line.explain;
    if (result.version || result.explain) return result;

    auto const ranks_here = [](char const* option, std::string const& text) {
        bool const automatic = text.empty() || text == "auto" || text == "cpu" || text == "gpu";
        return automatic ? 0 : detail::parse_integer(option, text, 1, 4096);
    };
    if (!line.nnodes.empty()) result.nodes = detail::parse_nodes(line.nnodes);
    if (!line.node_rank.empty()) result.node_rank = detail::parse_integer("--node-rank", line.node_rank, 0, 65535);
    if (!line.master_addr.empty()) result.master_addr = line.master_addr;
    if (!line.master_port.empty())
        result.master_port =
            static_cast<std::uint16_t>(detail::parse_integer("--master-port", line.master_port, 0, 65535));
    if (!line.prefix.empty()) result.prefix = detail::parse_prefix(line.prefix);
    if (!line.grace.empty()) result.grace = detail::parse_seconds("--grace", line.grace);
    if (!line.bind.empty() && line.bind != "cores" && line.bind != "none")
        throw usage_problem("--bind takes cores or none, not '" + line.bind + "'");
    result.bind = line.bind != "none";
    if (!line.max_restarts.empty())
        result.max_restarts = detail::parse_integer("--max-restarts", line.max_restarts, 0, 1000000);

    result.log_dir = line.log_dir;
    result.flight_dir = line.flight_dir;
    unsigned const both = line.tee.empty() && line.redirects.empty() ? 3U : 0U;
    unsigned const tee =
        line.tee.empty() ? both : static_cast<unsigned>(detail::parse_integer("--tee", line.tee, 0, 3));
    unsigned const only =
        line.redirects.empty() ? 0U : static_cast<unsigned>(detail::parse_integer("--redirects", line.redirects, 0, 3));
    if (result.log_dir.empty() && (only != 0 || !line.tee.empty()))
        throw usage_problem("--tee and --redirects write into files: say where with --log-dir");
    result.in_files = tee | only;
    result.shown = 3U & (~only | tee);

    detail::carry_time(result.carried, "--dead", "DDP_TIMEOUT_DEAD", line.dead);
    detail::carry_time(result.carried, "--heartbeat", "DDP_TIMEOUT_HEARTBEAT", line.heartbeat);
    detail::carry_time(result.carried, "--suspect", "DDP_TIMEOUT_SUSPECT", line.suspect);
    detail::carry_time(result.carried, "--collective", "DDP_TIMEOUT_COLLECTIVE", line.collective);
    detail::carry_time(result.carried, "--straggler", "DDP_TIMEOUT_STRAGGLER", line.straggler);
    detail::carry_time(result.carried, "--join", "DDP_TIMEOUT_JOIN", line.join);
    detail::carry_time(result.carried, "--handshake", "DDP_TIMEOUT_HANDSHAKE", line.handshake);
    detail::carry_time(result.carried, "--shutdown", "DDP_TIMEOUT_SHUTDOWN", line.shutdown);
    if (result.command.empty() || result.command.front().empty()) throw usage_problem("no program to start");
    for (std::string const& one : line.carried)
        if (one.front() == '=') throw usage_problem("-x takes NAME or NAME=VALUE, not " + detail::shown(one));
    if (!line.hosts.empty() || !line.hostfile.empty()) {
        if (!line.hosts.empty() && !line.hostfile.empty()) throw usage_problem("-H and --hostfile: give one of them");
        if (result.nodes > 1 || line.standalone)
            throw usage_problem("-H and --hostfile contradict --nnodes, --standalone");
        result.hosts = line.hosts.empty() ? detail::read_hostfile(line.hostfile) : detail::parse_hosts(line.hosts);
        detail::place(result, line, nproc_given);
        result.carried.insert(result.carried.end(), line.carried.begin(), line.carried.end());
        std::istringstream agent(line.launch_agent);
        for (std::string word; agent >> word;) result.launch_agent.push_back(word);
        if (line.master_addr.empty()) result.master_addr.clear();
        return result;
    }
    if (!line.launch_agent.empty()) throw usage_problem("--launch-agent is for -H and --hostfile");
    result.carried.insert(result.carried.end(), line.carried.begin(), line.carried.end());

    result.local_size = line.n.empty() ? ranks_here("--nproc-per-node", line.nproc) : ranks_here("-n", line.n);
    if (result.local_size == 0) {
        // Machines may differ in cores, and ranks are numbered by one count for all.
        if (result.nodes > 1) throw usage_problem("with --nnodes, say -n N: the same number of ranks on every machine");
        result.local_size = std::max(usable_cores(), 2);
    }
    if (line.standalone && result.nodes > 1) throw usage_problem("--standalone and --nnodes contradict each other");
    if (result.node_rank >= result.nodes)
        throw usage_problem("--node-rank " + std::to_string(result.node_rank) + " is not below --nnodes " +
                            std::to_string(result.nodes));
    if (result.nodes > 1 && (line.master_addr.empty() || result.master_port == 0))
        throw usage_problem("--nnodes requires --master-addr and --master-port, the same on every machine");
    return result;
}

}  // namespace ddprun
