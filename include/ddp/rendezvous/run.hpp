/// \file
/// run: runs one program as threads, as processes over TCP, under MPI, or alone, depending on how it was started.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <array>
#include <atomic>
#include <concepts>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <ddp/comm/communicator.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {

/// How to start. Everything has a default: run<threads, tcp>(body) reads the environment.
struct run_options {
    std::string transport = {};  ///< "inproc", "tcp" (also for secure_tcp), "mpi"; empty: what the environment says
    int ranks = 0;               ///< number of threads; for processes it must be the launcher's number, or 0
    timing times = {};           ///< time limits; the environment overrides some of them, see run
    /// Which thread moves messages while the program computes; DDP_COMMUNICATION_THREAD overrides it.
    communication_thread thread = communication_thread::automatic;
    bool encrypt = false;  ///< secure_tcp: TLS 1.3 on all connections; also DDP_TLS=1
    /// Allows tcp beyond loopback without a secret: anybody who can reach the port can then take part. Also
    /// DDP_INSECURE=1.
    bool insecure = false;
};

/// A way to start the ranks that a program was built with: threads, tcp, mpi.
///
///  name          what run_options.transport calls it
///  detected()    whether the environment asks for it
///  also_detected()        optional: whether it can form a job from an environment that asks for no other way
///  start(options, body)   makes the communicators of this process's ranks and calls body(comm) with each; throws what body
///                         throws. `body` is what run was given: take it as function_ref<void(communicator<>&)>, or, to
///                         pass communicators of other types, as a template parameter
template <class L>
concept Launch = requires(run_options const& options) {
    { L::name } -> std::convertible_to<std::string_view>;
    { L::detected() } -> std::same_as<bool>;
};

namespace detail {

/// Calls body(comm). If it throws, the text of the exception is reported to the other ranks.
void call_body(function_ref<void(communicator<>&)> body, communicator<>& comm);

/// The options with the times that the environment sets. Throws environment_error if they name no transport among `choices`,
/// or make no sense; usage_error if the times do not go together (timing::validate).
[[nodiscard]] run_options checked(run_options options, std::span<std::string_view const> choices);
/// `times`, with the values of DDP_TIMEOUT_DEAD, _HEARTBEAT, _SUSPECT, _COLLECTIVE, _STRAGGLER, _JOIN, _HANDSHAKE and _SHUTDOWN, in
/// seconds, if they are set.
[[nodiscard]] timing with_environment(timing times);

/// For an environment that asks for no transport among `choices`: throws environment_error if this program would train
/// alone although several were started.
void expect_alone(run_options const& options, std::span<std::string_view const> choices);

/// Returns `code`. If that is EXIT_SUCCESS but C's stdout could not be written, prints a line to stderr and returns EXIT_FAILURE.
[[nodiscard]] int checked_output(int code) noexcept;

/// Prints the exception that is being handled to stderr, after `who`. Returns the exit code for it.
[[nodiscard]] int report_exception(char const* who = "") noexcept;

}  // namespace detail

/// Ranks are threads of this process: run_options.ranks of them, one by default. body is called once on each thread, so what it
/// captures is shared.
struct threads {
    static constexpr std::string_view name = "inproc";
    static constexpr int most_ranks = 1024;  ///< each keeps state for all others: 1,024 take 1 GB
    [[nodiscard]] static bool detected() noexcept { return false; }

    static void start(run_options const& options, function_ref<void(communicator<>&)> body);
};
static_assert(Launch<threads>);

