/// \file
/// frame_endings: how a connection of a framed transport ends, and what this rank then reports about the peer.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string_view>
#include <system_error>
#include <utility>

#include <ddp/comm/transport.hpp>
#include <ddp/core/error.hpp>
#include <ddp/transport/framed/frame_news.hpp>
#include <ddp/transport/framed/frame_stream.hpp>

namespace ddp {

/// Part of framed. The two directions of a connection end independently (out_open, in_open); once it is `gone`, no operation
/// with the peer can make progress.
template <class Link>
class frame_endings {
public:
    /// `news` and `ended` outlive this. Operations that end are appended to `ended`.
    frame_endings(int rank, frame_news<Link>& news, completion_list& ended) : rank_(rank), news_(news), ended_(ended) {}

    /// Whether a stream has ended or was shut since this was asked last.
    [[nodiscard]] bool any_new() noexcept { return std::exchange(any_new_, false); }

    /// When this process last continued after it was stopped for longer than its peers wait, and for how long it was.
    void continues(time_point at, nanoseconds stopped) noexcept {
        continued_ = at;
        stopped_ = stopped;
    }
    /// What this rank publishes for `record` if all connections have ended: it reports itself if they did while it was stopped.
    [[nodiscard]] failure own_record(failure record) const noexcept {
        if (record.is_verdict || record.kind != failure_kind::closed || !left_behind_) return record;
        record.kind = failure_kind::silent;
        record.code = errc::peer_silent;
        record.text = news_.of(record.peer).record.text;
        record.peer = rank_;
        record.waited_ns = static_cast<std::uint64_t>(stopped_.count());
        return record;
    }

    /// Processes what the peer has just sent about itself and others. `was_clean`: no error had been found in its bytes
    /// before.
    void heard_from(Link& l, bool was_clean) {
        if (!news_.hear(l)) distrust(l);
        report const& about = news_.of(l.peer);
        if (l.in.said_goodbye() && about.is == report::state::silent) {
            news_.change(l.peer).is = report::state::left;
            let_go(l);
        }
        if (was_clean && !l.in.error().empty()) close(l, errc::frame, l.in.error());
    }
    /// Nothing more arrives from the peer: the stream has ended or reported an error. `owed`: whether a goodbye was
    /// still expected.
    void reading_ended(Link& l, time_point at, bool owed) noexcept {
        l.in_open = false;
        l.ended = at;
        any_new_ = true;
        if (l.gone || !owed || news_.of(l.peer).is != report::state::silent) let_go(l);
    }
    /// The stream has ended, or reported `why`. After changed bytes what follows is thrown away, but read: otherwise a reset
    /// could overtake this rank's record.
    void reading_failed(Link& l, std::error_code why, time_point at, bool owed) noexcept {
        if (why) l.why = why;
        if (why != std::errc::bad_message || !owed || std::exchange(l.altered, true)) return reading_ended(l, at, owed);
        close_without_goodbye(l);
        l.in.discard_input();
        if constexpr (requires { l.stream.discard_input(); }) l.stream.discard_input();
    }
    /// The stream takes no more bytes. What the peer sent before that may still be read.
    void writing_failed(Link& l, std::error_code why) noexcept {
        l.why = why;
        l.out_open = false;
        l.out.drop();
        if (why == std::errc::bad_message) l.stream.shutdown_send();  // the peer waits for this end
        any_new_ = true;
    }
    /// Half-closes the stream. What was not written is dropped.
    void shut(Link& l) noexcept {
        l.out.drop();
        if (std::exchange(l.out_open, false)) l.stream.shutdown_send();
        any_new_ = true;
    }
    /// The stream ended without goodbye, and no record of the peer's has come since.
    void close_without_goodbye(Link& l) noexcept {
        left_behind_ |= stopped_.count() != 0 && l.ended >= continued_ - stopped_ && l.ended < continued_ + soon;
        std::array<char, 128> why{};
        std::snprintf(why.data(), why.size(), "%s%s", l.why ? l.why.message().c_str() : "end of file",
                      l.in.in_frame() ? ", inside a message" : "");
        close(l, l.why == std::errc::bad_message ? errc::frame : errc::peer_closed, why.data());
    }
    /// The peer is lost. Invalid bytes close one direction only, so that this rank's record may still reach the peer.
    void close(Link& l, errc code, std::string_view why) noexcept {
        l.gone = true;
        if (news_.of(l.peer).is == report::state::silent) {
            failure record{.kind = failure_kind::closed, .code = code, .rank = rank_, .peer = l.peer};
            std::snprintf(record.text.chars.data(), record.text.chars.size(),
                          "the connection to rank %d%s%s%s %s: %.*s (%u frames were read)", l.peer,
                          l.name.empty() ? "" : " (", l.name.c_str(), l.name.empty() ? "" : ")",
                          code == errc::frame ? "carries bytes that ddp did not write" : "ended without goodbye",
                          static_cast<int>(why.size()), why.data(), l.in.frames());
            news_.change(l.peer) = {report::state::closed, record, false};
        }
        news_.confirm_all();  // one rank fewer can be asked
        end_operations(l, op_status::closed);
    }
    void end_operations(Link& l, op_status status) noexcept {
        l.out.end_all(status, ended_);
        l.in.end_all(status, ended_);
    }

private:
    static constexpr std::chrono::seconds soon{1};  // to read what had arrived before the end of a stream
    void distrust(Link& l) noexcept {
        l.in.discard_input();
        close(l, errc::frame, "a record of a rank that does not exist, or of another than its sender");
    }
    /// The peer has left cleanly, or its record is known, so it need not be told that this rank ends.
    void let_go(Link& l) noexcept {
        l.gone = true;
        news_.confirm_all();
        end_operations(l, op_status::closed);
        if (!l.out.abort_pending() && l.flush().status != stream_status::would_block) shut(l);
    }

    int rank_;
    frame_news<Link>& news_;
    completion_list& ended_;
    bool any_new_ = false;
    bool left_behind_ = false;  // a connection had ended when this process continued
    time_point continued_;
    nanoseconds stopped_{0};
};

}  // namespace ddp
