/// \file
/// virtual_transport: all ranks in one thread, with a simulated clock and network.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include <ddp/comm/transport.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/transport/virtual/virtual_world.hpp>

namespace ddp {

/// One rank of a virtual_world. A send completes when the message has been received, or has been stored for a receive that is
/// posted later. progress() never blocks the thread: it moves the clock (see virtual_world::progress_advances). All ranks of a
/// world are used from one thread, wake() included. Throws usage_error if a peer is not another rank of the world.
class virtual_transport {
public:
    virtual_transport(std::shared_ptr<virtual_world> world, int rank) : world_(std::move(world)), rank_(rank) {}
    virtual_transport(virtual_transport const&) = delete;
    virtual_transport& operator=(virtual_transport const&) = delete;
    ~virtual_transport() { world_->leave(rank_); }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return world_->size(); }
    [[nodiscard]] time_point now() const noexcept { return world_->now(); }
    [[nodiscard]] virtual_world& world() noexcept { return *world_; }

    void post_send(int peer, tag what, const_bytes out, completion& done) {
        expect_other(peer);
        done.post(peer, what, out.data(), out.size(), true);
        world_->send(rank_, peer, what, done);
    }
    void post_receive(int peer, tag what, mutable_bytes in, completion& done) {
        expect_other(peer);
        done.post(peer, what, in.data(), in.size(), false);
        world_->receive(rank_, peer, what, done);
    }
    bool progress(time_point until) { return world_->progress(rank_, until); }
    void abort(failure const& record) { world_->abort(rank_, record); }
    [[nodiscard]] std::span<report const> reports() const noexcept {
        auto const& own = world_->at(rank_).reports;
        return own.empty() ? world_->silence_ : own;
    }
    void wake() {
        world_->at(rank_).woken = true;
        world_->touch(rank_);
    }
    /// Whether progress() would have something to do.
    [[nodiscard]] bool has_moved() const noexcept {
        auto const& s = world_->at(rank_);
        return s.woken || s.news || !s.done.empty();
    }

private:
    void expect_other(int peer) const {
        DDP_EXPECTS(peer >= 0 && peer < size() && peer != rank_, "post to another rank of this world");
    }

    std::shared_ptr<virtual_world> world_;
    int rank_;
};
static_assert(Transport<virtual_transport>);

inline std::unique_ptr<virtual_transport> virtual_world::connect(int rank) {
    DDP_EXPECTS(rank >= 0 && rank < size(), detail::concat({"connect: there is no rank ", rank, " among ", size()}));
    return std::make_unique<virtual_transport>(shared_from_this(), rank);
}

}  // namespace ddp
