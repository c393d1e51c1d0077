/// \file
/// tcp: run's way to start as one of several processes that meet over TCP.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <memory>
#include <string_view>

#include <ddp/comm/communicator.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/rendezvous/job_secret.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>

namespace ddp {

/// This process is one rank, as job_from_environment finds it (rendezvous/environment.hpp): ddprun, torchrun, Kubernetes,
/// Slurm and mpirun say which. Rank 0 serves the rendezvous; nothing else has to run.
///
///     ddprun -n 4 ./train
///     srun -n 4 ./train
///     torchrun --no-python --standalone --nproc-per-node 4 ./train
///
/// torchrun's agent listens at MASTER_PORT itself (TORCHELASTIC_USE_AGENT_STORE=True says so): ranks then meet at the
/// first of 16 other ports that is free, and know each other by TORCHELASTIC_RUN_ID. Beyond loopback all ranks need secure_tcp
/// and a secret, or DDP_INSECURE=1 (run_options.insecure): connections of this one are not encrypted. DDP_LISTEN_FD is a listening socket that rank 0 inherits
/// instead of the port.
struct tcp {
    static constexpr std::string_view name = "tcp";

    /// RANK or WORLD_SIZE is set, or MASTER_ADDR or MASTER_PORT without a process manager.
    [[nodiscard]] static bool detected();

    /// srun or mpirun started this process as one of several: used if the program has no better way, such as MPI.
    [[nodiscard]] static bool also_detected();

    /// Brings the job together as connect_tcp does (rendezvous/bootstrap.hpp), then body(comm).
    static void start(run_options const& options, function_ref<void(communicator<>&)> body);
};
static_assert(Launch<tcp>);

namespace detail {
using make_security = std::unique_ptr<tcp_security>(job_secret const& secret, bool encrypts);
/// What tcp and secure_tcp share. `security`: see tcp_options.
void start_tcp(run_options const& options, make_security* security, function_ref<void(communicator<>&)> body);
}  // namespace detail

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/run_tcp.ipp>
#endif
