/// \file
/// run: one program as threads, as processes over TCP, under MPI, or alone, decided by how it was started.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/comm/communicator.hpp>
#include <ddp/core/error.hpp>
#include <ddp/transport/any.hpp>
#include <ddp/transport/inproc.hpp>

namespace ddp {

/// How to start. Everything has a default: run<threads, tcp>(body) asks the environment.
struct run_options {
    std::string transport = {};  ///< "inproc", "tcp", "mpi"; empty: what the environment says
    int ranks = 0;               ///< of threads; elsewhere the launcher says how many, and this must agree or be 0
    timing times = {};
    bool insecure = false;  ///< tcp beyond loopback without a secret: anybody who reaches the port can take part
};

/// A way to start the ranks that a program was built with: threads, tcp, mpi.
///
///  name          what run_options.transport calls it
///  detected()    whether the environment asks for it
///  start(options, body)   makes this process's communicator(s) and calls body(comm); throws what body throws
template <class L>
concept Launch = requires(run_options const& options) {
    { L::name } -> std::convertible_to<std::string_view>;
    { L::detected() } -> std::same_as<bool>;
};

namespace detail {

/// The exception that tells most: what a rank's own code threw, before what others say about it.
inline void rethrow_root_cause(std::vector<std::exception_ptr> const& thrown) {
    std::exception_ptr verdict;
    for (std::exception_ptr const& e : thrown) {
        if (!e) continue;
        try {
            std::rethrow_exception(e);
        } catch (comm_error const&) {
            if (!verdict) verdict = e;
        } catch (...) {
            throw;
        }
    }
    if (verdict) std::rethrow_exception(verdict);
}

/// What to say when `variable` says that a launcher has started several of us, and nothing here knows the others.
inline std::string many_alone(std::string const& variable, std::string const& value, bool has_tcp, bool has_mpi) {
    std::string const text = variable + "=" + value + " says that this program is one of " + value +
                             ", but it knows nothing about the others: each would train alone. ";
    if (variable == "WORLD_SIZE")
        return text + "Add ddp::tcp to ddp::run<...> (<ddp/rendezvous/run_tcp.hpp>, target ddp::tcp).";
    if (has_mpi) return text + "This launcher has not started them as an MPI program; with srun, add --mpi=pmix.";
    std::string const launch =
        "Start it with ddprun -n " + value + " instead, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or build";
    return text + (has_tcp ? launch : "Build") +
           " it with MPI: add ddp::mpi to ddp::run<...> (<ddp/rendezvous/run_mpi.hpp>, target ddp::mpi).";
}

/// body(comm); what it throws reaches the other ranks in its own words.
template <class Body, class Comm>
void call_body(Body& body, Comm& comm) {
    try {
        body(comm);
    } catch (...) {
        comm.fail(std::current_exception());
        throw;
    }
}

}  // namespace detail

/// Ranks are threads of this process: run_options.ranks of them, one by default.
struct threads {
    static constexpr std::string_view name = "inproc";
    [[nodiscard]] static bool detected() noexcept { return false; }

    template <class Body>
    static void start(run_options const& options, Body& body) {
        int const ranks = std::max(1, options.ranks);
        auto const world = inproc_world::create(ranks);
        std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(ranks));
        auto const one = [&](int rank) {
            try {
                communicator<> comm = any_communicator(world->connect(rank), options.times);
                detail::call_body(body, comm);
            } catch (...) {
                thrown[static_cast<std::size_t>(rank)] = std::current_exception();
            }
        };
        {
            std::vector<std::jthread> others;
            for (int rank = 1; rank < ranks; ++rank) others.emplace_back(one, rank);
            one(0);
        }
        detail::rethrow_root_cause(thrown);
    }
};
static_assert(Launch<threads>);

/// Calls body(comm) once for every rank of this process, with a communicator<> over the transport that the options or the
/// environment choose among `Launches`. Nothing in the environment: one rank, no sockets.
///
/// Throws environment_error if what is asked for was not built in or contradicts itself, otherwise what body throws.
template <Launch... Launches, class Body>
void run(run_options const& options, Body body) {
    if (options.ranks < 0)
        throw environment_error("run_options.ranks is " + std::to_string(options.ranks) +
                                "; expected how many ranks there are, or 0: as many as the launcher says");
    bool started = false;
    std::string choices;
    auto const try_one = [&]<class L>(std::type_identity<L>, bool chosen) {
        if (started || !chosen) return;
        started = true;
        L::start(options, body);
    };
    if (!options.transport.empty()) {
        (try_one(std::type_identity<Launches>{}, options.transport == Launches::name), ...);
        ((choices += (choices.empty() ? "" : ", ") + std::string(Launches::name)), ...);
        if (!started)
            throw environment_error("transport '" + options.transport + "' is not one this program was built with: " +
                                    choices + ". Add it to ddp::run<...> and link its door (ddp::tcp, ddp::mpi).");
        return;
    }
    (try_one(std::type_identity<Launches>{}, Launches::detected()), ...);
    if (started) return;
    // A launcher that nobody here understands would start N programs of one rank each: the classic silent mistake.
    for (char const* const variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"})
        if (char const* const value = std::getenv(variable); value != nullptr && std::string_view(value) != "1")
            throw environment_error(detail::many_alone(variable, value, ((Launches::name == "tcp") || ...),
                                                       ((Launches::name == "mpi") || ...)));
    if (options.ranks > 1 && !(std::is_same_v<Launches, threads> || ...))
        throw environment_error(std::to_string(options.ranks) +
                                " ranks were asked for, but nothing started them: use ddprun -n " +
                                std::to_string(options.ranks) +
                                " or mpirun -n, or add ddp::threads to ddp::run<...> for ranks that are threads.");
    threads::start(options, body);
}
template <Launch... Launches, class Body>
void run(Body body) {
    run<Launches...>(run_options{}, std::move(body));
}

/// run for a main function: prints what goes wrong to stderr and returns the exit code.
template <Launch... Launches, class Body>
[[nodiscard]] int run_main(run_options const& options, Body body) noexcept {
    try {
        run<Launches...>(options, std::move(body));
        return EXIT_SUCCESS;
    } catch (std::exception const& e) {
        std::fflush(stdout);
        std::fprintf(stderr, "%s\n", e.what());
    } catch (...) {
        std::fprintf(stderr, "an exception that is no std::exception ended the program\n");
    }
    return EXIT_FAILURE;
}
template <Launch... Launches, class Body>
[[nodiscard]] int run_main(Body body) noexcept {
    return run_main<Launches...>(run_options{}, std::move(body));
}

}  // namespace ddp
