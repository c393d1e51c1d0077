/// \file
/// tcp_channel: a layer between a socket and its user that authenticates or encrypts the connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <system_error>

#include <ddp/core/bytes.hpp>
#include <ddp/core/interface.hpp>

namespace ddp {

/// Why a channel can no longer be trusted.
enum class channel_error : std::uint8_t {
    none,      ///< nothing is wrong
    unproven,  ///< the other side has not proved that it knows the secret
    altered,   ///< bytes are not those that the other side wrote, in that order
    failed,    ///< the library that proves or encrypts failed
};

/// Authenticates or encrypts one connection: bytes in, bytes out, no sockets. Both sides prove that they know a secret before
/// any byte of a user is sent or returned. Not thread-safe.
class tcp_channel : public detail::interface {
public:
    /// Memory for bytes from the socket; never empty. Then call arrived() with their number.
    [[nodiscard]] virtual mutable_bytes space() noexcept = 0;
    /// Says that `bytes` bytes from the socket are in space().
    virtual void arrived(std::size_t bytes) noexcept = 0;
    /// Copies bytes of the other side's user that have arrived into `to`. Returns how many; 0 if there are none.
    [[nodiscard]] virtual std::size_t read(mutable_bytes to) noexcept = 0;
    /// Whether read() would return something.
    [[nodiscard]] virtual bool readable() noexcept = 0;

    /// Bytes to be sent on the socket. Then call sent() with the number of those that were sent.
    [[nodiscard]] virtual const_bytes pending() noexcept = 0;
    /// Says that the first `bytes` bytes of pending() have been sent.
    virtual void sent(std::size_t bytes) noexcept = 0;
    /// Takes bytes of this side's user for sending, while nothing is pending. Returns how many; 0 before established().
    [[nodiscard]] virtual std::size_t write(std::span<const_bytes const> from) noexcept = 0;

    /// Whether both sides have proved who they are.
    [[nodiscard]] virtual bool established() const noexcept = 0;
    /// What is wrong with the connection; channel_error::none if nothing is.
    [[nodiscard]] virtual channel_error error() const noexcept = 0;
};

/// Makes the channels of a job, one for each connection.
class tcp_security : public detail::interface {
public:
    /// The channel for one connection. `dials`: whether this side has made the connection.
    [[nodiscard]] virtual std::unique_ptr<tcp_channel> channel(bool dials) const = 0;
};

namespace detail {
[[nodiscard]] inline std::unique_ptr<tcp_channel> channel_of(tcp_security const* security, bool dials) {
    return security != nullptr ? security->channel(dials) : nullptr;
}
}  // namespace detail

/// channel_error as a std::error_code; altered is std::errc::bad_message.
[[nodiscard]] inline std::error_code make_error_code(channel_error error) noexcept {
    static struct : std::error_category {
        [[nodiscard]] char const* name() const noexcept override { return "ddp::channel_error"; }
        [[nodiscard, gnu::cold]] std::string message(int code) const override {
            switch (static_cast<channel_error>(code)) {
                case channel_error::none: break;
                case channel_error::unproven: return "it has not proved that it knows this job's secret";
                case channel_error::altered: return "bytes were changed on the way";
                case channel_error::failed: return "OpenSSL failed";
            }
            return "no error";
        }
        [[nodiscard, gnu::cold]] std::error_condition default_error_condition(int code) const noexcept override {
            if (static_cast<channel_error>(code) != channel_error::altered) return {code, *this};
            return std::make_error_condition(std::errc::bad_message);
        }
    } const category;
    return {static_cast<int>(error), category};
}

}  // namespace ddp
