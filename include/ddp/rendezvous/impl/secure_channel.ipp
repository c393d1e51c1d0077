/// \file
/// What rendezvous/secure_channel.hpp declares.
#pragma once

#include <memory>

#include <ddp/core/error.hpp>
#include <ddp/rendezvous/job_secret.hpp>
#include <ddp/rendezvous/proof_channel.hpp>
#include <ddp/rendezvous/secure_channel.hpp>
#include <ddp/rendezvous/secure_key.hpp>
#include <ddp/rendezvous/tls_channel.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>

namespace ddp {

namespace detail {

class proof_security final : public tcp_security {
public:
    explicit proof_security(secure_key const& key) : key_(key) {}
    [[nodiscard]] std::unique_ptr<tcp_channel> channel(bool dials) const override {
        return std::make_unique<proof_channel>(key_, dials);
    }

private:
    secure_key key_;
};

class tls_security final : public tcp_security {
public:
    explicit tls_security(secure_key const& key) : context_(std::make_shared<tls_context const>(key)) {}
    [[nodiscard]] std::unique_ptr<tcp_channel> channel(bool dials) const override {
        return std::make_unique<tls_channel>(context_, dials);
    }

private:
    std::shared_ptr<tls_context const> context_;
};

}  // namespace detail

[[gnu::cold]] DDP_DECL std::unique_ptr<tcp_security> make_tcp_security(job_secret const& secret, bool encrypts) {
    detail::secure_key key;  // each use of the secret has its own
    if (!detail::hmac(secret.bytes, encrypts ? "ddp: TLS 1.3" : "ddp: proof", {}, key))
        throw environment_error("this OpenSSL lacks HMAC-SHA-256, which a job's secret needs");
    if (encrypts) return std::make_unique<detail::tls_security>(key);
    return std::make_unique<detail::proof_security>(key);
}

}  // namespace ddp
