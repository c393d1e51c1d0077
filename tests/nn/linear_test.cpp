#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/core/random.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/slice_reports.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

namespace {

std::vector<double> copy(std::span<double const> values) {
    return {values.begin(), values.end()};
}

/// Gradients of both parameters, one behind the other.
std::vector<double> gradients(nn::linear<double>& layer) {
    std::vector<double> all;
    for (auto const& p : layer.parameters()) all.insert(all.end(), p.gradient().begin(), p.gradient().end());
    return all;
}

}  // namespace

TEST_CASE("linear's gradients are the slopes of its result", "[nn][gradient]") {
    auto const [rows, inputs, outputs] = GENERATE(
        table<std::size_t, std::size_t, std::size_t>({{1, 1, 1}, {1, 5, 3}, {4, 3, 1}, {5, 3, 4}, {19, 33, 17}}));
    CAPTURE(rows, inputs, outputs);
    nn::linear<double> layer(inputs, outputs);
    REQUIRE(test::worst_gradient_error(layer, rows, inputs) < 1e-8);
}

TEST_CASE("linear multiplies by the weight, stored output by output, and adds the bias", "[nn]") {
    nn::linear<float> layer(3, 2);
    std::span<float> const w = layer.parameters()[0].value(), b = layer.parameters()[1].value();
    std::vector<float> const weight{1, 2, 3, 4, 5, 6}, bias{10, 20}, x{1, 1, 1, 1, 0, -1};
    std::copy(weight.begin(), weight.end(), w.begin());
    std::copy(bias.begin(), bias.end(), b.begin());
    auto const y = layer.forward(nn::as_matrix(std::span<float const>(x), 2, 3), {});
    REQUIRE(std::vector<float>(y.data(), y.data() + y.size()) == std::vector<float>{16, 35, 8, 18});
}

TEST_CASE("linear assigns its gradients over whatever was there, or adds to it", "[nn]") {
    auto const outputs = GENERATE(std::size_t{2}, std::size_t{40});  // below and above where Eigen's GEMM begins
    std::size_t const rows = 6, inputs = 30;
    nn::linear<double> layer(inputs, outputs);
    auto const x = test::random_numbers<double>(rows * inputs, 3);
    auto dy = test::random_numbers<double>(rows * outputs, 4);
    auto const back = [&](nn::backward_mode mode) {
        layer.forward(nn::as_matrix(std::span<double const>(x), rows, inputs), {});
        layer.backward(nn::as_matrix(std::span<double>(dy), rows, outputs), mode);
        return gradients(layer);
    };
    for (auto& p : layer.parameters()) std::fill(p.gradient().begin(), p.gradient().end(), std::nan(""));
    auto const once = back({});
    for (double const g : once) REQUIRE(std::isfinite(g));
    REQUIRE(back({}) == once);
    auto const twice = back({.accumulate = true});
    for (std::size_t i = 0; i < once.size(); ++i) REQUIRE(twice[i] == Approx(2 * once[i]).epsilon(1e-13));
}

TEST_CASE("linear on no rows has no result, gradients of zero, and adds nothing", "[nn]") {
    nn::linear<double> layer(4, 3);
    for (auto& p : layer.parameters()) std::fill(p.gradient().begin(), p.gradient().end(), 7.0);
    auto const none = nn::as_matrix(std::span<double>(), 0, 3);
    REQUIRE(layer.forward(nn::as_matrix(std::span<double const>(), 0, 4), {}).size() == 0);
    layer.backward(none, {.accumulate = true});
    REQUIRE(gradients(layer) == std::vector<double>(15, 7.0));
    layer.backward(none, {});
    REQUIRE(gradients(layer) == std::vector<double>(15, 0.0));
}

