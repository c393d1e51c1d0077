/// \file
/// mpi: run's way to start under mpirun, or inside a program that has MPI already.
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

/// The library's communicator over a duplicate of the user's: what a program that has MPI already begins with.
///
///     boost::mpi::communicator world;
///     auto comm = ddp::mpi_communicator(world);
///
/// `users` is an MPI_Comm or a boost::mpi::communicator, which converts. Collective over it; it may be any intracommunicator: of all ranks, or of those that train. The user's messages
/// and ours never meet, in whatever order the two are used. Destroy it before MPI ends. Throws as mpi_transport does.
///
/// `host`: ranks that give different names count as ranks of different hosts, even on one machine; empty: what DDP_HOST says.
[[nodiscard]] communicator<> mpi_communicator(MPI_Comm users, timing const& times = {}, std::string_view host = {},
                                              communication_thread thread = communication_thread::automatic);

/// Ranks are the processes of MPI_COMM_WORLD (of a duplicate: the user's messages and ours never meet). MPI is initialised
/// here if it is not yet, at MPI_THREAD_FUNNELED: the library then calls MPI on the thread that calls the library, during
/// hooks and blocking calls, and in comm.progress(). A program that has initialised MPI at MPI_THREAD_MULTIPLE gets a
/// communication thread, which drives where this host has two cores for each of its ranks, and else rests
/// (communication_thread).
///
/// Failure: every rank throws the same verdict; MPI cannot go on after that, so the job ends once every rank has said
/// what it has to say. A killed rank ends the job at once: mpirun does that.
struct mpi {
    static constexpr std::string_view name = "mpi";

    /// Started by mpirun, srun or another process manager that speaks PMI, as one of several or one.
    [[nodiscard]] static bool detected() noexcept;

    static void start(run_options const& options, function_ref<void(communicator<>&)> body);
};
static_assert(Launch<mpi>);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/run_mpi.ipp>
#endif
