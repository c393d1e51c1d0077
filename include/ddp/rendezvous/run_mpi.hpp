/// \file
/// mpi: run's way to start under mpirun, or inside a program that uses MPI already.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <string_view>

#include <ddp/comm/communicator.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/rendezvous/run.hpp>

#include <mpi.h>

namespace ddp {

/// A communicator of the library over a duplicate of the user's, for a program that already uses MPI.
///
///     boost::mpi::communicator world;
///     auto comm = ddp::mpi_communicator(world);
///
/// users   an MPI_Comm, or a boost::mpi::communicator, which converts: any intracommunicator, of all processes or of those that
///         train. The call is collective over it. Messages of the program and of the library never match each other.
/// host    ranks that give different names count as ranks of different hosts, even on one machine; empty: what DDP_HOST says.
/// Throws  as mpi_transport and the constructor of communicator.
///
/// Destroy the communicator before MPI_Finalize. After an error end the job with MPI_Abort: MPI_Finalize may wait forever for a
/// message that no rank will receive.
[[nodiscard]] communicator<> mpi_communicator(MPI_Comm users, timing const& times = {}, std::string_view host = {},
                                              communication_thread thread = communication_thread::automatic);

/// Ranks are the processes of MPI_COMM_WORLD; the library uses a duplicate, so messages of the program and of the library never
/// match each other. If MPI is not initialised yet, this initialises it at MPI_THREAD_FUNNELED: the library then calls
/// MPI only on the thread that calls the library, during hooks and blocking calls, and in comm.progress(). A program
/// that has initialised MPI at MPI_THREAD_MULTIPLE gets a communication thread, which drives if this host has two cores
/// for each of its ranks, and otherwise rests (communication_thread).
///
/// Failure  every rank throws the same verdict. If run has initialised MPI, the job then ends by MPI_Abort, once every rank
///          has printed its error, or after a second; otherwise the program has to do that. mpirun ends the job at once when
///          a rank is killed, unless Open MPI's --enable-recovery tells it not to.
struct mpi {
    static constexpr std::string_view name = "mpi";

    /// Whether mpirun, srun or another process manager that uses PMI started this process, alone or as one of several.
    [[nodiscard]] static bool detected() noexcept;

    static void start(run_options const& options, function_ref<void(communicator<>&)> body);
};
static_assert(Launch<mpi>);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/run_mpi.ipp>
#endif
