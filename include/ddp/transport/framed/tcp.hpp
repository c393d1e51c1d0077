/// \file
/// tcp_transport: framed over TCP sockets (Boost.Asio), payloads from other hosts checked by XXH3 (xxHash).
#pragma once

#include <utility>  // Boost 1.74 uses std::exchange without it

#include <boost/asio/buffer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>

// With -march=native and AVX-512, -Wall warns about xxHash's and GCC's own headers in user code. With -Og, GCC does not inline
// what xxHash 0.8.1 requires to be inlined, which is an error.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O2")
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#if defined(XXH_INLINE_ALL)
#include <xxhash.h>
#else
#define XXH_INLINE_ALL  // without it a program would have to link libxxhash
#include <xxhash.h>
#undef XXH_INLINE_ALL
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <system_error>

#include <ddp/comm/timing.hpp>
#include <ddp/transport/framed/frame_checksum.hpp>
#include <ddp/transport/framed/frame_stream.hpp>
#include <ddp/transport/framed/framed.hpp>
#include <ddp/transport/framed/memory_path.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>

namespace ddp {

/// The context of Asio's sockets. Never run: the sockets are non-blocking, and framed polls them. Never destroyed:
/// where a program calls exit(), a thread of the library may still be using a socket.
inline boost::asio::io_context& tcp_context() {
    static boost::asio::io_context& context = *new boost::asio::io_context(1);
    return context;
}

/// XXH3, 64 bits (xxHash). Takes about 20 % of the time of a transfer over loopback; between hosts the network is slower.
class xxh3_checksum {
public:
    xxh3_checksum() noexcept { reset(); }
    void reset() noexcept { XXH3_64bits_reset(&state_); }
    void update(const_bytes piece) noexcept { XXH3_64bits_update(&state_, piece.data(), piece.size()); }
    [[nodiscard]] std::uint64_t value() noexcept { return XXH3_64bits_digest(&state_); }

private:
    XXH3_state_t state_;
};
static_assert(Checksum<xxh3_checksum>);

/// Sets options before connect or listen. Options that the system refuses are left as they are.
inline void tune_unconnected(int fd) noexcept {
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
}
/// Sets options of a connected socket. Heartbeats detect silence. There is a user timeout only where they allow more of it than
/// the kernel does by itself (about 15 minutes without an acknowledgement): with one, the kernel also ends the connection to
/// a process that it has seen stopped for that long, although a job that is stopped as a whole (Ctrl-Z) may go on.
inline void tune_connected(int fd, timing const& times) noexcept {
    int const on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    if (times.dead > std::chrono::minutes(10)) {
        unsigned const limit = static_cast<unsigned>((times.dead + times.collective).count());
        ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, sizeof limit);
    }
    ::setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on,
                 sizeof on);  // heartbeats come back soon after an outage
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
}

/// A connected TCP socket as a Stream, with a tcp_channel or without. Without one, each read or write is one call of
/// recvmsg or sendmsg; Asio's composed operations move at most 64 KiB. Between processes of one host, bytes may go
/// through memory of the host instead of the socket.
class tcp_stream {
public:
    /// A socket with io_context's own executor, which costs less code than the any_io_executor of ip::tcp::socket.
    using socket = boost::asio::basic_stream_socket<boost::asio::ip::tcp, boost::asio::io_context::executor_type>;
    static constexpr std::string_view name = "tcp";

    explicit tcp_stream(socket connected, std::unique_ptr<tcp_channel> channel = nullptr)
        : socket_(std::move(connected)), channel_(std::move(channel)) {
        boost::system::error_code ignored;  // one that is not open fails at its first use
        socket_.non_blocking(true, ignored);
    }

    /// From now on bytes go through memory, at the far end too. None may be on the way.
    void go_through(std::unique_ptr<memory_path> memory) noexcept { memory_ = std::move(memory); }
    /// Whether bytes go through memory: a read or write that moves nothing then costs no system call.
    [[nodiscard]] bool in_memory() const noexcept { return memory_ != nullptr; }

