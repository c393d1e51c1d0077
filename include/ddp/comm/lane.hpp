/// \file
/// lane: what a collective communicates over, and the operations and memory that it uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

#include <ddp/comm/operation.hpp>
#include <ddp/comm/scheduler.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/task.hpp>

namespace ddp {

/// What a collective communicates over: a group of ranks, and the identity and fingerprint of its messages. Passed by
/// value. Ranks and peers are numbered as in the group.
template <Transport T>
struct lane {
    scheduler<T>* on = nullptr;     ///< runs the coroutines and owns the transport
    group* of = nullptr;            ///< the ranks
    identity id = {};               ///< identity of its messages
    std::uint64_t fingerprint = 0;  ///< what both ends of a message compare

    lane() = default;
    lane(scheduler<T>& scheduler, group& ranks, identity const& identity, std::uint64_t print) noexcept
        : on(&scheduler), of(&ranks), id(identity), fingerprint(print) {}
    /// A lane among all ranks of the job.
    lane(scheduler<T>* scheduler, identity const& identity, std::uint64_t print) noexcept
        : lane(*scheduler, scheduler->world(), identity, print) {}

    [[nodiscard]] int rank() const noexcept { return of->rank(); }
    [[nodiscard]] int size() const noexcept { return of->size(); }

    /// A lane for another stage of the same collective: messages of different phases never match each other. p < 4.
    [[nodiscard]] lane phase(std::uint32_t p) const noexcept {
        lane other = *this;
        other.id.channel += p;
        return other;
    }

    /// Posts a send of `out` to rank `peer`; await `op` before `out` changes. Allocates nothing. Throws usage_error if there is
    /// no such rank.
    void send(operation& op, int peer, const_bytes out) const {
        begin(op, peer, out.size(), true);
        if (op.done_) return;
        on->count_sent(out.size());
        on->post([&] { on->transport().post_send(op.peer, op.tag, out, op); });
    }
    /// Posts a receive from rank `peer` into `in`, which must have the length of the message; await `op` before reading
    /// it. `reader`: a send that still reads `in`, if there is one. Allocates nothing. Throws usage_error if there is no such
    /// rank.
    void receive(operation& op, int peer, mutable_bytes in, operation const* reader = nullptr) const {
        begin(op, peer, in.size(), false);
        op.reader = reader;
        if (op.done_) return;
        on->post([&] { on->transport().post_receive(op.peer, op.tag, in, op); });
    }

private:
    void begin(operation& op, int peer, std::size_t bytes, bool sends) const {
        op.peer = of->world_rank(peer);  // for messages: a transport need not keep them
        op.tag = {id, fingerprint};
        op.size = bytes;
        op.sends = sends;
        op.on_ = on;
        op.of_ = of;
        op.done_ = on->failed();
        op.waiting_ = false;
        op.status = op.done_ ? op_status::aborted : op_status::pending;
    }
};

/// An array of `count` operations, in memory of the scheduler's pool.
class operations {
public:
    explicit operations(std::size_t count) : count_(count) {
        if (count == 0) return;
        first_ = static_cast<operation*>(frame_pool::allocate(count * sizeof(operation)));
        for (std::size_t i = 0; i < count; ++i) ::new (first_ + i) operation();
    }
    operations(operations const&) = delete;
    operations& operator=(operations const&) = delete;
    ~operations() {
        for (std::size_t i = 0; i < count_; ++i) first_[i].~operation();
        if (first_ != nullptr) frame_pool::deallocate(first_, count_ * sizeof(operation));
    }
    operation& operator[](std::size_t i) noexcept { return first_[i]; }
    [[nodiscard]] std::size_t size() const noexcept { return count_; }

private:
    std::size_t count_;
    operation* first_ = nullptr;
};

/// Uninitialised memory for messages from the scheduler's pool, 64-byte aligned.
class scratch {
public:
    explicit scratch(std::size_t bytes) : bytes_(bytes), raw_(bytes == 0 ? nullptr : frame_pool::allocate(bytes + 64)) {
        auto const at = reinterpret_cast<std::uintptr_t>(raw_);
        data_ = reinterpret_cast<std::byte*>((at + 63) & ~std::uintptr_t{63});
    }
    scratch(scratch const&) = delete;
    scratch& operator=(scratch const&) = delete;
    ~scratch() {
        if (raw_ != nullptr) frame_pool::deallocate(raw_, bytes_ + 64);
    }
    [[nodiscard]] mutable_bytes bytes() const noexcept { return {data_, bytes_}; }
    template <class E>
    [[nodiscard]] std::span<E> as() const noexcept {
        return {reinterpret_cast<E*>(data_), bytes_ / sizeof(E)};
    }

private:
    std::size_t bytes_;
    void* raw_;
    std::byte* data_;
};

}  // namespace ddp
