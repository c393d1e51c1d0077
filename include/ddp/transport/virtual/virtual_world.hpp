/// \file
/// virtual_world: the clock, the network and the faults of a simulated cluster: an event queue.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/random.hpp>
#include <ddp/transport/virtual/network_model.hpp>
#include <ddp/transport/virtual/virtual_events.hpp>
#include <ddp/transport/virtual/virtual_messages.hpp>

namespace ddp {

class virtual_transport;

/// Ranks, clock, network and faults. Make it once, connect(rank) each rank; sim/cluster.hpp drives it with schedulers.
///
/// Deterministic: the same calls with the same seed give the same events, told by trace().
/// Cost: two events a message, O(log n) each in the events outstanding; matching is a hash look-up. Memory is pooled.
class virtual_world : public std::enable_shared_from_this<virtual_world> {
public:
    [[nodiscard]] static std::shared_ptr<virtual_world> create(int ranks, network_model const& network = {}) {
        DDP_EXPECTS(ranks >= 1, "a virtual world needs at least one rank");
        DDP_EXPECTS(network.bytes_per_second > 0, "network_model::bytes_per_second must be positive");
        return std::shared_ptr<virtual_world>(new virtual_world(ranks, network));
    }
    [[nodiscard]] std::unique_ptr<virtual_transport> connect(int rank);

    [[nodiscard]] int size() const noexcept { return static_cast<int>(stations_.size()); }
    [[nodiscard]] network_model const& network() const noexcept { return network_; }
    [[nodiscard]] time_point now() const noexcept { return now_; }
    /// Since the world was made; the scripts of faults count from there as well.
    [[nodiscard]] nanoseconds elapsed() const noexcept { return now_ - start(); }
    [[nodiscard]] static constexpr time_point start() noexcept { return time_point(std::chrono::hours(24)); }
    [[nodiscard]] std::uint64_t events() const noexcept { return events_.taken(); }
    /// A digest of every event so far: time, kind and place.
    [[nodiscard]] std::uint64_t trace() const noexcept { return events_.trace(); }

    // The script. Times count from start().

    /// The rank ends as a killed process does: its program is not run any more; what its card had not sent is lost.
    void kill(int rank, nanoseconds at) { schedule(start() + at, kind::kill, rank, 0); }
    void kill(int rank) { die(at(rank), rank); }
    /// Likewise when it posts its k-th send, which does not leave any more. k counts from 1.
    void kill_at_message(int rank, std::uint64_t k) { at(rank).fatal = k; }
    /// Nothing of the rank runs and nothing arrives there in [from, to); then everything does, in order.
    void freeze(int rank, nanoseconds from, nanoseconds to) {
        schedule(start() + from, kind::freeze, rank, 0);
        schedule(start() + to, kind::thaw, rank, 0);
    }
    /// From then on what `sender` sends to `receiver` vanishes; a record of a failure comes by way of a third rank.
    void blackhole(int sender, int receiver, nanoseconds from) { holes_.push_back({sender, receiver, start() + from}); }

    [[nodiscard]] bool dead(int rank) const noexcept { return at(rank).dead; }
    [[nodiscard]] bool frozen(int rank) const noexcept { return at(rank).frozen; }

    // For whoever drives the ranks.

