/// \file
/// secure_tcp: tcp with a secret that ranks prove to each other (OpenSSL).
#pragma once

#include <ddp/core/language.hpp>  // first

#include <string_view>

#include <ddp/comm/communicator.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/rendezvous/run_tcp.hpp>

namespace ddp {

/// Starts as tcp does, also between hosts: give all ranks the same secret (DDP_SECRET_FILE, a file of 16 to 64 random bytes
/// that only its owner can read, or DDP_SECRET_FD), and they need no DDP_INSECURE.
///
///     ddp::run<ddp::threads, ddp::secure_tcp>([](auto& comm) { train(comm); });
///
/// Every connection beyond loopback, and every connection to rank 0, begins with a mutual proof of the secret, and bytes that
/// were changed on the way are never used. With DDP_TLS=1 or run_options.encrypt all connections use TLS 1.3, so that they
/// cannot be read either. If a job has a secret, either all of its ranks use secure_tcp, or all use tcp.
///
/// See make_tcp_security (rendezvous/secure_channel.hpp). Links OpenSSL's libssl and libcrypto (ddp::secure).
struct secure_tcp {
    static constexpr std::string_view name = "tcp";

    [[nodiscard]] static bool detected() { return tcp::detected(); }
    [[nodiscard]] static bool also_detected() { return tcp::also_detected(); }
    static void start(run_options const& options, function_ref<void(communicator<>&)> body);
};
static_assert(Launch<secure_tcp>);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/run_secure.ipp>
#endif
