/// \file
/// ddp-perf's command line; and the environment that --candidate reads, by which one script starts the benchmarks of
/// several libraries in turn.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include <ddp/collective/algorithms/any_allreduce.hpp>

namespace ddp_perf {

/// A command line that makes no sense. The text says what was expected.
class usage_problem : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Who makes the ranks of a transport when no launcher has.
enum class started_by {
    threads,  ///< this process
    ddprun,   ///< which this program runs, and itself under it
    mpirun,   ///< which the user has to run
};

struct transport_choice {
    std::string_view name;
    started_by start;
    std::string_view run_as = name;  ///< what ddp::run calls it
};

inline constexpr std::array transports{
    transport_choice{"inproc", started_by::threads},
    transport_choice{"shm", started_by::ddprun,
                     "tcp"},                      ///< ranks of one host: all goes through memory, or it is an error
    transport_choice{"tcp", started_by::ddprun},  ///< all goes through sockets, inside a host too
    transport_choice{"mpi", started_by::mpirun},
};

struct settings {
    std::string collective;
    std::string transport;  ///< empty: the launcher's, else TCP, and memory between ranks of one host
    std::string algorithm = ddp::automatic_allreduce::name;  ///< one of any_allreduce's choices
    int ranks = 0;                                           ///< 0: as many as the launcher has started, else 2
    std::vector<std::size_t> sizes;                          ///< bytes
    bool check = false;
    bool dirty = false;
    double budget = 0.25;        ///< seconds a size
    std::size_t iterations = 0;  ///< 0: what fits into the budget, from `least` to `most`
    std::size_t least = 4, most = 4000;
    std::string json, plot, beside;  ///< files; empty: none

    bool candidate = false;  ///< settings from the environment, results as JSON lines
    bool startup =
        false;  ///< with candidate: MODE=startup: only the seconds from `t0` to the end of the first allreduce
    double t0 = 0;
    std::string impl = "ddp", net = "loopback";

