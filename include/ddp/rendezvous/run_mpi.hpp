/// \file
/// mpi: run's way to start under mpirun, or inside a program that has MPI already.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string_view>
#include <thread>

#include <ddp/comm/communicator.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/transport/any.hpp>
#include <ddp/transport/mpi/mpi.hpp>

#include <mpi.h>
#include <boost/mpi/communicator.hpp>
#include <boost/mpi/environment.hpp>

namespace ddp {

/// The library's communicator over a duplicate of the user's: what a program that has MPI already begins with.
///
///     boost::mpi::communicator world;
///     auto comm = ddp::mpi_communicator(world);
///
/// `users` is an MPI_Comm or a boost::mpi::communicator, which converts. Collective over it; it may be any intracommunicator: of all ranks, or of those that train. The user's messages
/// and ours never meet, in whatever order the two are used. Destroy it before MPI ends. Throws as mpi_transport does.
[[nodiscard]] inline communicator<> mpi_communicator(MPI_Comm users, timing const& times = {}) {
    return any_communicator(std::make_unique<mpi_transport>(users, mpi_options{.times = times}), times);
}

/// Ranks are the processes of MPI_COMM_WORLD (of a duplicate: the user's messages and ours never meet). MPI is initialised
/// here if it is not yet, at MPI_THREAD_FUNNELED: the library then calls MPI on the thread that calls the library, during
/// hooks and blocking calls, and in comm.progress(). A program that has initialised MPI at MPI_THREAD_MULTIPLE gets a
/// communication thread.
///
/// Failure: every rank throws the same verdict; MPI cannot go on after that, so the job ends once every rank has said
/// what it has to say. A killed rank ends the job at once: mpirun does that.
struct mpi {
    static constexpr std::string_view name = "mpi";

    /// Started by mpirun, srun or another process manager that speaks PMI, as one of several or one.
    [[nodiscard]] static bool detected() noexcept {
        for (char const* const variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"})
            if (std::getenv(variable) != nullptr) return true;
        return false;
    }

    template <class Body>
    static void start(run_options const& options, Body& body) {
        std::unique_ptr<boost::mpi::environment> own;
        if (!boost::mpi::environment::initialized())
            own = std::make_unique<boost::mpi::environment>(boost::mpi::threading::funneled, false);
        boost::mpi::communicator const world;
        if (options.ranks != 0 && options.ranks != world.size())
            throw environment_error("mpirun started " + std::to_string(world.size()) + " ranks, but " +
                                    std::to_string(options.ranks) + " were asked for: give mpirun -n " +
                                    std::to_string(options.ranks));
        std::exception_ptr thrown;
        try {
            communicator<> comm = mpi_communicator(world, options.times);
            detail::call_body(body, comm);
        } catch (...) {
            thrown = std::current_exception();
        }
        if (!thrown) return;
        if (own != nullptr && world.size() > 1) end_job(thrown);
        std::rethrow_exception(thrown);
    }

private:
    /// MPI_Finalize may wait for ever for a message that nobody will receive: the job ends here instead.
    [[noreturn]] static void end_job(std::exception_ptr const& thrown) {
        int rank = 0;
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        std::fflush(stdout);
        try {
            std::rethrow_exception(thrown);
        } catch (std::exception const& e) {
            std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
        } catch (...) {
            std::fprintf(stderr, "rank %d: an exception that is no std::exception\n", rank);
        }
        std::fflush(stderr);
        // The first to abort silences the others: give them time to speak.
        MPI_Request everybody = MPI_REQUEST_NULL;
        auto const until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
        if (MPI_Ibarrier(MPI_COMM_WORLD, &everybody) == MPI_SUCCESS)
            for (int done = 0; done == 0 && std::chrono::steady_clock::now() < until;) {
                if (MPI_Test(&everybody, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
        std::abort();
    }
};
static_assert(Launch<mpi>);

}  // namespace ddp