    stream_result read_some(std::span<mutable_bytes const> buffers) noexcept {
        return memory_ != nullptr ? read_memory(buffers) : read_socket(buffers);
    }
    stream_result write_some(std::span<const_bytes const> buffers) noexcept {
        return memory_ != nullptr ? write_memory(buffers) : write_socket(buffers);
    }
    /// From now on whatever the socket receives is thrown away: read_some returns would_block until the stream ends.
    void discard_input() noexcept { discards_ = true; }
    stream_result read_socket(std::span<mutable_bytes const> buffers) noexcept {
        if (discards_) return discard();
        if (channel_ != nullptr) return read_channel(buffers);
        std::array<boost::asio::mutable_buffer, 64> list;
        boost::system::error_code error;
        std::size_t const n = socket_.read_some(convert(buffers, list), error);
        return result(n, error);
    }
    stream_result write_socket(std::span<const_bytes const> buffers) noexcept {
        if (channel_ != nullptr) return write_channel(buffers);
        std::array<boost::asio::const_buffer, 64> list;
        boost::system::error_code error;
        std::size_t const n = socket_.write_some(convert(buffers, list), error);
        return result(n, error);
    }
    /// Whether read_some would return bytes that poll() does not see.
    [[nodiscard]] bool buffered() const noexcept {
        if (memory_ != nullptr && memory_->in.has_bytes()) return true;
        return channel_ != nullptr && !discards_ && (channel_->readable() || channel_->error() != channel_error::none);
    }
    /// Whether nothing has arrived through memory. Sometimes it returns false anyway, so that a read checks the socket.
    [[nodiscard]] bool quiet() noexcept {
        return memory_ != nullptr && !memory_->in.has_bytes() && !memory_->rung &&
               memory_->ended.status == stream_status::ok && ++memory_->idle < looks_a_call;
    }
    /// Call it before waiting for the descriptor, which the far end then makes readable. If it returns false, do not
    /// wait.
    [[nodiscard]] bool may_sleep(bool reads, bool writes) noexcept {
        return memory_ == nullptr ||
               ((!reads || memory_->in.reader_may_sleep()) && (!writes || memory_->out.writer_may_sleep()));
    }
    /// Call it after the wait. `readable`: whether the descriptor was.
    void woken(bool readable) noexcept {
        if (memory_ == nullptr) return;
        memory_->in.reader_wakes();
        memory_->out.writer_wakes();
        memory_->rung |= readable;
    }
    /// Ok once the channel is established, and the socket has taken all that write_some took.
    stream_result flush() noexcept {
        while (channel_ != nullptr) {
            if (stream_result const r = push(); r.status != stream_status::ok) return r;
            if (channel_->established()) break;
            if (stream_result const r = pull(); r.status != stream_status::ok) return r;
        }
        return {};
    }
    /// What to poll the descriptor for when write_some or flush would block.
    [[nodiscard]] short write_event() const noexcept {
        return channel_ == nullptr || channel_->established() || unsent() ? POLLOUT : POLLIN;
    }
    [[nodiscard]] bool unsent() const noexcept { return channel_ != nullptr && !channel_->pending().empty(); }
    [[nodiscard]] socket& base() noexcept { return socket_; }

