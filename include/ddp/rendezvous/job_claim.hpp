/// \file
/// job_claim: this process's rank and the number of ranks, according to the variables of one launcher.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <ddp/core/error.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/rendezvous/environment_view.hpp>

namespace ddp::detail {

inline constexpr int most_ranks = 65536;

/// What one source says.
struct job_claim {
    int rank = 0, size = 1;
    std::optional<int> local_rank = {}, local_size = {};
    std::string said = {};  ///< the variables
    std::string id = {};    ///< of the job, or empty
    int hosts = 0;          ///< their number, if the source knows it; otherwise 0
    std::string first_host = {};
};

// One for each launcher; each returns nothing if its variables are not set. Each throws environment_error if they
// contradict each other, if one makes no sense, or if they describe a job that cannot start.

[[nodiscard]] std::optional<job_claim> ddp_claim(environment_view const& env);
[[nodiscard]] std::optional<job_claim> torchrun_claim(environment_view const& env);
[[nodiscard]] std::optional<job_claim> slurm_claim(environment_view const& env);
[[nodiscard]] std::optional<job_claim> open_mpi_claim(environment_view const& env);
[[nodiscard]] std::optional<job_claim> pmix_claim(environment_view const& env);
[[nodiscard]] std::optional<job_claim> pmi_claim(environment_view const& env);

/// RANK and WORLD_SIZE behind `prefix`, MASTER_ADDR, MASTER_PORT: an error that lists which of them are set and which are not.
[[nodiscard]] environment_error half_of_a_job(environment_view const& env, std::string_view prefix);
/// How many ranks per host PET_NPROC_PER_NODE requests from torchrun or ddprun; 1 if it is not set or not a number.
[[nodiscard]] int pet_ranks_a_host(environment_view const& env);
/// Whether mpirun has started this process: inside Slurm, Slurm's variables are then those of mpirun's daemons.
[[nodiscard]] bool started_by_mpirun(environment_view const& env);
/// The number of the Slurm step. None in a batch script and in salloc's shell, to which Slurm gives special step
/// numbers.
[[nodiscard]] std::optional<std::uint32_t> slurm_step(environment_view const& env);

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/job_claim.ipp>
#endif
