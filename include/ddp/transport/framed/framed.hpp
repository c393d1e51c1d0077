/// \file
/// framed: a transport over one connected byte stream for each peer.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/comm/host.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/text.hpp>
#include <ddp/transport/framed/frame_checksum.hpp>
#include <ddp/transport/framed/frame_endings.hpp>
#include <ddp/transport/framed/frame_inbox.hpp>
#include <ddp/transport/framed/frame_link.hpp>
#include <ddp/transport/framed/frame_news.hpp>
#include <ddp/transport/framed/frame_outbox.hpp>
#include <ddp/transport/framed/frame_stream.hpp>
#include <ddp/transport/framed/frame_wait.hpp>
#include <ddp/transport/framed/framed_options.hpp>
#include <ddp/transport/shm/memfd.hpp>

namespace ddp {

/// A Transport over streams that are connected already.
///
/// Early     a message that arrives before its receive is stored in bounded memory at the receiver. If that is full,
///           the sender announces it and keeps it until the receive is posted. Neither delays another identity.
/// Liveness  a peer that left cleanly is report::left; one whose stream ends otherwise is report::closed after
///           timing.end_of_file; overdue_peer() names one that is connected but silent for timing.dead.
/// Ending    leave() or the destructor: sends are flushed, a goodbye is sent, and what peers still send is read, for at most
///           timing.shutdown, and after an abort at most a second. Operations that remain end as aborted.
/// Cost      64 bytes on the stream for each 256 KiB of a message, at least once; many messages share a system call; nothing is
///           allocated. Matching walks the receives posted for the peer: O(1) if messages come in the order of posting.
/// Throws    usage_error if a peer is not another rank.
template <Stream S, Checksum Sum = no_checksum>
class framed {
public:
    /// The name of the stream if it has one, otherwise "stream".
    static constexpr std::string_view name = [] {
        if constexpr (requires { S::name; })
            return std::string_view(S::name);
        else
            return std::string_view("stream");
    }();

    /// `peers`: one connected stream for every other rank, in any order. Throws usage_error otherwise, and for invalid
    /// options.
    framed(int rank, int size, std::vector<framed_peer<S>> peers, framed_options options = {})
        : rank_(rank),
          options_(std::move(options)),
          by_rank_(static_cast<std::size_t>(std::max(size, 0)), nullptr),
          news_(rank, by_rank_),
          endings_(rank, news_, ready_) {
        DDP_EXPECTS(rank >= 0 && rank < size, "framed: rank must be in [0, size)");
        DDP_EXPECTS(peers.size() + 1 == by_rank_.size(), "framed: give one stream for every other rank");
        DDP_EXPECTS(options_.paths.empty() || options_.paths.size() == by_rank_.size(),
                    detail::concat({"framed_options::paths: give ", size, " numbers, one for each rank, or none"}));
        options_.times.validate();
        if (options_.host == 0) options_.host = this_host();
        std::size_t const share = (std::size_t{16} << 20) / by_rank_.size();
        std::size_t const bytes =
            options_.early_bytes != 0 ? options_.early_bytes : std::max(std::size_t{1} << 20, share);
        std::size_t const blocks = std::clamp<std::size_t>(bytes / sizeof(early_store::block), 1, std::size_t{1} << 30);
        links_.reserve(peers.size());
        for (framed_peer<S>& peer : peers) {
            DDP_EXPECTS(peer.rank >= 0 && peer.rank < size && peer.rank != rank,
                        detail::concat({"framed: each peer must be another rank of the job, not ", peer.rank}));
            DDP_EXPECTS(by_rank_[index(peer.rank)] == nullptr, "framed: give one stream for each peer");
            DDP_EXPECTS(!(std::is_same_v<Sum, no_checksum> && peer.checked),
                        "framed: a checked peer needs a checksum policy, such as xxh3_checksum");
            links_.push_back(std::make_unique<link>(rank, peer, options_.job, static_cast<std::uint32_t>(blocks)));
            by_rank_[index(peer.rank)] = links_.back().get();
        }
        wait_.make_room(links_.size());
        if (!links_.empty()) memory_ = std::make_unique_for_overwrite<std::byte[]>(staging_bytes + inbox::max_read);
        sockets_ = static_cast<std::size_t>(
            std::count_if(links_.begin(), links_.end(), [](auto const& l) { return !l->in_memory(); }));
        restart_clocks(now());
    }
    framed(framed const&) = delete;
    framed& operator=(framed const&) = delete;
    ~framed() { leave(); }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return static_cast<int>(by_rank_.size()); }
    [[nodiscard]] time_point now() const noexcept { return monotonic_clock::now(); }
    [[nodiscard]] std::span<report const> reports() const noexcept { return news_.reports(); }
    /// The least duration of a wait from now on, while many bytes go over sockets: reading them in batches takes less
    /// processor time than waking at each arrival. wake() and bytes that come through memory end a wait at once. 0: a wait
    /// ends as soon as anything moves.
    void pace(nanoseconds least) noexcept { wait_.pace(least); }
    void wake() noexcept { wait_.wake(); }
    /// framed_options::looks; 0 where this host has more ranks than cores.
    [[nodiscard]] int looks() const noexcept { return options_.looks; }
    [[nodiscard]] bool in_memory(int peer) const { return link_to(peer).in_memory(); }  ///< of bytes for this peer
    /// Whether payloads to and from this peer carry a checksum: if they leave the host and nothing else protects them.
    [[nodiscard]] bool checked(int peer) const { return link_to(peer).checked; }
    /// framed_options::name or framed_peer::name.
    [[nodiscard]] std::string_view process_of(int rank) const {
        return rank == rank_ ? options_.name : link_to(rank).name;
    }
    /// See PathTransport.
    [[nodiscard]] std::optional<bool> through_memory(int a, int b) const {
        return a == b || (!options_.paths.empty() && options_.paths[index(a)] == options_.paths[index(b)]);
    }
    /// The number of this rank's host (see host_of).
    [[nodiscard]] std::uint64_t host() const noexcept { return options_.host; }
    /// See SharingTransport.
    [[nodiscard]] static std::unique_ptr<memory_sharing> share_memory() { return std::make_unique<memfd_sharing>(); }

