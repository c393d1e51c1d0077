/// \file
/// descriptor_stream: a Stream over any connected POSIX socket (Unix domain, socketpair, TCP without Asio).
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <span>
#include <system_error>
#include <utility>

#include <ddp/transport/framed/frame_stream.hpp>

namespace ddp {

/// A connected stream socket as a Stream: from socketpair(), a Unix domain socket, or TCP without Asio. A pipe does not
/// work: it has one direction only, and recvmsg and sendmsg reject it; use socketpair(AF_UNIX, SOCK_STREAM, 0, two)
/// instead.
///
///     std::vector<ddp::framed_peer<ddp::descriptor_stream>> peers;
///     peers.push_back({.rank = 1, .stream = ddp::descriptor_stream(two[0])});
///     auto transport = std::make_unique<ddp::framed<ddp::descriptor_stream>>(0, 2, std::move(peers));
///     auto comm = ddp::any_communicator(std::move(transport));
///
/// Owns the descriptor and makes it non-blocking; the destructor closes it. Throws nothing: errors come as
/// stream_result.
class descriptor_stream {
public:
    explicit descriptor_stream(int connected) noexcept : fd_(connected) {
        ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) | O_NONBLOCK);
    }
    descriptor_stream(descriptor_stream&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    descriptor_stream& operator=(descriptor_stream&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~descriptor_stream() {
        if (fd_ >= 0) ::close(fd_);
    }

    stream_result read_some(std::span<mutable_bytes const> buffers) noexcept {
        std::array<::iovec, 64> list;
        ::msghdr message{};
        message.msg_iov = list.data();
        message.msg_iovlen = fill(list, buffers);
        ssize_t const n = retry([&] { return ::recvmsg(fd_, &message, 0); });
        if (n == 0) return {0, stream_status::end, {}};
        return result(n);
    }
    stream_result write_some(std::span<const_bytes const> buffers) noexcept {
        std::array<::iovec, 64> list;
        ::msghdr message{};
        message.msg_iov = list.data();
        message.msg_iovlen = fill(list, buffers);
        return result(retry([&] { return ::sendmsg(fd_, &message, MSG_NOSIGNAL); }));
    }
    [[nodiscard]] int descriptor() const noexcept { return fd_; }
    void shutdown_send() noexcept { ::shutdown(fd_, SHUT_WR); }

private:
    template <class Buffers>
    static std::size_t fill(std::array<::iovec, 64>& list, Buffers buffers) noexcept {
        std::size_t const count = std::min(list.size(), buffers.size());
        for (std::size_t i = 0; i < count; ++i)
            list[i] = {const_cast<std::byte*>(buffers[i].data()), buffers[i].size()};  // iovec knows no const
        return count;
    }
    template <class Call>
    static ssize_t retry(Call call) noexcept {
        for (;;) {
            ssize_t const n = call();
            if (n >= 0 || errno != EINTR) return n;
        }
    }
    static stream_result result(ssize_t n) noexcept {
        if (n >= 0) return {static_cast<std::size_t>(n), stream_status::ok, {}};
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM)
            return {0, stream_status::would_block, {}};  // the last two are temporary: the kernel is short of memory
        return {0, stream_status::error, {errno, std::generic_category()}};
    }

    int fd_;
};

static_assert(Stream<descriptor_stream>);

}  // namespace ddp
