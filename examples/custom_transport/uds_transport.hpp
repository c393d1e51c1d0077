// A transport of one's own: Unix-domain sockets between the processes of one machine, under ddp's framing.
// The stream is all that framed<> asks for; connect() is how the ranks of a job find each other. docs/own_transport.md
// explains.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <ddp/core/error.hpp>
#include <ddp/transport/framed/framed.hpp>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace uds {

/// A connected socket that never blocks. Owns the descriptor.
class stream {
public:
    static constexpr std::string_view name = "unix";  // what messages call the transport

    explicit stream(int socket) noexcept : fd_(socket) {}
    stream(stream&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    stream& operator=(stream&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~stream() {
        if (fd_ >= 0) ::close(fd_);
    }

    ddp::stream_result read_some(std::span<ddp::mutable_bytes const> buffers) noexcept {
        ddp::stream_result const got = move(buffers, [this](::msghdr& m) { return ::recvmsg(fd_, &m, MSG_DONTWAIT); });
        if (got.status == ddp::stream_status::ok && got.bytes == 0) return {0, ddp::stream_status::end, {}};
        return got;
    }
    ddp::stream_result write_some(std::span<ddp::const_bytes const> buffers) noexcept {
        constexpr int how = MSG_DONTWAIT | MSG_NOSIGNAL;  // a closed peer is an error, not a signal
        return move(buffers, [this](::msghdr& m) { return ::sendmsg(fd_, &m, how); });
    }
    [[nodiscard]] int descriptor() const noexcept { return fd_; }
    void shutdown_send() noexcept { ::shutdown(fd_, SHUT_WR); }

private:
    /// One system call for the whole list: framed gives at most 64 buffers, and few bytes in each are common.
    template <class Buffers, class Call>
    static ddp::stream_result move(Buffers buffers, Call call) noexcept {
        std::array<::iovec, 64> list;
        for (std::size_t i = 0; i < buffers.size(); ++i)
            list[i] = {const_cast<std::byte*>(buffers[i].data()), buffers[i].size()};  // iovec knows no const
        ::msghdr message{};
        message.msg_iov = list.data();
        message.msg_iovlen = buffers.size();
        ssize_t const n = call(message);
        if (n >= 0) return {static_cast<std::size_t>(n), ddp::stream_status::ok, {}};
        if (errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ENOMEM)
            return {0, ddp::stream_status::would_block, {}};
        return {0, ddp::stream_status::error, {errno, std::generic_category()}};
    }

    int fd_;
};
static_assert(ddp::Stream<stream>);

using transport = ddp::framed<stream>;  // no checksum: these bytes never leave the kernel's memory
static_assert(ddp::TimedTransport<transport>);

namespace detail {

[[noreturn]] inline void fail(std::string const& what, int why) {
    throw ddp::error(ddp::errc::rendezvous, "unix sockets: " + what + ": " + std::generic_category().message(why));
}
inline ::sockaddr_un address(std::string const& path) {
    ::sockaddr_un a{.sun_family = AF_UNIX, .sun_path = {}};
    if (path.size() >= sizeof a.sun_path)
        fail(path + " is too long for a socket; use a shorter directory", ENAMETOOLONG);
    path.copy(a.sun_path, path.size());
    return a;
}
inline stream make_socket() {
    int const fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) fail("no socket", errno);
    return stream(fd);
}
/// What is left until then, as the limit of the next receive or accept; at least a millisecond, as 0 would be no limit.
inline void limit_waits(stream const& s, ddp::time_point until) {
    auto const left = std::max<ddp::nanoseconds>(until - ddp::monotonic_clock::now(), std::chrono::milliseconds(1));
    ::timeval const t{left.count() / 1'000'000'000, left.count() / 1000 % 1'000'000};
    ::setsockopt(s.descriptor(), SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
}

}  // namespace detail

/// Rank `rank` of `size`. `directory` is the job's own: new, empty, and closed to other users, for whoever can enter it
/// can take part. Each rank listens at directory/<rank>, connects to the lower ranks and accepts the higher. When
/// all are connected it returns; when times.join has passed it throws ddp::error.
inline std::unique_ptr<transport> connect(std::string const& directory, int rank, int size,
                                          ddp::timing const& times = {}) {
    ddp::time_point const until = ddp::monotonic_clock::now() + times.join;
    std::vector<ddp::framed_peer<stream>> peers;

    stream const listener = detail::make_socket();
    std::string const mine = directory + "/" + std::to_string(rank);
    ::sockaddr_un const here = detail::address(mine);
    if (::bind(listener.descriptor(), reinterpret_cast<::sockaddr const*>(&here), sizeof here) != 0 ||
        ::listen(listener.descriptor(), size) != 0)
        detail::fail("cannot listen at " + mine + "; every job needs a new directory of its own", errno);

    for (int lower = 0; lower < rank; ++lower) {
        std::string const path = directory + "/" + std::to_string(lower);
        ::sockaddr_un const there = detail::address(path);
        stream s = detail::make_socket();
        while (::connect(s.descriptor(), reinterpret_cast<::sockaddr const*>(&there), sizeof there) != 0) {
            bool const early = errno == ENOENT || errno == ECONNREFUSED || errno == EINTR;  // it does not listen yet
            if (!early || ddp::monotonic_clock::now() >= until)
                detail::fail("rank " + std::to_string(lower) + " at " + path, errno);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        if (::send(s.descriptor(), &rank, sizeof rank, MSG_NOSIGNAL) != sizeof rank) detail::fail(path, errno);
        peers.push_back({.rank = lower, .stream = std::move(s), .name = path});
    }
    while (static_cast<int>(peers.size()) + 1 < size) {
        detail::limit_waits(listener, until);
        stream s(::accept4(listener.descriptor(), nullptr, nullptr, SOCK_CLOEXEC));
        if (s.descriptor() < 0 && errno == EINTR) continue;
        if (s.descriptor() < 0)
            detail::fail(
                mine + " heard of " + std::to_string(peers.size()) + " of " + std::to_string(size - 1) + " other ranks",
                errno == EAGAIN ? ETIMEDOUT : errno);
        detail::limit_waits(s, until);
        int who = -1;
        if (::recv(s.descriptor(), &who, sizeof who, MSG_WAITALL) != sizeof who)
            detail::fail("somebody connected to " + mine + " and did not say its rank", EPROTO);
        peers.push_back({.rank = who, .stream = std::move(s), .name = directory + "/" + std::to_string(who)});
    }
    return std::make_unique<transport>(rank, size, std::move(peers), ddp::framed_options{.times = times});
}

}  // namespace uds
