/// \file
/// job: this process's rank and the number of ranks, from its launcher's environment variables.
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
    int rank = 0;                           ///< this process's rank, between 0 and size - 1
    int size = 1;                           ///< the number of ranks
    int local_rank = 0;                     ///< this process's number among the ranks of its host, from 0
    int local_size = 1;                     ///< the number of ranks on this host
    bool several_hosts = false;             ///< the launcher says that ranks are on more than one host
    std::string master_addr = "127.0.0.1";  ///< name or address at which rank 0 listens during start-up
    std::uint16_t master_port = 29500;      ///< the TCP port there
    /// The launcher itself listens at master_port, as torchrun's agent does; rank 0 takes one of 16 other ports.
    bool port_is_launchers = false;
    /// Identifies the job, if the launcher does; otherwise empty. Ranks with different ids never connect to each other.
    std::string id = {};
    std::string source = {};  ///< where this comes from, for messages: "Slurm (SLURM_PROCID=2 …)"
    std::string advice = {};  ///< what to check if the ranks do not find each other; may be empty
};

namespace detail {

/// Whether the text of an address is a loopback address.
[[nodiscard]] bool is_loopback(std::string_view address);

/// Whether RANK, WORLD_SIZE or their DDP_ forms are set, or MASTER_ADDR or MASTER_PORT without a process manager. A program
/// that also has MPI then prefers TCP.
[[nodiscard]] bool job_is_named(environment_reader get);

/// A readable text: what each source says, which one is used, and where they disagree. If job_from_environment would
/// throw, it contains the error.
[[nodiscard]] std::string explain_job(environment_reader get);

}  // namespace detail

/// The job as the launcher describes it, from the first of these sources that says anything about ranks:
///
///  1. DDP_RANK, DDP_WORLD_SIZE, DDP_LOCAL_RANK, DDP_LOCAL_WORLD_SIZE
///  2. RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: torchrun, ddprun, Kubernetes
///  3. Slurm: SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID (ignored where mpirun has started the
///     process inside Slurm: they are then the ranks of mpirun's daemons)
///  4. Open MPI: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE
///  5. PMIx: PMIX_RANK, with WORLD_SIZE or DDP_WORLD_SIZE
///  6. PMI: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS: MPICH, Intel MPI
///
/// The ranks meet at DDP_MASTER_ADDR or MASTER_ADDR, and DDP_MASTER_PORT or MASTER_PORT. If these are not set: in Slurm,
/// at the first host of SLURM_STEP_NODELIST and a port made from the job's and step's numbers; with 4 to 6, over loopback
/// if all ranks are on one host. A Slurm step on one node meets over loopback, and so do torchrun's workers on one host.
///
/// get      another environment, for tests and launchers: get(name) returns a std::optional<std::string>.
/// Returns  std::nullopt if no source says anything: there is no job.
/// Throws   environment_error (DDP-E101) if only some of a source's variables are set, one is invalid, or they describe
///          a job that cannot start (a batch script without srun, or a number of hosts used as a number of ranks).
[[nodiscard]] std::optional<job> job_from_environment(function_ref<std::optional<std::string>(std::string const&)> get);

/// The same from this process's environment.
[[nodiscard]] std::optional<job> job_from_environment();

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/environment.ipp>
#endif