TEST_CASE("linear's initial values depend on seed, parameter and element alone", "[nn][random]") {
    nn::linear<double> a(16, 8), b(16, 8), wider(16, 9);
    a.initialize(5, 2);
    b.initialize(6, 2);
    REQUIRE(copy(a.parameters()[0].value()) != copy(b.parameters()[0].value()));
    b.initialize(5, 4);
    REQUIRE(copy(a.parameters()[0].value()) != copy(b.parameters()[0].value()));
    b.initialize(5, 2);
    REQUIRE(copy(a.parameters()[0].value()) == copy(b.parameters()[0].value()));
    REQUIRE(copy(a.parameters()[1].value()) == copy(b.parameters()[1].value()));
    wider.initialize(5, 2);  // more elements leave the first ones what they were
    REQUIRE(copy(a.parameters()[0].value()) == copy(wider.parameters()[0].value().first(16 * 8)));

    random_stream const draws{5, random_use::initial_values, 3};
    for (std::size_t i = 0; i < 8; ++i) REQUIRE(a.parameters()[1].value()[i] == 0.25 * draws.at(i).symmetric<double>());
}

TEST_CASE("linear starts with values of the deviation that keeps signals in range", "[nn][random]") {
    nn::linear<float> layer(100, 100);
    double squares = 0;
    float largest = 0;
    for (float const v : layer.parameters()[0].value()) {
        squares += double(v) * double(v);
        largest = std::max(largest, std::abs(v));
    }
    REQUIRE(largest <= 0.1f);
    REQUIRE(std::sqrt(squares / 10000) == Approx(0.1 / std::sqrt(3.0)).epsilon(0.03));
}

TEST_CASE("linear refuses samples of another width, and widths of zero", "[nn][bad-input]") {
    nn::linear<float> layer(4, 3);
    std::vector<float> const x(10);
    REQUIRE_THROWS_WITH(
        layer.forward(nn::as_matrix(std::span<float const>(x), 2, 5), {}),
        Catch::Contains("linear(4, 3) was given samples of 5 features: pass that number as its first argument"));
    REQUIRE_THROWS_WITH(nn::linear<float>(0, 3),
                        Catch::Contains("linear: inputs or outputs is 0; both must be at least 1"));
    REQUIRE_THROWS_WITH(nn::linear<float>(3, 0),
                        Catch::Contains("linear: inputs or outputs is 0; both must be at least 1"));
}

TEST_CASE("a layer for which there is no memory says how large it is", "[nn]") {
    std::size_t const huge = std::size_t{1} << 62;  // the product of two is 0 in 64 bits
    for (auto const& [inputs, outputs, size] :
         {std::tuple{std::size_t{784}, std::size_t{1'000'000'000'000}, "takes 3.14e+06 GB"},
          std::tuple{huge, huge, "takes 8.51e+28 GB"}, std::tuple{huge, std::size_t{1}, "takes 1.84e+10 GB"}}) {
        std::string text;
        try {
            nn::linear<float> const layer(inputs, outputs);
        } catch (usage_error const& e) {
            text = e.what();
        }
        CAPTURE(text);
        REQUIRE(text.find("a layer's 'weight' of " + std::to_string(outputs) + " x " + std::to_string(inputs)) !=
                std::string::npos);
        REQUIRE(text.find(size) != std::string::npos);
    }
}

namespace {

/// Bits of both gradients of a layer (inputs, outputs) at `rows` random samples. `bytes`: of a slice; 0: as a whole. What is
/// reported has to be final, and all of it, each element once.
template <class E>
std::vector<E> gradients_in_slices(std::size_t rows, std::size_t inputs, std::size_t outputs, bool accumulate,
                                   std::size_t bytes, std::size_t& reports) {
    nn::linear<E> layer(inputs, outputs);
    auto const x = test::random_numbers<E>(rows * inputs, 3);
    auto dy = test::random_numbers<E>(rows * outputs, 4);
    for (auto& p : layer.parameters())
        std::ranges::copy(test::random_numbers<E>(p.size(), 5 + p.size()), p.gradient().begin());
    layer.forward(nn::as_matrix(std::span<E const>(x), rows, inputs), {});
    std::vector<E> reported[2];
    std::size_t left[2];
    for (std::size_t p : {0u, 1u}) {
        left[p] = layer.parameters()[p].size();
        reported[p].assign(left[p], E(-1e9));
    }
    auto const report = [&](std::size_t p, std::size_t first, std::size_t count) {
        std::span<E const> const now = layer.parameters()[p].gradient().subspan(first, count);
        std::ranges::copy(now, reported[p].begin() + static_cast<std::ptrdiff_t>(first));
        left[p] = first + count == left[p] ? first : std::size_t{1} << 40;
        ++reports;
    };
    nn::slice_reports slices(bytes, report);
    layer.backward(nn::as_matrix(std::span<E>(dy), rows, outputs),
                   {.accumulate = accumulate, .slices = bytes == 0 ? nullptr : &slices});
    std::vector<E> all;
    for (std::size_t p : {0u, 1u}) {
        auto const gradient = layer.parameters()[p].gradient();
        if (slices.used() && left[p] != 0) return {};
        if (slices.used()) all.insert(all.end(), reported[p].begin(), reported[p].end());
        if (!slices.used()) all.insert(all.end(), gradient.begin(), gradient.end());
    }
    return all;
}

}  // namespace

