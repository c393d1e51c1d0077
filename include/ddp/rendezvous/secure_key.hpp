/// \file
/// secure_key: keys made from a job's secret by OpenSSL, erased from memory when they are no longer needed.
#pragma once

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/ssl.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string_view>

#include <ddp/core/bytes.hpp>

namespace ddp::detail {

/// A key of 32 bytes; the destructor erases it.
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

}  // namespace ddp::detail
