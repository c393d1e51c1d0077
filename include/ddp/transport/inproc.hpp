/// \file
/// inproc: ranks are threads of one process; a message is one copy from the sender's memory into the receiver's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/host.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/contract.hpp>

namespace ddp {

class inproc_transport;

/// Where the ranks of one process meet. Make it once, then connect(rank) on each rank's thread.
class inproc_world : public std::enable_shared_from_this<inproc_world> {
public:
    /// `hosts`: a number for each rank, so that one process can play several hosts; none: all are on this one.
    [[nodiscard]] static std::shared_ptr<inproc_world> create(int ranks, std::vector<std::uint64_t> hosts = {}) {
        DDP_EXPECTS(ranks >= 1, "an inproc world needs at least one rank");
        DDP_EXPECTS(hosts.empty() || hosts.size() == static_cast<std::size_t>(ranks), "give one host a rank, or none");
        return std::shared_ptr<inproc_world>(new inproc_world(ranks, std::move(hosts)));
    }

    [[nodiscard]] int size() const noexcept { return static_cast<int>(stations_.size()); }

    /// Rank `rank`'s end. Each rank connects once.
    [[nodiscard]] std::unique_ptr<inproc_transport> connect(int rank);

    /// For tests: rank `rank` is dead as a killed process is: its peers see a closed connection and no record.
    void kill(int rank) { announce(rank, {.is = report::state::closed}); }

private:
    friend class inproc_transport;

    /// What waits at one rank for one of its peers.
    struct inbox {
        completion_list receives;  // posted here, not yet met by a message
        completion_list sends;     // the peer's nodes: messages nobody has posted a receive for
        int borrowed = 0;          // nodes of the peer that were taken off `sends` and are not on its done list yet
    };
    struct station {
        std::mutex mutex;
        std::condition_variable moved;
        std::vector<inbox> from;  // one a peer
        completion_list done;     // ended, to be run by this rank's progress()
        int foreign_copies = 0;   // copies that peers are making into this rank's memory
        bool woken = false;
        bool ended = false;  // aborted, left or killed: nothing may be matched with it any more
    };

    inproc_world(int ranks, std::vector<std::uint64_t> hosts)
        : reports_(static_cast<std::size_t>(ranks)), hosts_(std::move(hosts)) {
        for (int r = 0; r < ranks; ++r) {
            stations_.push_back(std::make_unique<station>());
            stations_.back()->from.resize(static_cast<std::size_t>(ranks));
        }
    }
    station& at(int rank) noexcept { return *stations_[static_cast<std::size_t>(rank)]; }

    void announce(int rank, report const& what) {
        {
            std::scoped_lock lock(board_);
            report& mine = reports_[static_cast<std::size_t>(rank)];
            if (mine.is == report::state::closed) return;
            mine = what;
            news_.fetch_add(1);
        }
        bool const leaves = what.is == report::state::left || what.is == report::state::closed;
        for (int r = 0; r < size(); ++r) {
            station& s = at(r);
            std::scoped_lock lock(s.mutex);
            if (leaves && r != rank)  // what it can never send is not waited for
                while (completion* const node = s.from[static_cast<std::size_t>(rank)].receives.pop_front())
                    end(s, *node, op_status::closed);
            s.woken = true;
            s.moved.notify_all();
        }
        if (leaves) refuse_messages_for(rank);
    }

    /// Ends what peers have sent to `rank` and it can never receive.
    void refuse_messages_for(int rank) {
        station& gone = at(rank);
        for (int r = 0; r < size(); ++r) {
            inbox& box = gone.from[static_cast<std::size_t>(r)];
            completion_list refused;
            {
                std::scoped_lock lock(gone.mutex);
                gone.ended = true;
                ++box.borrowed;
                std::swap(refused, box.sends);
            }
            {
                std::scoped_lock lock(at(r).mutex);
                while (completion* const node = refused.pop_front()) end(at(r), *node, op_status::closed);
            }
            give_back(gone, box);
        }
    }
    static void give_back(station& s, inbox& box) {
        std::scoped_lock lock(s.mutex);
        if (--box.borrowed == 0) s.moved.notify_all();
    }
    static void end(station& s, completion& node, op_status how) noexcept {
        node.status = how;
        s.done.push_back(node);
        s.moved.notify_all();
    }

    std::vector<std::unique_ptr<station>> stations_;
    std::mutex board_;
    std::vector<report> reports_;
    std::vector<std::uint64_t> hosts_;
    std::atomic<std::uint64_t> news_{0};
};

/// One rank's end of an inproc_world. A send completes when it was received: no copy is kept in between.
/// Cost: one memcpy a message, made by whichever side comes second.
class inproc_transport {
public:
    static constexpr std::string_view name = "inproc";

    inproc_transport(std::shared_ptr<inproc_world> world, int rank)
        : world_(std::move(world)), rank_(rank), reports_(static_cast<std::size_t>(world_->size())) {}
    inproc_transport(inproc_transport const&) = delete;
    inproc_transport& operator=(inproc_transport const&) = delete;
    ~inproc_transport() {
        withdraw();
        if (!aborted_) world_->announce(rank_, {.is = report::state::left});
    }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return world_->size(); }
    [[nodiscard]] time_point now() const { return clock::now(); }
    /// Where this rank runs (see host_of).
    [[nodiscard]] std::uint64_t host() const {
        return world_->hosts_.empty() ? this_host() : world_->hosts_[static_cast<std::size_t>(rank_)];
    }