    void post_send(int peer, tag what, const_bytes out, completion& done) {
        link& l = link_to(peer);
        done.post(peer, what, out.data(), out.size(), true);
        if (aborted_ || left_) return end(done, op_status::aborted);
        if (l.gone) return end(done, op_status::closed);
        l.out.post(done);
    }
    void post_receive(int peer, tag what, mutable_bytes in, completion& done) {
        link& l = link_to(peer);
        done.post(peer, what, in.data(), in.size(), false);
        if (aborted_ || left_) return end(done, op_status::aborted);
        if (l.gone && !l.in.has_complete(what.id)) return end(done, op_status::closed);
        l.in.post(done, ready_);
    }

    bool progress(time_point until) {
        time_point at = now();
        bool fresh = false;  // the links' flags are from a poll just made
        bool slept = false;
        for (time_point spin_until = at + spin();;) {
            nanoseconds const since = at - last_turn_;
            bool const moved = pump(at, fresh);
            if (since > std::max(options_.times.suspect, 3 * options_.times.heartbeat) / 2) listening_since_ = at;
            if (since > options_.times.dead / 2) restart_clocks(at);  // this process was stopped: no peer is late
            if (since > options_.times.dead) endings_.continues(at, since);
            last_turn_ = at;
            bool const late = (std::exchange(slept, false) || at - timers_ran_ >= timer_grain) && run_timers(at);
            if (aborted_) news_.share_losses();
            bool const ran = run_ready();
            bool const changed = news_.have_changed();
            bool const ended = endings_.any_new();
            if (wait_.woken() || ran || changed || late || ended || at >= until) return changed;
            fresh = false;
            if (moved) {
                at = now();
                spin_until = at + spin();
                continue;
            }
            slept = at >= spin_until;
            if (slept) {
                fresh = wait_.sleep(links_, at, std::min({until, next_timer(), at + options_.times.dead / 4}));
            } else if (options_.yields && !glance()) {
                ::sched_yield();
            }
            at = now();
        }
    }

    void abort(failure const& record) noexcept {
        bool const alone = std::none_of(links_.begin(), links_.end(), [](auto const& l) { return l->in_open; });
        failure const own = alone ? endings_.own_record(record) : record;
        for (auto const& l : links_) {
            if (!aborted_) l->in.discard_messages();
            l->out.abort(own);
            endings_.end_operations(*l, op_status::aborted);
        }
        aborted_ = true;
        news_.change(rank_) = {report::state::spoke, own};
        try {
            news_.share_losses();          // with the record: a rank that has both may leave
        } catch (std::bad_alloc const&) {  // the next turn tries again
        }
        for (auto const& l : links_) write(*l, now());
        run_ready();
    }

