/// \file
/// job: which rank of how many this process is, as its launcher's environment variables say.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/rendezvous/environment_view.hpp>

namespace ddp {

/// One process of a job, as the environment describes it.
struct job {
    int rank = 0;                           ///< which of them this process is
    int size = 1;                           ///< how many processes there are
    int local_rank = 0;                     ///< among the ranks of this host
    int local_size = 1;                     ///< how many there are on this host
    bool several_hosts = false;             ///< the launcher says that the ranks are on more than one
    std::string master_addr = "127.0.0.1";  ///< where rank 0 listens while the job comes together
    std::uint16_t master_port = 29500;      ///< the port there
    /// The launcher itself listens at master_port, as torchrun's agent does: rank 0 takes one of the next ports.
    bool port_is_launchers = false;
    /// Which job this is, if the launcher says so; else empty. Ranks of two jobs never meet.
    std::string id = {};
    std::string source = {};  ///< who says so, for messages: "Slurm (SLURM_PROCID=2 …)"
    std::string advice = {};  ///< what to look at should the ranks not find each other; empty: nothing is known
};

namespace detail {

/// Whether the text of an address says that it is this machine's own.
[[nodiscard]] bool is_loopback(std::string_view address);

/// Whether RANK, WORLD_SIZE or their DDP_ forms are set, or MASTER_ADDR or MASTER_PORT without a process manager: what a
/// program that has MPI too prefers to it.
[[nodiscard]] bool job_is_named(environment_reader get);

/// What each source says, which one counts, and where they disagree. Where job_from_environment would throw, the text
/// contains the error.
[[nodiscard]] std::string explain_job(environment_reader get);

}  // namespace detail

/// What the launcher says, from the first of these that says anything about ranks:
///
///  1. DDP_RANK, DDP_WORLD_SIZE, DDP_LOCAL_RANK, DDP_LOCAL_WORLD_SIZE
///  2. RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: torchrun, ddprun, Kubernetes
///  3. Slurm: SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID (ignored where mpirun has started the
///     process inside Slurm: they are then the ranks of mpirun's daemons)
///  4. Open MPI: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
///  5. PMIx: PMIX_RANK, with WORLD_SIZE or DDP_WORLD_SIZE
///  6. PMI: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS: MPICH, Intel MPI
///
/// The ranks meet at DDP_MASTER_ADDR or MASTER_ADDR, and DDP_MASTER_PORT or MASTER_PORT. Where these are absent: in Slurm
/// at the first host of SLURM_STEP_NODELIST and a port made of the job's and the step's number; with 4 to 6 over loopback
/// if all ranks are on one host. A Slurm step on one node meets over loopback, and so do torchrun's workers on one host.
///
/// None of them is set: no job. Throws environment_error if only some variables are set, one is invalid, or
/// they describe a job that cannot come together (a batch script without srun, a count of hosts taken for a count of
/// ranks).
///
/// get(name) returns a std::optional<std::string>: another environment, for tests and launchers.
[[nodiscard]] std::optional<job> job_from_environment(function_ref<std::optional<std::string>(std::string const&)> get);

/// From this process's environment.
[[nodiscard]] std::optional<job> job_from_environment();

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/environment.ipp>
#endif
