#include <ddp/core/random.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "support/catch.hpp"

using ddp::random_stream;
using ddp::random_use;
using words = std::array<std::uint32_t, 4>;

namespace {

constexpr int draws = 100'000;

struct moments {
    double mean = 0;
    double variance = 0;
    double smallest = std::numeric_limits<double>::infinity();
    double greatest = -std::numeric_limits<double>::infinity();
};

template <class Draw>
moments moments_of(Draw draw) {
    double sum = 0, squares = 0;
    moments m;
    for (std::uint64_t i = 0; i < draws; ++i) {
        auto const x = static_cast<double>(draw(i));
        sum += x;
        squares += x * x;
        m.smallest = std::min(m.smallest, x);
        m.greatest = std::max(m.greatest, x);
    }
    m.mean = sum / draws;
    m.variance = squares / draws - m.mean * m.mean;
    return m;
}

}  // namespace

TEST_CASE("Philox4x32-10 gives the known answers of its authors' library Random123", "[core][random]") {
    CHECK(ddp::philox4x32({0, 0, 0, 0}, {0, 0}) == words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    CHECK(ddp::philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}) ==
          words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
    // The digits of pi.
    CHECK(ddp::philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
          words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
    static_assert(ddp::philox4x32({0, 0, 0, 0}, {0, 0})[0] == 0x6627e8d5);
}

TEST_CASE("seed, use, part and index each select a block of their own", "[core][random]") {
    // Documented layout: (index, part, use | part's upper bits) under the seed.
    CHECK(random_stream(0x1111111122222222, random_use::dropout, 0x666677778888).at(0x3333333344444444).words() ==
          ddp::philox4x32({0x44444444, 0x33333333, 0x77778888, 0x03006666}, {0x22222222, 0x11111111}));

    std::vector<words> blocks;
    for (std::uint64_t const seed : {0ull, 1ull, 1ull << 32, 1ull << 63})
        for (random_use const use : {random_use::shuffle, random_use::initial_values, random_use::dropout,
                                     random_use::augmentation, random_use::user})
            for (std::uint64_t const part : {0ull, 1ull, 1ull << 16, 1ull << 32, 1ull << 47})
                for (std::uint64_t const index : {0ull, 1ull, 1ull << 16, 1ull << 32, 1ull << 63})
                    blocks.push_back(random_stream(seed, use, part).at(index).words());
    REQUIRE(blocks.size() == 500);
    std::sort(blocks.begin(), blocks.end());
    CHECK(std::adjacent_find(blocks.begin(), blocks.end()) == blocks.end());

    CHECK_THROWS_WITH(
        random_stream(0, random_use::user, 1ull << 48),
        Catch::Contains("random_stream: part must be below 2^48; number epochs and parameters from zero"));
}

TEST_CASE("the upper half of a 64-bit product is right where carries meet", "[core][random]") {
    __extension__ using wide = unsigned __int128;
    constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
    for (std::uint64_t const x : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{0xffffffff}, std::uint64_t{1} << 32,
                                  std::uint64_t{0x9e3779b97f4a7c15}, most - 1, most})
        for (std::uint64_t const y : {std::uint64_t{0}, std::uint64_t{3}, std::uint64_t{0xffffffff},
                                      std::uint64_t{1} << 33, std::uint64_t{0xfedcba9876543210}, most}) {
            CAPTURE(x, y);
            CHECK(ddp::detail::multiply_high(x, y) == static_cast<std::uint64_t>(wide{x} * y >> 64));
        }
}

TEST_CASE("integers below a bound are uniform", "[core][random]") {
    random_stream const stream{42, random_use::user};
    constexpr std::size_t bound = 7;
    std::array<int, bound> seen{};
    for (std::uint64_t i = 0; i < draws; ++i) ++seen.at(static_cast<std::size_t>(stream.at(i).below(bound)));
    double const expected = double{draws} / bound;
    for (int const count : seen) CHECK(std::abs(count - expected) < 5 * std::sqrt(expected));

    CHECK(stream.at(0).below(1) == 0);
    CHECK_THROWS_WITH(
        stream.at(0).below(0),
        Catch::Contains("random_draw::below(0): there is no integer in an empty range; pass a positive bound"));
}

TEST_CASE("integers below a bound that does not divide 2^64 are rejected rather than biased", "[core][random]") {
    // Without rejection a third of the numbers below 3 * 2^62 comes twice as often as the others.
    random_stream const stream{42, random_use::user, 1};
    constexpr std::uint64_t bound = std::uint64_t{3} << 62;
    std::array<int, 3> seen{};
    for (std::uint64_t i = 0; i < draws; ++i) {
        std::uint64_t const x = stream.at(i).below(bound);
        REQUIRE(x < bound);
        ++seen.at(static_cast<std::size_t>(x % 3));
    }
    for (int const count : seen) CHECK(std::abs(count - draws / 3.0) < 5 * std::sqrt(draws / 3.0));
}

