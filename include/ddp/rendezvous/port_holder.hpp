/// \file
/// Which process of this machine has a TCP port, for messages.
#pragma once

#include <sys/socket.h>

#include <string>

#include <ddp/core/separate.hpp>

namespace ddp::detail {

/// " (pid 4711, nginx)": a process that listens at `address` (IPv4 or IPv6) or at its port of all addresses or, if there is none,
/// has a connection from it, as /proc says. Empty if there is none of these either, or if it is another user's, of whose
/// descriptors only root may know. Cost: a look at every descriptor that this user may see.
[[nodiscard]] std::string port_holder(::sockaddr const* address);

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/port_holder.ipp>
#endif