    /// How many bytes the far end has acknowledged, or taken from the memory; 0 if the system does not say.
    [[nodiscard]] std::uint64_t delivered() const noexcept {
        return memory_ != nullptr ? memory_->out.delivered() : info().acked;
    }
    /// Whether bytes go over a network.
    [[nodiscard]] bool leaves_host() const noexcept {
        boost::system::error_code error;
        auto const near = socket_.local_endpoint(error).address(), far = socket_.remote_endpoint(error).address();
        return memory_ == nullptr && !error && near != far && !far.is_loopback();
    }
    /// Whether the system retransmits bytes that the far end's system does not acknowledge. The system of a stopped process
    /// still acknowledges.
    [[nodiscard]] bool unacknowledged() const noexcept {
        ::tcp_info const now = info().known;
        return now.tcpi_unacked != 0 && now.tcpi_retransmits != 0;
    }
    [[nodiscard]] int descriptor() const noexcept { return const_cast<socket&>(socket_).native_handle(); }
    void shutdown_send() noexcept {
        boost::system::error_code ignored;
        socket_.shutdown(socket::shutdown_send, ignored);
    }

private:
    struct tcp_facts {
        ::tcp_info known;  // glibc's ends where Linux 2.6 did
        std::uint64_t pacing, max_pacing, acked;
    };
    /// Zeros if the system does not say.
    [[nodiscard]] tcp_facts info() const noexcept {
        tcp_facts facts{};
        ::socklen_t size = sizeof facts;
        static_assert(sizeof facts == 128, "linux/tcp.h: tcpi_bytes_acked is at 120");
        bool const got = ::getsockopt(descriptor(), IPPROTO_TCP, TCP_INFO, &facts, &size) == 0;
        return got && size >= sizeof facts ? facts : tcp_facts{};
    }

    template <class Buffer>
    static std::span<Buffer const> convert(auto buffers, std::array<Buffer, 64>& list) noexcept {
        std::size_t const count = std::min(list.size(), buffers.size());
        for (std::size_t i = 0; i < count; ++i) list[i] = Buffer(buffers[i].data(), buffers[i].size());
        return {list.data(), count};
    }
    static stream_result result(std::size_t bytes, boost::system::error_code const& error) noexcept {
        namespace asio = boost::asio;
        if (!error) return {bytes, stream_status::ok, {}};
        if (error == asio::error::eof) return {0, stream_status::end, {}};
        if (error == asio::error::would_block || error == asio::error::try_again || error == asio::error::interrupted ||
            error == asio::error::no_buffer_space || error == asio::error::no_memory)
            return {0, stream_status::would_block, {}};
        return {0, stream_status::error, std::error_code(error.value(), std::generic_category())};
    }

    stream_result read_memory(std::span<mutable_bytes const> buffers) noexcept {
        for (;;) {
            byte_ring::result const got = memory_->in.take(buffers);
            if (got.wakes) static_cast<void>(wake_other());
            if (got.bytes != 0) return {got.bytes};
            if (memory_->in.broken()) return {0, stream_status::error, std::make_error_code(std::errc::bad_message)};
            if (memory_->ended.status != stream_status::ok) return memory_->ended;
            if (!memory_->rung && ++memory_->idle < looks_a_call) return {0, stream_status::would_block, {}};
            memory_->idle = 0;
            if (stream_result const r = hear_bell(); r.status == stream_status::would_block) return r;
        }
    }
    stream_result write_memory(std::span<const_bytes const> buffers) noexcept {
        byte_ring::result const put = memory_->out.write(buffers);
        if (put.wakes) static_cast<void>(wake_other());
        if (put.bytes != 0) return {put.bytes};
        if (memory_->out.broken()) return {0, stream_status::error, std::make_error_code(std::errc::bad_message)};
        // If the far end is gone, the memory stays full: only the socket shows that.
        stream_result const bell = memory_->ended.status == stream_status::end ? wake_other() : stream_result{};
        if (bell.status == stream_status::error) return bell;
        return {0, stream_status::would_block, {}};
    }
    /// Sends a byte on the socket. If the socket is full, others are on the way, and no further one is needed.
    stream_result wake_other() noexcept {
        static constexpr std::array<std::byte, 1> bell{};
        const_bytes const one(bell);
        return write_socket({&one, 1});
    }
    /// Reads such bytes. The end of the socket counts once the memory is empty.
    stream_result hear_bell() noexcept {
        std::array<std::byte, 64> bells;
        mutable_bytes const all(bells);
        memory_->rung = false;
        stream_result const r = read_socket({&all, 1});
        if (r.status == stream_status::end || r.status == stream_status::error) memory_->ended = r;
        return r;
    }

