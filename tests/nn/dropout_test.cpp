#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/train/data_parallel.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"

using namespace ddp;

namespace {

std::vector<float> mask_of(nn::dropout<float>& layer, std::size_t rows, std::size_t columns, nn::forward_mode mode) {
    std::vector<float> const ones(rows * columns, 1.0f);
    auto const y = layer.forward(nn::as_matrix(std::span<float const>(ones), rows, columns), mode);
    return {y.data(), y.data() + y.size()};
}

}  // namespace

TEST_CASE("dropout's gradient is the slope of its result", "[nn][gradient]") {
    nn::dropout<double> layer(0.4);
    std::vector<std::uint32_t> const samples{5, 2, 9};
    REQUIRE(test::worst_gradient_error(layer, 3, 17, {.samples = samples}) < 1e-8);
    REQUIRE(test::worst_gradient_error(layer, 6, 17, {.samples = samples}) < 1e-8);
    REQUIRE(test::worst_gradient_error(layer, 3, 17, {.training = false}) < 1e-8);
}

TEST_CASE("what dropout leaves out is what its page says", "[nn][random]") {
    nn::dropout<float> layer(0.25);
    std::vector<std::uint32_t> const samples{7, 4000000000u};
    nn::forward_mode const mode{.seed = 11, .step = 12, .layer = 3, .samples = samples};
    auto const mask = mask_of(layer, 2, 10, mode);
    random_stream const draws{11, random_use::dropout, std::uint64_t{3} << 36 | 12};
    for (std::size_t s = 0; s < 2; ++s)
        for (std::size_t i = 0; i < 10; ++i) {
            auto const word = draws.at(std::uint64_t{samples[s]} << 32 | i / 4).words()[i % 4];
            REQUIRE(mask[10 * s + i] == (word < 0x40000000u ? 0.0f : static_cast<float>(1 / 0.75)));
        }
}

TEST_CASE("dropout depends on seed, step, layer and sample, and on nothing else", "[nn][random]") {
    nn::dropout<float> layer(0.5);
    std::vector<std::uint32_t> const both{3, 8}, turned{8, 3}, alone{8};
    auto const first = mask_of(layer, 2, 40, {.seed = 1, .step = 2, .layer = 3, .samples = both});
    auto const of_three = std::vector<float>(first.begin(), first.begin() + 40);
    auto const of_eight = std::vector<float>(first.begin() + 40, first.end());
    REQUIRE(of_three != of_eight);
    REQUIRE(mask_of(layer, 1, 40, {.seed = 1, .step = 2, .layer = 3, .samples = alone}) == of_eight);
    auto const second = mask_of(layer, 2, 40, {.seed = 1, .step = 2, .layer = 3, .samples = turned});
    REQUIRE(std::vector<float>(second.begin(), second.begin() + 40) == of_eight);
    REQUIRE(std::vector<float>(second.begin() + 40, second.end()) == of_three);
    REQUIRE(mask_of(layer, 2, 20, {.seed = 1, .step = 2, .layer = 3, .samples = alone}) == of_eight);  // rows of tokens

    REQUIRE(mask_of(layer, 2, 40, {.seed = 2, .step = 2, .layer = 3, .samples = both}) != first);
    REQUIRE(mask_of(layer, 2, 40, {.seed = 1, .step = 3, .layer = 3, .samples = both}) != first);
    REQUIRE(mask_of(layer, 2, 40, {.seed = 1, .step = 2, .layer = 4, .samples = both}) != first);
}

TEST_CASE("dropout leaves out as many as it should, and keeps the mean", "[nn][random]") {
    auto const p = GENERATE(0.1, 0.5, 0.9);
    nn::dropout<float> layer(p);
    std::vector<std::uint32_t> samples(100);
    std::iota(samples.begin(), samples.end(), 0u);
    auto const mask = mask_of(layer, 100, 1001, {.samples = samples});
    double out = 0, sum = 0;
    for (float const m : mask) {
        out += m == 0.0f ? 1 : 0;
        sum += double(m);
    }
    auto const n = static_cast<double>(mask.size());
    REQUIRE(std::abs(out / n - p) < 5 * std::sqrt(p * (1 - p) / n));
    REQUIRE(sum / n == Approx(1).margin(5 * std::sqrt(p / (1 - p) / n)));
}

TEST_CASE("dropout does nothing in evaluation, nor with a probability of 0", "[nn]") {
    nn::dropout<float> layer(0.5), nothing(0);
    auto const x = test::random_numbers<float>(30, 1);
    auto const expected = [&] {
        auto all = x;
        auto const dy = test::random_numbers<float>(30, 2);
        all.insert(all.end(), dy.begin(), dy.end());
        return all;
    }();
    std::vector<std::uint32_t> const samples{1, 2, 3};
    REQUIRE(test::pass_through(layer, x, 3, {}, {.samples = samples}) != expected);
    REQUIRE(test::pass_through(layer, x, 3, {}, {.training = false}) == expected);
    REQUIRE(test::pass_through(nothing, x, 3) == expected);
    REQUIRE(test::same_in_place(layer, 3, 10, {.samples = samples}));
    REQUIRE(test::same_in_place(layer, 3, 10, {.training = false}));
}

