/// \file
/// ddp-perf: measures the collectives over a range of sizes, as nccl-tests does.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_secure.hpp>

#include "ddp-perf/collectives.hpp"
#include "ddp-perf/launch.hpp"
#include "ddp-perf/measure.hpp"
#include "ddp-perf/options.hpp"
#include "ddp-perf/plot.hpp"
#include "ddp-perf/results.hpp"
#if defined(PERF_WITH_MPI)
#include <ddp/rendezvous/run_mpi.hpp>
#endif

namespace {

using namespace ddp_perf;

constexpr char const* needs_two_ranks = "pingpong needs two ranks: -n 2";

/// Elements that are wrong on any rank after one operation, from each root.
template <class C>
std::size_t count_wrong(ddp::communicator<> const& comm, C const& what) {
    std::uint64_t mine = 0;
    for (std::size_t k = 0; k < (C::rooted ? static_cast<std::size_t>(comm.size()) : 1); ++k) {
        what.fill();
        what.run(k);
        mine += what.wrong(k);
    }
    std::size_t all = 0;
    for (std::uint64_t const one : ddp::all_gather(comm, mine)) all += one;
    return all;
}

template <class C>
row measure_size(settings const& with, ddp::communicator<> const& comm, ddp::any_allreduce const& algorithm,
                 std::size_t bytes) {
    auto const ranks = static_cast<std::size_t>(comm.size());
    std::size_t count = bytes / sizeof(float);
    if (C::sliced) count = (count + ranks - 1) / ranks * ranks;
    C const what(comm, algorithm, count);
    row result{.bytes = count * sizeof(float), .count = count, .algorithm = what.chosen()};
    result.bus_factor = C::bus_factor(static_cast<double>(ranks));
    if (with.check) result.wrong = count_wrong(comm, what);
    // Zeros stay zeros: no sum of many operations overflows.
    what.clear();
    result.seconds = measure(
        comm,
        {.bytes = result.bytes,
         .turns = C::rooted ? ranks : 1,
         .iterations = with.iterations,
         .budget = with.budget,
         .least = with.least,
         .most = with.most,
         .prepares = with.dirty},
        [&] { what.prepare(); }, [&](std::size_t k) { what.run(k); });
    result.seconds.divide_by(C::operations);
    if (with.check) result.wrong = result.wrong.value_or(0) + count_wrong(comm, what);  // after many
    return result;
}

std::string transport_of(settings const& with, ddp::communicator<> const& comm) {
    return with.transport.empty() ? std::string(comm.transport().name()) : with.transport;
}

/// What results depend on; no rows yet.
results described(settings const& with, ddp::communicator<> const& comm, std::string const& collective,
                  std::string const& impl) {
    results all{.collective = collective,
                .transport = transport_of(with, comm),
                .messages = ddp::name_of(comm.messages()),
                .algorithm = with.algorithm,
                .impl = impl,
                .net = with.candidate ? with.net : "",
                .ranks = comm.size(),
                .dirty = with.dirty};
#if defined(PERF_WITH_MPI)
    if (comm.transport().name() != "mpi") return all;
    char words[MPI_MAX_LIBRARY_VERSION_STRING] = {};
    int length = 0;
    MPI_Get_library_version(words, &length);
    all.mpi = words;
    all.mpi.resize(std::min(all.mpi.size(), all.mpi.find_first_of(",\n")));  // the rest: who has built it, and when
    for (char const* const name : {"OMPI_MCA_pml", "OMPI_MCA_btl", "UCX_TLS"})
        if (char const* const value = std::getenv(name); value != nullptr)
            all.mpi_settings += (all.mpi_settings.empty() ? "" : " ") + std::string(name) + '=' + value;
#endif
    return all;
}

template <class C>
results measure_sizes(settings const& with, ddp::communicator<> const& comm) {
    auto const algorithm = ddp::any_allreduce::parse(with.algorithm, comm);
    bool const is_default = with.algorithm == ddp::automatic_allreduce::name;
    std::string const label =
        "ddp, " + transport_of(with, comm) + (is_default ? "" : ", " + with.algorithm) + (with.dirty ? ", dirty" : "");
    results all = described(with, comm, C::name, with.candidate ? with.impl : label);
    bool const prints = comm.rank() == 0;
    if (prints && !with.candidate) std::cout << table_head(all, with) << std::flush;
    for (std::size_t const bytes : with.sizes) {
        row const one = measure_size<C>(with, comm, algorithm, bytes);
        all.rows.push_back(one);
        if (prints) std::cout << (with.candidate ? candidate_line(all, one) : table_line(one)) << std::flush;
    }
    return all;
}

void write_files(settings const& with, results const& all) {
    if (!with.json.empty()) write_file(with.json, to_json(all));
    if (with.plot.empty()) return;
    std::vector<series> lines{{all.impl, {}}};
    for (row const& r : all.rows) lines.front().points.emplace_back(static_cast<double>(r.bytes), r.bus_bandwidth());
    if (!with.beside.empty())
        for (series const& other : read_series(with.beside, all.collective, all.ranks, all.rows.front().bus_factor))
            lines.push_back(other);
    write_file(with.plot, plot(all.collective + " of float between " + std::to_string(all.ranks) + " ranks", lines));
}

/// --candidate with MODE=startup.
void print_startup(settings const& with, ddp::communicator<> const& comm) {
    float one = 1;
    ddp::allreduce(comm, std::span<float>(&one, 1), ddp::any_allreduce::parse(with.algorithm, comm));
    double const now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    if (comm.rank() != 0) return;
    std::cout << text("%.3f\n", now - with.t0) << std::flush;
    if (with.json.empty()) return;
    results all = described(with, comm, with.collective, with.impl);
    all.startup = now - with.t0;
    write_file(with.json, to_json(all));
}

/// Whether messages between all ranks go through memory, and arrays are memory that all see.
bool shares_memory(ddp::communicator<> const& comm) {
    return comm.through_memory() && (comm.size() == 1 || ddp::shared_array<float>(comm, 1).memory() != nullptr);
}

/// Whether all elements were right. Every rank returns the same.
bool measure_all(settings const& with, ddp::communicator<> const& comm) {
    if (with.startup) {
        print_startup(with, comm);
        return true;
    }
    if (with.collective == pingpong::name && comm.size() < 2) throw usage_problem(needs_two_ranks);
    if (with.transport == "shm" && !shares_memory(comm))
        throw usage_problem(
            std::string("--transport shm is for ranks that share memory, and between these messages go through ") +
            ddp::name_of(comm.messages()) +
            ". Start all on one host, outside containers of their own, without DDP_SHARE_MEMORY=0; "
            "or leave --transport out");
    results all;
    for_each_collective([&]<class C>(C const*) {
        if (with.collective == C::name) all = measure_sizes<C>(with, comm);
    });
    if (comm.rank() == 0) write_files(with, all);
    std::size_t wrong = 0;
    for (row const& r : all.rows) wrong += r.wrong.value_or(0);
    if (wrong != 0 && comm.rank() == 0) std::cerr << "ddp-perf: " << wrong << " elements are wrong\n";
    return wrong == 0;
}

/// Somebody has started this process as one rank of several.
bool is_launched() {
#if defined(PERF_WITH_MPI)
    if (ddp::mpi::detected()) return true;
#endif
    return ddp::secure_tcp::detected() || ddp::secure_tcp::also_detected();
}

/// What would fail after the measurement fails before it.
void expect_files(settings const& with, int ranks) {
    if (!with.beside.empty()) (void)read_series(with.beside, with.collective, ranks, 1);
    for (std::string const& path : {with.json, with.plot})
        if (!path.empty() && !std::ofstream(path, std::ios::app)) throw usage_problem(path + " cannot be written");
}

/// 0; 1 if elements were wrong.
int run(settings with, int argc, char const* const* argv) {
    bool const launched = is_launched();
    if (with.collective == pingpong::name && with.ranks == 1) throw usage_problem(needs_two_ranks);
    std::string_view const wanted = with.transport.empty() && !launched ? "shm" : std::string_view(with.transport);
    std::string run_as;
    if (with.transport == "tcp") ::setenv("DDP_SHARE_MEMORY", "0", 1);
    for (transport_choice const& choice : transports) {
        if (choice.name != wanted) continue;
        run_as = choice.run_as;
        if (choice.start == started_by::threads) {
            if (launched)
                throw usage_problem("--transport " + with.transport +
                                    " starts its ranks itself, as threads of one process, "
                                    "and a launcher has started this one as one of several: leave out one of the two");
            if (with.ranks == 0) with.ranks = 2;
        } else if (!launched && choice.start == started_by::ddprun) {
            if (with.ranks == 0) with.ranks = 2;
            expect_files(with, with.ranks);
            continue_under_ddprun(with.ranks, argc, argv);
        } else if (choice.start == started_by::mpirun) {
#if !defined(PERF_WITH_MPI)
            throw usage_problem("this ddp-perf was built without MPI");
#endif
            if (!launched)
                throw usage_problem("ranks over MPI are started by mpirun: mpirun -n 2 ddp-perf " + with.collective +
                                    " --transport mpi");
        }
    }
    std::atomic<bool> good{true};
    auto const body = [&](ddp::communicator<>& comm) {
        if (comm.rank() == 0) expect_files(with, comm.size());
        if (!measure_all(with, comm)) good = false;
    };
    ddp::run_options const options{.transport = run_as, .ranks = with.ranks};
#if defined(PERF_WITH_MPI)
    ddp::run<ddp::threads, ddp::secure_tcp, ddp::mpi>(options, body);
#else
    ddp::run<ddp::threads, ddp::secure_tcp>(options, body);
#endif
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        settings const with = parse(argc, argv, collective_names());
        if (with.print.empty()) return run(with, argc, argv);
        std::cout << with.print << std::flush;
        return std::cout ? EXIT_SUCCESS : EXIT_FAILURE;
    } catch (usage_problem const& problem) {
        std::cerr << "ddp-perf: " << problem.what() << '\n';
        if (!is_launched()) std::cerr << "See ddp-perf --help for options.\n";
        return 2;
    } catch (ddp::environment_error const& problem) {
        std::cerr << "ddp-perf: " << problem.what() << '\n';
        return 2;
    } catch (std::bad_alloc const&) {
        std::cerr << "ddp-perf: out of memory; make the largest size smaller (-e)\n";
    } catch (std::exception const& problem) {
        std::cerr << "ddp-perf: " << problem.what() << '\n';
    }
    return EXIT_FAILURE;
}
