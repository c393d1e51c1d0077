// All ranks hold the same bits after every step; with canonical algorithms these depend on no policy.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr std::size_t steps = fewer == 1 ? 4 : 2;

template <Element E>
void expect_same_bits(int ranks, any_optimizer const& optimizer) {
    CAPTURE(ranks);
    auto const got =
        run_ranks(ranks, [&](auto& comm) { return check_same_bits<E>(comm, steps, optimizer); }, patient());
    for (auto const& [digest, wrong] : got) {
        REQUIRE(wrong == "");
        REQUIRE(digest == got.front().first);
    }
}

}  // namespace

TEST_CASE("canonical algorithms, bucket and update policies train to the same bits in float", "[train]") {
    expect_same_bits<float>(GENERATE(2, 3, 5, 6, 7, 9), adam{.lr = 0.01});
}

TEST_CASE("canonical algorithms, bucket and update policies train to the same bits in double", "[train]") {
    expect_same_bits<double>(GENERATE(3, 6), sgd{.lr = 0.1, .momentum = 0.9});
}

namespace {
/// Rank r's only sample.
double sample_of(std::size_t r) {
    return std::ldexp(random_stream(3, random_use::user, r).at(0).symmetric<double>(), static_cast<int>(7 * r % 19));
}
/// The canonical tree over ranks [lo, hi), written once more.
double tree_sum(std::size_t lo, std::size_t hi, double factor) {
    if (hi - lo == 1) return factor * sample_of(lo);
    std::size_t half = 1;
    while (2 * half < hi - lo) half *= 2;
    return tree_sum(lo, lo + half, factor) + tree_sum(lo + half, hi, factor);
}
}  // namespace

TEST_CASE("the mean is the canonical tree's sum of the ranks' gradients, times 1/W", "[train]") {
    for (int const ranks : {1, 2, 3, 4, 5, 6, 7, 11})
        for (bool const sharded : {false, true})
            for (bool const in_memory : {false, true}) {
                CAPTURE(ranks, sharded, in_memory);
                auto const got = run_ranks(
                    ranks,
                    [&](auto& comm) {
                        std::vector<scripted_model<>::part> parts;
                        for (int i = 0; i < 20; ++i) parts.push_back({"p" + std::to_string(i), {3}});
                        scripted_model<> net(parts);
                        training_options options = options_of(sharded, false);
                        options.share_memory = in_memory;
                        auto trainer = make_trainer(net, comm, options);
                        trainer.step(numbers{{sample_of(static_cast<std::size_t>(comm.rank()))}});
                        std::vector<double> all;
                        for (std::size_t i = 0; i < 20; ++i)
                            all.insert(all.end(), net.value(i).begin(), net.value(i).end());
                        return all;
                    },
                    patient());
                std::vector<double> expected;
                for (std::size_t i = 0; i < 20; ++i)
                    expected.insert(
                        expected.end(), 3,
                        -(tree_sum(0, static_cast<std::size_t>(ranks), static_cast<double>(i + 1)) * (1.0 / ranks)));
                for (auto const& one : got) REQUIRE(one == expected);
            }
}

TEST_CASE("the ring trains to the same bits on all ranks, but to bits of its own", "[train]") {
    auto const with = [](any_allreduce const& algorithm, bool sharded) {
        recipe const by{.name = algorithm.name, .algorithm = algorithm, .options = options_of(sharded, true)};
        return run_ranks(5, [&](auto& comm) { return train<float>(comm, by, 10); }, patient());
    };
    auto const ring = with(ring_allreduce{}, false);
    for (auto const& one : ring) {
        REQUIRE(one.wrong == "");
        REQUIRE(one.digest == ring.front().digest);
    }
    REQUIRE(with(ring_allreduce{}, true).front().digest == ring.front().digest);  // repeatable
    REQUIRE(with(direct_allreduce{}, false).front().digest != ring.front().digest);
}

