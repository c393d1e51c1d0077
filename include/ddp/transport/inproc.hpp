/// \file
/// inproc: ranks are threads of one process; a message is one copy from the sender's memory into the receiver's.
#pragma once

#include <atomic>
#include <condition_variable>  // and std::mutex, which its interface needs: <mutex> is 400 lines more
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/host.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

class inproc_transport;

/// The ranks of one process. Make it once, then call connect(rank) on each rank's thread.
class inproc_world : public std::enable_shared_from_this<inproc_world> {
public:
    /// `hosts`: the number of each rank's host, so that one process can stand for several hosts; empty: all are on this host.
    /// Throws usage_error unless there is at least one rank, and a number for each rank or for none.
    [[nodiscard]] static std::shared_ptr<inproc_world> create(int ranks, std::vector<std::uint64_t> hosts = {}) {
        DDP_EXPECTS(ranks >= 1, "an inproc world needs at least one rank");
        DDP_EXPECTS(hosts.empty() || hosts.size() == static_cast<std::size_t>(ranks),
                    "inproc_world: `hosts` needs a number for each rank, or none");
        return std::shared_ptr<inproc_world>(new inproc_world(ranks, std::move(hosts)));
    }

    /// The number of ranks.
    [[nodiscard]] int size() const noexcept { return static_cast<int>(stations_.size()); }

    /// The transport of rank `rank`. Each rank connects once. Throws usage_error unless `rank` is between 0 and size() - 1.
    [[nodiscard]] std::unique_ptr<inproc_transport> connect(int rank);

    /// For tests: rank `rank` ends like a killed process. Its peers see a closed connection and no record.
    void kill(int rank) { announce(rank, {.is = report::state::closed}); }

private:
    friend class inproc_transport;
    class sharing;

    /// The operations that wait at one rank for one of its peers.
    struct inbox {
        completion_list receives;  // posted here, without a message yet
        completion_list sends;     // the peer's nodes: messages for which no receive is posted yet
        int borrowed = 0;          // nodes of the peer that were taken off `sends` and are not on its done list yet
    };
    struct station {
        std::mutex mutex;
        std::condition_variable moved;
        std::vector<inbox> from;  // one a peer
        completion_list done;     // ended, to be run by this rank's progress()
        int foreign_copies = 0;   // copies that peers are making into this rank's memory
        mark entered;             // what this rank has entered last
        bool woken = false;
        std::atomic<bool> stirred{false};  // woken, or something is done: for a rank that looks without the mutex
        bool ended = false;                // aborted, left or killed: nothing may be matched with it any more
    };

    inproc_world(int ranks, std::vector<std::uint64_t> hosts);
    station& at(int rank) noexcept { return *stations_[static_cast<std::size_t>(rank)]; }

    void announce(int rank, report const& what);

    /// Ends the sends of peers to `rank` that it can no longer receive.
    void refuse_messages_for(int rank);
    static void give_back(station& s, inbox& box);
    /// After a change that ends a wait of s.
    static void stir(station& s) noexcept {
        s.stirred.store(true, std::memory_order_release);
        s.moved.notify_all();
    }
    static void end(station& s, completion& node, op_status how) noexcept;

    std::vector<std::unique_ptr<station>> stations_;
    std::mutex board_;
    std::vector<report> reports_;
    std::vector<std::uint64_t> hosts_;
    /// Memory that is currently offered, with its number. Guarded by board_.
    std::vector<std::pair<std::uint64_t, std::shared_ptr<std::byte>>> memory_;
    std::uint64_t offers_ = 0;
    std::atomic<std::uint64_t> news_{0};
    bool spare_cores_ = false;  // one for each rank
};

/// One rank of an inproc_world. A send completes when it has been received: no copy is kept in between.
///
/// Cost    one memcpy for each message, made by the side that posts second. With a core for each rank, a waiting caller
///         polls for 20 us before it sleeps: an allreduce of a few bytes then takes about 2 us instead of 16.
/// Throws  usage_error if a peer is not another rank of the world.
class inproc_transport {
public:
    static constexpr std::string_view name = "inproc";

    inproc_transport(std::shared_ptr<inproc_world> world, int rank)
        : world_(std::move(world)), rank_(rank), reports_(static_cast<std::size_t>(world_->size())) {
        pace({});
    }
    inproc_transport(inproc_transport const&) = delete;
    inproc_transport& operator=(inproc_transport const&) = delete;
    ~inproc_transport();

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return world_->size(); }
    [[nodiscard]] time_point now() const { return monotonic_clock::now(); }
    /// The number of this rank's host (see host_of).
    [[nodiscard]] std::uint64_t host() const;
    /// See SharingTransport.
    [[nodiscard]] std::unique_ptr<memory_sharing> share_memory();
    /// See PathTransport.
    [[nodiscard]] static std::optional<bool> through_memory(int /*a*/, int /*b*/) noexcept { return true; }

    void post_send(int peer, tag what, const_bytes out, completion& done);

    void post_receive(int peer, tag what, mutable_bytes in, completion& done);

    bool progress(time_point until);
    /// As framed::pace, but it only matters whether `least` is above 0: progress() then sleeps without polling first.
    void pace(nanoseconds least) noexcept { spins_ = least <= nanoseconds{0} && world_->spare_cores_; }

    void abort(failure const& record);

    [[nodiscard]] std::span<report const> reports() const noexcept { return reports_; }

    /// See WatchfulTransport. Threads of one process are never overdue.
    void entered(mark const& mine);
    [[nodiscard]] mark mark_of(int peer) const;
    [[nodiscard]] static std::optional<int> overdue_peer() noexcept { return std::nullopt; }
    [[nodiscard]] time_point last_heard(int /*peer*/) const { return now(); }

    void wake();

private:
    void expect_other(int peer) const {
        DDP_EXPECTS(peer >= 0 && peer < size() && peer != rank_, "post to another rank of this world");
    }
    static completion* find(completion_list const& list, identity const& id) noexcept;
    static void copy(completion const& from, completion& to) noexcept;
    static void look(inproc_world::station const& here, time_point until) noexcept;
    void finish(completion& node);
    bool gone(int peer);
    bool refresh();

    /// Takes back every posted operation of this rank and runs it as aborted; returns once no peer touches its memory.
    void withdraw();

    std::shared_ptr<inproc_world> world_;
    int rank_;
    bool aborted_ = false;
    bool spins_ = false;
    std::uint64_t seen_ = 0;
    std::vector<report> reports_;
};
static_assert(SharingTransport<inproc_transport> && WatchfulTransport<inproc_transport>);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/transport/impl/inproc.ipp>
#endif
