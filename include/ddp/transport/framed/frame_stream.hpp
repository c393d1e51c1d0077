/// \file
/// Stream: the ordered, connected byte stream that framed turns into a transport.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <system_error>

#include <ddp/core/bytes.hpp>

namespace ddp {

/// How an attempt to read or write ended.
enum class stream_status : std::uint8_t {
    ok,           ///< `bytes` were moved, at least one
    would_block,  ///< nothing can be moved now: poll the descriptor
    end,          ///< the other side will send no more
    error,        ///< the connection is broken; `why` says how
};

/// What read_some and write_some return.
struct stream_result {
    std::size_t bytes = 0;                     ///< moved by this call
    stream_status status = stream_status::ok;  ///< what may be tried next
    std::error_code why = {};                  ///< with stream_status::error: the system's reason
    std::size_t arrived = 0;                   ///< with would_block: bytes received that cannot be read yet
};

/// A connected byte stream that never blocks. The lists hold at most 64 buffers, none of them empty; a call may move any
/// number of their bytes, in order.
///
/// What the compiler cannot check:
///  1. Order       bytes arrive as they were sent, all of them, until end or error.
///  2. Signals     writing to a closed stream is an error, not SIGPIPE.
///  3. Descriptor  poll() on descriptor() says when read_some or write_some should be tried again.
///  4. Ending      shutdown_send() lets what was written arrive, then the other side reads `end`. The destructor closes.
///
/// Optional members:
///
/// - `std::uint64_t delivered() const noexcept`: how many bytes the far end has acknowledged. A peer that is silent behind a
///   slow link, to which bytes still move, is then not taken for dead.
/// - `bool buffered() noexcept`, whether read_some would return bytes that poll() does not see, and `stream_result flush()
///   noexcept`, which is ok once everything that write_some took has been sent: for a stream with buffers of its own.
/// - `bool in_memory() const noexcept`, whether bytes bypass the descriptor; `bool may_sleep(bool reads, bool writes)
///   noexcept`, after which the descriptor becomes readable when there is something to read, or room to write (false: there
///   is already); and `void woken(bool readable) noexcept`, called after the sleep: of a stream whose bytes may bypass its
///   descriptor. Also `bool quiet() noexcept`, whether read_some need not be called, because nothing has come.
///
/// - `void discard_input() noexcept`, after which read_some discards what arrives, and returns would_block until the stream
///   ends: of a stream that can tell that bytes were changed on the way (std::errc::bad_message), and would say so for ever.
///
/// Models: descriptor_stream, tcp_stream.
template <class S>
concept Stream = std::movable<S> && requires(S& s, S const& unchanged, std::span<mutable_bytes const> in,
                                             std::span<const_bytes const> out) {
    { s.read_some(in) } noexcept -> std::same_as<stream_result>;
    { s.write_some(out) } noexcept -> std::same_as<stream_result>;
    { unchanged.descriptor() } noexcept -> std::same_as<int>;
    { s.shutdown_send() } noexcept;
};

}  // namespace ddp
