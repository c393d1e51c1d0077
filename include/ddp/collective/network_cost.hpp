/// \file
/// network_cost: what algorithms for sums over ranks cost, in a model with a few constants.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <bit>
#include <cstddef>

namespace ddp {

/// Constants of a network and of the processors that it connects, in microseconds. automatic_allreduce uses them to
/// choose among algorithms that give the same bits, so they never change a result. All ranks must use the same constants:
/// if choices differ, every rank throws comm_error with both (DDP-E205, or DDP-E102 while a trainer is being made).
///
/// The defaults are measurements of TCP on loopback (docs/performance.md); those of in_memory() were measured between two ranks
/// of one host with a core each. measure_network gives those of other networks.
///
/// Source  the model of Hockney (1994) with the time for posting from LogP (Culler et al., 1993), for the algorithms of
///         Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005.
struct network_cost {
    double message = 7;      ///< from one rank's send to the other's receive, for a few bytes
    double post = 4;         ///< the part of `message` that a rank sending many messages at once needs for each
    double byte = 0.2e-3;    ///< for each byte of a message
    double addition = 5e-5;  ///< for each byte that is added

    /// The constants of ranks of one host whose messages go through memory.
    [[nodiscard]] static constexpr network_cost in_memory() noexcept {
        return {.message = 1, .post = 0.6, .byte = 1e-4, .addition = 1.5e-5};
    }

    /// Microseconds that recursive_doubling_allreduce takes for `bytes` bytes over `ranks` >= 2.
    [[nodiscard]] double doubling(std::size_t bytes, int ranks) const noexcept {
        return steps(ranks) * (message + size(bytes) * (byte + addition));
    }
    /// The same for direct_allreduce.
    [[nodiscard]] double direct(std::size_t bytes, int ranks) const noexcept {
        double const others = ranks - 1, share = others / ranks;
        return 2 * (message + others * post) + size(bytes) * share * (2 * byte + addition);
    }
    /// The same for halving_doubling_allreduce: between two ranks its messages are those of direct_allreduce, and where `ranks`
    /// is no power of two some rank sends all data twice.
    [[nodiscard]] double halving(std::size_t bytes, int ranks) const noexcept {
        if (ranks == 2) return direct(bytes, ranks);
        double const share = std::has_single_bit(static_cast<unsigned>(ranks)) ? (ranks - 1.0) / ranks : 1;
        return 2 * steps(ranks) * message + size(bytes) * share * (2 * byte + addition);
    }
    /// The same for a reduction to slices and a gathering of slices by halving_doubling_allreduce, each of which also moves slices
    /// between the ranks that have added them and their owners.
    [[nodiscard]] double halving_to_slices(std::size_t bytes, int ranks) const noexcept {
        return halving(bytes, ranks) + 2 * (message + size(bytes) / ranks * byte);
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
