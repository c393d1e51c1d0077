/// \file
/// memory_path: the two rings that carry a connection between two processes of one host.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include <ddp/core/bytes.hpp>
#include <ddp/transport/framed/frame_stream.hpp>
#include <ddp/transport/shm/byte_ring.hpp>

namespace ddp {

/// What a stream has besides its socket if both ends see each other's memory. Bytes go through the rings; the socket is
/// used for two things only: a byte on it wakes an end that sleeps, and its end is the end of the connection.
struct memory_path {
    byte_ring out;                    ///< this end writes
    byte_ring in;                     ///< this end reads
    std::shared_ptr<std::byte> mine;  ///< where `out` is
    std::shared_ptr<std::byte> theirs;
    int idle = 0;              ///< how often there was nothing to read since the socket was last checked
    bool rung = false;         ///< poll has seen something on the socket
    stream_result ended = {};  ///< how the socket ended; ok: it has not
};

}  // namespace ddp
