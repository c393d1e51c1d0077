/// \file
/// frame_link: one connection of a framed transport, with both of its halves and what is known about the path.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/text.hpp>
#include <ddp/transport/framed/frame_checksum.hpp>
#include <ddp/transport/framed/frame_header.hpp>
#include <ddp/transport/framed/frame_inbox.hpp>
#include <ddp/transport/framed/frame_outbox.hpp>
#include <ddp/transport/framed/frame_stream.hpp>
#include <ddp/transport/framed/framed_options.hpp>
#include <ddp/transport/silences.hpp>

namespace ddp {

/// Part of framed, which drives it; users never see it.
template <Stream S, Checksum Sum>
struct frame_link {
    frame_link(int rank, framed_peer<S>& p, std::uint64_t job, std::uint32_t blocks)
        : peer(p.rank),
          checked(p.checked),
          stream(std::move(p.stream)),
          name(std::move(p.name)),
          out(frame_key(job, rank, peer), p.checked, blocks),
          in(frame_key(job, peer, rank), p.checked, blocks, out) {}

    int peer;
    bool checked;  // payloads carry a checksum
    S stream;
    std::string name;
    frame_outbox<Sum> out;
    frame_inbox<Sum> in;
    time_point heard, sent, ended, part_since, acknowledged;
    std::size_t part_bytes = 0;              // see heard_part
    std::optional<std::uint64_t> delivered;  // see sign_of_life
    bool out_open = true, in_open = true;
    bool blocked = false;            // the stream takes no more bytes
    bool readable = true;            // as far as is known
    bool shut_when_written = false;  // half-close once everything is out
    bool overdue = false;
    detail::silences silent;
    bool altered = false;  // the stream has said that bytes were changed on the way
    std::size_t largest_read = 0;
    bool gone = false;  // no operation can move any more
    std::error_code why;

    /// Whether its bytes go through memory.
    [[nodiscard]] bool in_memory() const noexcept {
        if constexpr (requires { stream.in_memory(); }) return stream.in_memory();
        return false;
    }
    /// Whether a read would return bytes that poll() does not see.
    [[nodiscard]] bool buffered() noexcept {
        if constexpr (requires { stream.buffered(); }) return in_open && stream.buffered();
        return false;
    }
    /// Whether a write would do nothing, which matters where it costs no system call: most peers of a large job are silent at any
    /// moment.
    [[nodiscard]] bool nothing_to_write() const noexcept {
        return in_memory() && !shut_when_written && out.idle(in.consumed());
    }
    /// Whether the stream says that a read would return nothing.
    [[nodiscard]] bool nothing_to_read() noexcept {
        if constexpr (requires { stream.quiet(); }) return stream.quiet();
        return false;
    }
    /// Ok once the stream has passed on everything that was written.
    stream_result flush() noexcept {
        if constexpr (requires { stream.flush(); }) return stream.flush();
        return {};
    }

    /// Sets `text` to what is known about the path to a peer that has become overdue, for the verdict; leaves it
    /// unchanged if nothing is known.
    void say_what_is_stuck(auto& text) noexcept {
        if constexpr (requires { stream.leaves_host(); }) {
            if (!stream.leaves_host()) return;
            text = {};
            if (largest_read < full_packet && in.largest_awaited() >= full_packet)
                std::snprintf(
                    text.chars.data(), text.chars.size(),
                    "At most %zu bytes at once have come from rank %d: large packets may be lost on the way (MTU).",
                    largest_read, peer);
            else if (stream.unacknowledged())
                std::snprintf(text.chars.data(), text.chars.size(), "What is sent to rank %d is not acknowledged.",
                              peer);
        }
    }
    /// Something has come from the peer.
    void heard_at(time_point now) noexcept {
        heard = now;
        overdue = false;
        silent.end();
    }
    /// Bytes of a record that cannot be read yet. They count if more come in the time of a heartbeat than heartbeats would be:
    /// otherwise these alone could fill a record whose length was changed on the way, and keep a link alive that is broken.
    void heard_part(time_point now, std::size_t bytes, nanoseconds heartbeat) noexcept {
        if (bytes == 0) return;
        if (now - part_since >= heartbeat) {
            part_since = now;
            part_bytes = 0;
        }
        part_bytes += bytes;
        if (part_bytes > most_of_heartbeats) heard_at(now);
    }
    /// If this rank's bytes fill the path to a peer, those of the peer may be stuck behind others: as long as the far end
    /// acknowledges more, the link is slow, not dead. (The kernel of a stopped process acknowledges too, until its buffer is
    /// full: so this counts only while the stream takes no more bytes.)
    [[nodiscard]] bool sign_of_life() noexcept {
        if constexpr (requires { stream.delivered(); }) {
            if (!blocked || !out_open) return false;
            std::uint64_t const now = stream.delivered();
            return now > std::exchange(delivered, now).value_or(now);
        } else {
            return false;
        }
    }
    /// Whether the peer has become overdue: silent for timing.dead.
    [[nodiscard]] bool becomes_overdue(time_point at, timing const& times) noexcept {
        nanoseconds const since = at - heard;
        if (overdue || since < std::min(times.suspect, times.dead) / 2) return false;
        bool const lives = sign_of_life();
        if (lives) acknowledged = at;
        if (lives && since >= times.dead / 2) heard = at - times.dead / 2;
        return overdue = !lives && since >= times.dead;
    }
    /// Of a peer that has been silent for timing.suspect: see detail::silences. Call becomes_overdue() before.
    [[nodiscard]] std::string becomes_suspect(int rank, time_point at, timing const& times) {
        return overdue ? std::string() : silent.told(rank, peer, name, at, heard, acknowledged, times);
    }

private:
    static constexpr std::size_t most_of_heartbeats =
        3 * (sizeof(frame_header) + mark::text_bytes + 26);  // 26: what a channel adds
    static constexpr std::size_t full_packet = 1280;  // what every IPv6 link carries, and less than Ethernet's MSS
};

/// Prints a line about each peer that becomes suspect, if this is the lowest of the other ranks; eight at once at most.
void name_suspects(auto const& links, auto const& watched, int rank, time_point at, timing const& times) {
    std::string lines;
    int most = 8;
    for (auto const& l : links)
        if (rank == detail::teller_of(l->peer) && watched(*l))
            if (std::string const line = l->becomes_suspect(rank, at, times); !line.empty() && most-- > 0)
                lines += line;
    detail::print_if_ready(lines);
}

}  // namespace ddp
