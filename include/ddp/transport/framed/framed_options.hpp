/// \file
/// What a framed transport is made of: a connected stream a peer, and its options.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/transport/framed/frame_stream.hpp>

namespace ddp {

/// One connection, and who is at its other end.
template <Stream S>
struct framed_peer {
    int rank = -1;          ///< who is at the other end
    S stream;               ///< connected
    std::string name = {};  ///< for messages: address and process, say
    bool checked = false;   ///< payloads carry a checksum; the same at both ends
};

/// The same on all ranks, except the times.
struct framed_options {
    timing times = {};      ///< heartbeats, deadlines, the end
    std::uint64_t job = 0;  ///< frames of another job are refused
    /// Kept for messages that come before their receive, a peer. 0: 16 MiB in all, at least 1 MiB a peer.
    std::size_t early_bytes = 0;
    nanoseconds spin{0};  ///< how long progress() tries again before it sleeps
    /// Gives up the core between two tries. Costs 0.3 us where every rank has a core of its own; where ranks share one,
    /// an exchange of 4 bytes took 25 us with it and 70 to 130 us without.
    bool yields = true;
    /// How often it looks at memory before it gives up the core: 20 to 30 ns a look. 0 where there are more ranks than cores.
    int looks = 20;
    /// Ranks that give the same number share a host; 0: the machine's own. So one machine can play several hosts.
    std::uint64_t host = 0;
    /// Of each rank, a number: ranks with equal ones send each other messages through memory. Empty: nobody does.
    std::vector<int> paths = {};
};

}  // namespace ddp
