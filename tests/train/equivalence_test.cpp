// P ranks with a share of the batch train to what one rank with the whole batch trains to.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr std::size_t steps = 50;

/// The largest |difference| / |parameter| over the parameters, in the Euclidean norm.
template <Element E>
double distance(trained<E> const& a, trained<E> const& b) {
    double worst = 0;
    for (std::size_t i = 0; i < a.values.size(); ++i) {
        double difference = 0, size = 0;
        for (std::size_t k = 0; k < a.values[i].size(); ++k) {
            double const x = static_cast<double>(a.values[i][k]), y = static_cast<double>(b.values[i][k]);
            difference += (x - y) * (x - y);
            size += y * y;
        }
        if (size > 0) worst = std::max(worst, std::sqrt(difference / size));
    }
    return worst;
}

std::vector<std::pair<std::string, any_allreduce>> algorithms() {
    auto all = canonical_algorithms();
    all.emplace_back("ring", ring_allreduce{});
    all.emplace_back("ring, tiny segments", ring_allreduce{.segment_bytes = 128, .window = 2});
    return all;
}

/// What one rank comes to, once for each optimizer, with and without clipping.
template <Element E>
trained<E> const& alone(std::size_t optimizer, bool clipped) {
    static std::map<std::pair<std::size_t, bool>, trained<E>> known;
    auto const [at, missing] = known.try_emplace({optimizer, clipped});
    if (missing) {
        recipe const by{
            .name = "alone", .optimizer = optimizers()[optimizer].second, .options = options_of(false, clipped)};
        at->second = run_ranks(1, [&](auto& comm) { return train<E>(comm, by, steps); }).front();
    }
    return at->second;
}

/// Every combination of optimizer, algorithm, buckets, update, clipping and rank count; `stride` takes only every so many.
template <Element E>
void compare_all(double tolerance, std::size_t stride) {
    std::size_t combination = 0, tried = 0;
    double worst = 0;
    auto const compare = [&](recipe const& by, std::size_t optimizer, bool clipped, int ranks) {
        if (combination++ % stride != 0) return;
        ++tried;
        auto const got = run_ranks(ranks, [&](auto& comm) { return train<E>(comm, by, steps); }, patient());
        for (auto const& one : got) {
            INFO(by.name << " on " << ranks << " ranks");
            REQUIRE(one.wrong.empty());
            worst = std::max(worst, distance(one, alone<E>(optimizer, clipped)));
            REQUIRE(distance(one, alone<E>(optimizer, clipped)) <= tolerance);
        }
    };
    for (std::size_t o = 0; o < optimizers().size(); ++o)
        for (auto const& [algorithm_name, algorithm] : algorithms())
            for (auto const& [buckets_name, buckets] : bucket_policies())
                for (bool const sharded : {false, true})
                    for (bool const clipped : {false, true}) {
                        recipe const by{.name = optimizers()[o].first + ", " + algorithm_name + ", " + buckets_name +
                                                (sharded ? ", sharded" : ", replicated") + (clipped ? ", clipped" : ""),
                                        .optimizer = optimizers()[o].second,
                                        .algorithm = algorithm,
                                        .buckets = buckets,
                                        .options = options_of(sharded, clipped)};
                        for (int const ranks : {1, 2, 3, 4, 7}) compare(by, o, clipped, ranks);
                    }
    CAPTURE(worst, tried);
    REQUIRE(tried >= 40);
    REQUIRE(worst > 0);  // it did compare different orders of summation
}

}  // namespace

// Strides are prime to the length of every loop: each pair of choices is tried with every other choice.
TEST_CASE("ranks that share a batch train in double as one rank with all of it", "[train]") {
    compare_all<double>(1e-10, fewer == 1 ? 17 : 47);
}

TEST_CASE("every optimizer trains over TCP as one rank with all of the batch", "[train]") {
    std::size_t const o = GENERATE(range(std::size_t{0}, optimizers().size()));
    for (int const ranks : {1, 2, 3, 4}) {
        bool const sharded = (o + static_cast<std::size_t>(ranks)) % 2 == 0, clipped = ranks == 3;
        recipe by{.name = optimizers()[o].first,
                  .optimizer = optimizers()[o].second,
                  .options = options_of(sharded, clipped)};
        by.options.share_memory = ranks == 4;  // else by messages
        CAPTURE(by.name, ranks, sharded);
        for (auto const& one : on_ranks(ranks, [&](auto& comm) { return train<double>(comm, by, steps); })) {
            REQUIRE(one.wrong.empty());
            REQUIRE(distance(one, alone<double>(o, clipped)) <= 1e-10);
        }
    }
}

TEST_CASE("ranks that share a batch train in float as one rank with all of it", "[train]") {
    compare_all<float>(2e-5, fewer == 1 ? 29 : 79);
}

TEST_CASE("every combination of ranks that share a batch trains as one rank with all of it", "[.full]") {
    compare_all<double>(1e-10, 1);
    compare_all<float>(2e-5, 1);
}

TEST_CASE("one rank trains as gradient descent written by hand", "[train]") {
    recipe const by{.name = "by hand", .optimizer = sgd{.lr = 0.2}};
    auto const got = run_ranks(1, [&](auto& comm) { return train<double>(comm, by, steps); }).front();

    task_data<double> const data(7, 3, 64);
    tanh_mlp<double> model(7, 24, 3, 5);
    trained<double> expected;
    constexpr std::size_t batches[] = {13, 16, 5, 3, 11};
    for (std::size_t step = 0; step < steps; ++step) {
        std::size_t const rows = batches[step % 5], offset = step * 7 % (64 - rows + 1);
        (void)model.forward(data.batch(offset, offset + rows));
        model.backward({.scale = 1}, [](std::size_t) {});
        for (std::size_t i = 0; i < 5; ++i)
            for (std::size_t k = 0; k < model.value(i).size(); ++k) model.value(i)[k] -= 0.2 * model.gradient(i)[k];
    }
    for (std::size_t i = 0; i < 5; ++i) expected.values.emplace_back(model.value(i).begin(), model.value(i).end());
    REQUIRE(distance(got, expected) <= 1e-12);
}