TEST_CASE("dropout wants to know the samples", "[nn][bad-input]") {
    nn::sequential net{nn::linear<double>(4, 3), nn::dropout<double>(), nn::mean_squared_error<double>()};
    auto const inputs = test::random_numbers<double>(20, 1), targets = test::random_numbers<double>(15, 2);
    std::vector<std::uint32_t> const samples{0, 1, 2, 3, 4};
    regression_batch<double> batch{.inputs = inputs, .targets = targets, .rows = 5, .features = 4};
    REQUIRE(test::usage_complaint([&] { net.forward(batch); }).find("Give the batch `samples`") != std::string::npos);
    REQUIRE(net.evaluate(batch).weight == 5);
    net.training(false);
    REQUIRE(net.forward(batch) > 0);
    net.training(true);
    batch.samples = samples;
    REQUIRE(net.forward(batch) > 0);
    batch.samples = std::span(samples).first(4);
    REQUIRE(test::usage_complaint([&] { net.forward(batch); }).find("names 4 samples for 5 rows") != std::string::npos);
    nn::dropout<float> layer;  // by itself: rows of tokens, as many for each sample
    REQUIRE(test::usage_complaint([&] { mask_of(layer, 6, 2, {.samples = std::span(samples).first(2)}); }).empty());
    REQUIRE(
        test::usage_complaint([&] {
            mask_of(layer, 5, 2, {.samples = std::span(samples).first(2)});
        }).find("dropout: 5 rows are not a whole number for each of 2 samples; give `samples` one number a sample") !=
        std::string::npos);
    for (double const p : {-0.1, 1.0, std::nan("")})
        REQUIRE_THROWS_WITH(nn::dropout<float>(p), Catch::Contains("): a probability of leaving out is in [0, 1)"));
}

namespace {

/// The values after 25 steps on batches of 13, the first of each step's two parts accumulated now and then.
template <class Comm>
std::vector<double> train_with_dropout(Comm& comm) {
    test::task_data<double> const data(7, 3, 64);
    nn::sequential model{nn::dropout<double>(0.1), nn::linear<double>(7, 24), nn::tanh<double>(),
                         nn::dropout<double>(0.5), nn::linear<double>(24, 3), nn::mean_squared_error<double>()};
    model.initialize(9);
    data_parallel trainer{model, sgd{.lr = 0.1, .momentum = 0.9}, comm};
    std::vector<std::uint32_t> numbers(64);
    std::iota(numbers.begin(), numbers.end(), 0u);
    auto const rows = [&](std::size_t begin, std::size_t end) {
        auto const part = data.batch(begin, end);
        return regression_batch<double>{.inputs = part.x,
                                        .targets = part.y,
                                        .rows = part.rows,
                                        .features = 7,
                                        .samples = std::span(numbers).subspan(begin, end - begin)};
    };
    for (std::size_t step = 0; step < 25; ++step) {
        auto const [begin, end] = test::share(13, step, comm.rank(), comm.size());
        if (step % 3 == 1) {
            std::size_t const middle = (begin + end) / 2;
            trainer.forward(rows(step + begin, step + middle));
            trainer.accumulate();
            trainer.forward(rows(step + middle, step + end));
            trainer.backward();
            trainer.finish();
        } else {
            trainer.step(rows(step + begin, step + end));
        }
        if (!trainer.replicas_identical()) return {};
    }
    std::vector<double> values;
    for (auto const& p : trainer.parameters()) values.insert(values.end(), p.value.begin(), p.value.end());
    return values;
}

}  // namespace

TEST_CASE("several ranks leave out the same units of a sample as one", "[nn][random]") {
    auto const [ranks, tcp] = GENERATE(test::ways_to_run());
    CAPTURE(ranks, tcp);
    auto const alone = test::run_ranks(1, [](auto& comm) { return train_with_dropout(comm); }).front();
    auto const got = test::ranks_over(tcp, ranks, [](auto& comm) { return train_with_dropout(comm); }, test::patient());
    REQUIRE(alone.size() == 7 * 24 + 24 + 24 * 3 + 3);
    for (auto const& one : got) {
        REQUIRE(one == got.front());
        REQUIRE(one.size() == alone.size());
        for (std::size_t i = 0; i < alone.size(); ++i) REQUIRE(std::abs(one[i] - alone[i]) < 1e-10);
    }
}

TEST_CASE("ranks whose dropout would leave out other units hear so when the trainer is made", "[nn][bad-input]") {
    auto const [ranks, tcp] = GENERATE(test::ways_to_run());
    if (ranks == 1) return;
    CAPTURE(ranks, tcp);
    int const odd = ranks - 1;
    auto const errors = [&, number = ranks, over_tcp = tcp](std::uint64_t seed, double p) {  // of the last rank
        return test::errors_over(
            over_tcp, number,
            [&](auto& comm) {
                nn::sequential model{nn::dropout<double>(comm.rank() == odd ? p : 0.5), nn::linear<double>(7, 3),
                                     nn::mean_squared_error<double>()};
                if (std::uint64_t const mine = comm.rank() == odd ? seed : 7; mine != 0) model.initialize(mine);
                data_parallel trainer{model, sgd{.lr = 0.1}, comm};
            },
            test::patient());
    };
    std::string const who = "rank " + std::to_string(odd);
    for (auto const& text : errors(7, 0.5)) REQUIRE(text.empty());
    // Rank 0's values go everywhere, its seed does not.
    for (auto const& text : errors(0, 0.5))
        REQUIRE(text.find("DDP-E102 model differs: " + who +
                          " differs from rank 0: another hash() of the model (seed 7 on rank 0, seed 0 on " + who +
                          ").") == 0);
    for (auto const& text : errors(7, 0.4))
        REQUIRE(text.find("another hash() of the model (layer 0: dropout(0.5) on rank 0, layer 0: dropout(0.4) on " +
                          who + ").") != std::string::npos);
}
