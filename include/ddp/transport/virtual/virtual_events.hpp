/// \file
/// The events of a virtual world, in the order of their times, and a digest of those that have happened.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ddp/comm/transport.hpp>

namespace ddp::detail::virtual_net {

enum class event_kind : std::uint8_t { head, delivered, record, left, closed, timer, kill, freeze, thaw };

struct event {
    time_point when;
    std::uint64_t order;
    event_kind what;
    int rank;             // where it happens
    std::uint32_t index;  // message, record, peer or cookie
};

/// Events of one time are returned in the order in which they were added. O(log n).
class event_queue {
public:
    [[nodiscard]] bool empty() const noexcept { return heap_.empty(); }
    [[nodiscard]] time_point next() const noexcept { return heap_.front().when; }
    [[nodiscard]] std::uint64_t taken() const noexcept { return taken_; }
    [[nodiscard]] std::uint64_t trace() const noexcept { return trace_; }

    void put(time_point when, event_kind what, int rank, std::uint32_t index) {
        heap_.push_back({when, order_++, what, rank, index});
        std::push_heap(heap_.begin(), heap_.end(), later);
    }
    event take() {
        std::pop_heap(heap_.begin(), heap_.end(), later);
        event const first = heap_.back();
        heap_.pop_back();
        ++taken_;
        for (std::uint64_t const word :
             {static_cast<std::uint64_t>(first.when.time_since_epoch().count()),
              std::uint64_t{static_cast<std::uint8_t>(first.what)} << 32 | static_cast<std::uint32_t>(first.rank)})
            trace_ = (trace_ ^ (trace_ >> 29) ^ word) * 0x9e3779b97f4a7c15u;
        return first;
    }

private:
    [[nodiscard]] static bool later(event const& a, event const& b) noexcept {
        return a.when != b.when ? a.when > b.when : a.order > b.order;
    }

    std::vector<event> heap_;
    std::uint64_t order_ = 0, taken_ = 0, trace_ = 0;
};

}  // namespace ddp::detail::virtual_net