/// Calls body(comm), which returns nothing, once for every rank of this process, with a communicator<> over the transport that
/// the options or the environment choose among `Launches`. If the environment says nothing, ranks are threads where `threads`
/// is among them, options.ranks of them; otherwise there is one rank. No socket is opened then.
///
///     ddp::run<ddp::threads, ddp::tcp>([](auto& comm) { train(comm); });
///
/// Choice  options.transport if it is set; otherwise the first of `Launches` that the environment asks for: RANK and
///         WORLD_SIZE mean tcp, a process manager's variables (OMPI_COMM_WORLD_SIZE, PMI_SIZE, PMIX_RANK) mpi. If it asks
///         for none: tcp, if the variables of srun or mpirun say where to meet (job_from_environment).
/// Times   DDP_TIMEOUT_DEAD, _HEARTBEAT, _SUSPECT, _COLLECTIVE, _STRAGGLER, _JOIN, _HANDSHAKE and _SHUTDOWN (seconds, "0.5"
///         or "600"; the same for all ranks) override options.times.
/// Thread  DDP_COMMUNICATION_THREAD (automatic, drives, rests) overrides options.thread; comm.thread() says what was
///         chosen.
/// Signals SIGUSR2 makes a process write what its rank did last (docs/faults.md), unless the program handles that signal
///         itself. DDP_FLIGHT_DIR says where; the same is written when the job fails.
/// Cost    tcp: a rendezvous at rank 0 and a connection for every pair of ranks, for at most timing.join (30 s).
///         threads: a thread for each rank. mpi: a duplicate of MPI_COMM_WORLD. Returns when body has returned on every rank
///         of this process and these have left the job.
/// Throws  environment_error (DDP-E101) if what is asked for was not built in or contradicts itself, if several
///         processes were started that do not form a job, or if a thread cannot be started. usage_error if options.times
///         or options.thread make no sense. rendezvous_error (DDP-E201) if ranks did not find each other; over mpi
///         ddp::error with E201, E202 or E205 if they cannot form a job. Otherwise what body throws: with threads the
///         lowest rank's own exception, or comm_error if all threw that. Over mpi, if this call has initialised MPI, a
///         failed job of several ranks ends with MPI_Abort instead, after the error has been printed (see mpi).
template <Launch... Launches, class Body>
void run(run_options const& with, Body body) {
    static_assert(std::is_void_v<std::invoke_result_t<Body&, communicator<>&>>,
                  "ddp::run: the body returns nothing; with ddp::run_main it may also return an int, the exit code");
    std::array<std::string_view, sizeof...(Launches)> const choices{Launches::name...};
    run_options const options = detail::checked(with, choices);
    bool started = false;
    auto const try_one = [&]<class L>(std::type_identity<L>) {
        if (started || !(options.transport.empty() ? L::detected() : options.transport == L::name)) return;
        started = true;
        L::start(options, body);
    };
    (try_one(std::type_identity<Launches>{}), ...);
    if (started) return;
    auto const try_late = [&]<class L>(std::type_identity<L>) {
        if constexpr (requires { L::also_detected(); }) {
            if (started || !L::also_detected()) return;
            started = true;
            L::start(options, body);
        }
    };
    (try_late(std::type_identity<Launches>{}), ...);
    if (started) return;
    detail::expect_alone(options, choices);
    threads::start(options, body);
}
template <Launch... Launches, class Body>
void run(Body body) {
    run<Launches...>(run_options{}, std::move(body));
}

/// Does what run does, for a main function: prints an error to stderr and returns the exit code. After a ddp::error that is
/// its exit_code() (202 for DDP-E202), after any other exception, or if C's stdout could not be written, EXIT_FAILURE; otherwise
/// EXIT_SUCCESS, or what the body returns if that is an int (with threads: the first that is not 0; as for any program, the
/// system keeps the lowest 8 bits). Throws nothing.
template <Launch... Launches, class Body>
[[nodiscard]] int run_main(run_options const& options, Body body) noexcept {
    try {
        std::atomic<int> code{EXIT_SUCCESS};
        if constexpr (std::same_as<std::invoke_result_t<Body&, communicator<>&>, int>)
            run<Launches...>(options, [&](communicator<>& comm) {
                int const mine = body(comm);
                int none = EXIT_SUCCESS;
                if (mine != EXIT_SUCCESS) code.compare_exchange_strong(none, mine);
            });
        else
            run<Launches...>(options, std::move(body));
        return detail::checked_output(code);
    } catch (...) {
        return detail::report_exception();
    }
}
template <Launch... Launches, class Body>
[[nodiscard]] int run_main(Body body) noexcept {
    return run_main<Launches...>(run_options{}, std::move(body));
}

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/run.ipp>
#endif