TEST_CASE("a rejected draw goes on in blocks that no other index owns", "[core][random]") {
    // Just above 2^63 nearly every second 64-bit number is refused, so that a quarter of the draws needs a second
    // block.
    random_stream const stream{3, random_use::user};
    constexpr std::uint64_t bound = (std::uint64_t{1} << 63) + 1;
    auto const halves = [](words const& w) {
        return std::array{w[0] | std::uint64_t{w[1]} << 32, w[2] | std::uint64_t{w[3]} << 32};
    };
    int retried = 0;
    for (std::uint32_t i = 0; i < 64; ++i) {
        // The published rule, spelt out: 2^64 mod bound = 2^63 - 1 low products are refused, 32-bit words (i, 0, 0, use
        // | retry).
        std::uint64_t expected = 0;
        for (std::uint32_t retry = 0; expected == 0; ++retry) {
            retried += retry == 1;
            for (std::uint64_t const x : halves(ddp::philox4x32({i, 0, 0, 0xff000000u | retry << 16}, {3, 0})))
                if (expected == 0 && x * bound >= (std::uint64_t{1} << 63) - 1)
                    expected = ddp::detail::multiply_high(x, bound);
        }
        CHECK(stream.at(i).below(bound) == expected);
    }
    CHECK(retried > 5);
}

TEMPLATE_TEST_CASE("uniform numbers fill [0, 1) evenly and never reach 1", "[core][random]", float, double) {
    random_stream const stream{7, random_use::initial_values, 2};
    moments const m = moments_of([&](auto i) { return stream.at(i).template uniform<TestType>(); });
    CHECK(m.smallest >= 0);
    CHECK(m.smallest < 1e-3);
    CHECK(m.greatest < 1);
    CHECK(m.greatest > 1 - 1e-3);
    CHECK(std::abs(m.mean - 0.5) < 5 * std::sqrt(1 / 12.0 / draws));
    CHECK(std::abs(m.variance - 1 / 12.0) < 0.002);

    // The upper bits of the words, so exactly representable: nothing was rounded, up to 1 least of all.
    auto const w = stream.at(5).words();
    if constexpr (std::is_same_v<TestType, float>)
        CHECK(stream.at(5).template uniform<float>() == std::ldexp(static_cast<float>(w[0] >> 8), -24));
    else
        CHECK(stream.at(5).template uniform<double>() ==
              std::ldexp(static_cast<double>((w[0] | std::uint64_t{w[1]} << 32) >> 11), -53));
    CHECK(stream.at(5).template symmetric<TestType>() == 2 * stream.at(5).template uniform<TestType>() - 1);
}

TEMPLATE_TEST_CASE("normal numbers have the moments and tails of the standard normal", "[core][random]", float,
                   double) {
    random_stream const stream{7, random_use::initial_values, 3};
    moments const m = moments_of([&](auto i) { return stream.at(i).template normal<TestType>(); });
    CHECK(std::abs(m.mean) < 5 / std::sqrt(double{draws}));
    CHECK(std::abs(m.variance - 1) < 5 * std::sqrt(2.0 / draws));
    CHECK(m.greatest < 8.6);
    CHECK(m.smallest > -8.6);

    double fourth = 0;
    int beyond_two = 0;
    double neighbours = 0;
    for (std::uint64_t i = 0; i < draws; ++i) {
        auto const x = static_cast<double>(stream.at(i).template normal<TestType>());
        fourth += x * x * x * x / draws;
        beyond_two += std::abs(x) > 2;
        neighbours += x * static_cast<double>(stream.at(i + 1).template normal<TestType>()) / draws;
    }
    CHECK(std::abs(fourth - 3) < 5 * std::sqrt(96.0 / draws));
    CHECK(std::abs(beyond_two / double{draws} - 0.0455) < 5 * std::sqrt(0.0455 / draws));
    CHECK(std::abs(neighbours) < 5 / std::sqrt(double{draws}));
}

TEST_CASE("drawn numbers are what they were in earlier versions", "[core][random]") {
    // A change here changes every shuffle and every initial value: it needs a reason, and a line in the release notes.
    random_stream const stream{1, random_use::initial_values, 4};
    CHECK(stream.at(9).bits() == 0x48bba8a8f5ef35c9u);
    CHECK(stream.at(9).below(1000) == 284);
    CHECK(stream.at(9).uniform<float>() == 0x1.ebde6ap-1f);
    CHECK(stream.at(9).symmetric<double>() == -0x1.ba22bab850868p-2);
    CHECK(stream.at(9).normal<float>() == Approx(-1.36426055).epsilon(1e-6));  // libm's last bit may differ
}
