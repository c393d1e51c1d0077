/// \file
/// tls_channel: a tcp_channel that encrypts by TLS 1.3, with a secret in place of certificates.
#pragma once

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include <ddp/core/bytes.hpp>
#include <ddp/core/error.hpp>
#include <ddp/rendezvous/secure_key.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>

namespace ddp::detail {

/// The key, in place of certificates, and all state that connections share.
class tls_context {
public:
    tls_context(tls_context const&) = delete;
    tls_context& operator=(tls_context const&) = delete;
    [[gnu::cold]] explicit tls_context(secure_key const& key) : key_(key), context_(SSL_CTX_new(TLS_method())) {
        SSL_CTX* const c = context_.get();
        if (c == nullptr || SSL_CTX_set_min_proto_version(c, TLS1_3_VERSION) != 1 ||
            SSL_CTX_set_ciphersuites(c, "TLS_AES_128_GCM_SHA256") != 1 || SSL_CTX_set_num_tickets(c, 0) != 1 ||
            SSL_CTX_set_ex_data(c, 0, this) != 1)
            throw environment_error("this OpenSSL lacks TLS 1.3 with TLS_AES_128_GCM_SHA256, which DDP_TLS=1 needs");
        SSL_CTX_set_psk_use_session_callback(
            c, [](SSL* ssl, EVP_MD const*, unsigned char const** id, std::size_t* size, SSL_SESSION** session) {
                *id = reinterpret_cast<unsigned char const*>(name.data());
                *size = name.size();
                return (*session = make_session(ssl)) != nullptr ? 1 : 0;
            });
        SSL_CTX_set_psk_find_session_callback(
            c, [](SSL* ssl, unsigned char const* id, std::size_t size, SSL_SESSION** session) {
                bool const ours = std::string_view(reinterpret_cast<char const*>(id), size) == name;
                *session = ours ? make_session(ssl) : nullptr;
                return 1;  // without a session there is no certificate either, and the handshake fails
            });
    }
    [[nodiscard]] SSL_CTX* get() const noexcept { return context_.get(); }

private:
    static constexpr std::string_view name = "ddp";
    [[nodiscard, gnu::cold]] static SSL_SESSION* make_session(SSL* ssl) noexcept {
        auto const* const self = static_cast<tls_context const*>(SSL_CTX_get_ex_data(SSL_get_SSL_CTX(ssl), 0));
        static constexpr unsigned char aes_128_gcm_sha256[] = {0x13, 0x01};
        SSL_SESSION* const made = SSL_SESSION_new();
        SSL_CIPHER const* const cipher = SSL_CIPHER_find(ssl, aes_128_gcm_sha256);
        if (made != nullptr && cipher != nullptr && SSL_SESSION_set_cipher(made, cipher) == 1 &&
            SSL_SESSION_set_protocol_version(made, TLS1_3_VERSION) == 1 &&
            SSL_SESSION_set1_master_key(made, octets(self->key_.bytes.data()), self->key_.bytes.size()) == 1)
            return made;
        SSL_SESSION_free(made);
        return nullptr;
    }

    secure_key key_;
    openssl_ptr<SSL_CTX> context_;
};

/// TLS 1.3 between two memory buffers.
class tls_channel final : public tcp_channel {
public:
    [[gnu::cold]] tls_channel(std::shared_ptr<tls_context const> context, bool dials)
        : context_(std::move(context)), ssl_(SSL_new(context_->get())) {
        BIO *inside = nullptr, *outside = nullptr;
        if (ssl_ == nullptr || BIO_new_bio_pair(&inside, buffer_bytes, &outside, buffer_bytes) != 1) {
            error_ = channel_error::failed;
            return;
        }
        SSL_set_bio(ssl_.get(), inside, inside);
        wire_.reset(outside);
        dials ? SSL_set_connect_state(ssl_.get()) : SSL_set_accept_state(ssl_.get());
        shake();
    }

