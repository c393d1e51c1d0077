/// \file
/// counting_transport: any transport, with a count of what this rank sends.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include <ddp/comm/communication_thread.hpp>
#include <ddp/comm/transport.hpp>

namespace ddp::test {

/// Messages and bytes, as posted: empty messages are messages.
struct traffic {
    std::size_t messages = 0;
    std::size_t bytes = 0;
    friend bool operator==(traffic const&, traffic const&) = default;
};

template <Transport Inner>
class counting_transport {
public:
    explicit counting_transport(std::unique_ptr<Inner> inner) : inner_(std::move(inner)) {}

    /// Since the last call.
    traffic take_sent() noexcept { return std::exchange(sent_, {}); }

    [[nodiscard]] int rank() const noexcept { return inner_->rank(); }
    [[nodiscard]] int size() const noexcept { return inner_->size(); }
    void post_send(int peer, tag what, const_bytes out, completion& done) {
        ++sent_.messages;
        sent_.bytes += out.size();
        inner_->post_send(peer, what, out, done);
    }
    void post_receive(int peer, tag what, mutable_bytes in, completion& done) {
        inner_->post_receive(peer, what, in, done);
    }
    bool progress(time_point until) { return inner_->progress(until); }
    void abort(failure const& record) { inner_->abort(record); }
    [[nodiscard]] std::span<report const> reports() const { return inner_->reports(); }
    void wake() { inner_->wake(); }
    [[nodiscard]] time_point now() const { return inner_->now(); }

    [[nodiscard]] bool may_own_thread() const { return ddp::may_own_thread(*inner_); }
    [[nodiscard]] bool shares_cores() const { return ddp::shares_cores(*inner_); }
    void pace(nanoseconds least)
        requires requires(Inner& inner) { inner.pace(least); }
    {
        inner_->pace(least);
    }
    [[nodiscard]] time_point next_timer() const
        requires TimedTransport<Inner>
    {
        return inner_->next_timer();
    }
    [[nodiscard]] std::optional<int> overdue_peer() const
        requires WatchfulTransport<Inner>
    {
        return inner_->overdue_peer();
    }
    [[nodiscard]] time_point last_heard(int peer) const
        requires WatchfulTransport<Inner>
    {
        return inner_->last_heard(peer);
    }
    [[nodiscard]] mark mark_of(int peer) const
        requires WatchfulTransport<Inner>
    {
        return inner_->mark_of(peer);
    }
    void entered(mark const& mine)
        requires WatchfulTransport<Inner>
    {
        inner_->entered(mine);
    }

protected:
    std::unique_ptr<Inner> inner_;

private:
    traffic sent_;
};

}  // namespace ddp::test
