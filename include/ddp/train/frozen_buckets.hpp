/// \file
/// frozen_buckets: which parameters are frozen, and which buckets are therefore not exchanged.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ddp/train/bucket.hpp>

namespace ddp::detail {

/// Changes between steps only.
class frozen_buckets {
public:
    frozen_buckets(std::size_t parameters, std::size_t buckets)
        : frozen_(parameters), silent_(buckets), active_(buckets) {}

    /// `frozen`: by parameter, not 0 where it is.
    void set(std::span<std::uint8_t const> frozen, bucket_map const& buckets) {
        frozen_.assign(frozen.begin(), frozen.end());
        any_ = std::ranges::any_of(frozen_, [](std::uint8_t one) { return one != 0; });
        std::ranges::fill(silent_, std::uint8_t{any_});
        for (std::size_t i = 0; i < frozen_.size(); ++i)
            if (frozen_[i] == 0)
                for (std::size_t const b : buckets.touches(i)) silent_[b] = 0;
        active_ = static_cast<std::size_t>(std::ranges::count(silent_, std::uint8_t{0}));
    }
    [[nodiscard]] bool any() const noexcept { return any_; }
    [[nodiscard]] bool operator[](std::size_t i) const noexcept { return frozen_[i] != 0; }
    /// By bucket: not 0 if all of its parameters are frozen, so that it is not exchanged.
    [[nodiscard]] std::span<std::uint8_t const> silent() const noexcept { return silent_; }
    /// The number of buckets that are exchanged.
    [[nodiscard]] std::size_t active() const noexcept { return active_; }

private:
    std::vector<std::uint8_t> frozen_, silent_;
    bool any_ = false;
    std::size_t active_;
};

}  // namespace ddp::detail
