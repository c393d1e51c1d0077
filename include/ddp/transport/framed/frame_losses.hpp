/// \file
/// Which ranks have lost their connection to which others, as far as this rank knows.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <cstddef>
#include <vector>

namespace ddp {

/// After a failure, ranks report to each other which ranks they can no longer reach, so that a rank that reaches both
/// sides forwards records. Takes size * size bits, from the first loss on.
class frame_losses {
public:
    explicit frame_losses(int size) : size_(static_cast<std::size_t>(size)) {}

    /// `who` has lost `whom`. Returns whether that is news.
    bool note(int who, int whom) {
        if (lost_.empty()) lost_.resize(size_ * size_);
        std::size_t const at = index(who, whom);
        if (lost_[at]) return false;
        return lost_[at] = true;
    }
    [[nodiscard]] bool has_lost(int who, int whom) const { return !lost_.empty() && lost_[index(who, whom)]; }
    /// Whether one of the two has lost the other, so that messages between them may be lost.
    [[nodiscard]] bool severed(int a, int b) const { return has_lost(a, b) || has_lost(b, a); }

private:
    [[nodiscard]] std::size_t index(int who, int whom) const noexcept {
        return static_cast<std::size_t>(who) * size_ + static_cast<std::size_t>(whom);
    }

    std::size_t size_;
    std::vector<bool> lost_;
};

}  // namespace ddp
