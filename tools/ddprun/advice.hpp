/// \file
/// What the environment says that may not be meant: variables that nobody reads, and a launcher around this one.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>

#include <unistd.h>

#include <ddp/core/error.hpp>
#include <ddp/rendezvous/environment_view.hpp>
#include <ddp/rendezvous/job_claim.hpp>

#include "hosts.hpp"

extern char** environ;

namespace ddprun {

/// All variables that begin with DDP_ and that the library or ddprun reads.
inline constexpr std::array<std::string_view, 29> known_variables = {"DDP_COMMUNICATION_THREAD",
                                                                     "DDP_FLIGHT_DIR",
                                                                     "DDP_FLIGHT_FD",
                                                                     "DDP_HOST",
                                                                     "DDP_INSECURE",
                                                                     "DDP_JOB_ID",
                                                                     "DDP_LISTEN_FD",
                                                                     "DDP_LOCAL_RANK",
                                                                     "DDP_LOCAL_WORLD_SIZE",
                                                                     "DDP_MASTER_ADDR",
                                                                     "DDP_MASTER_PORT",
                                                                     "DDP_PORTS",
                                                                     "DDP_RANK",
                                                                     "DDP_RESTART_COUNT",
                                                                     "DDP_SECRET_FD",
                                                                     "DDP_SECRET_FILE",
                                                                     "DDP_SHARE_MEMORY",
                                                                     "DDP_TCP_CONGESTION",
                                                                     "DDP_TIMEOUT_DEAD",
                                                                     "DDP_TIMEOUT_HANDSHAKE",
                                                                     "DDP_TIMEOUT_HEARTBEAT",
                                                                     "DDP_TIMEOUT_JOIN",
                                                                     "DDP_TIMEOUT_COLLECTIVE",
                                                                     "DDP_TIMEOUT_SHUTDOWN",
                                                                     "DDP_TIMEOUT_STRAGGLER",
                                                                     "DDP_TIMEOUT_SUSPECT",
                                                                     "DDP_TLS",
                                                                     "DDP_TTY",
                                                                     "DDP_WORLD_SIZE"};

/// A line for each variable that looks like one of the library's and is none: a name misspelt, or a variable of the program.
[[nodiscard]] inline std::string unknown_variables() {
    std::string text;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        std::string_view const all = *entry;
        std::string_view const name = all.substr(0, all.find('='));
        if (name.starts_with("DDP_") && std::ranges::find(known_variables, name) == known_variables.end())
            text += "note: " + detail::shown(name) + " is set, but the library has no variable of that name\n";
    }
    return text;
}

/// What another launcher says if this ddprun is its rank 0 of several; else nothing.
[[nodiscard]] inline std::string outer_launcher() {
    auto const read = [](std::string const& name) { return ddp::detail::environment_variable(name); };
    ddp::detail::environment_view const env(read);
    for (auto* const ask : {&ddp::detail::ddp_claim, &ddp::detail::torchrun_claim, &ddp::detail::slurm_claim,
                            &ddp::detail::open_mpi_claim, &ddp::detail::pmix_claim, &ddp::detail::pmi_claim}) {
        try {
            if (auto const claim = ask(env)) return claim->size > 1 && claim->rank == 0 ? claim->said : "";
        } catch (ddp::environment_error const&) {  // what that launcher has started is none of its ranks
        }
    }
    return "";
}

}  // namespace ddprun