    /// Moves the clock to the next moment at which something happens, and lets it happen; or to `until`, if that is
    /// sooner. Returns whether anything happened. With nothing to come and no `until`, throws: nobody would ever wake.
    bool advance(time_point until = never) {
        if (events_.empty() || events_.next() > until) {
            if (until == never)
                throw error(errc::deadline, "virtual time: every rank waits and nothing will ever happen");
            now_ = std::max(now_, until);
            return false;
        }
        now_ = std::max(now_, events_.next());
        while (!events_.empty() && events_.next() <= now_) process(events_.take());
        return true;
    }
    /// Whether progress() moves the clock itself while its rank has nothing to do. False: it returns at once, because
    /// somebody above runs the other ranks first.
    void progress_advances(bool yes) noexcept { advances_ = yes; }
    /// Calls the rank moved at a time, as a timer does. `cookie` comes back in woken().
    void wake_at(int rank, time_point when, std::uint32_t cookie = 0) { schedule(when, kind::timer, rank, cookie); }
    struct timer {
        int rank;
        std::uint32_t cookie;
    };
    /// Timers that have gone off; the caller empties the list.
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
        completion_list sends;        // posted here, not ended
        completion_list done;         // ended, to be run by progress()
        std::vector<report> reports;  // empty as long as nobody has said anything: a thousand ranks share silence
        std::vector<event> missed;    // while frozen
        time_point out_free = {}, in_free = {}, died = never;
        std::uint64_t posted = 0, fatal = std::numeric_limits<std::uint64_t>::max();
        bool dead = false, frozen = false, gone = false, aborted = false;
        bool woken = false, news = false, listed = false;
    };
    struct hole {
        int from, to;
        time_point since;
    };

    virtual_world(int ranks, network_model const& network)
        : network_(network),
          delays_(network.seed, random_use::user),
          stations_(static_cast<std::size_t>(ranks)),
          silence_(static_cast<std::size_t>(ranks)) {}

    station& at(int rank) noexcept { return stations_[static_cast<std::size_t>(rank)]; }
    [[nodiscard]] station const& at(int rank) const noexcept { return stations_[static_cast<std::size_t>(rank)]; }

    void schedule(time_point when, kind what, int rank, std::uint32_t index) { events_.put(when, what, rank, index); }
    [[nodiscard]] nanoseconds wire(std::size_t bytes) const noexcept {
        return nanoseconds(static_cast<std::int64_t>(static_cast<double>(bytes) * 1e9 / network_.bytes_per_second));
    }
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

    void end(int rank, completion& node, op_status how) {
        node.status = how;
        at(rank).done.push_back(node);
        touch(rank);
    }
    /// The send is over; its node no longer belongs to message m.
    void end_send(message& m, op_status how) {
        completion& node = *std::exchange(m.sender, nullptr);
        at(m.from).sends.erase(node);
        end(m.from, node, how);
    }
    void hand_over(message& m, completion& receive) {
        receive.fingerprint = m.fingerprint;
        receive.length = m.size;
        bool const fits = m.size == receive.size;
        if (fits && m.size > 0) std::memcpy(receive.data, m.stored ? m.copy.data() : m.sender->data, m.size);
        end(m.to, receive, fits ? op_status::ok : op_status::length);
        if (m.sender != nullptr) end_send(m, op_status::ok);
    }

    // What transports ask for.

