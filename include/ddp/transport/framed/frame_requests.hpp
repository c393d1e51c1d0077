/// \file
/// frame_requests: messages that a peer has asked to send, and whose receives are not posted yet.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ddp/comm/transport.hpp>

namespace ddp {

/// Part of frame_inbox: in the order in which the peer has asked. Taking the oldest costs O(1).
class frame_requests {
public:
    static constexpr std::size_t max_waiting = std::size_t{1} << 20;

    frame_requests() { waiting_.reserve(64); }

    /// Stores the peer's request to send this message, with its number `serial`. Returns false if too many are waiting.
    [[nodiscard]] bool keep(identity const& id, std::uint64_t serial) {
        if (waiting_.size() - first_ >= max_waiting) return false;
        waiting_.push_back({id, serial});
        return true;
    }
    /// Removes the oldest request of this identity and returns its serial.
    [[nodiscard]] std::optional<std::uint64_t> take(identity const& id) noexcept {
        auto const found = std::find_if(waiting_.begin() + static_cast<std::ptrdiff_t>(first_), waiting_.end(),
                                        [&](request const& r) { return r.id == id; });
        if (found == waiting_.end()) return std::nullopt;
        std::uint64_t const serial = found->serial;
        forget(static_cast<std::size_t>(found - waiting_.begin()));
        return serial;
    }

private:
    struct request {
        identity id;
        std::uint64_t serial;
    };

    void forget(std::size_t at) noexcept {
        if (at != first_) {
            waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(at));
            return;
        }
        ++first_;
        if (first_ == waiting_.size() || first_ >= 4096) {  // a move for each would be O(n)
            waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(first_));
            first_ = 0;
        }
    }

    std::vector<request> waiting_;
    std::size_t first_ = 0;  // those before it were taken
};

}  // namespace ddp