TEMPLATE_TEST_CASE("linear's gradient in slices has the bits of the whole, whatever the shape", "[nn]", float, double) {
    random_stream const draws{23, random_use::user};
    std::uint64_t drawn = 0;
    std::size_t sliced = 0, whole = 0;
    auto const check = [&](std::size_t rows, std::size_t inputs, std::size_t outputs, std::size_t bytes) {
        for (bool const accumulate : {false, true}) {
            CAPTURE(rows, inputs, outputs, bytes, accumulate);
            std::size_t none = 0, reports = 0;
            auto const plain = gradients_in_slices<TestType>(rows, inputs, outputs, accumulate, 0, none);
            auto const parts = gradients_in_slices<TestType>(rows, inputs, outputs, accumulate, bytes, reports);
            REQUIRE(none == 0);
            REQUIRE(parts.size() == plain.size());
            REQUIRE(std::memcmp(parts.data(), plain.data(), plain.size() * sizeof(TestType)) == 0);
            ++(reports > 2 ? sliced : whole);
        }
    };
    for (int tries = 0; tries < 60; ++tries) {
        auto const below = [&](std::uint64_t n) { return static_cast<std::size_t>(draws.at(drawn++).below(n)); };
        std::size_t const outputs = 1 + below(tries % 4 == 0 ? 400 : 90), inputs = 1 + below(tries % 3 == 0 ? 300 : 60);
        check(1 + below(tries % 5 == 0 ? 500 : 70), inputs, outputs, 1 + below(20'000));
    }
    check(1, 4, 64, 1);  // so small that Eigen takes its GEMM just about
    check(1, 3, 64, 1);  // or not
    check(3, 1, 400, 1);
    check(5, 1000, 17, 1);
    check(600, 40, 300, 1);  // sums so long that Eigen blocks them
    REQUIRE(sliced > 40);
    REQUIRE(whole > 10);
}

TEST_CASE("linear reports slices of about the size that is asked for, the bias first, and no single row", "[nn]") {
    nn::linear<float> layer(64, 100);  // rows of 256 bytes
    std::vector<float> const x(64);
    std::vector<float> dy(100);
    std::vector<std::array<std::size_t, 3>> got;
    auto const report = [&](std::size_t p, std::size_t first, std::size_t count) { got.push_back({p, first, count}); };
    nn::slice_reports slices(32 * 256 + 255, report);
    layer.forward(nn::as_matrix(std::span<float const>(x), 1, 64), {});
    layer.backward(nn::as_matrix(std::span<float>(dy), 1, 100), {.slices = &slices});
    REQUIRE(got == std::vector<std::array<std::size_t, 3>>{
                       {1, 0, 100}, {0, 64 * 64, 36 * 64}, {0, 32 * 64, 32 * 64}, {0, 0, 32 * 64}});
    got.clear();
    nn::slice_reports large(100 * 256, report);  // then nothing is gained
    layer.backward(nn::as_matrix(std::span<float>(dy), 1, 100), {.slices = &large});
    REQUIRE(got.empty());
    REQUIRE(!large.used());
}
