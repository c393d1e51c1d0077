/// \file
/// How long anything may take before it is a failure: every wait of the library is bounded by one of these.
#pragma once

#include <chrono>

#include <ddp/core/contract.hpp>

namespace ddp {

/// All on the transport's clock. No value may be zero: there is no "never".
struct timing {
    using milliseconds = std::chrono::milliseconds;

    milliseconds heartbeat{250};      ///< a connection on which nothing else is sent carries one this often
    milliseconds dead{3000};          ///< nothing heard for this long: the peer is silent
    milliseconds collective{120000};  ///< one wait for one peer, counted from when it is awaited
    milliseconds end_of_file{100};    ///< how long a closed connection waits for a record before it counts as a death
    milliseconds verdict{300};        ///< after a failure: how long ranks that have published no record are waited for
    milliseconds handshake{3000};     ///< per connection
    milliseconds join{30000};         ///< the whole job coming together
    milliseconds shutdown{5000};      ///< a graceful end

    /// Short times for tests: what takes seconds by default takes a fraction.
    [[nodiscard]] static timing for_tests() {
        return {.heartbeat = milliseconds{50},
                .dead = milliseconds{1500},
                .collective = milliseconds{3000},
                .handshake = milliseconds{500},
                .join = milliseconds{5000},
                .shutdown = milliseconds{1000}};
    }

    void validate() const {
        for (milliseconds const value : {heartbeat, dead, collective, end_of_file, verdict, handshake, join, shutdown})
            DDP_EXPECTS(value > milliseconds{0} && value <= std::chrono::hours{24 * 7},
                        "every time in ddp::timing must be positive and at most a week; there is no 'never'");
        DDP_EXPECTS(heartbeat * 2 <= dead,
                    "ddp::timing: dead must be at least twice heartbeat, or a healthy peer is taken for dead");
    }
};

}  // namespace ddp
