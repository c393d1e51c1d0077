/// \file
/// What transport/inproc.hpp declares.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>  // and std::mutex, which its interface needs: <mutex> is 400 lines more
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <utility>

#include <ddp/core/contract.hpp>
#include <ddp/core/spin.hpp>
#include <ddp/transport/inproc.hpp>

namespace ddp {

DDP_DECL inproc_world::inproc_world(int ranks, std::vector<std::uint64_t> hosts)
    : reports_(static_cast<std::size_t>(ranks)), hosts_(std::move(hosts)) {
    ::cpu_set_t cores;
    spare_cores_ = ::sched_getaffinity(0, sizeof cores, &cores) == 0 && ranks <= CPU_COUNT(&cores);
    for (int r = 0; r < ranks; ++r) {
        stations_.push_back(std::make_unique<station>());
        stations_.back()->from.resize(static_cast<std::size_t>(ranks));
    }
}
DDP_DECL void inproc_world::announce(int rank, report const& what) {
    {
        std::unique_lock const lock(board_);
        report& mine = reports_[static_cast<std::size_t>(rank)];
        if (mine.is == report::state::closed) return;
        mine = what;
        news_.fetch_add(1);
    }
    bool const leaves = what.is == report::state::left || what.is == report::state::closed;
    for (int r = 0; r < size(); ++r) {
        station& s = at(r);
        std::unique_lock const lock(s.mutex);
        if (leaves && r != rank)  // peers do not wait for what it can no longer send
            while (completion* const node = s.from[static_cast<std::size_t>(rank)].receives.pop_front())
                end(s, *node, op_status::closed);
        s.woken = true;
        stir(s);
    }
    if (leaves) refuse_messages_for(rank);
}
DDP_DECL void inproc_world::refuse_messages_for(int rank) {
    station& gone = at(rank);
    for (int r = 0; r < size(); ++r) {
        inbox& box = gone.from[static_cast<std::size_t>(r)];
        completion_list refused;
        {
            std::unique_lock const lock(gone.mutex);
            gone.ended = true;
            ++box.borrowed;
            std::swap(refused, box.sends);
        }
        {
            std::unique_lock const lock(at(r).mutex);
            while (completion* const node = refused.pop_front()) end(at(r), *node, op_status::closed);
        }
        give_back(gone, box);
    }
}
DDP_DECL void inproc_world::give_back(station& s, inbox& box) {
    std::unique_lock const lock(s.mutex);
    if (--box.borrowed == 0) s.moved.notify_all();
}
DDP_DECL void inproc_world::end(station& s, completion& node, op_status how) noexcept {
    node.status = how;
    s.done.push_back(node);
    stir(s);
}
DDP_DECL inproc_transport::~inproc_transport() {
    withdraw();
    if (!aborted_) world_->announce(rank_, {.is = report::state::left});
}
DDP_DECL void inproc_transport::post_send(int peer, tag what, const_bytes out, completion& done) {
    expect_other(peer);
    done.post(peer, what, out.data(), out.size(), true);
    inproc_world::station& there = world_->at(peer);
    completion* match = nullptr;
    {
        std::unique_lock const lock(there.mutex);
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
        std::unique_lock const lock(there.mutex);
        --there.foreign_copies;
        there.done.push_back(*match);
        inproc_world::stir(there);
    }
    done.status = op_status::ok;
    finish(done);
}
DDP_DECL void inproc_transport::post_receive(int peer, tag what, mutable_bytes in, completion& done) {
    expect_other(peer);
    done.post(peer, what, in.data(), in.size(), false);
    inproc_world::station& here = world_->at(rank_);
    inproc_world::inbox& box = here.from[static_cast<std::size_t>(peer)];
    completion* match = nullptr;
    {
        std::unique_lock const lock(here.mutex);
        if (!aborted_) {
            match = find(box.sends, what.id);
            if (match == nullptr && !gone(peer)) return box.receives.push_back(done);
        }
        if (match == nullptr) return inproc_world::end(here, done, aborted_ ? op_status::aborted : op_status::closed);
        box.sends.erase(*match);
        ++box.borrowed;  // the sender may abort now: it waits until its node is back
    }
    copy(*match, done);
    {
        inproc_world::station& there = world_->at(peer);
        std::unique_lock const lock(there.mutex);
        inproc_world::end(there, *match, op_status::ok);
    }
    inproc_world::give_back(here, box);
    finish(done);
}
DDP_DECL bool inproc_transport::progress(time_point until) {
    inproc_world::station& here = world_->at(rank_);
    completion_list done;
    if (spins_ && until > time_point{}) look(here, until);
    {
        std::unique_lock lock(here.mutex);
        here.moved.wait_until(lock, until, [&] { return here.woken || !here.done.empty(); });
        here.woken = false;
        here.stirred.store(false, std::memory_order_relaxed);
        std::swap(done, here.done);
    }
    while (completion* const node = done.pop_front()) node->run(*node);
    return refresh();
}
/// Looks for a while whether anything has been stirred.
DDP_DECL void inproc_transport::look(inproc_world::station const& here, time_point until) noexcept {
    time_point const end = std::min(until, monotonic_clock::now() + std::chrono::microseconds(20));
    for (int looks = 1; !here.stirred.load(std::memory_order_acquire); ++looks) {
        if (looks % 16 == 0 && monotonic_clock::now() >= end) return;
        detail::spin_pause();
    }
}
DDP_DECL void inproc_transport::abort(failure const& record) {
    aborted_ = true;
    world_->announce(rank_, {.is = report::state::spoke, .record = record});
    withdraw();
    refresh();
}
DDP_DECL void inproc_transport::entered(mark const& mine) {
    inproc_world::station& here = world_->at(rank_);
    std::unique_lock const lock(here.mutex);
    here.entered = mine;
}
DDP_DECL mark inproc_transport::mark_of(int peer) const {
    inproc_world::station& there = world_->at(peer);
    std::unique_lock const lock(there.mutex);
    return there.entered;
}
DDP_DECL void inproc_transport::wake() {
    inproc_world::station& here = world_->at(rank_);
    std::unique_lock const lock(here.mutex);
    here.woken = true;
    inproc_world::stir(here);
}
DDP_DECL completion* inproc_transport::find(completion_list const& list, identity const& id) noexcept {
    completion* node = list.front();
    while (node != nullptr && node->tag.id != id) node = node->next;
    return node;
}
DDP_DECL void inproc_transport::copy(completion const& from, completion& to) noexcept {
    to.fingerprint = from.tag.fingerprint;
    to.length = from.size;
    to.status = from.size == to.size ? op_status::ok : op_status::length;
    if (to.status == op_status::ok && to.size > 0) std::memcpy(to.data, from.data, to.size);
}
DDP_DECL void inproc_transport::finish(completion& node) {
    inproc_world::station& here = world_->at(rank_);
    std::unique_lock const lock(here.mutex);
    here.done.push_back(node);
    here.stirred.store(true, std::memory_order_relaxed);
}
DDP_DECL bool inproc_transport::gone(int peer) {
    std::unique_lock const lock(world_->board_);
    auto const is = world_->reports_[static_cast<std::size_t>(peer)].is;
    return is == report::state::left || is == report::state::closed;
}
DDP_DECL bool inproc_transport::refresh() {
    std::uint64_t const news = world_->news_.load();
    if (news == seen_) return false;
    std::unique_lock const lock(world_->board_);
    seen_ = world_->news_.load();
    reports_ = world_->reports_;
    return true;
}
DDP_DECL void inproc_transport::withdraw() {
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
DDP_DECL std::uint64_t inproc_transport::host() const {
    return world_->hosts_.empty() ? this_host() : world_->hosts_[static_cast<std::size_t>(rank_)];
}
/// Ranks are threads: a number in the world's table finds the memory.
class inproc_world::sharing final : public memory_sharing {
public:
    explicit sharing(std::shared_ptr<inproc_world> world) : world_(std::move(world)) {}
    ~sharing() override { sharing::settle(); }
    std::shared_ptr<std::byte> make(std::size_t bytes, memory_offer& mine) override {
        constexpr std::align_val_t page{header_bytes};
        auto* const raw = static_cast<std::byte*>(::operator new(header_bytes + bytes, page));
        std::memset(raw, 0, header_bytes + bytes);
        std::shared_ptr<std::byte> memory(raw, [](std::byte* p) { ::operator delete(p, page); });
        std::unique_lock const lock(world_->board_);
        number_ = mine.where[0] = ++world_->offers_;
        world_->memory_.emplace_back(number_, memory);
        return memory;
    }
    bool give(memory_offer const& /*peer*/) noexcept override { return true; }
    void take(std::span<memory_offer const> /*all*/) noexcept override {}
    std::shared_ptr<std::byte> view(memory_offer const& peer) noexcept override {
        std::unique_lock const lock(world_->board_);
        for (auto const& [number, memory] : world_->memory_)
            if (number == peer.where[0]) return memory;
        return nullptr;
    }
    void settle() noexcept override {
        std::unique_lock const lock(world_->board_);
        std::erase_if(world_->memory_, [this](auto const& one) { return one.first == number_; });
    }

private:
    std::shared_ptr<inproc_world> world_;
    std::uint64_t number_ = 0;
};
DDP_DECL std::unique_ptr<memory_sharing> inproc_transport::share_memory() {
    return std::make_unique<inproc_world::sharing>(world_);
}
DDP_DECL std::unique_ptr<inproc_transport> inproc_world::connect(int rank) {
    DDP_EXPECTS(rank >= 0 && rank < size(), detail::concat({"connect: there is no rank ", rank, " among ", size()}));
    return std::make_unique<inproc_transport>(shared_from_this(), rank);
}

}  // namespace ddp
