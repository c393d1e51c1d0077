#include <ddp/kernel/norm.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "kernel/mixed_values.hpp"
#include "support/catch.hpp"

namespace {

double canonical(std::span<double const> values) {
    if (values.empty()) return 0;
    if (values.size() == 1) return values[0];
    std::size_t left = 1;
    while (2 * left < values.size()) left *= 2;
    double const a = canonical(values.first(left));
    double const b = canonical(values.subspan(left));
    return a + b;
}

/// The documented order of one block: lane i mod 16, in order of i, then the canonical tree over the lanes.
template <class E>
double block_by_hand(std::span<E const> block) {
    std::vector<double> lanes(16);
    for (std::size_t i = 0; i < block.size(); ++i) {
        double const square = static_cast<double>(block[i]) * static_cast<double>(block[i]);
        double const volatile rounded = square;  // no contraction in the test either
        lanes[i % 16] = lanes[i % 16] + rounded;
    }
    return canonical(lanes);
}

template <class E>
std::vector<double> squares(std::span<E const> piece) {
    std::vector<double> out(ddp::norm_blocks(piece.size()), -1.0);
    ddp::block_squares(piece, std::span(out));
    return out;
}

}  // namespace

TEST_CASE("tree_sum has the shape of the canonical tree", "[kernel][norm]") {
    for (std::size_t count = 0; count <= 200; ++count) {
        CAPTURE(count);
        auto const values = test::mixed_values(count).vector<double>(count);
        REQUIRE(ddp::tree_sum(values) == canonical(values));
    }
    auto const many = test::mixed_values(5).vector<double>(9001);
    REQUIRE(ddp::tree_sum(many) == canonical(many));
}

TEST_CASE("the number of blocks rounds up", "[kernel][norm]") {
    STATIC_REQUIRE(ddp::norm_blocks(0) == 0);
    STATIC_REQUIRE(ddp::norm_blocks(1) == 1);
    STATIC_REQUIRE(ddp::norm_blocks(4096) == 1);
    STATIC_REQUIRE(ddp::norm_blocks(4097) == 2);
}

TEMPLATE_TEST_CASE("block squares are summed in the documented order", "[kernel][norm]", float, double) {
    auto const elements = GENERATE(0u, 1u, 7u, 15u, 16u, 17u, 1000u, 4095u, 4096u, 4097u, 20000u);
    CAPTURE(elements);
    auto const values = test::mixed_values(elements).vector<TestType>(elements);
    std::span<TestType const> const all(values);
    auto const sums = squares(all);
    double plain = 0;
    for (std::size_t b = 0; b < sums.size(); ++b) {
        auto const block = all.subspan(b * 4096, std::min<std::size_t>(4096, elements - b * 4096));
        REQUIRE(sums[b] == block_by_hand(block));
        for (TestType const x : block) plain += static_cast<double>(x) * static_cast<double>(x);
    }
    REQUIRE(ddp::tree_sum(sums) == Approx(plain).epsilon(1e-12));
}

TEMPLATE_TEST_CASE("pieces cut at blocks give the sums of the whole", "[kernel][norm]", float, double) {
    auto const values = test::mixed_values(3).vector<TestType>(5 * 4096 + 77);
    std::span<TestType const> const all(values);
    auto const whole = squares(all);
    std::vector<double> pieces;
    for (std::size_t const cut : {2u, 3u, 5u}) {
        std::size_t const begin = pieces.size() * 4096;
        auto const part = squares(all.subspan(begin, cut * 4096 - begin));
        pieces.insert(pieces.end(), part.begin(), part.end());
    }
    auto const rest = squares(all.subspan(pieces.size() * 4096));
    pieces.insert(pieces.end(), rest.begin(), rest.end());
    REQUIRE(test::same_bits(pieces, whole));
}

TEST_CASE("squares of floats neither overflow nor vanish", "[kernel][norm]") {
    std::vector<float> const large(100, 1e30F);
    REQUIRE(squares(std::span(large)).front() == Approx(1e62));
    std::vector<float> const small(100, 1e-30F);
    REQUIRE(squares(std::span(small)).front() == Approx(1e-58));
}

TEMPLATE_TEST_CASE("norms show NaN and infinity", "[kernel][norm]", float, double) {
    for (std::size_t const place : {0u, 15u, 16u, 99u}) {
        std::vector<TestType> values(100, TestType(1));
        values[place] = std::numeric_limits<TestType>::quiet_NaN();
        REQUIRE(std::isnan(squares(std::span<TestType const>(values)).front()));
        values[place] = -std::numeric_limits<TestType>::infinity();
        REQUIRE(squares(std::span<TestType const>(values)).front() == std::numeric_limits<double>::infinity());
    }
    std::vector<double> const sums{1.0, std::numeric_limits<double>::quiet_NaN(), 2.0};
    REQUIRE(std::isnan(ddp::tree_sum(sums)));
}

TEST_CASE("block_squares refuses the wrong number of results", "[kernel][norm]") {
    std::vector<float> const values(5000);
    std::vector<double> out(1);
    REQUIRE_THROWS_WITH(ddp::block_squares(std::span(values), std::span(out)),
                        Catch::Contains("block_squares needs one result a block: norm_blocks(piece.size()) of them"));
}
