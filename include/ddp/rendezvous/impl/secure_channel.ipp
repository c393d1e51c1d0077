/// \file
/// What rendezvous/secure_channel.hpp declares.
#pragma once

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <utility>

#include <ddp/core/bytes.hpp>
#include <ddp/core/error.hpp>
#include <ddp/rendezvous/job_secret.hpp>
#include <ddp/rendezvous/secure_channel.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>

namespace ddp {

namespace detail {

/// 32 bytes that are no longer in memory once they are not needed.
struct secure_key {
    std::array<std::byte, 32> bytes = {};
    secure_key() = default;
    secure_key(secure_key const&) = default;
    secure_key& operator=(secure_key const&) = default;
    ~secure_key() { OPENSSL_cleanse(bytes.data(), bytes.size()); }
};
[[nodiscard]] inline unsigned char const* octets(std::byte const* at) noexcept {
    return reinterpret_cast<unsigned char const*>(at);
}
[[nodiscard]] inline unsigned char* octets(std::byte* at) noexcept {
    return reinterpret_cast<unsigned char*>(at);
}

/// HMAC-SHA-256 of `role`, then `text`.
[[nodiscard, gnu::cold]] inline bool hmac(const_bytes key, std::string_view role, const_bytes text,
                                          secure_key& to) noexcept {
    std::array<std::byte, 128> all;
    if (role.size() + text.size() > all.size()) return false;
    std::memcpy(all.data(), role.data(), role.size());
    if (!text.empty()) std::memcpy(all.data() + role.size(), text.data(), text.size());
    unsigned size = 0;
    return HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), octets(all.data()), role.size() + text.size(),
                octets(to.bytes.data()), &size) != nullptr &&
           size == to.bytes.size();
}

struct openssl_delete {
    void operator()(EVP_CIPHER_CTX* p) const noexcept { EVP_CIPHER_CTX_free(p); }
    void operator()(SSL_CTX* p) const noexcept { SSL_CTX_free(p); }
    void operator()(SSL* p) const noexcept { SSL_free(p); }
    void operator()(BIO* p) const noexcept { BIO_free(p); }
};
template <class T>
using openssl_ptr = std::unique_ptr<T, openssl_delete>;

/// The AES-128-GMAC of the records of one direction, each under a number of its own.
class record_mac {
public:
    static constexpr std::size_t tag_bytes = 16;
    using tag = std::array<std::byte, tag_bytes>;

    [[nodiscard, gnu::cold]] bool start(secure_key const& key) noexcept {
        context_.reset(EVP_CIPHER_CTX_new());
        return context_ != nullptr &&
               EVP_EncryptInit_ex(context_.get(), EVP_aes_128_gcm(), nullptr, octets(key.bytes.data()), nullptr) == 1;
    }
    [[nodiscard]] bool of_next(const_bytes record, tag& to) noexcept {
        std::array<std::byte, 12> number{};
        std::memcpy(number.data() + 4, &count_, sizeof count_);
        ++count_;
        int n = 0;
        unsigned char none = 0;
        return EVP_EncryptInit_ex(context_.get(), nullptr, nullptr, nullptr, octets(number.data())) == 1 &&
               EVP_EncryptUpdate(context_.get(), nullptr, &n, octets(record.data()), static_cast<int>(record.size())) ==
                   1 &&
               EVP_EncryptFinal_ex(context_.get(), &none, &n) == 1 &&
               EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_GET_TAG, tag_bytes, to.data()) == 1;
    }

private:
    openssl_ptr<EVP_CIPHER_CTX> context_;
    std::uint64_t count_ = 0;
};

/// A mutual proof, then records: length (4 bytes), that many bytes, tag (16 bytes). The handshake: the side that has dialled
/// says `greeting` and its number; the other its own and its proof; the first its proof.
class proof_channel final : public tcp_channel {
public:
    [[gnu::cold]] proof_channel(secure_key const& key, bool dials) : key_(key), dials_(dials) {
        std::size_t const first = dials ? 0 : number_bytes;
        if (RAND_bytes(octets(numbers_.data() + first), number_bytes) != 1) {
            fail(channel_error::failed);
            return;
        }
        if (!dials) return;
        say(greeting);
        say(std::span(numbers_).first(number_bytes));
    }

