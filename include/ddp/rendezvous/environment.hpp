/// \file
/// job: which rank of how many this process is, as torchrun, ddprun and Kubernetes say it in the environment.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <ddp/core/separate.hpp>

namespace ddp {

/// One process of a job, as the environment describes it. torchrun, ddprun and Kubernetes set these variables.
struct job {
    int rank = 0;                           ///< RANK: which of them this process is
    int size = 1;                           ///< WORLD_SIZE: how many processes there are
    int local_rank = 0;                     ///< LOCAL_RANK: among the ranks of this host
    int local_size = 1;                     ///< LOCAL_WORLD_SIZE: how many there are on this host
    std::string master_addr = "127.0.0.1";  ///< MASTER_ADDR: where rank 0 listens while the job comes together
    std::uint16_t master_port = 29500;      ///< MASTER_PORT: the port there
    /// The launcher itself listens at master_port, as torchrun's agent does: rank 0 takes one of the next ports.
    bool port_is_launchers = false;
    /// Which job this is, if the launcher says so; else empty. Ranks of two jobs never meet.
    std::string id = {};
};

namespace detail {

/// A whole decimal number in [least, most], or an error that names the variable, its value and what it should be.
[[nodiscard]] int environment_number(std::string_view name, std::string_view text, int least, int most,
                                     std::string_view meaning);

inline constexpr std::array<char const*, 9> job_variables = {"RANK",
                                                             "WORLD_SIZE",
                                                             "MASTER_ADDR",
                                                             "MASTER_PORT",
                                                             "LOCAL_RANK",
                                                             "LOCAL_WORLD_SIZE",
                                                             "TORCHELASTIC_RUN_ID",
                                                             "TORCHELASTIC_RESTART_COUNT",
                                                             "TORCHELASTIC_USE_AGENT_STORE"};
using job_values = std::array<std::optional<std::string>, job_variables.size()>;
/// What these variables, in the order of job_variables, say.
[[nodiscard]] std::optional<job> job_from(job_values const& values);

}  // namespace detail

/// Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and, if they are there, LOCAL_RANK and LOCAL_WORLD_SIZE. None of
/// the four: no job. Throws environment_error if only some are there, or one makes no sense.
///
/// torchrun sets all six, and TORCHELASTIC_*: its agent's own store listens at MASTER_PORT, and where all ranks run on one
/// host MASTER_ADDR may still be the host's name. They meet over loopback then, without DDP_INSECURE.
///
/// get(name) returns a std::optional<std::string>: another environment, for tests and launchers.
template <class Get>
[[nodiscard]] std::optional<job> job_from_environment(Get get) {
    detail::job_values values;
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = get(std::string(detail::job_variables[i]));
    return detail::job_from(values);
}

/// From this process's environment.
[[nodiscard]] std::optional<job> job_from_environment();

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/environment.ipp>
#endif