    void send(int from, int to, tag const& what, completion& node) {
        station& here = at(from);
        station& there = at(to);
        node.moved = none;
        if (here.aborted) return end(from, node, op_status::aborted);
        if (departed(here, to)) return end(from, node, op_status::closed);
        here.sends.push_back(node);
        if (here.dead) return;
        if (++here.posted == here.fatal) return die(here, from);
        std::uint32_t const index = messages_.take();
        message& m = messages_[index];
        m.sender = &node;
        m.fingerprint = what.fingerprint;
        m.size = node.size;
        m.id = what.id;
        m.from = from;
        m.to = to;
        node.moved = index;
        time_point const leaves = std::max(now_, here.out_free) + network_.overhead;
        m.sent = here.out_free = leaves + wire(m.size);
        channel& c = channel_of(there, from, what.id)->second;
        ++c.under_way;
        c.latest = std::max(c.latest, leaves + network_.latency + extra());
        schedule(c.latest, kind::head, to, index);
    }
    void receive(int rank, int peer, tag const& what, completion& node) {
        station& here = at(rank);
        if (here.aborted) return end(rank, node, op_status::aborted);
        auto const found = channel_of(here, peer, what.id);
        channel& c = found->second;
        while (c.first != none) {
            std::uint32_t const index = c.first;
            message& m = messages_[index];
            c.first = m.next;
            if (c.first == none) c.last = none;
            m.next = none;
            bool const withdrawn = m.sender == nullptr && !m.stored;
            if (!withdrawn) hand_over(m, node);
            messages_.drop(index);
            if (!withdrawn) return release(here, found);
        }
        if (departed(here, peer) && c.under_way == 0) {
            release(here, found);
            return end(rank, node, op_status::closed);
        }
        c.receives.push_back(node);
    }
    bool progress(int rank, time_point until) {
        station& s = at(rank);
        while (advances_ && !s.woken && !s.news && s.done.empty() && now_ < until) advance(until);
        s.woken = false;
        completion_list done;
        std::swap(done, s.done);
        while (completion* const node = done.pop_front()) node->run(*node);
        return std::exchange(s.news, false);
    }
    void abort(int rank, failure const& record) {
        station& s = at(rank);
        if (!s.dead) {
            table(s)[static_cast<std::size_t>(rank)] = {.is = report::state::spoke, .record = record};
            records_.push_back({rank, record, false});
            auto const index = static_cast<std::uint32_t>(records_.size() - 1);
            tell_peers(rank, kind::record, index, nanoseconds{0});
            pass_on(rank, index);
        }
        withdraw(rank);
    }
    void leave(int rank) {
        station& s = at(rank);
        bool const quietly = s.aborted || s.dead;
        withdraw(rank);
        s.gone = true;
        if (!quietly) tell_peers(rank, kind::left, static_cast<std::uint32_t>(rank), nanoseconds{0});
    }
    void withdraw(int rank) {
        station& s = at(rank);
        s.aborted = true;
        std::swap(going_, s.done);
        while (completion* const node = s.sends.pop_front()) {
            messages_.withdraw(*node);
            node->status = op_status::aborted;
            going_.push_back(*node);
        }
        for (auto c = s.channels.begin(); c != s.channels.end();) {
            auto const here = c++;
            while (completion* const node = here->second.receives.pop_front()) {
                node->status = op_status::aborted;
                going_.push_back(*node);
            }
            release(s, here);
        }
        while (completion* const node = going_.pop_front()) node->run(*node);
    }

    // What happens at its time.

    void tell_peers(int rank, kind what, std::uint32_t index, nanoseconds after) {
        for (int peer = 0; peer < size(); ++peer)
            if (peer != rank) schedule(now_ + after + network_.latency + extra(), what, peer, index);
    }
    /// As streams do: where a record vanishes in a hole, whoever reaches both ends passes it on.
    void pass_on(int rank, std::uint32_t index) {
        for (int peer = 0; peer < size(); ++peer) {
            if (peer == rank || !swallowed(rank, peer)) continue;
            for (int by = 0; by < size(); ++by) {
                if (by == rank || by == peer || at(by).dead || swallowed(rank, by) || swallowed(by, peer)) continue;
                published const relayed{rank, records_[index].record, true};
                records_.push_back(relayed);
                schedule(now_ + 2 * network_.latency + extra(), kind::record, peer,
                         static_cast<std::uint32_t>(records_.size() - 1));
                break;
            }
        }
    }
    void die(station& s, int rank) {
        if (s.dead || s.gone) return;
        s.dead = true;
        s.died = now_;
        touch(rank);
        tell_peers(rank, kind::closed, static_cast<std::uint32_t>(rank), network_.detection);
    }
    std::vector<report>& table(station& s) {
        if (s.reports.empty()) s.reports = silence_;
        return s.reports;
    }
    [[nodiscard]] static bool departed(station const& s, int peer) noexcept {
        if (s.reports.empty()) return false;
        report::state const is = s.reports[static_cast<std::size_t>(peer)].is;
        return is == report::state::left || is == report::state::closed;
    }