    void post_send(int peer, tag what, const_bytes out, completion& done) {
        prepare(done, peer, what, const_cast<std::byte*>(out.data()), out.size(), true);
        inproc_world::station& there = world_->at(peer);
        completion* match = nullptr;
        {
            std::scoped_lock lock(there.mutex);
            if (aborted_ || there.ended) {
                done.status = aborted_ ? op_status::aborted : op_status::closed;
            } else {
                inproc_world::inbox& box = there.from[static_cast<std::size_t>(rank_)];
                match = find(box.receives, what.id);
                if (match == nullptr) return box.sends.push_back(done);
                box.receives.erase(*match);
                ++there.foreign_copies;
            }
        }
        if (match == nullptr) return finish(done);
        copy(done, *match);
        {
            std::scoped_lock lock(there.mutex);
            --there.foreign_copies;
            there.done.push_back(*match);
            there.moved.notify_all();
        }
        done.status = op_status::ok;
        finish(done);
    }

    void post_receive(int peer, tag what, mutable_bytes in, completion& done) {
        prepare(done, peer, what, in.data(), in.size(), false);
        inproc_world::station& here = world_->at(rank_);
        inproc_world::inbox& box = here.from[static_cast<std::size_t>(peer)];
        completion* match = nullptr;
        {
            std::scoped_lock lock(here.mutex);
            if (!aborted_) {
                match = find(box.sends, what.id);
                if (match == nullptr && !gone(peer)) return box.receives.push_back(done);
            }
            if (match == nullptr)
                return inproc_world::end(here, done, aborted_ ? op_status::aborted : op_status::closed);
            box.sends.erase(*match);
            ++box.borrowed;  // the sender may abort now: it waits until its node is back
        }
        copy(*match, done);
        {
            inproc_world::station& there = world_->at(peer);
            std::scoped_lock lock(there.mutex);
            inproc_world::end(there, *match, op_status::ok);
        }
        inproc_world::give_back(here, box);
        finish(done);
    }

    bool progress(time_point until) {
        inproc_world::station& here = world_->at(rank_);
        completion_list done;
        {
            std::unique_lock lock(here.mutex);
            here.moved.wait_until(lock, until, [&] { return here.woken || !here.done.empty(); });
            here.woken = false;
            std::swap(done, here.done);
        }
        while (completion* const node = done.pop_front()) node->run(*node);
        return refresh();
    }

    void abort(failure const& record) {
        aborted_ = true;
        world_->announce(rank_, {.is = report::state::spoke, .record = record});
        withdraw();
        refresh();
    }

    [[nodiscard]] std::span<report const> reports() const noexcept { return reports_; }

    void wake() {
        inproc_world::station& here = world_->at(rank_);
        std::scoped_lock lock(here.mutex);
        here.woken = true;
        here.moved.notify_all();
    }

private:
    void prepare(completion& done, int peer, tag what, std::byte* data, std::size_t bytes, bool sends) {
        DDP_EXPECTS(peer >= 0 && peer < size() && peer != rank_, "post to another rank of this world");
        done.status = op_status::pending;
        done.peer = peer;
        done.tag = what;
        done.data = data;
        done.size = bytes;
        done.sends = sends;
        done.fingerprint = 0;
        done.length = 0;
    }
    static completion* find(completion_list const& list, identity const& id) noexcept {
        completion* node = list.front();
        while (node != nullptr && node->tag.id != id) node = node->next;
        return node;
    }
    static void copy(completion const& from, completion& to) noexcept {
        to.fingerprint = from.tag.fingerprint;
        to.length = from.size;
        to.status = from.size == to.size ? op_status::ok : op_status::length;
        if (to.status == op_status::ok && to.size > 0) std::memcpy(to.data, from.data, to.size);
    }
    void finish(completion& node) {
        inproc_world::station& here = world_->at(rank_);
        std::scoped_lock lock(here.mutex);
        here.done.push_back(node);
    }
    bool gone(int peer) {
        std::scoped_lock lock(world_->board_);
        auto const is = world_->reports_[static_cast<std::size_t>(peer)].is;
        return is == report::state::left || is == report::state::closed;
    }
    bool refresh() {
        std::uint64_t const news = world_->news_.load();
        if (news == seen_) return false;
        std::scoped_lock lock(world_->board_);
        seen_ = world_->news_.load();
        reports_ = world_->reports_;
        return true;
    }

    /// Takes every posted operation of this rank back and runs it as aborted; returns once nobody touches our memory.
    void withdraw() {
        completion_list mine;
        for (int peer = 0; peer < size(); ++peer) {
            inproc_world::station& there = world_->at(peer);
            std::unique_lock lock(there.mutex);
            if (peer == rank_) {
                there.ended = true;
                for (inproc_world::inbox& box : there.from)
                    while (completion* const node = box.receives.pop_front()) mine.push_back(*node);
            } else {
                inproc_world::inbox& box = there.from[static_cast<std::size_t>(rank_)];
                while (completion* const node = box.sends.pop_front()) mine.push_back(*node);
                there.moved.wait(lock, [&] { return box.borrowed == 0; });
            }
        }
        inproc_world::station& here = world_->at(rank_);
        completion_list done;
        {
            std::unique_lock lock(here.mutex);
            here.moved.wait(lock, [&] { return here.foreign_copies == 0; });
            std::swap(done, here.done);
        }
        while (completion* const node = done.pop_front()) node->run(*node);
        while (completion* const node = mine.pop_front()) {
            node->status = op_status::aborted;
            node->run(*node);
        }
    }

    std::shared_ptr<inproc_world> world_;
    int rank_;
    bool aborted_ = false;
    std::uint64_t seen_ = 0;
    std::vector<report> reports_;
};
static_assert(Transport<inproc_transport>);

inline std::unique_ptr<inproc_transport> inproc_world::connect(int rank) {
    DDP_EXPECTS(rank >= 0 && rank < size(), "connect a rank between 0 and size() - 1");
    return std::make_unique<inproc_transport>(shared_from_this(), rank);
}

}  // namespace ddp
