#include <ddp/kernel/sum.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include <ddp/kernel/store.hpp>

#include "kernel/mixed_values.hpp"
#include "support/catch.hpp"

namespace {

/// The definition, word for word: one element, ranks [lo, hi).
template <class E>
E canonical(std::vector<std::vector<E>> const& ranks, std::size_t lo, std::size_t hi, std::size_t element) {
    if (hi - lo == 1) return ranks[lo][element];
    std::size_t left = 1;
    while (2 * left < hi - lo) left *= 2;
    E const a = canonical(ranks, lo, lo + left, element);
    E const b = canonical(ranks, lo + left, hi, element);
    return a + b;
}

template <class E>
struct summands {
    std::vector<std::vector<E>> ranks;
    std::vector<E const*> pointers;
    std::vector<E> expected;

    summands(std::size_t count, std::size_t elements) {
        test::mixed_values random(1000 * count + elements);
        for (std::size_t r = 0; r < count; ++r) ranks.push_back(random.vector<E>(elements));
        for (auto const& rank : ranks) pointers.push_back(rank.data());
        expected.resize(elements);
        for (std::size_t i = 0; i < elements; ++i) expected[i] = canonical(ranks, 0, count, i);
    }
};

}  // namespace

TEST_CASE("the canonical split is the largest power of two strictly below the count", "[kernel][sum]") {
    static_assert(ddp::canonical_split(2) == 1);
    static_assert(ddp::canonical_split(3) == 2);
    static_assert(ddp::canonical_split(4) == 2);
    static_assert(ddp::canonical_split(5) == 4);
    static_assert(ddp::canonical_split(8) == 4);
    REQUIRE(ddp::canonical_split(9) == 8);
    REQUIRE(ddp::canonical_split(1000) == 512);
}

TEMPLATE_TEST_CASE("sum_tree gives the canonical tree's bits for any number of ranks", "[kernel][sum]", float, double) {
    for (std::size_t ranks = 1; ranks <= 35; ++ranks)
        for (std::size_t const elements : {0u, 1u, 7u, 8u, 63u, 64u, 511u, 512u, 513u, 1000u}) {
            CAPTURE(ranks, elements);
            summands<TestType> const given(ranks, elements);
            std::vector<TestType> out(elements, TestType(-7));
            ddp::sum_tree(std::span(out), std::span(given.pointers));
            REQUIRE(test::same_bits(out, given.expected));
        }
}

