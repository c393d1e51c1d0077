/// \file
/// What rendezvous/run.hpp declares.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include <ddp/comm/communication_thread.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/transport/inproc.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL void call_body(function_ref<void(communicator<>&)> body, communicator<>& comm) {
    try {
        body(comm);
    } catch (...) {
        comm.fail(std::current_exception());
        comm.driver()->recorder().dump("exception");
        throw;
    }
}

/// Rethrows the most informative exception: one that a rank's own code threw, rather than what others report about it.
[[gnu::cold]] DDP_DECL void rethrow_root_cause(std::vector<std::exception_ptr> const& thrown) {
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

[[gnu::cold]] DDP_DECL timing with_environment(timing times) {
    auto const set = [](char const* name, timing::milliseconds& time) {
        char const* const value = std::getenv(name);
        std::string_view const text = value == nullptr ? "" : value;
        if (text.empty()) return false;
        bool const plain = text.find_first_not_of("0123456789.") == text.npos;  // no sign, no "nan", no unit
        double seconds = 0;  // not strtod, whose decimal point depends on the locale
        auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
        if (!plain || error != std::errc() || end != text.data() + text.size() ||
            !(seconds >= 0.01 && seconds <= 604'800))
            throw environment_error(concat({name, " is \"", printable(text, 40),
                                            "\"; expected seconds, from 0.01 to 604800 (a week), such as 0.5 or 600"}));
        time = timing::milliseconds(static_cast<timing::milliseconds::rep>(seconds * 1000));
        return true;
    };
    if (set("DDP_TIMEOUT_DEAD", times.dead)) times.heartbeat = std::min(times.heartbeat, times.dead / 4);
    set("DDP_TIMEOUT_HEARTBEAT", times.heartbeat);
    set("DDP_TIMEOUT_SUSPECT", times.suspect);
    set("DDP_TIMEOUT_COLLECTIVE", times.collective);
    set("DDP_TIMEOUT_STRAGGLER", times.straggler);
    set("DDP_TIMEOUT_JOIN", times.join);
    set("DDP_TIMEOUT_HANDSHAKE", times.handshake);
    set("DDP_TIMEOUT_SHUTDOWN", times.shutdown);
    return times;
}

[[gnu::cold]] DDP_DECL run_options checked(run_options options, std::span<std::string_view const> choices) {
    options.times = with_environment(options.times);
    options.times.validate();
    static_cast<void>(chosen_thread(options.thread, false));  // throws before this rank joins
    if (options.ranks < 0)
        throw environment_error(concat({"run_options.ranks is ", options.ranks,
                                        "; expected how many ranks there are, or 0: as many as the launcher says"}));
    if (options.transport.empty()) return options;
    std::string names;
    for (std::string_view const choice : choices) {
        if (choice == options.transport) return options;
        names += concat({names.empty() ? "" : ", ", choice});
    }
    throw environment_error(concat({"transport '", options.transport, "' is not one this program was built with: ",
                                    names, ". Add it to ddp::run<...> and link its target (ddp::tcp, ddp::mpi)."}));
}

/// The error for a `variable` that says that a launcher has started several processes, when this one knows of no others.
[[gnu::cold]] DDP_DECL std::string many_alone(std::string_view variable, std::string_view value, bool has_tcp,
                                              bool has_mpi) {
    std::string const text = concat({variable, "=", value, " says that this program is one of ", value,
                                     ", but it knows nothing about the others: each would train alone. "});
    if (variable == "WORLD_SIZE")
        return text + "Add ddp::tcp to ddp::run<...> (<ddp/rendezvous/run_tcp.hpp>, target ddp::tcp).";
    if (has_mpi) return text + "This launcher has not started them as an MPI program; with srun, add --mpi=pmix.";
    std::string const launch =
        has_tcp ? concat({"Start it with ddprun -n ", value,
                          " instead, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or build"})
                : "Build";
    return concat(
        {text, launch, " it with MPI: add ddp::mpi to ddp::run<...> (<ddp/rendezvous/run_mpi.hpp>, target ddp::mpi)."});
}

[[gnu::cold]] DDP_DECL void expect_alone(run_options const& options, std::span<std::string_view const> choices) {
    auto const has = [&](std::string_view name) {
        return std::find(choices.begin(), choices.end(), name) != choices.end();
    };
    // A launcher whose variables are not understood would start N programs of one rank each, without any error.
    for (char const* const variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"})
        if (char const* const value = std::getenv(variable); value != nullptr && std::string_view(value) != "1")
            throw environment_error(many_alone(variable, value, has("tcp"), has("mpi")));
    if (options.ranks > 1 && !has(threads::name))
        throw environment_error(
            concat({options.ranks, " ranks were asked for, but nothing started them: use ddprun -n ", options.ranks,
                    " or mpirun -n, or add ddp::threads to ddp::run<...> for ranks that are threads."}));
}

[[gnu::cold]] DDP_DECL int checked_output(int code) noexcept {
    if (code != EXIT_SUCCESS || (std::fflush(stdout) == 0 && std::ferror(stdout) == 0)) return code;
    std::fputs("ddp: not all of the program's standard output could be written\n", stderr);
    return EXIT_FAILURE;
}

[[gnu::cold]] DDP_DECL int report_exception(char const* who) noexcept {
    std::fflush(stdout);
    try {
        throw;
    } catch (std::bad_alloc const&) {
        std::fprintf(stderr, "%sout of memory: use a smaller model or batch, fewer ranks, or a higher ulimit -v\n",
                     who);
    } catch (std::exception const& e) {
        std::fprintf(stderr, "%s%s\n", who, e.what());
        if (auto const* const ours = dynamic_cast<error const*>(&e)) return ours->exit_code();
    } catch (...) {
        std::fprintf(stderr, "%san exception that is not a std::exception ended the program\n", who);
    }
    return EXIT_FAILURE;
}

}  // namespace ddp::detail

namespace ddp {

[[gnu::cold]] DDP_DECL void threads::start(run_options const& options, function_ref<void(communicator<>&)> body) {
    int const ranks = std::max(1, options.ranks);
    if (ranks > most_ranks)
        throw environment_error(
            detail::concat({"run_options.ranks is ", ranks, ", but one process can run at most ", most_ranks,
                            " ranks as threads; ask for fewer, or start processes with ddprun or mpirun"}));
    auto const world = inproc_world::create(ranks);
    std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(ranks));
    auto const one = [&](int rank) {
        try {
            communicator<> comm = any_communicator(world->connect(rank), options.times, options.thread);
            detail::call_body(body, comm);
        } catch (...) {
            thrown[static_cast<std::size_t>(rank)] = std::current_exception();
        }
    };
    {
        std::vector<std::jthread> others;
        int started = 1;
        try {
            for (; started < ranks; ++started) others.emplace_back(one, started);
        } catch (std::system_error const& e) {
            environment_error const cause(detail::concat(
                {"the system does not start the thread of rank ", started, " of ", ranks, ": ", e.what(),
                 ". Ask for fewer ranks, or raise the limit on threads (ulimit -u) or memory (ulimit -v)."}));
            failure record{.kind = failure_kind::threw, .code = errc::remote_exception};
            record.text = std::string_view(cause.what());
            thrown[0] = std::make_exception_ptr(cause);
            for (int rank : {0, started}) {  // those that run wait for all ranks
                record.rank = rank;
                world->connect(rank)->abort(record);
            }
        }
        if (!thrown[0]) one(0);
    }
    detail::rethrow_root_cause(thrown);
}

}  // namespace ddp
