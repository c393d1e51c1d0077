/// \file
/// Specified randomness: every number is a pure function of (seed, use, part, index), on every rank and platform.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <numbers>

#include <ddp/core/contract.hpp>
#include <ddp/core/math.hpp>

namespace ddp {

/// Philox4x32-10: maps a 128-bit counter to 128 random bits under a 64-bit key; for one key it is a bijection.
/// Cost: 20 32-bit multiplications, no memory, and calls with different counters run side by side in the pipeline.
/// Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
[[nodiscard]] constexpr std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                                std::array<std::uint32_t, 2> key) noexcept {
    for (int round = 0; round < 10; ++round) {
        std::uint64_t const a = std::uint64_t{0xD2511F53u} * counter[0];
        std::uint64_t const b = std::uint64_t{0xCD9E8D57u} * counter[2];
        counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
                   static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
        key[0] += 0x9E3779B9u;  // golden ratio
        key[1] += 0xBB67AE85u;  // sqrt(3) - 1
    }
    return counter;
}

/// What random numbers are used for. Streams of different uses share no counter, so one seed serves a whole program.
/// The values are part of the format: changing one changes every result that was ever drawn with it.
enum class random_use : std::uint8_t {
    shuffle = 1,         ///< part: epoch; index: position in the shuffle
    initial_values = 2,  ///< part: parameter; index: element
    dropout = 3,         ///< part: step and layer; index: global sample and element
    augmentation = 4,    ///< part: epoch; index: sample
    compression = 5,     ///< part: parameter or bucket; index: step and element
    user = 255,          ///< the caller's own
};

namespace detail {

/// The upper half of the 128-bit product, without a 128-bit type (ISO C++ has none).
[[nodiscard]] constexpr std::uint64_t multiply_high(std::uint64_t x, std::uint64_t y) noexcept {
    std::uint64_t const xl = x & 0xffffffffu, xh = x >> 32, yl = y & 0xffffffffu, yh = y >> 32;
    std::uint64_t const low = xl * yl;
    std::uint64_t const middle = xh * yl + (low >> 32);            // at most 2^64 - 2^32: no overflow
    std::uint64_t const other = xl * yh + (middle & 0xffffffffu);  // nor here
    return xh * yh + (middle >> 32) + (other >> 32);
}

}  // namespace detail

/// The 128 random bits of one index of a stream, in the form that you ask for. All functions read the same bits: use
/// each index with only one of them.
class random_draw {
public:
    constexpr random_draw(std::array<std::uint32_t, 2> key, std::array<std::uint32_t, 4> counter) noexcept
        : key_(key), counter_(counter) {}

    /// Four words of 32 random bits each.
    [[nodiscard]] constexpr std::array<std::uint32_t, 4> words() const noexcept { return philox4x32(counter_, key_); }

    /// 64 random bits: word 0 is the lower half, word 1 the upper.
    [[nodiscard]] constexpr std::uint64_t bits() const noexcept { return low(words()); }

    /// A uniform integer in [0, bound), without bias: multiply and reject (Lemire, "Fast random integer generation in
    /// an interval", ACM TOMACS 29(1), 2019). A rejected draw takes the block's other 64 bits, then a block of its own
    /// retry number, so that draws at other indices do not change. bound must be positive.
    [[nodiscard]] constexpr std::uint64_t below(std::uint64_t bound) const {
        DDP_EXPECTS(bound > 0, "random_draw::below(0): there is no integer in an empty range; pass a positive bound");
        std::array<std::uint32_t, 4> counter = counter_;
        for (int retry = 0;; ++retry) {
            std::array<std::uint32_t, 4> const block = philox4x32(counter, key_);
            for (std::uint64_t const x : {low(block), high(block)}) {
                // 2^64 mod bound values of x are one too many. The first test saves the division nearly always.
                if (x * bound >= bound || x * bound >= (std::uint64_t{0} - bound) % bound)
                    return detail::multiply_high(x, bound);
                if (retry == 255) return detail::multiply_high(x, bound);  // 511 refusals at odds below one half each
            }
            counter[3] += 1u << 16;
        }
    }

    /// Uniform in [0, 1): a multiple of 2^-24 (float) or 2^-53 (double), hence exact and never 1.
    template <std::floating_point E>
    [[nodiscard]] constexpr E uniform() const noexcept {
        static_assert(std::same_as<E, float> || std::same_as<E, double>, "drawn as float or double");
        if constexpr (std::same_as<E, float>)
            return static_cast<float>(words()[0] >> 8) * 0x1p-24f;
        else
            return static_cast<double>(bits() >> 11) * 0x1p-53;
    }

    /// Uniform in [-1, 1). Exact, whether or not the compiler fuses operations: for initial values write
    /// `bound * draw.symmetric<E>()`, which rounds once; `low + (high - low) * u` depends on the compiler.
    template <std::floating_point E>
    [[nodiscard]] constexpr E symmetric() const noexcept {
        return E{2} * uniform<E>() - E{1};
    }

    /// Standard normal, by Box and Muller ("A note on the generation of random normal deviates", Ann. Math. Stat. 29,
    /// 1958), computed in double and rounded once to E; |value| < 8.6. The only draw that uses the platform's libm (log
    /// and cos): the same bits where libms agree, and in float nearly always even if not. Ranks with different libms
    /// still start with equal values, because rank 0 sends the initial values.
    template <std::floating_point E>
    [[nodiscard]] E normal() const noexcept {
        std::array<std::uint32_t, 4> const block = words();
        double const u = static_cast<double>((low(block) >> 11) + 1) * 0x1p-53;  // (0, 1]: its logarithm is finite
        double const v = static_cast<double>(high(block) >> 11) * 0x1p-53;       // [0, 1)
        return static_cast<E>(detail::square_root(-2.0 * detail::logarithm(u)) *
                              detail::cosine_of(2.0 * std::numbers::pi * v));
    }

private:
    static constexpr std::uint64_t low(std::array<std::uint32_t, 4> const& w) noexcept {
        return w[0] | std::uint64_t{w[1]} << 32;
    }
    static constexpr std::uint64_t high(std::array<std::uint32_t, 4> const& w) noexcept {
        return w[2] | std::uint64_t{w[3]} << 32;
    }

    std::array<std::uint32_t, 2> key_;
    std::array<std::uint32_t, 4> counter_;
};

/// 2^64 independent draws, each reached directly: `random_stream{seed, random_use::shuffle, epoch}.at(i).below(n)`.
///
/// `part` (below 2^48) distinguishes the streams of one use: the epoch of a shuffle, the parameter that is initialised.
/// Key and counter hold all of (seed, use, part, index) side by side, without hashing: different arguments never share
/// a block. The rank is not an argument: random numbers must not depend on how many processes compute them.
class random_stream {
public:
    constexpr random_stream(std::uint64_t seed, random_use use, std::uint64_t part = 0)
        : key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)},
          part_low_(static_cast<std::uint32_t>(part)),
          use_and_part_(static_cast<std::uint32_t>(use) << 24 | static_cast<std::uint32_t>(part >> 32)) {
        DDP_EXPECTS(part >> 48 == 0, "random_stream: part must be below 2^48; number epochs and parameters from zero");
    }

    [[nodiscard]] constexpr random_draw at(std::uint64_t index) const noexcept {
        // Bits 16 to 23 of the last word are below()'s retry number.
        return {key_,
                {static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), part_low_, use_and_part_}};
    }

private:
    std::array<std::uint32_t, 2> key_;
    std::uint32_t part_low_;
    std::uint32_t use_and_part_;
};

}  // namespace ddp
