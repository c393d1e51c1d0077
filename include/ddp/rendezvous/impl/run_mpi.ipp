/// \file
/// What rendezvous/run_mpi.hpp declares.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string_view>
#include <thread>

#include <ddp/comm/host.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/flight_signal.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/rendezvous/run_mpi.hpp>
#include <ddp/transport/any.hpp>
#include <ddp/transport/mpi/mpi.hpp>
#include <ddp/transport/mpi/mpi_failures.hpp>

#include <mpi.h>
#include <boost/mpi/communicator.hpp>
#include <boost/mpi/environment.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL communicator<> mpi_communicator(MPI_Comm users, timing const& times, std::string_view host,
                                                       communication_thread thread) {
    mpi_options const options{.times = times, .host = host_named(host)};
    return any_communicator(std::make_unique<mpi_transport>(users, options), times, thread);
}

namespace detail {

/// Ends the job: MPI_Finalize might wait forever for a message that no rank will receive.
[[noreturn, gnu::cold]] DDP_DECL void end_job(std::exception_ptr const& thrown) {
    using std::chrono::milliseconds;
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int code = EXIT_FAILURE;
    milliseconds pause{};  // of many aborts at once mpirun may hang
    try {
        std::rethrow_exception(thrown);
    } catch (comm_error const& e) {  // after a rank that has thrown, which has an exit code of its own for mpirun
        pause = milliseconds(e.code() == errc::remote_exception ? 300 : 20) + milliseconds(20) * std::min(rank, 49);
        code = report_exception(concat({"rank ", rank, ": "}).c_str());
    } catch (...) {
        code = report_exception(concat({"rank ", rank, ": "}).c_str());
    }
    std::fflush(stderr);
    // MPI_Abort kills all ranks: give the others time to print their errors.
    MPI_Request everybody = MPI_REQUEST_NULL;
    auto const until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    if (mpi::barrier_of_the_living(MPI_COMM_WORLD, &everybody) == MPI_SUCCESS)
        for (int done = 0; done == 0 && std::chrono::steady_clock::now() < until;) {
            if (MPI_Test(&everybody, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
            std::this_thread::sleep_for(milliseconds(1));
        }
    std::this_thread::sleep_for(pause);
    if (!mpi::failed_ranks(MPI_COMM_WORLD).empty())
        std::_Exit(code);  // after MPI_Abort, Open MPI's mpirun may return 0
    std::signal(SIGALRM, SIG_DFL);
    ::alarm(3);  // MPI_Abort may hang where mpirun has ended
    MPI_Abort(MPI_COMM_WORLD, code);
    std::abort();
}

}  // namespace detail

[[gnu::cold]] DDP_DECL bool mpi::detected() noexcept {
    for (char const* const variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"})
        if (std::getenv(variable) != nullptr) return true;
    return false;
}

[[gnu::cold]] DDP_DECL void mpi::start(run_options const& options, function_ref<void(communicator<>&)> body) {
    std::unique_ptr<boost::mpi::environment> own;
    if (!boost::mpi::environment::initialized())
        own = std::make_unique<boost::mpi::environment>(boost::mpi::threading::funneled, false);
    boost::mpi::communicator const world;
    if (options.ranks != 0 && options.ranks != world.size())
        throw environment_error(detail::concat({"mpirun started ", world.size(), " ranks, but ", options.ranks,
                                                " were asked for: give mpirun -n ", options.ranks}));
    for (char const* const variable : {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE"})
        if (char const* const value = std::getenv(variable);
            own != nullptr && world.size() == 1 && value != nullptr && std::string_view(value) != "1")
            throw environment_error(detail::concat(
                {variable, "=", std::string_view(value).substr(0, 80),
                 " says that this process is one of several, but ",
                 "MPI_Init found none of the others: this MPI library does not understand the launcher, and each rank "
                 "would train alone. Use this library's own mpirun, or, with srun, the --mpi that it was built for "
                 "(srun --mpi=list)"}));
    detail::flight_signal const on_request;
    std::exception_ptr thrown;
    try {
        communicator<> comm = mpi_communicator(world, options.times, {}, options.thread);
        detail::flight_signal::target const whose(comm.driver()->recorder());
        detail::call_body(body, comm);
    } catch (...) {
        thrown = std::current_exception();
    }
    if (!thrown) return;
    if (own != nullptr && world.size() > 1) detail::end_job(thrown);
    std::rethrow_exception(thrown);
}

}  // namespace ddp
