/// \file
/// Which process of this machine has a TCP port, for messages.
#pragma once

#include <cstdint>
#include <string>

#include <ddp/core/separate.hpp>

namespace ddp::detail {

/// " (pid 4711, nginx)": a process that listens at `port` or has a connection from it, as /proc says. Empty if there is none, or
/// if it is another user's, of whose descriptors only root may know.
[[nodiscard]] std::string port_holder(std::uint16_t port);

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/port_holder.ipp>
#endif
