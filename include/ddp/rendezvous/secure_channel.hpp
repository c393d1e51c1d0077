/// \file
/// make_tcp_security: connections that prove a secret, or encrypt with it (OpenSSL).
#pragma once

#include <memory>

#include <ddp/core/separate.hpp>
#include <ddp/rendezvous/job_secret.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>

namespace ddp {

/// For tcp_options::security. Every connection begins with a proof by both sides, for which each draws 32 random bytes:
/// a recorded proof is useless, and a side does not accept its own proof.
///
/// Proof    `encrypts` false: HMAC-SHA-256 of both draws and the side's role under the secret. Every record of at most
///          64 KiB then carries its AES-128-GMAC, 16 bytes, under a key of the connection and direction and a number that
///          counts records: bytes that are changed, left out, repeated or taken from elsewhere end the connection
///          before any of them is used. They are not encrypted.
/// TLS      `encrypts` true: TLS 1.3, TLS_AES_128_GCM_SHA256 with a key exchange for every connection, and a key made from
///          the secret in place of certificates.
/// Cost     20 or 22 bytes per record, and a copy at each end. Memory: 0.5 MiB for each connection.
/// Throws   environment_error (DDP-E101) if this OpenSSL lacks an algorithm that it needs.
[[nodiscard]] std::unique_ptr<tcp_security> make_tcp_security(job_secret const& secret, bool encrypts);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/secure_channel.ipp>
#endif
