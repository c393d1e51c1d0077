#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <ddp/nn/nn.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

namespace {

nn::matrix_view<double> looked_up(nn::embedding<double>& layer, std::vector<double> const& ids, std::size_t tokens) {
    return layer.forward(nn::as_matrix(std::span<double const>(ids), ids.size() / tokens, tokens), {});
}

}  // namespace

TEST_CASE("embedding puts the vectors of a sample's ids side by side", "[nn]") {
    nn::embedding<double> layer(5, 3, 2);
    REQUIRE(layer.parameters()[0].name() == "weight");
    REQUIRE(layer.parameters()[0].shape() == std::vector<std::size_t>{5, 3});
    std::span<double> const w = layer.parameters()[0].value();
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<double>(i);
    auto const y = looked_up(layer, {4, 0, 1, 4}, 2);
    REQUIRE(std::vector<double>(y.data(), y.data() + y.size()) ==
            std::vector<double>{12, 13, 14, 0, 1, 2, 3, 4, 5, 12, 13, 14});
}

TEST_CASE("embedding's gradient is the slope of its result, for ids that come more than once too", "[nn][gradient]") {
    nn::sequential net{nn::embedding<double>(6, 4, 3), nn::layer_norm<double>(12), nn::gelu<double>(),
                       nn::linear<double>(12, 2), nn::mean_squared_error<double>()};
    net.initialize(2);
    std::vector<double> const ids{1, 5, 1, /**/ 0, 2, 5}, targets = test::random_numbers<double>(4, 1);
    regression_batch<double> const batch{.inputs = ids, .targets = targets, .rows = 2, .features = 3};
    for (auto const& p : net.parameters()) std::fill(p.gradient.begin(), p.gradient.end(), std::nan(""));
    net.forward(batch);
    net.backward({}, [](std::size_t) {});
    for (auto const& p : net.parameters())
        for (std::size_t i = 0; i < p.value.size(); ++i)
            REQUIRE(std::abs(test::slope(p.value[i], [&] { return net.forward(batch); }) - p.gradient[i]) < 1e-8);
    net.forward(batch);
    net.backward({.accumulate = true}, [](std::size_t) {});
    auto const table = net.parameters()[0];
    for (std::size_t i = 0; i < table.value.size(); ++i)
        REQUIRE(2 * test::slope(table.value[i], [&] { return net.forward(batch); }) ==
                Approx(table.gradient[i]).margin(1e-8));
}

TEST_CASE("embedding's first values are standard normal", "[nn][random]") {
    nn::embedding<double> layer(100, 100);
    layer.initialize(3, 4);
    random_stream const draws{3, random_use::initial_values, 4};
    double sum = 0, squares = 0;
    for (double const v : layer.parameters()[0].value()) {
        sum += v;
        squares += v * v;
    }
    REQUIRE(layer.parameters()[0].value()[7] == draws.at(7).normal<double>());
    REQUIRE(sum / 1e4 == Approx(0).margin(0.05));
    REQUIRE(squares / 1e4 == Approx(1).margin(0.07));
}

TEST_CASE("embedding names an id that is not in the vocabulary", "[nn][bad-input]") {
    nn::embedding<double> layer(5, 3, 2);
    auto const said = [&](std::vector<double> const& ids) {
        return test::usage_complaint([&] { looked_up(layer, ids, 2); });
    };
    REQUIRE(said({0, 4, 1, 2}).empty());
    REQUIRE(said({0, 1, 2, 5}).find("the id 5 at row 1, position 1 of the batch is not a whole number in [0, 5)") !=
            std::string::npos);
    REQUIRE(said({0, 1, -1, 2}).find("the id -1 at row 1, position 0") != std::string::npos);
    REQUIRE(said({0.5, 1}).find("the id 0.5 at row 0") != std::string::npos);
    REQUIRE(said({std::numeric_limits<double>::quiet_NaN(), 1}).find("the id nan at row 0") != std::string::npos);
    REQUIRE(said({std::numeric_limits<double>::infinity(), 1}).find("the id inf at row 0") != std::string::npos);
    REQUIRE(
        test::usage_complaint([&] {
            looked_up(layer, {1, 2, 3}, 3);
        }).find("embedding: samples have 3 ids, the layer was made for 2; pass that number as its third argument") !=
        std::string::npos);
    REQUIRE(test::usage_complaint([] {
                nn::embedding<float>(0, 3);
            }).find("embedding: vocabulary, width and tokens are positive numbers") != std::string::npos);
    REQUIRE(test::usage_complaint([] {
                nn::embedding<float>(std::size_t{1} << 40, 3);
            }).find("a vocabulary of 1099511627776 has ids that the batch's numbers cannot hold; use double") !=
            std::string::npos);
    REQUIRE(test::usage_complaint([] {
                nn::sequential net{nn::linear(2, 2), nn::embedding(5, 3, 2), nn::softmax_cross_entropy()};
                std::vector<float> const zeros(2);
                std::vector<std::uint32_t> const label{0};
                for (auto const& p : net.parameters())
                    if (p.name[0] == '0') std::fill(p.value.begin(), p.value.end(), 0.0f);
                net.forward(classification_batch<float>{zeros, label, 1, 2});
                net.backward({}, [](std::size_t) {});
            }).find("embedding: ids have no gradient, so no layer before this one can learn; make it the first") !=
            std::string::npos);
}
