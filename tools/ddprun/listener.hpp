/// \file
/// The socket on which rank 0 will serve: made here, so that no port is chosen before it is taken.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <ddp/rendezvous/port_holder.hpp>

#include "posix.hpp"

namespace ddprun {

struct listener {
    unique_fd socket;
    std::uint16_t port = 0;
};

/// Whether only this machine reaches it.
[[nodiscard]] inline bool is_loopback(sockaddr_storage const& at) {
    if (at.ss_family == AF_INET) return (ntohl(reinterpret_cast<sockaddr_in const&>(at).sin_addr.s_addr) >> 24) == 127;
    return at.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<sockaddr_in6 const&>(at).sin6_addr);
}

/// Listens on `address`:`port` (0: any free port). Nothing where the address is not one of this machine's. With
/// `others` on other machines, a name that is loopback here is an error; an address that says so is the user's wish. A name
/// that has no address yet is nothing then: rank 0 listens by itself, and asks for the address again until timing.join.
[[nodiscard]] inline std::optional<listener> listen_on(std::string const& address, std::uint16_t port, bool others) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    int const code = ::getaddrinfo(address.c_str(), nullptr, &hints, &found);
    bool const may_come = code == EAI_AGAIN || code == EAI_NONAME || code == EAI_NODATA;
    if (others && port != 0 && may_come) return std::nullopt;
    if (code != 0) throw launch_error(exit_launcher, "--master-addr " + address + ": " + ::gai_strerror(code));
    std::unique_ptr<addrinfo, void (*)(addrinfo*)> const owner(found, ::freeaddrinfo);

    for (addrinfo const* at = found; at != nullptr; at = at->ai_next) {
        sockaddr_storage where{};
        socklen_t length = at->ai_addrlen;
        std::memcpy(&where, at->ai_addr, length);
        std::uint16_t const wire_port = htons(port);
        if (where.ss_family == AF_INET)
            reinterpret_cast<sockaddr_in&>(where).sin_port = wire_port;
        else if (where.ss_family == AF_INET6)
            reinterpret_cast<sockaddr_in6&>(where).sin6_port = wire_port;
        else
            continue;

        if (others && is_loopback(where) && address != "localhost" && address != "::1" && !address.starts_with("127."))
            throw launch_error(exit_launcher, "--master-addr " + address +
                                                  " is a loopback address on this machine (/etc/hosts says so), which "
                                                  "the other machines cannot reach: give its address as a number");

        unique_fd socket(::socket(where.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (!socket) continue;  // an address family that this kernel lacks
        int const on = 1;       // the previous job's connections may linger in TIME_WAIT
        ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&where), length) != 0) {
            if (errno == EADDRNOTAVAIL) continue;
            std::string const what = "cannot bind " + address + ":" + std::to_string(port);
            if (errno == EADDRINUSE)
                throw launch_error(exit_launcher,
                                   what + ": the port is in use" +
                                       ddp::detail::port_holder(reinterpret_cast<sockaddr*>(&where)) +
                                       ". Leave --master-port out (one machine), or choose another one.");
            throw_errno(what);
        }
        if (::listen(socket.get(), SOMAXCONN) != 0) throw_errno("cannot listen on " + address);
        length = sizeof where;
        if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&where), &length) != 0) throw_errno("getsockname");
        std::uint16_t const bound = where.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(where).sin_port
                                                               : reinterpret_cast<sockaddr_in6&>(where).sin6_port;
        return listener{std::move(socket), ntohs(bound)};
    }
    return std::nullopt;
}

}  // namespace ddprun
