/// \file
/// What transport/virtual/virtual_world.hpp declares.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/transport/virtual/virtual_world.hpp>

namespace ddp {

DDP_DECL bool virtual_world::advance(time_point until) {
    if (events_.empty() || events_.next() > until) {
        if (until == never)
            throw error(errc::deadline, "virtual time: every rank waits, and no event is left that could wake one");
        now_ = std::max(now_, until);
        return false;
    }
    now_ = std::max(now_, events_.next());
    while (!events_.empty() && events_.next() <= now_) process(events_.take());
    return true;
}

DDP_DECL void virtual_world::end(int rank, completion& node, op_status how) {
    node.status = how;
    at(rank).done.push_back(node);
    touch(rank);
}

DDP_DECL void virtual_world::end_send(message& m, op_status how) {
    completion& node = *std::exchange(m.sender, nullptr);
    at(m.from).sends.erase(node);
    end(m.from, node, how);
}

DDP_DECL void virtual_world::hand_over(message& m, completion& receive) {
    receive.fingerprint = m.fingerprint;
    receive.length = m.size;
    bool const fits = m.size == receive.size;
    if (fits && m.size > 0) std::memcpy(receive.data, m.stored ? m.copy.data() : m.sender->data, m.size);
    end(m.to, receive, fits ? op_status::ok : op_status::length);
    if (m.sender != nullptr) end_send(m, op_status::ok);
}

DDP_DECL void virtual_world::send(int from, int to, tag const& what, completion& node) {
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
    c.latest = std::max(c.latest, passed(from, to, m.size, leaves) + network_.latency + extra());
    schedule(c.latest, kind::head, to, index);
}

DDP_DECL time_point virtual_world::passed(int from, int to, std::size_t bytes, time_point leaves) noexcept {
    for (slow_link& one : slow_links_) {
        if (one.from != from || one.to != to || one.since > now_) continue;
        one.free = std::max(one.free, leaves) + wire(bytes, one.bytes_per_second);
        leaves = one.free + one.delay;
    }
    return leaves;
}

DDP_DECL void virtual_world::receive(int rank, int peer, tag const& what, completion& node) {
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

DDP_DECL bool virtual_world::progress(int rank, time_point until) {
    station& s = at(rank);
    while (advances_ && !s.woken && !s.news && s.done.empty() && now_ < until) advance(until);
    s.woken = false;
    completion_list done;
    std::swap(done, s.done);
    while (completion* const node = done.pop_front()) node->run(*node);
    return std::exchange(s.news, false);
}

DDP_DECL void virtual_world::abort(int rank, failure const& record) {
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

DDP_DECL void virtual_world::leave(int rank) {
    station& s = at(rank);
    bool const quietly = s.aborted || s.dead;
    withdraw(rank);
    s.gone = true;
    if (!quietly) tell_peers(rank, kind::left, static_cast<std::uint32_t>(rank), nanoseconds{0});
}

DDP_DECL void virtual_world::withdraw(int rank) {
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

DDP_DECL void virtual_world::tell_peers(int rank, kind what, std::uint32_t index, nanoseconds after) {
    std::vector<time_point>& told = at(rank).told;
    told.resize(stations_.size(), start());
    for (int peer = 0; peer < size(); ++peer) {
        if (peer == rank) continue;
        time_point& last = told[static_cast<std::size_t>(peer)];
        last = std::max(last, now_ + after + network_.latency + extra());
        schedule(last, what, peer, index);
    }
}

DDP_DECL void virtual_world::pass_on(int rank, std::uint32_t index) {
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

DDP_DECL void virtual_world::die(station& s, int rank) {
    if (s.dead || s.gone) return;
    s.dead = true;
    s.died = now_;
    touch(rank);
    tell_peers(rank, kind::closed, static_cast<std::uint32_t>(rank), network_.detection);
}

DDP_DECL void virtual_world::process(event const& e) {
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

DDP_DECL void virtual_world::head(station& s, event const& e) {
    message const& m = messages_[e.index];
    if (m.sent > at(m.from).died || s.dead || s.gone || swallowed(m.from, m.to)) return lost(s, e.index);
    s.in_free = std::max(now_, s.in_free) + wire(m.size);
    schedule(s.in_free, kind::delivered, e.rank, e.index);
}

DDP_DECL void virtual_world::lost(station& s, std::uint32_t index) {
    auto const c = s.channels.find({messages_[index].from, messages_[index].id});
    --c->second.under_way;
    messages_.drop(index);
    release(s, c);
}

DDP_DECL void virtual_world::delivered(station& s, event const& e) {
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

DDP_DECL void virtual_world::heard(station& s, event const& e) {
    published const& said = records_[e.index];
    if (s.dead || s.gone || (!said.passed_on && swallowed(said.rank, e.rank))) return;
    report& r = table(s)[static_cast<std::size_t>(said.rank)];
    if (r.is == report::state::spoke && r.record.is_verdict) return;  // the first record, overtaken by the verdict
    r = {.is = report::state::spoke, .record = said.record};
    s.news = true;
    touch(e.rank);
}

DDP_DECL void virtual_world::gone(station& s, event const& e) {
    int const peer = static_cast<int>(e.index);
    if (s.dead || s.gone || swallowed(peer, e.rank)) return;
    for (auto const& [key, c] : s.channels)
        if (key.peer == peer && c.under_way > 0)
            return schedule(now_ + std::max(network_.latency, nanoseconds{1000}), e.what, e.rank, e.index);
    report& r = table(s)[static_cast<std::size_t>(peer)];
    if (r.is == report::state::silent) r = {.is = e.what == kind::left ? report::state::left : report::state::closed};
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

}  // namespace ddp
