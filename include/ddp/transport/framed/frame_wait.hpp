/// \file
/// frame_wait: how a framed transport waits for its links: it checks memory, polls, and sleeps.
#pragma once

#include <poll.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/core/spin.hpp>
#include <ddp/transport/framed/frame_doorbell.hpp>

namespace ddp {

/// Part of framed. `links` is always the same list.
///
/// Pace  a thread that shares its core with others should be woken rarely: 64 MiB at 10 Gbit/s take 43 to 52 ms of a
///       core if each arrival wakes it, and 30 ms if it reads once a millisecond, for which socket buffers are large
///       enough. Therefore, if pace() is set, and at least bulk_bytes have moved over sockets in about the last such
///       interval, sockets are not polled for that time. The bell and links through memory wake it at once, and so do
///       sockets while fewer bytes move. (SO_RCVLOWAT is no alternative: a record of a failure is shorter than any
///       useful mark.)
template <class Link>
class frame_wait {
public:
    using link_list = std::vector<std::unique_ptr<Link>>;
    static constexpr std::size_t bulk_bytes = std::size_t{64} << 10;

    void make_room(std::size_t links) { polls_.resize(links + 1); }

    /// Ends a sleep, or the next one. From any thread.
    void wake() noexcept { bell_.ring(); }
    /// Whether wake() has been called since the last call.
    [[nodiscard]] bool woken() noexcept { return bell_.answered(); }

    void pace(nanoseconds least) noexcept { pace_ = least; }
    [[nodiscard]] bool paced() const noexcept { return pace_ > nanoseconds{0}; }
    /// Counts bytes that have gone through a socket.
    void moved(std::size_t bytes) noexcept { moved_ += bytes; }

    /// Checks a few times whether bytes have come through memory, which costs less than giving up the core.
    [[nodiscard]] bool glance(link_list const& links, int looks) const noexcept {
        for (int look = 0; look < looks; ++look) {
            for (auto const& l : links)
                if (l->in_memory() && l->buffered()) return true;
            detail::spin_pause();
        }
        return false;
    }
    /// Polls all links, and stores the results in their flags.
    void look(link_list const& links) noexcept { poll(links, 0, {}, true); }
    /// Waits for the links and the bell, at the latest until `until`. Returns whether the links' flags now come from a
    /// poll, which is not so if sockets were not polled.
    bool sleep(link_list const& links, time_point at, time_point until) noexcept {
        using namespace std::chrono;
        bool const sockets = !moves_much(at);
        if (!sockets) until = std::min(until, at + pace_);
        for (auto const& l : links) {
            if (l->buffered()) until = {};
            if constexpr (requires { l->stream.may_sleep(true, true); })
                if (!l->stream.may_sleep(l->in_open, l->out_open && l->blocked)) until = {};
        }
        nanoseconds const wait = std::clamp<nanoseconds>(until - monotonic_clock::now(), nanoseconds{0}, hours{1});
        if (bell_.fall_asleep()) {
            bell_.wake_up(poll(links, 1, wait, sockets));
            return sockets;
        }
        for (auto const& l : links)
            if constexpr (requires { l->stream.woken(false); }) l->stream.woken(false);
        return true;
    }

private:
    [[nodiscard]] bool moves_much(time_point at) noexcept {
        if (!paced()) return false;
        if (nanoseconds const window = at - since_; window >= pace_) {
            much_ = moved_ >= bulk_bytes && window < 4 * pace_;
            since_ = at;
            moved_ = 0;
        }
        return much_;
    }
    /// Returns whether the bell, polled with `extra` = 1, has rung.
    bool poll(link_list const& links, ::nfds_t extra, nanoseconds wait, bool sockets) noexcept {
        for (std::size_t i = 0; i < links.size(); ++i) {
            Link const& l = *links[i];
            bool const memory = l.in_memory();
            bool const full = l.out_open && l.blocked && !memory;
            short const events = static_cast<short>((l.in_open ? POLLIN : 0) | (full ? POLLOUT : 0));
            polls_[i] = {events != 0 && (sockets || memory) ? l.stream.descriptor() : -1, events, 0};
        }
        polls_[links.size()] = {bell_.descriptor(), POLLIN, 0};
        ::timespec const time{wait.count() / 1'000'000'000, wait.count() % 1'000'000'000};
        int const ready = ::ppoll(polls_.data(), links.size() + extra, &time, nullptr);
        bool const closed = (polls_[links.size()].revents & POLLNVAL) != 0;  // by the program: the bell
        if ((ready < 0 && errno != EINTR) || closed) guess(wait);
        for (std::size_t i = 0; i < links.size(); ++i) {
            Link& l = *links[i];
            int const seen = polls_[i].revents;
            if constexpr (requires { l.stream.woken(true); }) l.stream.woken(seen != 0);
            l.readable = (seen & (POLLIN | POLLHUP | POLLERR | POLLNVAL)) != 0 || l.buffered();
            if ((seen & (POLLOUT | POLLHUP | POLLERR | POLLNVAL)) != 0) l.blocked = false;
        }
        return polls_[links.size()].revents != 0;
    }

    /// For when ppoll() fails, as for more descriptors than the process may have by now (`ulimit -n`): waits for a millisecond
    /// at most, and then reports every descriptor as ready, so that all are tried.
    [[gnu::cold]] void guess(nanoseconds wait) noexcept {
        ::timespec const time{0, std::min<long>(wait.count(), 1'000'000)};
        ::nanosleep(&time, nullptr);
        for (::pollfd& p : polls_) p.revents = p.fd < 0 ? short{0} : p.events;
    }

    doorbell bell_;
    std::vector<::pollfd> polls_;
    nanoseconds pace_{0};
    time_point since_;       // when counting began
    std::size_t moved_ = 0;  // since then
    bool much_ = false;      // until the next count
};

}  // namespace ddp
