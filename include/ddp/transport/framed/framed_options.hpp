/// \file
/// The arguments of a framed transport: a connected stream for each peer, and options.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/transport/framed/frame_stream.hpp>

namespace ddp {

/// One connection, and the rank at its other end.
template <Stream S>
struct framed_peer {
    int rank = -1;          ///< at the other end
    S stream;               ///< connected
    std::string name = {};  ///< for error messages, such as address and process
    bool checked = false;   ///< whether payloads carry a checksum; the same at both ends
};

/// Options of a framed transport. `job`, `early_bytes` and `paths` must be the same on all ranks.
struct framed_options {
    timing times = {};      ///< limits for heartbeats, silence and shutdown
    std::uint64_t job = 0;  ///< a number for the job; frames of another job are refused (DDP-E207)
    /// Bytes for each peer, for messages that arrive before their receive. 0: 16 MiB for all together, but at least 1
    /// MiB for each.
    std::size_t early_bytes = 0;
    nanoseconds spin{0};  ///< how long progress() tries again before it sleeps
    /// Whether it gives up the core between two tries. Costs 0.3 us if every rank has a core of its own; if ranks share one, an
    /// exchange of 4 bytes took 25 us with it and 70 to 130 us without.
    bool yields = true;
    /// How often it checks memory before it gives up the core: 20 to 30 ns for each check. Use 0 if there are more ranks than
    /// cores.
    int looks = 20;
    /// A number for this rank's host, so that one machine can stand for several: ranks with equal numbers share a host. 0:
    /// that of the machine.
    std::uint64_t host = 0;
    /// A number for each rank: ranks with equal numbers send each other messages through memory. Empty: none do.
    std::vector<int> paths = {};
    /// An object that must live until the transport has closed its connections.
    std::shared_ptr<void> keeps = {};
    /// Of this rank, for error messages; framed_peer::name is that of a peer.
    std::string name = {};
};

}  // namespace ddp