TEST_CASE("models that are bound, release early or are copied train to the same bits", "[train]") {
    bool const sharded = GENERATE(false, true);
    recipe const by{.name = "kinds of memory",
                    .optimizer = adamw{.lr = 0.01},
                    .algorithm = direct_allreduce{},
                    .buckets = size_capped_buckets{.cap_bytes = 512, .first_bytes = 64},
                    .options = options_of(sharded, false)};
    auto const bound = run_ranks(3, [&](auto& c) { return train<float, memory::bound>(c, by, 20); }, patient());
    auto const releasing = run_ranks(3, [&](auto& c) { return train<float, memory::releasing>(c, by, 20); }, patient());
    auto const copied = run_ranks(3, [&](auto& c) { return train<float, memory::copied>(c, by, 20); }, patient());
    REQUIRE(bound.front().wrong == "");
    REQUIRE(copied.front().wrong == "");
    REQUIRE(bound.front().digest == releasing.front().digest);
    REQUIRE(bound.front().digest == copied.front().digest);
}

namespace {
/// Where the mean gradient of each parameter's first element stands.
struct where_means_are {
    std::vector<float const*>* at;
    void on(mean_gradient<float> const& event) const {
        if (event.begin == 0) (*at)[event.parameter] = event.gradient.data();
    }
};
}  // namespace

TEST_CASE("a bound model's backward writes where the mean will stand; of another, gradients are copied there",
          "[train]") {
    auto const places = [](auto& comm, auto& model) {
        task_data<float> const data(7, 3, 16);
        std::vector<float const*> means(5, nullptr);
        data_parallel trainer{model, sgd{.lr = 0.1}, comm,
                              training_options{.update = update::replicated, .share_memory = false},
                              where_means_are{&means}};
        trainer.step(data.batch(0, 4));
        std::size_t same = 0;
        for (std::size_t i = 0; i < 5; ++i) same += means[i] != nullptr && means[i] == model.gradient(i).data() ? 1 : 0;
        return same;
    };
    for (auto const& [bound, copied] : run_ranks(
             2,
             [&](auto& comm) {
                 tanh_mlp<float, memory::releasing> one(7, 24, 3, 1);
                 tanh_mlp<float, memory::copied> other(7, 24, 3, 1);
                 return std::pair(places(comm, one), places(comm, other));
             },
             patient())) {
        CHECK(bound == 4);  // one of the five is empty
        CHECK(copied == 0);
    }
}

TEST_CASE("a model over one array without gaps trains to the bits of one with gaps, whatever the plan", "[train]") {
    for (int const ranks : {1, 2, 3, 4})
        for (bool const sharded : {false, true})
            for (bool const in_memory : {false, true})
                for (any_buckets const& buckets :
                     {any_buckets(size_capped_buckets{.cap_bytes = 512, .first_bytes = 64}),
                      any_buckets(single_bucket{}), any_buckets(per_parameter_buckets{})}) {
                    CAPTURE(ranks, sharded, in_memory);
                    recipe by{.name = "no gaps",
                              .optimizer = adamw{.lr = 0.01},
                              .buckets = buckets,
                              .options = options_of(sharded, ranks % 2 == 1)};
                    by.options.share_memory = in_memory;
                    by.options.frozen = {"b1"};  // in the middle, and in nobody's own bucket
                    auto const run = [&]<memory Kind>(std::integral_constant<memory, Kind>) {
                        return run_ranks(ranks, [&](auto& c) { return train<float, Kind>(c, by, 5); }, patient());
                    };
                    auto const packed = run(std::integral_constant<memory, memory::packed>());
                    for (auto const& one : packed) {
                        REQUIRE(one.wrong == "");
                        REQUIRE(one.digest == packed.front().digest);
                    }
                    REQUIRE(packed.front().digest ==
                            run(std::integral_constant<memory, memory::releasing>()).front().digest);
                }
    recipe const scrambled{.name = "another order", .buckets = scrambled_buckets{}};
    for (std::string const& text :
         errors_of_ranks(2, [&](auto& c) { (void)train<float, memory::packed>(c, scrambled, 1); }, patient()))
        CHECK(text.find("DDP-E100 usage: the model is `contiguous`: its parameters lie as it lists them, so neither a "
                        "bucket policy") == 0);
}

TEST_CASE("one changed weight on one rank is seen on all ranks", "[train]") {
    int const ranks = GENERATE(1, 2, 5);
    int const culprit = ranks - 1;
    for (std::string const& wrong :
         run_ranks(ranks, [&](auto& comm) { return check_replica_differs(comm, culprit); }, patient()))
        REQUIRE(wrong == "");
}