    /// When progress() has to run next even if no call waits.
    [[nodiscard]] time_point next_timer() const noexcept {
        time_point next = never;
        for (auto const& l : links_) {
            if (l->out_open) next = std::min(next, l->sent + options_.times.heartbeat);
            if (l->gone) continue;
            if (!l->in_open) next = std::min(next, l->ended + options_.times.end_of_file);
            if (watched(*l) && !l->overdue) next = std::min(next, l->heard + options_.times.dead);
        }
        return next;
    }

    /// Sets what this rank's heartbeats report as entered.
    void entered(mark const& last) noexcept {
        bool const news = last.occupied != std::exchange(mark_, last).occupied;
        for (auto const& l : links_)  // a link that is busy carries no heartbeats otherwise
            if (news && l->out_open) l->out.beat(last);
    }
    /// What this peer's last heartbeat reported.
    [[nodiscard]] mark const& mark_of(int peer) const { return link_to(peer).in.last_mark(); }
    /// When anything was last read from this peer, or this process last continued after it had been stopped.
    [[nodiscard]] time_point last_heard(int peer) const { return link_to(peer).heard; }
    /// The lowest rank that is connected but has been silent for timing.dead, if there is one.
    [[nodiscard]] std::optional<int> overdue_peer() const noexcept {
        for (std::size_t r = 0; r < by_rank_.size(); ++r)
            if (by_rank_[r] != nullptr && by_rank_[r]->overdue && watched(*by_rank_[r])) return static_cast<int>(r);
        return std::nullopt;
    }

    /// See Ending. Operations that are posted later end as aborted. The destructor calls it.
    void leave() noexcept try {
        if (std::exchange(leaving_, true)) return;
        time_point const until =
            now() + (aborted_ ? std::min<nanoseconds>(options_.times.shutdown, std::chrono::seconds{1})
                              : nanoseconds{options_.times.shutdown});
        auto const drive = [&](auto wanted) {
            while (!std::all_of(links_.begin(), links_.end(), wanted) && now() < until) progress(until);
        };
        drive([](auto const& l) { return l->gone || !l->out_open || !l->out.has_messages(); });
        left_ = true;
        for (auto const& l : links_) {
            l->in.discard_messages();
            if (l->out.has_messages())
                endings_.shut(*l);  // no goodbye: some messages were not sent
            else if (!aborted_)
                l->out.say_goodbye();
            endings_.end_operations(*l, op_status::aborted);
            l->shut_when_written = true;
        }
        run_ready();
        drive([](auto const& l) { return !l->in_open && !l->out_open; });
    } catch (...) {  // out of memory: the streams are closed as they are
    }

private:
    using outbox = frame_outbox<Sum>;
    using inbox = frame_inbox<Sum>;
    using link = frame_link<S, Sum>;
    static constexpr std::size_t staging_bytes = std::size_t{64} << 10;
    static constexpr int turns = 4;  // reads and writes of one link before the next link
    static constexpr nanoseconds timer_grain = std::chrono::milliseconds{1};  // while this rank does not sleep