    stream_result discard() noexcept {
        std::array<std::byte, 4096> unread;
        boost::system::error_code error;
        for (int turn = 0; turn < 16 && !error; ++turn)
            socket_.read_some(boost::asio::buffer(unread.data(), unread.size()), error);
        return error ? result(0, error) : stream_result{0, stream_status::would_block, {}};
    }
    stream_result read_channel(std::span<mutable_bytes const> buffers) noexcept {
        std::size_t moved = 0;
        bool more = true;         // the socket may have
        std::size_t arrived = 0;  // of a record that is not whole yet
        for (mutable_bytes to : buffers)
            while (!to.empty()) {
                std::size_t const n = channel_->read(to);
                to = to.subspan(n);
                moved += n;
                if (n != 0) continue;
                if (channel_->error() != channel_error::none) return moved != 0 ? stream_result{moved} : broken();
                if (moved == 0 && !more) return {0, stream_status::would_block, {}, arrived};
                if (!more) return {moved};
                std::size_t const space = channel_->space().size();
                stream_result const r = pull();
                if (r.status != stream_status::ok)
                    return moved != 0 ? stream_result{moved} : stream_result{0, r.status, r.why, arrived};
                arrived += r.bytes;
                static_cast<void>(push());  // the channel's own answer
                more = r.bytes == space;
            }
        return {moved};
    }
    stream_result write_channel(std::span<const_bytes const> buffers) noexcept {
        std::array<const_bytes, 64> list;
        std::size_t const count = std::min(list.size(), buffers.size());
        std::copy_n(buffers.begin(), count, list.begin());
        std::span<const_bytes> rest(list.data(), count);
        std::size_t moved = 0;
        while (!rest.empty()) {
            stream_result const r = flush();
            if (r.status != stream_status::ok) return moved != 0 ? stream_result{moved} : r;
            std::size_t n = channel_->write(rest);
            if (n == 0) return broken();
            moved += n;
            while (!rest.empty() && n >= rest.front().size()) {
                n -= rest.front().size();
                rest = rest.subspan(1);
            }
            if (!rest.empty()) rest.front() = rest.front().subspan(n);
        }
        static_cast<void>(push());
        return {moved};
    }
    /// One read of the socket for the channel.
    stream_result pull() noexcept {
        if (channel_->error() != channel_error::none) return broken();
        mutable_bytes const space = channel_->space();
        boost::system::error_code error;
        std::size_t const n = socket_.read_some(boost::asio::buffer(space.data(), space.size()), error);
        if (error) return result(0, error);
        channel_->arrived(n);
        return channel_->error() != channel_error::none ? broken() : stream_result{n};
    }
    /// Sends the channel's pending bytes on the socket.
    stream_result push() noexcept {
        for (const_bytes out = channel_->pending(); !out.empty(); out = channel_->pending()) {
            boost::system::error_code error;
            std::size_t const n = socket_.write_some(boost::asio::buffer(out.data(), out.size()), error);
            if (error) return result(0, error);
            channel_->sent(n);
        }
        return {};
    }
    [[nodiscard]] stream_result broken() const noexcept {
        channel_error const error = channel_->error();
        return {0, stream_status::error, make_error_code(error == channel_error::none ? channel_error::failed : error)};
    }

    static constexpr int looks_a_call = 64;  // checks of the memory for one of the socket

    socket socket_;
    std::unique_ptr<tcp_channel> channel_;
    bool discards_ = false;
    std::unique_ptr<memory_path> memory_;
};
static_assert(Stream<tcp_stream>);

/// A transport over TCP, as connect_tcp makes it.
using tcp_transport = framed<tcp_stream, xxh3_checksum>;
static_assert(TimedTransport<tcp_transport>);

}  // namespace ddp
