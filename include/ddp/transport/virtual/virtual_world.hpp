/// \file
/// virtual_world: the clock, the network and the faults of a simulated cluster, as an event queue.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/random.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/transport/virtual/network_model.hpp>
#include <ddp/transport/virtual/virtual_events.hpp>
#include <ddp/transport/virtual/virtual_messages.hpp>

namespace ddp {

class virtual_transport;

/// Ranks, clock, network and faults. Make it once, connect(rank) each rank; sim/cluster.hpp drives it with schedulers.
///
/// Deterministic: the same calls with the same seed give the same events, which trace() confirms.
///
/// Cost    two events for each message, O(log n) each for n pending events; matching is a hash look-up. Memory is pooled.
class virtual_world : public std::enable_shared_from_this<virtual_world> {
public:
    /// A world of `ranks` ranks. Throws usage_error unless there is a rank and the bandwidth is positive.
    [[nodiscard]] static std::shared_ptr<virtual_world> create(int ranks, network_model const& network = {}) {
        DDP_EXPECTS(ranks >= 1, "a virtual world needs at least one rank");
        DDP_EXPECTS(network.bytes_per_second > 0, "network_model::bytes_per_second must be positive");
        return std::shared_ptr<virtual_world>(new virtual_world(ranks, network));
    }
    /// The transport of rank `rank`. Throws usage_error unless `rank` is between 0 and size() - 1.
    [[nodiscard]] std::unique_ptr<virtual_transport> connect(int rank);

    [[nodiscard]] int size() const noexcept { return static_cast<int>(stations_.size()); }
    [[nodiscard]] network_model const& network() const noexcept { return network_; }
    /// The virtual time.
    [[nodiscard]] time_point now() const noexcept { return now_; }
    /// Virtual time since start(), from which the times of faults are counted as well.
    [[nodiscard]] nanoseconds elapsed() const noexcept { return now_ - start(); }
    /// The virtual time at which a world begins.
    [[nodiscard]] static constexpr time_point start() noexcept { return time_point(std::chrono::hours(24)); }
    /// How many events have happened.
    [[nodiscard]] std::uint64_t events() const noexcept { return events_.taken(); }
    /// A digest of every event so far: time, kind and place.
    [[nodiscard]] std::uint64_t trace() const noexcept { return events_.trace(); }

    // Faults. Times count from start().

    /// The rank ends like a killed process: its program no longer runs, and what its card has not sent yet is lost.
    void kill(int rank, nanoseconds at) { schedule(start() + at, kind::kill, rank, 0); }
    void kill(int rank) { die(at(rank), rank); }
    /// The same when it posts its k-th send, which is not sent. k counts from 1.
    void kill_at_message(int rank, std::uint64_t k) { at(rank).fatal = k; }
    /// In [from, to) the rank does not run and nothing arrives there; afterwards everything arrives, in order.
    void freeze(int rank, nanoseconds from, nanoseconds to) {
        schedule(start() + from, kind::freeze, rank, 0);
        schedule(start() + to, kind::thaw, rank, 0);
    }
    /// From this time on, everything that `sender` sends to `receiver` is lost; a record of a failure arrives through a
    /// third rank.
    void blackhole(int sender, int receiver, nanoseconds from) { holes_.push_back({sender, receiver, start() + from}); }
    /// From this time on, messages from `sender` to `receiver` go one after the other through a link of this bandwidth, and
    /// take `delay` longer besides; records of failures do not. Throws usage_error unless the bandwidth is positive.
    void slow_down(int sender, int receiver, nanoseconds from, nanoseconds delay, double bytes_per_second) {
        DDP_EXPECTS(bytes_per_second > 0, "virtual_world::slow_down: bytes_per_second must be positive");
        slow_links_.push_back({sender, receiver, start() + from, delay, bytes_per_second, start()});
    }

    [[nodiscard]] bool dead(int rank) const noexcept { return at(rank).dead; }
    [[nodiscard]] bool frozen(int rank) const noexcept { return at(rank).frozen; }

    // For the code that drives the ranks.

    /// Moves the clock to the next time at which something happens, and lets it happen; or to `until`, if that is sooner.
    /// Returns whether anything happened. Throws ddp::error (DDP-E204) if there are no more events and no `until`, because no
    /// rank would ever wake.
    bool advance(time_point until = never);
    /// Whether progress() moves the clock while its rank has nothing to do. False: it returns at once, because the caller runs
    /// the other ranks first.
    void progress_advances(bool yes) noexcept { advances_ = yes; }
    /// Sets a timer: at `when` the rank is in moved(), and `cookie` in timers().
    void wake_at(int rank, time_point when, std::uint32_t cookie = 0) { schedule(when, kind::timer, rank, cookie); }
    /// A timer of a rank that has expired.
    struct timer {
        int rank;              ///< the rank of the timer
        std::uint32_t cookie;  ///< what was passed to wake_at()
    };
    /// Timers that have expired; the caller empties the list.
    [[nodiscard]] std::vector<timer>& timers() noexcept { return timers_; }
    /// Ranks for which something has happened, each once, in that order; the caller empties the list by settled().
    [[nodiscard]] std::vector<int> const& moved() const noexcept { return moved_; }
    void settled() noexcept {
        for (int const rank : moved_) at(rank).listed = false;
        moved_.clear();
    }

private:
    friend class virtual_transport;