    [[nodiscard]] mutable_bytes space() noexcept override {
        // Not a byte more than the handshake has: what follows belongs in the larger buffer.
        if (in_ == nullptr) return std::span(hello_).first(expected()).subspan(have_);
        if (first_ == last_) first_ = last_ = 0;
        if (in_bytes - last_ < in_bytes / 4) {
            std::memmove(in_.get(), in_.get() + first_, last_ - first_);
            last_ -= first_;
            first_ = 0;
        }
        return {in_.get() + last_, in_bytes - last_};
    }
    void arrived(std::size_t bytes) noexcept override {
        if (in_ != nullptr) {
            last_ += bytes;
            return;
        }
        have_ += bytes;
        // A stranger is recognised by its first byte.
        if (!dials_ && std::memcmp(hello_.data(), greeting.data(), std::min(have_, greeting.size())) != 0 && !answered_)
            return fail(channel_error::stranger);
        if (have_ == expected()) shake();
    }
    [[nodiscard]] std::size_t read(mutable_bytes to) noexcept override {
        if (left_ == 0 && !open()) return 0;
        std::size_t const n = std::min(to.size(), left_);
        std::memcpy(to.data(), in_.get() + first_, n);
        first_ += n;
        left_ -= n;
        if (left_ == 0) first_ += record_mac::tag_bytes;
        return n;
    }
    [[nodiscard]] bool readable() noexcept override { return left_ != 0 || open(); }

    [[nodiscard]] const_bytes pending() noexcept override {
        if (sent_ < said_) return std::span(handshake_).first(said_).subspan(sent_);
        return {out_.get() + written_, filled_ - written_};
    }
    void sent(std::size_t bytes) noexcept override { (sent_ < said_ ? sent_ : written_) += bytes; }
    [[nodiscard]] std::size_t write(std::span<const_bytes const> from) noexcept override {
        if (!established() || error_ != channel_error::none) return 0;
        std::size_t moved = 0;
        for (const_bytes const piece : from) {
            std::size_t const n = std::min(piece.size(), record_bytes - moved);
            std::memcpy(out_.get() + length_bytes + moved, piece.data(), n);
            moved += n;
        }
        std::uint32_t const length = static_cast<std::uint32_t>(moved);
        std::memcpy(out_.get(), &length, sizeof length);
        record_mac::tag tag;
        if (!sends_.of_next({out_.get(), length_bytes + moved}, tag)) return fail(channel_error::failed), 0;
        std::memcpy(out_.get() + length_bytes + moved, tag.data(), tag.size());
        written_ = 0;
        filled_ = length_bytes + moved + tag.size();
        return moved;
    }

    [[nodiscard]] bool established() const noexcept override { return in_ != nullptr; }
    [[nodiscard]] channel_error error() const noexcept override { return error_; }

private:
    static constexpr std::size_t number_bytes = 32, proof_bytes = 32, length_bytes = 4;
    static constexpr std::size_t record_bytes = std::size_t{64} << 10, in_bytes = std::size_t{384} << 10;
    static constexpr std::array<std::byte, 8> greeting = {std::byte{'d'}, std::byte{'d'}, std::byte{'p'},
                                                          std::byte{'p'}, std::byte{'r'}, std::byte{'o'},
                                                          std::byte{'v'}, std::byte{1}};

