/// \file
/// silences: the line about a peer from which nothing has come for timing.suspect, and how often that was so.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <algorithm>
#include <bit>
#include <chrono>
#include <string>
#include <string_view>

#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

/// The silences of one peer, as a transport that listens to it counts them.
class silences {
public:
    /// Something has come from the peer.
    void end() noexcept { told_ = false; }
    /// How many silences there have been.
    [[nodiscard]] unsigned count() const noexcept { return count_; }
    /// Nothing has come since `heard`. If that is as long as timing.suspect and two heartbeats, counts the silence once, and
    /// returns a line about it for the first, the second, the fourth, and so on; otherwise returns nothing. `who` is the
    /// peer's process; before `from` nothing counts, because this rank did not listen, or the peer was known to live.
    [[nodiscard]] std::string told(int rank, int peer, std::string_view who, time_point at, time_point heard,
                                   time_point from, timing const& times) {
        nanoseconds const least = std::max(times.suspect, 2 * times.heartbeat);
        if (told_ || least >= times.dead || at - std::max(heard, from) < least) return {};
        told_ = true;
        if (!std::has_single_bit(++count_)) return {};
        auto const seconds = [](nanoseconds time) {
            auto const tenths = std::chrono::duration_cast<std::chrono::milliseconds>(time).count() / 100;
            return concat({tenths / 10, ".", tenths % 10, " s"});
        };
        return concat({"ddp: rank ", rank, " has heard nothing from rank ", peer, who.empty() ? "" : " (", who,
                       who.empty() ? "" : ")", " for ", seconds(at - heard), " (silence number ", count_,
                       " of at least ", seconds(least), "). After ", seconds(times.dead),
                       " (timing.dead) the job fails\n"});
    }

private:
    unsigned count_ = 0;
    bool told_ = false;
};

/// The rank that prints the lines about a peer: the lowest of the others.
[[nodiscard]] constexpr int teller_of(int peer) noexcept {
    return peer == 0 ? 1 : 0;
}

}  // namespace ddp::detail