    void process(event const& e) {
        station& s = at(e.rank);
        if (s.frozen && e.what != kind::thaw && e.what != kind::kill) {
            s.missed.push_back(e);
            return;
        }
        switch (e.what) {
            case kind::head: return head(s, e);
            case kind::delivered: return delivered(s, e);
            case kind::record: return heard(s, e);
            case kind::left:
            case kind::closed: return gone(s, e);
            case kind::timer: timers_.push_back({e.rank, e.index}); return touch(e.rank);
            case kind::kill: return die(s, e.rank);
            case kind::freeze: s.frozen = !s.dead; return;
            case kind::thaw:
                s.frozen = false;
                for (event const& missed : s.missed) schedule(now_, missed.what, missed.rank, missed.index);
                s.missed.clear();
                return touch(e.rank);
        }
    }
    void head(station& s, event const& e) {
        message const& m = messages_[e.index];
        if (m.sent > at(m.from).died || s.dead || s.gone || swallowed(m.from, m.to)) return lost(s, e.index);
        s.in_free = std::max(now_, s.in_free) + wire(m.size);
        schedule(s.in_free, kind::delivered, e.rank, e.index);
    }
    /// It will never arrive. Its sender may wait for ever, as it would.
    void lost(station& s, std::uint32_t index) {
        auto const c = s.channels.find({messages_[index].from, messages_[index].id});
        --c->second.under_way;
        messages_.drop(index);
        release(s, c);
    }
    void delivered(station& s, event const& e) {
        message& m = messages_[e.index];
        if (s.dead || s.gone || s.aborted || m.sender == nullptr) return lost(s, e.index);
        auto const found = s.channels.find({m.from, m.id});
        channel& c = found->second;
        --c.under_way;
        if (completion* const receive = c.receives.pop_front()) {
            hand_over(m, *receive);
            messages_.drop(e.index);
            return release(s, found);
        }
        (c.last != none ? messages_[c.last].next : c.first) = e.index;
        c.last = e.index;
        if (m.size > network_.early_bytes) return;
        m.copy.assign(m.sender->data, m.sender->data + m.size);
        m.stored = true;
        end_send(m, op_status::ok);
    }
    void heard(station& s, event const& e) {
        published const& said = records_[e.index];
        if (s.dead || s.gone || (!said.passed_on && swallowed(said.rank, e.rank))) return;
        report& r = table(s)[static_cast<std::size_t>(said.rank)];
        if (r.is == report::state::spoke && r.record.is_verdict) return;  // the first record, overtaken by the verdict
        r = {.is = report::state::spoke, .record = said.record};
        s.news = true;
        touch(e.rank);
    }
    /// A peer has left or died: what it sent before comes first, then everything that involves it ends.
    void gone(station& s, event const& e) {
        int const peer = static_cast<int>(e.index);
        if (s.dead || s.gone || swallowed(peer, e.rank)) return;
        for (auto const& [key, c] : s.channels)
            if (key.peer == peer && c.under_way > 0)
                return schedule(now_ + std::max(network_.latency, nanoseconds{1000}), e.what, e.rank, e.index);
        report& r = table(s)[static_cast<std::size_t>(peer)];
        if (r.is == report::state::silent)
            r = {.is = e.what == kind::left ? report::state::left : report::state::closed};
        s.news = true;
        touch(e.rank);
        for (completion* node = s.sends.front(); node != nullptr;) {
            completion& send = *std::exchange(node, node->next);
            if (send.peer != peer) continue;
            messages_.withdraw(send);
            s.sends.erase(send);
            end(e.rank, send, op_status::closed);
        }
        for (auto c = s.channels.begin(); c != s.channels.end();) {
            auto const here = c++;
            if (here->first.peer != peer) continue;
            while (completion* const node = here->second.receives.pop_front()) end(e.rank, *node, op_status::closed);
            release(s, here);
        }
    }

    network_model network_;
    random_stream delays_;
    std::uint64_t drawn_ = 0;
    time_point now_ = start();
    bool advances_ = true;
    detail::virtual_net::event_queue events_;
    std::vector<station> stations_;
    std::vector<report> const silence_;
    std::vector<hole> holes_;
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
