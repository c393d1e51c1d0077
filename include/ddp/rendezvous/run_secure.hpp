/// \file
/// secure_tcp: tcp, with a secret that proves who takes part (OpenSSL).
#pragma once

#include <ddp/core/language.hpp>  // first

#include <string_view>

#include <ddp/comm/communicator.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/rendezvous/run_tcp.hpp>

namespace ddp {

/// As tcp, for jobs of several hosts: give all ranks the same secret (DDP_SECRET_FILE, a file of 16 to 64 random bytes that
/// only its owner can read, or DDP_SECRET_FD), and they need no DDP_INSECURE.
///
///     ddp::run<ddp::threads, ddp::secure_tcp>([](auto& comm) { … });
///
/// Every connection beyond loopback, and to rank 0, begins with a mutual proof of the secret, and nothing that was changed on
/// the way is used. All ranks of a job that has a secret must use it, or all tcp. DDP_TLS=1 or run_options.encrypt: TLS 1.3 on all of them, so that nothing can be read either. See
/// make_tcp_security (rendezvous/secure_channel.hpp). Links OpenSSL's libssl and libcrypto (ddp::secure).
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
