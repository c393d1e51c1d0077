/// \file
/// tcp: run's way to start as one of several processes that meet over TCP.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

#include <ddp/comm/communicator.hpp>
#include <ddp/rendezvous/bootstrap.hpp>
#include <ddp/rendezvous/environment.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/transport/any.hpp>
#include <ddp/transport/framed/tcp.hpp>

namespace ddp {

/// This process is one rank, as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say: ddprun, torchrun and Kubernetes set
/// them. Rank 0 serves the rendezvous; nothing else has to run.
struct tcp {
    static constexpr std::string_view name = "tcp";

    [[nodiscard]] static bool detected() { return job_from_environment().has_value(); }

    template <class Body>
    static void start(run_options const& options, Body& body) {
        auto const found = job_from_environment();
        if (!found)
            throw environment_error(
                "transport tcp: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set, so this process does not "
                "know the others. Start it with ddprun -n " +
                std::to_string(std::max(2, options.ranks)) + " -- PROGRAM, or set them.");
        if (options.ranks != 0 && options.ranks != found->size)
            throw environment_error("WORLD_SIZE is " + std::to_string(found->size) + ", but " +
                                    std::to_string(options.ranks) + " ranks were asked for: ddprun -n " +
                                    std::to_string(options.ranks));
        communicator<> comm = any_communicator(
            connect_tcp(*found, tcp_options{.times = options.times, .insecure = options.insecure}), options.times);
        detail::call_body(body, comm);
    }
};
static_assert(Launch<tcp>);

}  // namespace ddp