TEMPLATE_TEST_CASE("sum_tree gives the canonical tree's bits for large arrays", "[kernel][sum]", float, double) {
    auto const ranks = GENERATE(2u, 7u, 8u, 9u, 17u);
    CAPTURE(ranks);
    summands<TestType> const given(ranks, 100'000);
    std::vector<TestType> out(100'000);
    ddp::sum_tree(std::span(out), std::span(given.pointers));
    REQUIRE(test::same_bits(out, given.expected));
}

TEMPLATE_TEST_CASE("sum_tree may write into any one of its sources", "[kernel][sum]", float, double) {
    for (std::size_t const ranks : {1u, 2u, 3u, 5u, 8u, 9u, 12u, 17u})
        for (std::size_t own = 0; own < ranks; ++own)
            for (std::size_t const elements : {1u, 100u, 1300u}) {
                CAPTURE(ranks, own, elements);
                summands<TestType> given(ranks, elements);
                ddp::sum_tree(std::span(given.ranks[own]), std::span(given.pointers));
                REQUIRE(test::same_bits(given.ranks[own], given.expected));
            }
}

TEMPLATE_TEST_CASE("sum_tree_scaled is sum_tree, then scale, to the bit", "[kernel][sum]", float, double) {
    auto const factor = static_cast<TestType>(1.0 / 193.0);
    for (std::size_t const ranks : {1u, 2u, 3u, 6u, 7u, 9u, 13u})
        for (std::size_t const elements : {0u, 1u, 63u, 1000u}) {
            CAPTURE(ranks, elements);
            summands<TestType> given(ranks, elements);
            std::vector<TestType> two_steps(elements);
            ddp::sum_tree(std::span(two_steps), std::span(given.pointers));
            ddp::scale(std::span(two_steps), factor);
            std::vector<TestType> by_hand = given.expected;
            for (TestType& value : by_hand) value = value * factor;
            ddp::sum_tree_scaled(std::span(given.ranks[0]), std::span(given.pointers), factor);
            REQUIRE(test::same_bits(given.ranks[0], two_steps));
            REQUIRE(test::same_bits(given.ranks[0], by_hand));
        }
}

TEMPLATE_TEST_CASE("a range summed in pieces has the bits of the whole", "[kernel][sum]", float, double) {
    auto const ranks = GENERATE(3u, 8u, 11u);
    CAPTURE(ranks);
    summands<TestType> const given(ranks, 3001);
    test::mixed_values random(ranks);
    std::vector<TestType> out(3001);
    for (std::size_t begin = 0; begin < out.size();) {
        std::size_t const count = std::min(out.size() - begin, 1 + random.below(97));
        std::vector<TestType const*> sources;
        for (TestType const* const source : given.pointers) sources.push_back(source + begin);
        ddp::sum_tree(std::span(out).subspan(begin, count), std::span(sources));
        begin += count;
    }
    REQUIRE(test::same_bits(out, given.expected));
}

TEMPLATE_TEST_CASE("add adds, in place too", "[kernel][sum]", float, double) {
    for (std::size_t const elements : {0u, 1u, 7u, 64u, 1001u}) {
        CAPTURE(elements);
        summands<TestType> const given(2, elements);
        std::vector<TestType> out(elements);
        ddp::add(std::span(out), std::span(given.ranks[0]), std::span(given.ranks[1]));
        REQUIRE(test::same_bits(out, given.expected));

        std::vector<TestType> left = given.ranks[0];
        ddp::add(std::span(left), std::span(left), std::span(given.ranks[1]));
        REQUIRE(test::same_bits(left, given.expected));

        std::vector<TestType> right = given.ranks[1];
        ddp::add(std::span(right), std::span(given.ranks[0]), std::span(right));
        REQUIRE(test::same_bits(right, given.expected));

        std::vector<TestType> doubled = given.ranks[0];
        ddp::add(std::span(doubled), std::span(doubled), std::span(doubled));
        std::vector<TestType> expected = given.ranks[0];
        for (TestType& value : expected) value = 2 * value;
        REQUIRE(test::same_bits(doubled, expected));
    }
}

TEST_CASE("sums show NaN and infinity", "[kernel][sum]") {
    std::vector<float> a(20, 1.0F);
    std::vector<float> b(20, 2.0F);
    a[3] = std::numeric_limits<float>::quiet_NaN();
    a[17] = std::numeric_limits<float>::infinity();
    b[18] = -std::numeric_limits<float>::infinity();
    std::vector<float const*> const sources{a.data(), b.data()};
    std::vector<float> out(20);
    ddp::sum_tree(std::span(out), std::span(sources));
    REQUIRE(std::isnan(out[3]));
    REQUIRE(out[17] == std::numeric_limits<float>::infinity());
    REQUIRE(out[18] == -std::numeric_limits<float>::infinity());
    REQUIRE(out[19] == 3.0F);
}

TEST_CASE("a sum over no ranks and spans of different lengths are refused", "[kernel][sum]") {
    std::vector<float> out(3);
    REQUIRE_THROWS_WITH(ddp::sum_tree(std::span(out), std::span<float const* const>{}),
                        Catch::Contains("a tree needs at least one source; over no ranks it has no value"));
    REQUIRE_THROWS_WITH(ddp::add(std::span(out), std::span(out), std::span(out).first(2)),
                        Catch::Contains("needs three spans of one length"));
    REQUIRE_THROWS_WITH(ddp::stream(std::span(out), std::span<float const>(out).first(2)),
                        Catch::Contains("stream: both spans must have one length"));
}