    std::string print;  ///< to print and do nothing else
};

namespace detail {

inline std::size_t parse_count(std::string_view option, std::string_view text, std::size_t least, std::size_t most) {
    std::size_t value = 0;
    auto const [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc{} || end != text.data() + text.size() || value < least || value > most)
        throw usage_problem(std::string(option) + " takes an integer from " + std::to_string(least) + " to " +
                            std::to_string(most) + ", not '" + std::string(text) + "'");
    return value;
}

inline double parse_seconds(std::string_view option, std::string_view text) {
    double value = 0;
    auto const [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc{} || end != text.data() + text.size() || !(value >= 0 && value <= 3600))
        throw usage_problem(std::string(option) + " takes seconds from 0 to 3600, not '" + std::string(text) + "'");
    return value;
}

/// "4", "64K", "64KiB", "16M", "1G": bytes, a multiple of a float's 4.
inline std::size_t parse_size(std::string_view option, std::string_view text) {
    std::size_t value = 0;
    auto const [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    std::string_view const unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
    constexpr std::array<std::array<std::string_view, 3>, 4> units{
        {{"", "B", "B"}, {"K", "KB", "KiB"}, {"M", "MB", "MiB"}, {"G", "GB", "GiB"}}};
    std::size_t power = 0;
    while (power < units.size() && std::find(units[power].begin(), units[power].end(), unit) == units[power].end())
        ++power;
    std::size_t const shift = 10 * power;
    if (code != std::errc{} || power == units.size() || value == 0 || value > (std::size_t{1} << 40) >> shift ||
        (value << shift) % sizeof(float) != 0)
        throw usage_problem(std::string(option) +
                            " takes a size such as 4, 64K, 16M or 1G, a multiple of 4 bytes, not '" +
                            std::string(text) + "'");
    return value << shift;
}

inline std::string environment(char const* name, char const* otherwise) {
    char const* const value = std::getenv(name);
    return value != nullptr && *value != '\0' ? value : otherwise;
}

/// The command line as it stands, before anything is concluded from it.
struct command_line {
    std::string collective, transport, algorithm, n, begin = "4", end = "64M", factor = "4", budget, iterations;
    bool version = false;
};

class help_page : public CLI::Formatter {
public:
    std::string make_usage(CLI::App const*, std::string) const override {
        return "Usage: ddp-perf COLLECTIVE [options]\nMeasures a collective of ddp for a range of sizes.\n";
    }
    std::string make_positionals(CLI::App const*) const override { return ""; }
    std::string make_option_opts(CLI::Option const* option) const override {
        return option->get_items_expected_max() == 0 ? "" : " " + option->get_type_name();
    }
};

inline std::string transport_names(std::string_view between) {
    std::string names;
    for (transport_choice const& one : transports) names.append(names.empty() ? "" : between).append(one.name);
    return names;
}

inline void declare(CLI::App& app, command_line& to, settings& result, std::string const& collectives) {
    auto const layout = std::make_shared<help_page>();
    layout->column_width(28);
    app.formatter(layout);
    app.set_help_flag("-h,--help", "print this");
    app.add_flag("--version", to.version, "print the version");
    app.add_option("collective", to.collective);

    std::string group = "Ranks";
    auto const takes = [&](char const* names, std::string const& what, std::string& value, char const* text) {
        app.add_option(names, value, text)->type_name(what)->group(group);
    };
    auto const flag = [&](char const* names, bool& value, char const* text) {
        app.add_flag(names, value, text)->group(group);
    };
    takes("-n,--ranks", "N", to.n, "how many (2, or what a launcher has started)");
    takes("--transport", transport_names("|"), to.transport, "what they meet over (see below)");
    group = "What is measured";
    takes("--algorithm", "NAME", to.algorithm, ddp::any_allreduce::choices);
    takes("-b,--begin", "SIZE", to.begin, "the smallest size (4); K, M, G: powers of 1024");
    takes("-e,--end", "SIZE", to.end, "the largest size (64M)");
    takes("-f,--factor", "F", to.factor, "from one size to the next (4)");
    flag("--dirty", result.dirty, "all ranks rewrite their data before each operation");
    flag("--check", result.check, "verify results; status 1 if an element is wrong");
    takes("--budget", "SECONDS", to.budget, "time for each size (0.25)");
    takes("--iterations", "N", to.iterations, "repeat each size N times instead");
    group = "Output";
    takes("--json", "FILE", result.json, "the results, with all that they depend on");
    takes("--plot", "FILE.svg", result.plot, "bus bandwidth over size");
    takes("--beside", "FILE", result.beside, "draw that file's results too (--json, --candidate)");
    flag("--candidate", result.candidate, "of allreduce: environment in, JSON lines out");
    app.footer("Collectives:\n  " + collectives +
               ".\n"
               "--algorithm is for allreduce and reduce_scatter.\n"
               "\n"
               "Without a launcher, threads are the ranks of inproc, and ddp-perf starts\n"
               "itself under ddprun for shm and tcp. Under ddprun, torchrun, srun or mpirun it\n"
               "is one of the ranks. Rank 0 prints.\n"
               "\n"
               "shm: processes of one host, which send messages through memory and add in it.\n"
               "tcp: processes that share no memory. Neither: TCP between hosts, memory inside.\n"
               "\n"
               "Time is what rank 0 needs for one of many operations, back to back. Bandwidth\n"
               "is in 1e9 bytes a second: of the algorithm, size / time; of the bus, what each\n"
               "rank's link carries, with the factors of nccl-tests.\n"
               "\n"
               "--candidate reads SIZES (bytes), BUDGET (seconds a size), MINREPS, MAXREPS, IMPL\n"
               "and NET (names in the output); with MODE=startup it prints only the seconds\n"
               "from T0 (since the epoch) to the end of the first allreduce; --json then writes\n"
               "them with all that they depend on.\n"
               "\n"
               "Exit status: 0; 1 wrong elements or a failed job; 2 bad options.");
}

/// What the environment says.
inline void read_candidate(settings& to) {
    if (to.collective != "allreduce") throw usage_problem("--candidate is for allreduce, not " + to.collective);
    to.check = true;
    to.impl = environment("IMPL", "ddp");
    to.net = environment("NET", "loopback");
    to.budget = parse_seconds("BUDGET", environment("BUDGET", "0.25"));
    to.least = parse_count("MINREPS", environment("MINREPS", "4"), 1, 1000000);
    to.most = std::max(to.least, parse_count("MAXREPS", environment("MAXREPS", "4000"), 1, 1000000));
    to.startup = environment("MODE", "") == "startup";
    if ((!to.json.empty() && !to.startup) || !to.plot.empty())
        throw usage_problem("--candidate prints its results: no --json (but with MODE=startup), no --plot");
    if (to.startup) to.t0 = std::strtod(environment("T0", "0").c_str(), nullptr);
    std::istringstream words(environment("SIZES", ""));
    std::vector<std::size_t> sizes;
    for (std::string word; words >> word;) sizes.push_back(parse_size("SIZES", word));
    if (!sizes.empty()) to.sizes = sizes;
}

}  // namespace detail

/// `names`: of the collectives.
[[nodiscard]] inline settings parse(int argc, char const* const* argv, std::vector<std::string> const& names) {
    CLI::App app;
    detail::command_line line;
    settings result;
    std::string collectives;
    for (std::string const& name : names) collectives += (collectives.empty() ? "" : ", ") + name;
    detail::declare(app, line, result, collectives);
    try {
        app.parse(argc, argv);
    } catch (CLI::CallForHelp const&) {
        result.print = app.help();
        for (std::size_t gap; (gap = result.print.find("\n\n\n")) != std::string::npos;) result.print.erase(gap, 1);
        return result;
    } catch (CLI::ParseError const& e) {
        throw usage_problem(e.what());
    }
    if (line.version) {
        result.print = "ddp-perf " + std::to_string(ddp::version_major) + '.' + std::to_string(ddp::version_minor) +
                       '.' + std::to_string(ddp::version_patch) + '\n';
        return result;
    }

    if (line.collective.empty()) throw usage_problem("say which collective to measure: " + collectives);
    if (std::find(names.begin(), names.end(), line.collective) == names.end())
        throw usage_problem("there is no collective '" + line.collective + "'; choose one of " + collectives);
    result.collective = line.collective;
    result.transport = line.transport;
    if (!line.transport.empty() &&
        std::none_of(transports.begin(), transports.end(), [&](auto const& one) { return one.name == line.transport; }))
        throw usage_problem("there is no transport '" + line.transport + "'; choose one of " +
                            detail::transport_names(", "));
    if (!line.n.empty()) result.ranks = static_cast<int>(detail::parse_count("-n", line.n, 1, 4096));
    if (!line.algorithm.empty()) {
        if (line.collective != "allreduce" && line.collective != "reduce_scatter")
            throw usage_problem("--algorithm is for allreduce and reduce_scatter; " + line.collective +
                                " has no choice");
        std::istringstream choices(ddp::any_allreduce::choices);
        std::string choice;
        while (std::getline(choices, choice, '|') && choice != line.algorithm) {
        }
        if (choice != line.algorithm)
            throw usage_problem("there is no algorithm '" + line.algorithm + "'; choose one of " +
                                ddp::any_allreduce::choices);
        result.algorithm = line.algorithm;
    }

    std::size_t const begin = detail::parse_size("-b", line.begin), end = detail::parse_size("-e", line.end);
    std::size_t const factor = detail::parse_count("-f", line.factor, 2, 1024);
    if (end < begin) throw usage_problem("-e " + line.end + " is below -b " + line.begin);
    for (std::size_t bytes = begin; bytes <= end; bytes *= factor) result.sizes.push_back(bytes);
    if (line.collective == "barrier") result.sizes = {0};
    if (!line.budget.empty()) result.budget = detail::parse_seconds("--budget", line.budget);
    if (!line.iterations.empty()) result.iterations = detail::parse_count("--iterations", line.iterations, 1, 1000000);

    if (!result.plot.empty() && line.collective == "barrier")
        throw usage_problem("--plot shows bandwidth, and a barrier has none");
    if (!result.plot.empty() && !result.plot.ends_with(".svg"))
        throw usage_problem("--plot writes SVG: name it FILE.svg, not '" + result.plot + "'");
    if (!result.beside.empty() && result.plot.empty())
        throw usage_problem("--beside adds to a plot: say --plot FILE.svg");
    if (result.candidate) detail::read_candidate(result);
    return result;
}

}  // namespace ddp_perf