    [[nodiscard]] mutable_bytes space() noexcept override {
        char* at = nullptr;
        int const n = wire_ != nullptr ? BIO_nwrite0(wire_.get(), &at) : 0;
        if (n <= 0) return spare_;  // full, and nothing was read: an error that arrived() finds
        return {reinterpret_cast<std::byte*>(at), static_cast<std::size_t>(n)};
    }
    void arrived(std::size_t bytes) noexcept override {
        char* at = nullptr;
        int const n = static_cast<int>(bytes);
        if (wire_ == nullptr || BIO_nwrite(wire_.get(), &at, n) != n) error_ = channel_error::failed;
        shake();
    }
    [[nodiscard]] std::size_t read(mutable_bytes to) noexcept override {
        if (!established() || error_ != channel_error::none) return 0;
        ERR_clear_error();
        std::size_t n = 0;
        return went_well(SSL_read_ex(ssl_.get(), to.data(), to.size(), &n)) ? n : 0;
    }
    [[nodiscard]] bool readable() noexcept override {
        if (!established() || error_ != channel_error::none) return false;
        if (SSL_pending(ssl_.get()) > 0) return true;
        if (BIO_pending(SSL_get_rbio(ssl_.get())) == 0) return false;
        ERR_clear_error();
        char probe = 0;
        return went_well(SSL_peek(ssl_.get(), &probe, 1));  // a record may have come in part
    }

    [[nodiscard]] const_bytes pending() noexcept override {
        char* at = nullptr;
        int const n = wire_ != nullptr ? BIO_nread0(wire_.get(), &at) : 0;
        return n > 0 ? const_bytes{reinterpret_cast<std::byte const*>(at), static_cast<std::size_t>(n)} : const_bytes{};
    }
    void sent(std::size_t bytes) noexcept override {
        char* at = nullptr;
        static_cast<void>(BIO_nread(wire_.get(), &at, static_cast<int>(bytes)));
    }
    [[nodiscard]] std::size_t write(std::span<const_bytes const> from) noexcept override {
        if (!established() || error_ != channel_error::none) return 0;
        std::size_t moved = 0;
        for (std::size_t record = 0; record < buffer_bytes / (2 * plain_.size()); ++record) {
            std::size_t const taken = gather(from, moved);
            if (taken == 0) break;
            ERR_clear_error();
            if (++records_ % most_records == 0) SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED);
            std::size_t n = 0;
            if (SSL_write_ex(ssl_.get(), plain_.data(), taken, &n) != 1) error_ = channel_error::failed;
            moved += n;
        }
        return moved;
    }

    [[nodiscard]] bool established() const noexcept override { return established_; }
    [[nodiscard]] channel_error error() const noexcept override { return error_; }

private:
    static constexpr std::size_t buffer_bytes = std::size_t{256} << 10;
    static constexpr std::uint64_t most_records = std::uint64_t{1} << 23;  // under one key: RFC 8446, 5.5

    [[gnu::cold]] void shake() noexcept {
        if (established_ || error_ != channel_error::none) return;
        ERR_clear_error();
        int const r = SSL_do_handshake(ssl_.get());
        if (r == 1) {
            // A handshake with a certificate, which anybody can have, proves nothing: only the key from the secret does.
            established_ = SSL_session_reused(ssl_.get()) == 1;
            if (!established_) error_ = channel_error::unproven;
            return;
        }
        int const why = SSL_get_error(ssl_.get(), r);
        if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE) error_ = channel_error::unproven;
    }
    /// Whether a reading call has succeeded. Bytes that are not valid TLS are an error.
    [[nodiscard]] bool went_well(int result) noexcept {
        if (result == 1) return true;
        int const why = SSL_get_error(ssl_.get(), result);
        if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE) error_ = channel_error::altered;
        return false;
    }
    /// Fills plain_ from what follows the first `skip` bytes.
    [[nodiscard]] std::size_t gather(std::span<const_bytes const> from, std::size_t skip) noexcept {
        std::size_t taken = 0;
        for (const_bytes piece : from) {
            std::size_t const passed = std::min(skip, piece.size());
            skip -= passed;
            piece = piece.subspan(passed);
            piece = piece.first(std::min(piece.size(), plain_.size() - taken));
            if (piece.empty()) continue;
            std::memcpy(plain_.data() + taken, piece.data(), piece.size());
            taken += piece.size();
        }
        return taken;
    }

    std::shared_ptr<tls_context const> context_;
    openssl_ptr<SSL> ssl_;
    openssl_ptr<BIO> wire_;  // the outer end of the pair
    std::array<std::byte, 16384> plain_;
    std::array<std::byte, 1> spare_;
    std::uint64_t records_ = 0;  // that were sent
    bool established_ = false;
    channel_error error_ = channel_error::none;
};

}  // namespace ddp::detail
