#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/nn/loss.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

namespace {

template <class E>
auto view(std::vector<E> const& z, std::size_t rows) {
    return nn::as_matrix(std::span<E const>(z), rows, z.size() / rows);
}

template <class Loss, class Batch>
double worst_loss_gradient_error(Loss& loss, std::vector<double> z, std::size_t rows, Batch const& batch) {
    double const factor = 0.75;
    auto const value = [&] { return factor * loss.forward(view(z, rows), batch); };
    value();
    auto const dz = loss.backward(factor);
    std::vector<double> const said(dz.data(), dz.data() + dz.size());
    double worst = 0;
    for (std::size_t i = 0; i < z.size(); ++i) worst = std::max(worst, std::abs(test::slope(z[i], value) - said[i]));
    return worst;
}

template <class Loss, class Batch>
std::string refusal(Loss& loss, std::vector<double> const& z, std::size_t rows, Batch const& batch) {
    try {
        loss.forward(view(z, rows), batch);
    } catch (usage_error const& error) {
        return error.what();
    }
    return {};
}

struct signed_batch {
    std::vector<int> labels;
};

}  // namespace

TEST_CASE("the losses' gradients are their slopes", "[nn][gradient]") {
    auto const rows = GENERATE(std::size_t{1}, std::size_t{6});
    std::size_t const outputs = 5;
    auto const z = test::random_numbers<double>(rows * outputs, 1),
               targets = test::random_numbers<double>(rows * outputs, 2);
    std::vector<std::uint32_t> labels(rows);
    for (std::size_t r = 0; r < rows; ++r) labels[r] = static_cast<std::uint32_t>(r * 3 % outputs);

    nn::softmax_cross_entropy<double> entropy;
    REQUIRE(worst_loss_gradient_error(entropy, z, rows, classification_batch<double>{{}, labels, rows, 0}) < 1e-8);
    nn::mean_squared_error<double> squares;
    REQUIRE(worst_loss_gradient_error(squares, z, rows, regression_batch<double>{{}, targets, rows, 0}) < 1e-8);
}

TEST_CASE("cross-entropy of even odds is the logarithm of the number of classes", "[nn]") {
    nn::softmax_cross_entropy<float> loss;
    std::vector<std::uint32_t> const labels{0, 3};
    REQUIRE(loss.forward(view(std::vector<float>(8, 1.5f), 2), classification_batch<float>{{}, labels, 2, 0}) ==
            Approx(2 * std::log(4.0)));
}

TEST_CASE("cross-entropy survives outputs that no exponential would", "[nn]") {
    nn::softmax_cross_entropy<float> loss;
    std::vector<std::uint32_t> const labels{0, 1};
    std::vector<float> const z{1000, 0, 1000, -1000};
    REQUIRE(loss.forward(view(z, 2), classification_batch<float>{{}, labels, 2, 0}) == Approx(2000.0));
    auto const dz = loss.backward(1);
    REQUIRE(std::vector<float>(dz.data(), dz.data() + 4) == std::vector<float>{0, 0, 1, -1});
}

TEST_CASE("a NaN among the outputs makes the loss NaN and the row wrong", "[nn]") {
    nn::softmax_cross_entropy<double> loss;
    auto const position = GENERATE(std::size_t{0}, std::size_t{1}, std::size_t{2});
    std::vector<double> z{3, 1, 2};
    z[position] = std::numeric_limits<double>::quiet_NaN();
    std::vector<std::uint32_t> const labels{0};
    classification_batch<double> const batch{{}, labels, 1, 0};
    REQUIRE(std::isnan(loss.forward(view(z, 1), batch)));
    REQUIRE(loss.correct(view(z, 1), batch) == 0);
}

TEST_CASE("a row is right when its label has the largest output, the first among equals", "[nn]") {
    nn::softmax_cross_entropy<double> const loss;
    std::vector<double> const z{1, 2, 0, /**/ 5, 5, 1, /**/ 5, 5, 1, /**/ 0, 0, 9};
    std::vector<std::uint32_t> const labels{1, 0, 1, 2};
    REQUIRE(loss.correct(view(z, 4), classification_batch<double>{{}, labels, 4, 0}) == 3);
}

TEST_CASE("a row is right within the top few when fewer outputs come before its label's", "[nn]") {
    std::vector<double> const z{9, 8, 7, 6, /**/ 5, 5, 5, 5, /**/ 5, 5, 5, 5, /**/ 1, 2, 3, 4};
    std::vector<std::uint32_t> const labels{2, 1, 2, 0};
    classification_batch<double> const batch{{}, labels, 4, 0};
    auto const within = [&](std::size_t top) {
        return nn::softmax_cross_entropy<double>(top).correct_in_top(view(z, 4), batch);
    };
    REQUIRE(within(1) == nn::softmax_cross_entropy<double>().correct(view(z, 4), batch));
    REQUIRE(within(1) == 0);
    REQUIRE(within(2) == 1);
    REQUIRE(within(3) == 3);
    REQUIRE(within(4) == 4);
    REQUIRE(within(5) == 4);
    std::vector<double> odd{9, std::nan(""), 7, 6};
    std::vector<std::uint32_t> const second{1}, first{0};
    nn::softmax_cross_entropy<double> const two(2), all(9);
    REQUIRE(all.correct_in_top(view(odd, 1), classification_batch<double>{{}, second, 1, 0}) == 0);
    REQUIRE(two.correct_in_top(view(odd, 1), classification_batch<double>{{}, first, 1, 0}) == 1);
    REQUIRE_THROWS_WITH(
        nn::softmax_cross_entropy<double>(0),
        Catch::Contains("softmax_cross_entropy: no label is among the 0 largest outputs; pass 1 or more"));
}

TEST_CASE("a label outside the classes is refused with its position and value", "[nn][bad-input]") {
    nn::softmax_cross_entropy<double> loss;
    std::vector<double> const z(9);
    auto const high = refusal(loss, z, 3, signed_batch{{0, 2, 3}});
    REQUIRE(high.find("label 3 at position 2") != std::string::npos);
    auto const low = refusal(loss, z, 3, signed_batch{{0, -1, 2}});
    REQUIRE(low.find("label -1 at position 1") != std::string::npos);
    REQUIRE(refusal(loss, z, 3, signed_batch{{0, 1}})
                .find("softmax_cross_entropy: 3 samples have 2 labels; give each sample one") != std::string::npos);
    REQUIRE(refusal(loss, z, 3, signed_batch{{0, 1, 2}}).empty());
}

TEST_CASE("mean squared error averages over outputs, and wants a target for each", "[nn]") {
    nn::mean_squared_error<double> loss;
    std::vector<double> const z{1, 2, 3, 4}, targets{1, 0, 0, 0}, short_of_one{1, 0, 0};
    REQUIRE(loss.forward(view(z, 2), regression_batch<double>{{}, targets, 2, 0}) == 14.5);
    auto const said = refusal(loss, z, 2, regression_batch<double>{{}, short_of_one, 2, 0});
    REQUIRE(said.find("mean_squared_error: 2 samples of 2 outputs have 3 targets; give each output one") !=
            std::string::npos);
}
