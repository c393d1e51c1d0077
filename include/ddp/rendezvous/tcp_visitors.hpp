/// \file
/// Accepts connections, and limits how many there are, and for how long, before they have said who they are.
#pragma once

#include <poll.h>

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

inline constexpr std::size_t max_strangers = 64;
/// A rank that has just connected has this long to say hello before a flood of others may push it out.
inline constexpr std::chrono::milliseconds stranger_grace{100};

/// Accepts the connections that wait at `acceptor`, and calls hear(visitor) for each, which may have sent something already. A
/// Visitor has a `stream` and a time limit for its hello, `until`: times.handshake from now. With `security`, its bytes come
/// from someone who knows the secret. If max_strangers of them are strange(visitor), the oldest is dropped, so that strangers
/// neither fill memory nor delay the start; during its grace, the next one waits in the kernel. If no descriptor is left,
/// strangers are dropped as well. Returns EMFILE or ENFILE if there are none to drop, otherwise 0.
template <class Visitor, class Strange, class Hear>
[[nodiscard, gnu::cold]] int welcome(tcp_acceptor& acceptor, tcp_security const* security, std::list<Visitor>& visitors,
                                     timing const& times, Strange const& strange, Hear const& hear) {
    for (int i = 0; i < 256; ++i) {
        if (std::count_if(visitors.begin(), visitors.end(), strange) >= static_cast<std::ptrdiff_t>(max_strangers)) {
            auto const oldest = std::find_if(visitors.begin(), visitors.end(), strange);
            if (oldest->until - monotonic_clock::now() > times.handshake - stranger_grace) return 0;
            visitors.erase(oldest);
        }
        boost::system::error_code error;
        tcp_socket socket(tcp_context());
        acceptor.accept(socket, error);
        if (out_of_descriptors(error)) {
            // Linux reports this even if no connection waits.
            if (!poll_until(acceptor.native_handle(), POLLIN, time_point{})) return 0;
            auto const oldest = std::find_if(visitors.begin(), visitors.end(), strange);
            if (oldest == visitors.end()) return error.value();
            if (oldest->until - monotonic_clock::now() > times.handshake - stranger_grace) return 0;
            visitors.erase(oldest);
            continue;
        }
        if (error) return 0;
        tune_connected(socket.native_handle(), times);
        visitors.push_back(
            {tcp_stream(std::move(socket), channel_of(security, false)), monotonic_clock::now() + times.handshake});
        hear(visitors.back());
    }
    return 0;
}

}  // namespace ddp::detail