    static std::size_t total(auto buffers) noexcept {
        std::size_t sum = 0;
        for (auto const& b : buffers) sum += b.size();
        return sum;
    }
    static std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }
    link& link_to(int peer) const {
        DDP_EXPECTS(peer >= 0 && peer < size() && peer != rank_, "framed: the peer must be another rank of the group");
        return *by_rank_[index(peer)];
    }
    void end(completion& node, op_status status) noexcept {
        node.status = status;
        ready_.push_back(node);
    }
    /// Runs the completions that have ended so far; operations that they post wait for the next turn.
    bool run_ready() noexcept {
        completion_list batch = std::exchange(ready_, {});
        bool const any = !batch.empty();
        while (completion* const node = batch.pop_front()) node->run(*node);
        return any;
    }
    [[nodiscard]] bool watched(link const& l) const noexcept {
        return l.in_open && !l.gone && news_.of(l.peer).is == report::state::silent;
    }
    void restart_clocks(time_point at) noexcept {
        for (auto const& l : links_) {
            l->heard_at(at);
            if (l->sent == time_point{}) l->sent = at;
        }
        last_turn_ = at;
    }

    /// Writes and reads as much as possible. A few sockets are tried in turn; many are polled first.
    bool pump(time_point at, bool fresh) {
        bool const try_sockets = !fresh && sockets_ <= 3;
        if (!try_sockets && !fresh) wait_.look(links_);
        bool moved = false;
        for (auto const& l : links_) {
            bool const tried = try_sockets || l->in_memory();
            if ((tried || !l->blocked) && !l->nothing_to_write()) moved |= write(*l, at);
            if (l->in_open && (tried || l->readable) && !l->nothing_to_read()) moved |= read(*l, at);
        }
        return moved;
    }
    [[nodiscard]] bool glance() const noexcept { return sockets_ != links_.size() && wait_.glance(links_, looks()); }
    [[nodiscard]] nanoseconds spin() const noexcept { return wait_.paced() ? nanoseconds{0} : options_.spin; }
    bool write(link& l, time_point at) noexcept {
        std::array<const_bytes, outbox::max_buffers> list;
        bool moved = false;
        for (int turn = 0; l.out_open && turn < turns; ++turn) {
            l.out.fill(l.in.consumed());
            std::size_t const count = l.out.gather(list);
            stream_result const r = count != 0 ? l.stream.write_some(std::span(list).first(count)) : l.flush();
            if (count == 0 && r.status == stream_status::ok) {
                if (l.shut_when_written) endings_.shut(l);
                break;
            }
            if (r.status == stream_status::ok) {
                l.out.wrote(r.bytes, ready_);
                l.sent = at;
                moved = true;
                if (!l.in_memory()) wait_.moved(r.bytes);
            }
            l.blocked = r.status == stream_status::would_block ||
                        (r.status == stream_status::ok && r.bytes < total(std::span(list).first(count)));
            if (l.blocked) break;
            if (r.status == stream_status::ok) continue;
            endings_.writing_failed(l, r.why);
        }
        return moved;
    }
    bool read(link& l, time_point at) {
        std::array<mutable_bytes, inbox::max_segments> list;
        bool moved = false;
        for (int turn = 0; l.in_open && turn < turns; ++turn) {
            std::size_t const count = l.in.plan(list, {memory_.get(), staging_bytes});
            stream_result const r = l.stream.read_some(std::span(list).first(count));
            if (r.status == stream_status::would_block) {
                l.heard_part(at, r.arrived, options_.times.heartbeat);
                break;
            }
            if (r.status != stream_status::ok) {
                endings_.reading_failed(l, r.why, at, !leaving_);
                return true;
            }
            moved = true;
            if (!l.in_memory()) wait_.moved(r.bytes);
            l.heard_at(at);
            l.largest_read = std::max(l.largest_read, r.bytes);
            l.delivered.reset();
            bool const clean = l.in.error().empty();
            try {
                l.in.took(r.bytes, {memory_.get() + staging_bytes, inbox::max_read}, ready_);
            } catch (std::bad_alloc const&) {
                endings_.close(l, errc::frame, "no memory for its announcements");
                l.in.discard_input();
            }
            endings_.heard_from(l, clean);
            if (r.bytes < total(std::span(list).first(count))) break;
        }
        l.readable = false;
        return moved;
    }
    /// True if a peer has just become overdue.
    bool run_timers(time_point at) {
        bool late = false;
        timers_ran_ = at;
        for (auto const& l : links_) {
            // Its socket says that the far end is gone, and is looked at now and then only.
            if constexpr (requires { l->stream.woken(true); }) l->stream.woken(true);
            if (l->out_open && at - l->sent >= options_.times.heartbeat) {
                l->out.beat(mark_);
                l->sent = at;
                write(*l, at);
            }
            if (!l->in_open && !l->gone && at - l->ended >= options_.times.end_of_file) {
                endings_.close_without_goodbye(*l);
                if (!aborted_) endings_.shut(*l);
            }
            if (watched(*l) && l->becomes_overdue(at, options_.times)) {
                late = true;
                l->say_what_is_stuck(news_.of(l->peer).record.text);
            }
        }
        if (!aborted_ && !leaving_ && at - listening_since_ >= options_.times.suspect)
            name_suspects(links_, [this](link const& l) { return watched(l); }, rank_, at, options_.times);
        return late;
    }

    int rank_;
    framed_options options_;
    std::vector<std::unique_ptr<link>> links_;
    std::vector<link*> by_rank_;  // null: this one
    frame_news<link> news_;
    std::size_t sockets_ = 0;              // links whose bytes do not go through memory
    std::unique_ptr<std::byte[]> memory_;  // staging, then spill: shared by the links, empty between two reads
    completion_list ready_;                // ended, not run
    frame_endings<link> endings_;
    frame_wait<link> wait_;
    mark mark_;
    time_point last_turn_, timers_ran_, listening_since_;
    bool aborted_ = false, leaving_ = false, left_ = false;
};

}  // namespace ddp
