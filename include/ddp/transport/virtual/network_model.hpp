/// \file
/// network_model: the properties of a simulated cluster's network.
#pragma once

#include <cstddef>
#include <cstdint>

#include <ddp/comm/transport.hpp>

namespace ddp {

/// The network between the ranks: each has a network card of its own, and the switch that joins them is never the bottleneck.
///
/// A message occupies its sender's card for overhead + size / bandwidth. After its first byte has left and `latency` (plus a
/// random part of extra_delay) has passed, it occupies the receiver's card for size / bandwidth, and then has arrived. So one
/// message alone takes overhead + latency + size / bandwidth; several use a card in the order of arrival.
struct network_model {
    nanoseconds latency{20'000};       ///< from card to card
    double bytes_per_second = 1.25e9;  ///< of each card, in each direction; this is 10 Gbit/s
    nanoseconds overhead{0};           ///< of the sender's card, per message
    nanoseconds extra_delay{0};        ///< each message is late by a random time below this; keeps order in an identity
    nanoseconds detection{1'000'000};  ///< how long after a death its peers see the connection closed
    std::size_t early_bytes = 65536;   ///< a longer message waits at its sender until a receive is posted
    std::uint64_t seed = 0;            ///< of the random delays
};

}  // namespace ddp
