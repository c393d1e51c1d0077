/// \file
/// tcp: run's way to start as one of several processes that meet over TCP.
#pragma once

#include <string_view>

#include <ddp/comm/communicator.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/rendezvous/run.hpp>

namespace ddp {

/// This process is one rank, as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say: ddprun, torchrun and Kubernetes set
/// them. Rank 0 serves the rendezvous; nothing else has to run.
///
///     ddprun -n 4 ./train
///     torchrun --no-python --nproc-per-node 4 sh -c 'MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 exec ./train'
///
/// torchrun may listen at its MASTER_PORT itself (TORCHELASTIC_USE_AGENT_STORE=True says so): rank 0 then finds the
/// port in use, and ranks need another one, the same for all, as above. Beyond loopback all ranks need DDP_INSECURE=1
/// or run_options.insecure: connections are not encrypted. DDP_LISTEN_FD is a listening socket that rank 0 inherits
/// instead of the port.
struct tcp {
    static constexpr std::string_view name = "tcp";

    [[nodiscard]] static bool detected();

    /// Brings the job together as connect_tcp does (rendezvous/bootstrap.hpp), then body(comm).
    static void start(run_options const& options, function_ref<void(communicator<>&)> body);
};
static_assert(Launch<tcp>);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/run_tcp.ipp>
#endif
