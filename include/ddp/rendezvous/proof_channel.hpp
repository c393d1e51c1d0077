/// \file
/// proof_channel: a tcp_channel whose ends prove that they know a secret, and then authenticate every record.
#pragma once

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string_view>

#include <ddp/core/bytes.hpp>
#include <ddp/rendezvous/secure_key.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>

namespace ddp::detail {

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

/// A mutual proof, then records: length (4 bytes), that many bytes, tag (16 bytes). The handshake: the side that has
/// connected sends `greeting` and its number, the other side its own number and its proof, and then the first side its
/// proof.
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
        // Only the bytes of the handshake: what follows belongs in the larger buffer.
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
            return fail(channel_error::unproven);
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
        // What arrives may have been changed: the other side is still to be told so.
        if (!established() || (error_ != channel_error::none && error_ != channel_error::altered)) return 0;
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
        return fail(channel_error::unproven), false;
    }
    void say_proof(std::string_view role) noexcept {
        secure_key mine;
        if (!proof(role, mine)) return fail(channel_error::failed);
        say(mine.bytes);
    }
    /// Processes a message of the handshake, all of which has arrived.
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
    /// Verifies the next record. Returns true if all of it has arrived, unchanged.
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
    std::array<std::byte, 2 * number_bytes> numbers_;  // of the side that dials, of the side that listens
    std::array<std::byte, number_bytes + proof_bytes> hello_;
    std::size_t have_ = 0;  // of hello_
    std::array<std::byte, 8 + number_bytes + proof_bytes> handshake_;
    std::size_t said_ = 0, sent_ = 0;  // of handshake_

    record_mac sends_, receives_;
    std::unique_ptr<std::byte[]> in_, out_;  // in_: once the handshake is over
    std::size_t first_ = 0, last_ = 0;       // of in_: bytes that have arrived and were not read
    std::size_t left_ = 0;                   // bytes left of the verified record at first_
    std::size_t written_ = 0, filled_ = 0;   // of out_
};

}  // namespace ddp::detail
