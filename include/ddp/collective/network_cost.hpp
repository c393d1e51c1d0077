/// \file
/// network_cost: what the ways to add over ranks cost, as far as a few constants tell.
#pragma once

#include <bit>
#include <cstddef>

namespace ddp {

/// A network and the processors at its ends, in microseconds. Who adds chooses by it among algorithms of the same bits, so
/// it never shows in a result. All ranks need the same one: where their choices differ, that is an error which names both.
///
/// The defaults are what TCP on loopback was measured to need (docs/performance.md), in_memory() what measure_network found
/// between two ranks of one host with a core each. For others: measure_network.
/// Source  the model of Hockney (1994) with the time of posting from LogP (Culler et al., 1993), for the algorithms of
///         Thakur, Rabenseifner and Gropp, 2005.
struct network_cost {
    double message = 8;      ///< from one rank's send to the other's receive, for a few bytes
    double post = 2;         ///< of it, what a rank that sends many messages at once needs for each
    double byte = 0.2e-3;    ///< for each byte of a message
    double addition = 5e-5;  ///< for each byte that is added

    /// Of ranks of one host whose messages go through memory.
    [[nodiscard]] static constexpr network_cost in_memory() noexcept {
        return {.message = 1, .post = 0.6, .byte = 1e-4, .addition = 1.5e-5};
    }

    /// Of recursive_doubling_allreduce over `ranks` >= 2.
    [[nodiscard]] double doubling(std::size_t bytes, int ranks) const noexcept {
        return steps(ranks) * (message + size(bytes) * (byte + addition));
    }
    /// Of direct_allreduce.
    [[nodiscard]] double direct(std::size_t bytes, int ranks) const noexcept {
        double const others = ranks - 1, share = others / ranks;
        return 2 * (message + others * post) + size(bytes) * share * (2 * byte + addition);
    }
    /// Of halving_doubling_allreduce.
    [[nodiscard]] double halving(std::size_t bytes, int ranks) const noexcept {
        double const share = static_cast<double>(ranks - 1) / ranks;
        return 2 * steps(ranks) * message + size(bytes) * (2 * share * byte + addition);
    }
    friend bool operator==(network_cost const&, network_cost const&) = default;

private:
    /// Exchanges one after the other, with two more where the number of ranks is no power of two.
    [[nodiscard]] static double steps(int ranks) noexcept {
        unsigned const count = static_cast<unsigned>(ranks);
        return static_cast<double>(std::bit_width(count) - 1) + (std::has_single_bit(count) ? 0 : 2);
    }
    [[nodiscard]] static double size(std::size_t bytes) noexcept { return static_cast<double>(bytes); }
};

}  // namespace ddp
