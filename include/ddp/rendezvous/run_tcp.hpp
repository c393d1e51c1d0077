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
/// first of 16 other ports that is free, and recognise each other by TORCHELASTIC_RUN_ID. DDP_LISTEN_FD is a listening socket
/// that rank 0 inherits and uses instead of the port.
///
/// Between hosts, use secure_tcp and a secret. tcp itself neither authenticates nor encrypts its connections, and works beyond
/// loopback only with DDP_INSECURE=1 (run_options.insecure).
struct tcp {
    static constexpr std::string_view name = "tcp";

    /// Whether RANK or WORLD_SIZE is set, or MASTER_ADDR or MASTER_PORT without a process manager.
    [[nodiscard]] static bool detected();

    /// Whether srun or mpirun started this process as one of several: used if the program has no better way, such as MPI.
    [[nodiscard]] static bool also_detected();

    /// Connects the ranks as connect_tcp does (rendezvous/bootstrap.hpp), with its errors, and calls body(comm).
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
