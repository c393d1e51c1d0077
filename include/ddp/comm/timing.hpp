/// \file
/// timing: how long anything may take before it is a failure. Every wait of the library is bounded by one of these times; a
/// long_operation of another rank extends a wait for a peer, up to its own limit.
#pragma once

#include <chrono>
#include <utility>

#include <ddp/core/contract.hpp>
#include <ddp/core/text.hpp>

namespace ddp {

/// How long anything may take before it is a failure, in milliseconds on the transport's clock. Each is above zero and at most
/// a week, and `dead` is at least twice `heartbeat`; otherwise making a communicator throws usage_error.
struct timing {
    using milliseconds = std::chrono::milliseconds;

    milliseconds heartbeat{250};  ///< how often a connection on which nothing else is sent carries a heartbeat
    milliseconds suspect{1000};   ///< a peer silent for so long is named on stderr (TCP, MPI with threads); no failure
    milliseconds dead{3000};      ///< a peer from which nothing has come for this long is silent (DDP-E203)
    milliseconds collective{120000};  ///< limit for one wait for one peer, from its start (DDP-E204)
    milliseconds straggler{5000};     ///< a wait this long is reported on stderr, with the late ranks; no failure
    milliseconds end_of_file{100};    ///< a peer that closed without a record this long ago is dead (DDP-E202)
    milliseconds verdict{300};        ///< after a failure: how long ranks that have published no record are waited for
    milliseconds handshake{3000};     ///< limit for one connection, during start-up
    milliseconds join{30000};         ///< until all ranks of the job have met (DDP-E201)
    milliseconds shutdown{5000};      ///< in a clean exit: how long a rank that leaves waits for its peers

    /// Shorter times, for tests of failures: heartbeat 50 ms, suspect 0.75 s, dead 1.5 s, collective and straggler 3 s,
    /// handshake 0.5 s, join 5 s, shutdown 1 s.
    [[nodiscard]] static timing for_tests() {
        return {.heartbeat = milliseconds{50},
                .suspect = milliseconds{750},
                .dead = milliseconds{1500},
                .collective = milliseconds{3000},
                .straggler = milliseconds{3000},
                .handshake = milliseconds{500},
                .join = milliseconds{5000},
                .shutdown = milliseconds{1000}};
    }

    /// Throws usage_error if the times make no sense.
    void validate() const {
        using named = std::pair<char const*, milliseconds>;
        for (auto const& [name, value] :
             {named{"heartbeat", heartbeat}, named{"suspect", suspect}, named{"dead", dead},
              named{"collective", collective}, named{"straggler", straggler}, named{"end_of_file", end_of_file},
              named{"verdict", verdict}, named{"handshake", handshake}, named{"join", join},
              named{"shutdown", shutdown}})
            DDP_EXPECTS(value > milliseconds{0} && value <= std::chrono::hours{24 * 7},
                        detail::concat({"ddp::timing::", name, " is ", value.count(),
                                        " ms, but every time must be positive and at most a week; there is no "
                                        "'never'"}));
        DDP_EXPECTS(heartbeat * 2 <= dead,
                    detail::concat({"ddp::timing: dead, ", dead.count(), " ms, must be at least twice heartbeat, ",
                                    heartbeat.count(), " ms, or a healthy peer is taken for dead"}));
    }
};

}  // namespace ddp
