/// \file
/// The oracle itself, against sums written out by hand.
#include <ddp/collective/reference.hpp>

#include <ddp/kernel/sum.hpp>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"

TEST_CASE("the reference adds as the canonical tree does, shown by hand", "[collective][reference]") {
    // 2^24 + 1 is no float: each order of these gives another sum.
    float const big = 16777216.0f;
    std::vector<std::vector<float>> const terms{{big}, {1}, {1}, {1}, {-big}, {1}, {1}};
    auto const first = [&](std::size_t ranks) {
        return ddp::reference_sum(
            std::vector<std::vector<float>>(terms.begin(), terms.begin() + std::ptrdiff_t(ranks)));
    };
    CHECK(first(1)[0] == big);
    CHECK(first(2)[0] == big);                           // big + 1 rounds back
    CHECK(first(3)[0] == big);                           // (big + 1) + 1
    CHECK(first(4)[0] == big + 2);                       // (big + 1) + (1 + 1)
    CHECK(first(5)[0] == 2);                             // four + -big
    CHECK(first(6)[0] == (big + 2) + (-big + 1));        // four + (-big + 1)
    CHECK(first(7)[0] == (big + 2) + ((-big + 1) + 1));  // four + ((-big + 1) + 1)
}

TEST_CASE("the reference and the kernel agree though they share no code", "[collective][reference]") {
    for (int ranks = 1; ranks <= 40; ++ranks) {
        CAPTURE(ranks);
        auto const terms = ddp::test::addends<float>(ddp::test::values::mixed, 3, ranks, 100);
        std::vector<float const*> sources;
        for (auto const& t : terms) sources.push_back(t.data());
        std::vector<float> kernel(100);
        ddp::sum_tree(std::span<float>(kernel), sources);
        CHECK(ddp::test::compare(kernel, ddp::reference_sum(terms)) == "");
    }
}

TEST_CASE("the reference refuses addends of different lengths and none at all", "[collective][reference]") {
    CHECK_THROWS_WITH(ddp::reference_sum(std::vector<std::vector<float>>{}),
                      Catch::Contains("reference_reduce needs at least one rank's array"));
    CHECK_THROWS_WITH(ddp::reference_sum(std::vector<std::vector<float>>{{1}, {1, 2}}),
                      Catch::Contains("reference_reduce needs arrays of one length"));
}
