/// \file
/// listener: a listening socket on a free port of loopback, as a launcher hands it to rank 0.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <stdexcept>

namespace ddp::test {

struct listener {
    int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    std::uint16_t port = 0;

    explicit listener(bool listening = true, std::uint16_t wanted = 0) {
        ::sockaddr_in at{};
        at.sin_family = AF_INET;
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        at.sin_port = htons(wanted);
        ::socklen_t size = sizeof at;
        if (::bind(fd, reinterpret_cast<::sockaddr*>(&at), size) != 0 || (listening && ::listen(fd, SOMAXCONN) != 0) ||
            ::getsockname(fd, reinterpret_cast<::sockaddr*>(&at), &size) != 0)
            throw std::runtime_error("no port");
        port = ntohs(at.sin_port);
    }
    listener(listener const&) = delete;
    listener& operator=(listener const&) = delete;
    ~listener() { ::close(fd); }

    /// A descriptor of the same socket, for connect_tcp to take over.
    [[nodiscard]] int inherit() const { return ::dup(fd); }
};

}  // namespace ddp::test
