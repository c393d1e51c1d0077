/// \file
/// Blocking operations on TCP sockets, each with a deadline, for the rendezvous.
#pragma once

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/rendezvous_error.hpp>
#include <ddp/transport/framed/tcp.hpp>

namespace ddp {

namespace detail {

namespace tcp = boost::asio::ip;
using tcp_endpoint = boost::asio::ip::tcp::endpoint;
using tcp_socket = tcp_stream::socket;
using tcp_acceptor = boost::asio::basic_socket_acceptor<boost::asio::ip::tcp, boost::asio::io_context::executor_type>;

[[nodiscard, gnu::cold]] inline std::string text_of(tcp_endpoint const& at) {
    bool const brackets = at.address().is_v6();
    return concat({brackets ? "[" : "", at.address().to_string(), brackets ? "]:" : ":", at.port()});
}

/// Waits for `events` on a descriptor. Returns false at `until`.
[[gnu::cold]] inline bool poll_until(int fd, short events, time_point until) {
    for (;;) {
        auto const left = std::chrono::ceil<std::chrono::milliseconds>(until - monotonic_clock::now()).count();
        ::pollfd one{fd, events, 0};
        int const n = ::poll(&one, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 60000)));
        if (n > 0) return true;
        if (left <= 0) return false;
    }
}

enum class io_end : std::uint8_t { ok, closed, late };

/// Writes all bytes, or returns why that failed.
[[gnu::cold]] inline io_end write_all(tcp_stream& stream, const_bytes bytes, time_point until) {
    for (bool sent = false; !sent;) {
        stream_result const r = bytes.empty() ? stream.flush() : stream.write_some({&bytes, 1});
        sent = bytes.empty() && r.status == stream_status::ok;
        bytes = bytes.subspan(r.bytes);
        if (r.status == stream_status::would_block) {
            if (!poll_until(stream.descriptor(), stream.write_event(), until)) return io_end::late;
        } else if (r.status != stream_status::ok) {
            return io_end::closed;
        }
    }
    return io_end::ok;
}

/// Begins to connect a new socket, which becomes writable when that has ended. Asio's connect waits without a limit,
/// even on a non-blocking socket.
[[gnu::cold]] inline boost::system::error_code begin_dial(tcp_socket& socket, tcp_endpoint const& to) {
    boost::system::error_code error;
    socket.close(error);
    if (socket.open(to.protocol(), error)) return error;
    socket.non_blocking(true, error);
    int const fd = socket.native_handle();
    tune_unconnected(fd);
    if (::connect(fd, to.data(), static_cast<::socklen_t>(to.size())) != 0 && errno != EINPROGRESS)
        return {errno, boost::system::system_category()};
    return {};
}
/// The result of begin_dial(), at `until` at the latest: timed_out if there is none yet.
[[gnu::cold]] inline boost::system::error_code end_dial(tcp_socket& socket, time_point until) {
    int const fd = socket.native_handle();
    if (!poll_until(fd, POLLOUT, until)) return boost::asio::error::timed_out;
    int code = 0;
    ::socklen_t size = sizeof code;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &size);
    boost::system::error_code unbound, unconnected, ignored;
    // Where nobody listens yet, a socket that happens to get that very port connects to itself, and holds it.
    if (auto const here = socket.local_endpoint(unbound); code == 0 && !unbound)
        if (here == socket.remote_endpoint(unconnected) && !unconnected) {
            socket.set_option(boost::asio::socket_base::linger(true, 0), ignored);  // or the port is held for a minute
            socket.close(ignored);
            return boost::asio::error::connection_refused;
        }
    return {code, boost::system::system_category()};
}
/// Connects, and waits until `until` at most; the error is then timed_out.
[[gnu::cold]] inline boost::system::error_code dial(tcp_socket& socket, tcp_endpoint const& to, time_point until) {
    if (auto const error = begin_dial(socket, to)) return error;
    return end_dial(socket, until);
}

/// Listens at `at` (port 0: any free one).
[[gnu::cold]] inline boost::system::error_code listen_at(tcp_acceptor& acceptor, tcp_endpoint const& at) {
    boost::system::error_code error;
    if (acceptor.open(at.protocol(), error)) return error;
    tune_unconnected(acceptor.native_handle());
    acceptor.set_option(boost::asio::socket_base::reuse_address(true), error);
    acceptor.non_blocking(true, error);
    if (acceptor.bind(at, error) || acceptor.listen(SOMAXCONN, error)) {
        boost::system::error_code ignored;
        acceptor.close(ignored);
    }
    return error;
}

[[nodiscard, gnu::cold]] inline std::string this_host_name() {
    char host[65] = {};
    ::gethostname(host, sizeof host - 1);
    return host;
}

/// Whether this process, or the whole system, may open no more descriptors.
[[nodiscard, gnu::cold]] inline bool out_of_descriptors(int error) noexcept {
    return error == EMFILE || error == ENFILE;
}
[[nodiscard, gnu::cold]] inline bool out_of_descriptors(boost::system::error_code const& error) noexcept {
    return error.category() == boost::system::system_category() && out_of_descriptors(error.value());
}
/// How many descriptors a rank of a job of `size` may have open during start-up, besides the program's own:
/// three of Asio's, the standard streams, the store, the listening socket, and a socket and a piece of memory for each other
/// rank; rank 0 serves the store as well.
[[nodiscard, gnu::cold]] inline int descriptors_needed(int rank, int size) noexcept {
    return 2 * size + 8 + (rank == 0 ? size + 4 : 0);
}
/// For all ranks. `what` could not be opened by `rank`.
[[nodiscard, gnu::cold]] inline rendezvous_error too_many_files(int rank, int size, std::string_view what, int error) {
    std::string const text = std::generic_category().message(error);
    if (error == ENFILE)
        return rendezvous_error(concat({"rank ", rank, " on host ", this_host_name(), " cannot open ", what, ": ", text,
                                        ". Raise the limit of that host (sysctl fs.file-max)"}));
    ::rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    int const needed = descriptors_needed(rank, size);
    return rendezvous_error(
        concat({"rank ", rank, " on host ", this_host_name(), " cannot open ", what, ": ", text, ". Its limit is ",
                limit.rlim_cur, " descriptors (ulimit -n), and a rank of this job needs up to ", needed,
                " besides the program's own. Start it with a higher limit: ulimit -n ",
                std::max(1024u, std::bit_ceil(2 * static_cast<unsigned>(needed)))}));
}

/// "pid 4121 on node7"
[[nodiscard, gnu::cold]] inline std::string this_process() {
    return concat({"pid ", ::getpid(), " on ", this_host_name()});
}

}  // namespace detail
}  // namespace ddp
