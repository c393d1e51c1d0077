/// \file
/// What train/late_gather.hpp declares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include <ddp/train/late_gather.hpp>

namespace ddp::detail {

DDP_DECL late_gather::late_gather(scheduler_base& on, bucket_map const& buckets, frozen_buckets const& frozen,
                                  step_roots& roots, gather_source& values)
    : buckets_(buckets),
      frozen_(frozen),
      roots_(roots),
      values_(values),
      here_(buckets.count()),
      came_(buckets.count()) {
    for (std::optional<event>& one : came_) one.emplace(on);
}
DDP_DECL void late_gather::begin() noexcept {
    for (std::atomic<std::uint8_t>& one : here_) one.store(0, std::memory_order_relaxed);
    for (std::optional<event>& one : came_) one->reset();
    left_.left = 1;
}
/// Starts all at once: those that a forward pass needs first come first on each connection.
DDP_DECL void late_gather::start() {
    std::span<std::size_t const> const backward = buckets_.launch();
    left_.left += frozen_.active();
    for (std::size_t k = backward.size(); k-- > 0;)
        if (frozen_.silent()[backward[k]] == 0) roots_.start(backward[k], one(backward[k]), left_);
}
DDP_DECL task<> late_gather::made_current(std::size_t i) {
    for (std::size_t const b : buckets_.touches(i))
        if (frozen_.silent()[b] == 0) co_await *came_[b];
}
DDP_DECL task<> late_gather::one(std::size_t b) {
    co_await values_.gather(b);
    here_[b].store(1, std::memory_order_release);
    came_[b]->set();
}

}  // namespace ddp::detail