    using kind = detail::virtual_net::event_kind;
    using event = detail::virtual_net::event;
    using message = detail::virtual_net::message;
    using channel = detail::virtual_net::channel;
    using channel_map = detail::virtual_net::channel_map;
    static constexpr std::uint32_t none = detail::virtual_net::none;

    struct station {
        channel_map channels;
        completion_list sends;         // posted here, not ended
        completion_list done;          // ended, to be run by progress()
        std::vector<report> reports;   // empty as long as no rank has failed or left, which saves memory
        std::vector<event> missed;     // while frozen
        std::vector<time_point> told;  // by peer: when the last of this rank's records and ends arrives there, in order
        time_point out_free = {}, in_free = {}, died = never;
        std::uint64_t posted = 0, fatal = std::numeric_limits<std::uint64_t>::max();
        bool dead = false, frozen = false, gone = false, aborted = false;
        bool woken = false, news = false, listed = false;
    };
    struct hole {
        int from, to;
        time_point since;
    };

    struct slow_link {
        int from, to;
        time_point since;
        nanoseconds delay;
        double bytes_per_second;
        time_point free;  // from then on
    };

    virtual_world(int ranks, network_model const& network)
        : network_(network),
          delays_(network.seed, random_use::user),
          stations_(static_cast<std::size_t>(ranks)),
          silence_(static_cast<std::size_t>(ranks)) {}

    station& at(int rank) noexcept { return stations_[static_cast<std::size_t>(rank)]; }
    [[nodiscard]] station const& at(int rank) const noexcept { return stations_[static_cast<std::size_t>(rank)]; }

    void schedule(time_point when, kind what, int rank, std::uint32_t index) { events_.put(when, what, rank, index); }
    [[nodiscard]] nanoseconds wire(std::size_t bytes) const noexcept { return wire(bytes, network_.bytes_per_second); }
    [[nodiscard]] static nanoseconds wire(std::size_t bytes, double bytes_per_second) noexcept {
        return nanoseconds(static_cast<std::int64_t>(static_cast<double>(bytes) * 1e9 / bytes_per_second));
    }
    /// When what leaves its sender's card then has passed the slow links between these two.
    [[nodiscard]] time_point passed(int from, int to, std::size_t bytes, time_point leaves) noexcept;
    [[nodiscard]] nanoseconds extra() {
        if (network_.extra_delay <= nanoseconds{0}) return nanoseconds{0};
        return nanoseconds(static_cast<std::int64_t>(
            delays_.at(drawn_++).below(static_cast<std::uint64_t>(network_.extra_delay.count()))));
    }
    [[nodiscard]] bool swallowed(int from, int to) const noexcept {
        for (hole const& h : holes_)
            if (h.from == from && h.to == to && h.since <= now_) return true;
        return false;
    }
    void touch(int rank) {
        station& s = at(rank);
        if (s.listed) return;
        s.listed = true;
        moved_.push_back(rank);
    }

    channel_map::iterator channel_of(station& s, int peer, identity const& id) {
        return channel_nodes_.find_or_make(s.channels, peer, id);
    }
    void release(station& s, channel_map::iterator c) { channel_nodes_.release(s.channels, c); }

    void end(int rank, completion& node, op_status how);
    /// The send is over; its node no longer belongs to message m.
    void end_send(message& m, op_status how);
    void hand_over(message& m, completion& receive);

    // Called by transports.

    void send(int from, int to, tag const& what, completion& node);
    void receive(int rank, int peer, tag const& what, completion& node);
    bool progress(int rank, time_point until);
    void abort(int rank, failure const& record);
    void leave(int rank);
    void withdraw(int rank);

    // What happens at the time of an event.

    void tell_peers(int rank, kind what, std::uint32_t index, nanoseconds after);
    /// As over streams: if a record is lost in a hole, a rank that reaches both ends forwards it.
    void pass_on(int rank, std::uint32_t index);
    void die(station& s, int rank);
    std::vector<report>& table(station& s) {
        if (s.reports.empty()) s.reports = silence_;
        return s.reports;
    }
    [[nodiscard]] static bool departed(station const& s, int peer) noexcept {
        if (s.reports.empty()) return false;
        report::state const is = s.reports[static_cast<std::size_t>(peer)].is;
        return is == report::state::left || is == report::state::closed;
    }

    void process(event const& e);
    void head(station& s, event const& e);
    /// The message is lost. Its sender may wait forever, as it would over a network.
    void lost(station& s, std::uint32_t index);
    void delivered(station& s, event const& e);
    void heard(station& s, event const& e);
    /// A peer has left or died: what it sent before arrives first, then every operation that involves it ends.
    void gone(station& s, event const& e);

    network_model network_;
    random_stream delays_;
    std::uint64_t drawn_ = 0;
    time_point now_ = start();
    bool advances_ = true;
    detail::virtual_net::event_queue events_;
    std::vector<station> stations_;
    std::vector<report> const silence_;
    std::vector<hole> holes_;
    std::vector<slow_link> slow_links_;
    detail::virtual_net::message_pool messages_;
    detail::virtual_net::channel_pool channel_nodes_;
    struct published {
        int rank;
        failure record;
        bool passed_on;
    };
    std::deque<published> records_;
    std::vector<int> moved_;
    std::vector<timer> timers_;
    completion_list going_;
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/transport/virtual/impl/virtual_world.ipp>
#endif
