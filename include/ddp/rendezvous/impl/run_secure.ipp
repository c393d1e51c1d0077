/// \file
/// What rendezvous/run_secure.hpp declares.
#pragma once

#include <ddp/rendezvous/run_secure.hpp>
#include <ddp/rendezvous/run_tcp.hpp>
#include <ddp/rendezvous/secure_channel.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL void secure_tcp::start(run_options const& options, function_ref<void(communicator<>&)> body) {
    detail::start_tcp(options, &make_tcp_security, body);
}

}  // namespace ddp
