/// \file
/// bucket_gates: when buckets may be sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ddp/comm/scheduler_base.hpp>

namespace ddp::detail {

/// The gate of a bucket opens once its gradients are final and all ranks' weights are known.
class bucket_gates {
public:
    bucket_gates(scheduler_base& on, std::size_t buckets)
        : on_(on), full_(buckets), full_since_(buckets), open_(buckets) {
        for (std::optional<event>& gate : open_) gate.emplace(on);
    }

    /// A step begins.
    void reset() noexcept {
        granted_ = false;
        for (std::uint8_t& one : full_) one = 0;
        for (std::optional<event>& gate : open_) gate->reset();
    }
    /// The gradients of bucket b are final.
    void fill(std::size_t b) noexcept {
        full_[b] = 1;
        full_since_[b] = on_.now();
        if (granted_) open_[b]->set();
    }
    /// The weights are known.
    void grant() noexcept {
        granted_ = true;
        for (std::size_t b = 0; b < full_.size(); ++b)
            if (full_[b] != 0) open_[b]->set();
    }
    [[nodiscard]] event& of(std::size_t b) noexcept { return *open_[b]; }
    [[nodiscard]] time_point full_since(std::size_t b) const noexcept { return full_since_[b]; }

private:
    scheduler_base& on_;
    bool granted_ = false;
    std::vector<std::uint8_t> full_;
    std::vector<time_point> full_since_;
    std::vector<std::optional<event>> open_;
};

}  // namespace ddp::detail
