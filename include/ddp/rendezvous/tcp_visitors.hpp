/// \file
/// Accepts connections, and limits the number and duration of those that have not identified themselves.
#pragma once

#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <list>
#include <utility>

#include <ddp/comm/timing.hpp>
#include <ddp/rendezvous/tcp_socket.hpp>
#include <ddp/transport/framed/tcp.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>

namespace ddp::detail {

/// The minimum age at which a connection may be dropped to make room for others: if it has sent nothing, and if it has
/// sent something. A rank sends its first bytes at once, but a proof of the secret takes several messages.
inline constexpr std::chrono::milliseconds silent_grace{5}, stranger_grace{100};

/// The largest number of unidentified connections: an eighth of the descriptors that this process may open, between 64
/// and 256.
[[nodiscard, gnu::cold]] inline std::ptrdiff_t max_strangers() {
    ::rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 64;
    return static_cast<std::ptrdiff_t>(std::clamp<::rlim_t>(limit.rlim_cur / 8, 64, 256));
}

/// Accepts the connections that wait at `acceptor`, and calls hear(visitor) for each, which may have sent something
/// already. A Visitor has a `stream`, a time limit for its hello, `until`: times.handshake from now, and is `silent`
/// until bytes have come. With `security`, its bytes come from someone who knows the secret. If max_strangers() of them
/// are strange(visitor), the oldest that has had its grace is dropped, so that strangers neither fill memory nor delay
/// the start; while there is none, the next connection waits in the kernel. If no descriptor is left, strangers are
/// dropped as well. Returns EMFILE or ENFILE if there are none to drop, otherwise 0.
template <class Visitor, class Strange, class Hear>
[[nodiscard, gnu::cold]] int welcome(tcp_acceptor& acceptor, tcp_security const* security, std::list<Visitor>& visitors,
                                     timing const& times, Strange const& strange, Hear const& hear) {
    auto const displace = [&] {
        time_point const now = monotonic_clock::now();
        auto const one = std::find_if(visitors.begin(), visitors.end(), [&](Visitor& v) {
            auto const age = now - (v.until - times.handshake);
            if (!strange(v) || age < silent_grace) return false;
            v.silent = v.silent && !poll_until(v.stream.descriptor(), POLLIN, time_point{});
            return v.silent || age >= stranger_grace;
        });
        if (one == visitors.end()) return false;
        visitors.erase(one);
        return true;
    };
    std::ptrdiff_t const most = max_strangers();
    for (int i = 0; i < 256; ++i) {
        if (std::count_if(visitors.begin(), visitors.end(), strange) >= most && !displace()) return 0;
        boost::system::error_code error;
        tcp_socket socket(tcp_context());
        acceptor.accept(socket, error);
        if (out_of_descriptors(error)) {
            // Linux reports this even if no connection waits.
            if (!poll_until(acceptor.native_handle(), POLLIN, time_point{})) return 0;
            if (std::none_of(visitors.begin(), visitors.end(), strange)) return error.value();
            if (!displace()) return 0;
            continue;
        }
        if (error) return 0;
        tune_connected(socket.native_handle(), times);
        visitors.push_back(
            {tcp_stream(std::move(socket), channel_of(security, false)), monotonic_clock::now() + times.handshake});
        visitors.back().silent = !poll_until(visitors.back().stream.descriptor(), POLLIN, time_point{});
        hear(visitors.back());
    }
    return 0;
}

}  // namespace ddp::detail