    [[gnu::cold]] void fail(channel_error why) noexcept { error_ = why; }
    void say(const_bytes bytes) noexcept {
        std::memcpy(handshake_.data() + said_, bytes.data(), bytes.size());
        said_ += bytes.size();
    }
    /// Bytes of the message that this side waits for.
    [[nodiscard]] std::size_t expected() const noexcept {
        if (dials_) return number_bytes + proof_bytes;
        return answered_ ? proof_bytes : greeting.size() + number_bytes;
    }
    [[nodiscard]] bool proof(std::string_view role, secure_key& to) const noexcept {
        return hmac(key_.bytes, role, numbers_, to);
    }
    [[nodiscard]] bool proved(std::string_view role, std::byte const* claim) noexcept {
        secure_key mine;
        if (!proof(role, mine)) return fail(channel_error::failed), false;
        if (CRYPTO_memcmp(mine.bytes.data(), claim, mine.bytes.size()) == 0) return true;
        return fail(channel_error::stranger), false;
    }
    void say_proof(std::string_view role) noexcept {
        secure_key mine;
        if (!proof(role, mine)) return fail(channel_error::failed);
        say(mine.bytes);
    }
    /// A whole message of the handshake is here.
    [[gnu::cold]] void shake() noexcept {
        have_ = 0;
        if (dials_) {
            std::memcpy(numbers_.data() + number_bytes, hello_.data(), number_bytes);
            if (!proved("ddp: proof of who listens", hello_.data() + number_bytes)) return;
            say_proof("ddp: proof of who dials");
            return establish();
        }
        if (answered_) {
            if (proved("ddp: proof of who dials", hello_.data())) establish();
            return;
        }
        answered_ = true;
        std::memcpy(numbers_.data(), hello_.data() + greeting.size(), number_bytes);
        say(std::span(numbers_).last(number_bytes));
        say_proof("ddp: proof of who listens");
    }
    [[gnu::cold]] void establish() noexcept {
        secure_key down, up;
        if (!proof("ddp: key of who listens", down) || !proof("ddp: key of who dials", up) ||
            !(dials_ ? sends_ : receives_).start(up) || !(dials_ ? receives_ : sends_).start(down))
            return fail(channel_error::failed);
        OPENSSL_cleanse(key_.bytes.data(), key_.bytes.size());
        out_.reset(new (std::nothrow) std::byte[length_bytes + record_bytes + record_mac::tag_bytes]);
        if (out_ != nullptr) in_.reset(new (std::nothrow) std::byte[in_bytes]);
        if (in_ == nullptr) fail(channel_error::failed);
    }
    /// Looks at the next record. True if it is whole, and as it was sent.
    [[nodiscard]] bool open() noexcept {
        if (in_ == nullptr || error_ != channel_error::none || last_ - first_ < length_bytes) return false;
        std::uint32_t length = 0;
        std::memcpy(&length, in_.get() + first_, sizeof length);
        if (length == 0 || length > record_bytes) return fail(channel_error::altered), false;
        std::size_t const whole = length_bytes + length + record_mac::tag_bytes;
        if (last_ - first_ < whole) return false;
        record_mac::tag tag;
        if (!receives_.of_next({in_.get() + first_, length_bytes + length}, tag))
            return fail(channel_error::failed), false;
        if (CRYPTO_memcmp(tag.data(), in_.get() + first_ + length_bytes + length, tag.size()) != 0)
            return fail(channel_error::altered), false;
        first_ += length_bytes;
        left_ = length;
        return true;
    }

    secure_key key_;
    bool dials_, answered_ = false;
    channel_error error_ = channel_error::none;
    std::array<std::byte, 2 * number_bytes> numbers_;  // of who dials, of who listens
    std::array<std::byte, number_bytes + proof_bytes> hello_;
    std::size_t have_ = 0;  // of hello_
    std::array<std::byte, 8 + number_bytes + proof_bytes> handshake_;
    std::size_t said_ = 0, sent_ = 0;  // of handshake_

    record_mac sends_, receives_;
    std::unique_ptr<std::byte[]> in_, out_;  // in_: once the handshake is over
    std::size_t first_ = 0, last_ = 0;       // of in_: has arrived, and was not read
    std::size_t left_ = 0;                   // of the record at first_, which was found to be as it was sent
    std::size_t written_ = 0, filled_ = 0;   // of out_
};

/// The key, in place of certificates, and what all connections share.
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
            if (!established_) error_ = channel_error::stranger;
            return;
        }
        int const why = SSL_get_error(ssl_.get(), r);
        if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE) error_ = channel_error::stranger;
    }
    /// Of a call that reads: whether it did. Bytes that no TLS would send are an error.
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
