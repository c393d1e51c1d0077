#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ddp/testing/check_model.hpp>

#include "../examples/text/attention.hpp"
#include "../examples/text/transformer.hpp"
#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

namespace {

constexpr transformer_shape tiny{.vocabulary = 5, .time = 4, .width = 6, .heads = 2, .blocks = 2};

/// Two windows of four tokens and one of three.
struct tokens {
    std::vector<double> ids{0, 4, 1, 1, /**/ 3, 2, 2, 0, /**/ 4, 4, 3};
    std::vector<std::uint32_t> next{4, 1, 1, 3, /**/ 2, 2, 0, 4, /**/ 4, 3, 1};

    [[nodiscard]] classification_batch<double> batch() const {
        return {.inputs = ids, .labels = next, .rows = ids.size(), .features = 1};
    }
};

}  // namespace

TEST_CASE("attention's gradients are the slopes of its result", "[nn][gradient]") {
    auto const heads = GENERATE(std::size_t{1}, std::size_t{3});
    auto const time = GENERATE(std::size_t{1}, std::size_t{4});
    CAPTURE(heads, time);
    causal_attention<double> layer(6, heads, time);
    REQUIRE(test::worst_gradient_error(layer, 1, 18) < 1e-8);
    REQUIRE(test::worst_gradient_error(layer, 8, 18) < 1e-8);
    REQUIRE(test::worst_gradient_error(layer, 11, 18) < 1e-8);  // the last window is shorter
}

TEST_CASE("attention is the mean of the past's values, weighted by how their keys meet the query", "[nn]") {
    causal_attention<double> layer(2, 1, 3);
    std::vector<double> const x{1, 0, 5,  5, 10, 20,   // query, key, value
                                1, 1, 1,  0, 30, 40,   //
                                0, 2, -1, 1, 50, 60};  //
    auto const y = layer.forward(nn::as_matrix(std::span<double const>(x), 3, 6), {});
    REQUIRE(y(0, 0) == 10);
    REQUIRE(y(0, 1) == 20);
    double const a = std::exp(10 / std::sqrt(2.0)), b = std::exp(1 / std::sqrt(2.0));
    REQUIRE(y(1, 0) == Approx((a * 10 + b * 30) / (a + b)).epsilon(1e-12));
    double const c = std::exp(10 / std::sqrt(2.0)), d = std::exp(0), e = std::exp(2 / std::sqrt(2.0));
    REQUIRE(y(2, 1) == Approx((c * 20 + d * 40 + e * 60) / (c + d + e)).epsilon(1e-12));
}

TEST_CASE("attention refuses what it cannot share out", "[nn][bad-input]") {
    REQUIRE(test::usage_complaint([] { causal_attention<float>(10, 3, 4); }).find("10 does not divide among 3 heads") !=
            std::string::npos);
    REQUIRE(test::usage_complaint([] { causal_attention<float>(10, 0, 4); }).find("10 does not divide among 0 heads") !=
            std::string::npos);
    REQUIRE(test::usage_complaint([] { causal_attention<float>(10, 2, 0); }).find("windows of no tokens") !=
            std::string::npos);
    causal_attention<float> layer(4, 2, 3);
    std::vector<float> const x(8);
    REQUIRE(test::usage_complaint([&] {
                layer.forward(nn::as_matrix(std::span<float const>(x), 2, 4), {});
            }).find("12 numbers, not 4") != std::string::npos);
}

TEST_CASE("the transformer keeps what every model promises", "[nn][gradient]") {
    transformer<double> model(tiny);
    model.initialize(3);
    tokens const t;
    auto const batch = t.batch();
    CAPTURE(testing::check_model(model, batch));
    REQUIRE(testing::check_model(model, batch).empty());
}

TEST_CASE("the transformer's predictions do not know the future, nor other windows", "[nn]") {
    transformer<double> model(tiny);
    tokens const t;
    auto const before = [&](std::vector<double> const& ids) {
        auto const z = model.logits(ids);
        return std::vector<double>(z.data(), z.data() + z.size());
    };
    std::vector<double> const z = before(t.ids);
    std::vector<double> ids = t.ids;
    ids[6] = 4;  // in the second window, at place 2
    std::vector<double> const other = before(ids);
    for (std::size_t row = 0; row < ids.size(); ++row) {
        CAPTURE(row);
        bool const same = std::equal(z.begin() + static_cast<std::ptrdiff_t>(5 * row),
                                     z.begin() + static_cast<std::ptrdiff_t>(5 * row + 5),
                                     other.begin() + static_cast<std::ptrdiff_t>(5 * row));
        REQUIRE(same == (row != 6 && row != 7));
    }
}

TEST_CASE("the transformer's evaluation agrees with its loss, and a rank without windows has gradients of 0", "[nn]") {
    transformer<double> model(tiny);
    tokens const t;
    double const loss = model.forward(t.batch());
    nn::evaluation const sums = model.evaluate(t.batch());
    REQUIRE(sums.weight == 11);
    REQUIRE(sums.loss() == Approx(loss).epsilon(1e-14));
    REQUIRE(model.evaluate({.inputs = {}, .labels = {}, .rows = 0, .features = 1}).weight == 0);

    model.forward(t.batch());
    model.backward({}, [](std::size_t) {});
    REQUIRE(model.forward({.inputs = {}, .labels = {}, .rows = 0, .features = 1}) == 0);
    std::size_t reports = 0;
    model.backward({.scale = 3}, [&](std::size_t) { ++reports; });
    REQUIRE(reports == model.parameters().size());
    for (auto const& p : model.parameters()) {
        CAPTURE(p.name);
        REQUIRE(std::all_of(p.gradient.begin(), p.gradient.end(), [](double g) { return g == 0; }));
    }
}
