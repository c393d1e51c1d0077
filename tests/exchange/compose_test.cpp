// Exchanges that send less together with everything else a training has, against plain loops.
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "exchange/plain_loops.hpp"
#include "support/catch.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

struct variation {
    std::string name;
    training with;  // but for the exchange
    std::vector<int> ranks = {3};
};
std::vector<variation> variations() {
    training const plain{.exchange = bfloat16_exchange{}, .buckets = two_buckets};
    auto const changed = [&](auto const& change) {
        training one = plain;
        change(one);
        return one;
    };
    auto const by = [&](grouped const& optimizer) {
        return changed([&](training& t) {
            t.optimizer = optimizer;
            t.by_library = true;
        });
    };
    std::vector<variation> all = {
        {"adamw", by({adamw{.lr = 0.01, .weight_decay = 0.1}, {}}), {1, 2, 3, 4, 7}},
        {"lamb", by({lamb{.lr = 0.01, .weight_decay = 0.1}, {}})},
        {"lars", by({lars{.lr = 0.1, .momentum = 0.9}, {}})},
        {"groups", by({adamw{.lr = 0.01}, {{"b*", sgd{.lr = 0.1, .momentum = 0.5}}}})},
        {"clipped by norm", changed([](training& t) { t.clipped = true; }), {1, 2, 3, 4, 7}},
        {"clipped by value", changed([](training& t) { t.clip = clip_by_value{.limit = 0.05}; }), {1, 2, 3, 4, 7}},
        {"frozen from the start", changed([](training& t) { t.frozen = {"b1"}; })},
        {"left out", changed([](training& t) { t.leaves_out = true; })},
        {"an observer", changed([](training& t) { t.watched = true; })},
        {"four dimensions", changed([](training& t) { t.four_dimensions = true; })},
        {"all at once", changed([](training& t) {
             t.optimizer = {lamb{.lr = 0.01}, {{"w2", adamw{.lr = 0.02}}}};
             t.by_library = t.leaves_out = t.watched = t.clipped = true;
             t.frozen = {"b1"};
         })}};
    for (auto const& [name, buckets] : bucket_policies())
        all.push_back({name, changed([&, &chosen = buckets](training& t) { t.buckets = chosen; })});
    return all;
}

}  // namespace

TEST_CASE("every exchange with every optimizer, bucket plan, clipping, frozen and unused parameters and an observer",
          "[exchange]") {
    for (named const& one : all_exchanges())
        for (variation const& how : variations())
            for (int const ranks : how.ranks) {
                CAPTURE(one.name, how.name, ranks);
                training with = how.with;
                with.exchange = one.exchange;
                std::vector<ending> got[2];
                for (bool const sharded : {false, true}) {
                    with.sharded = sharded;
                    got[sharded] = train_on(ranks, with);
                }
                auto const expected = simulate(got[0][0].plan, one.simulation(got[0][0].plan), with);
                // Slices of a sharded update are cut elsewhere where there are norms: int8 has its groups there.
                auto const also = simulate(got[1][0].plan, one.simulation(got[1][0].plan), with);
                for (std::size_t r = 0; r < got[0].size(); ++r)
                    for (bool const sharded : {false, true}) {
                        CAPTURE(sharded, r);
                        REQUIRE(got[sharded][r].wrong == "");
                        REQUIRE(got[sharded][r].digests == got[0][0].digests);
                        auto const& values = (sharded ? also : expected).values;
                        for (std::size_t i = 0; i < values.size(); ++i)
                            for (std::size_t k = 0; k < values[i].size(); ++k)
                                REQUIRE(std::abs(got[sharded][r].values[i][k] - values[i][k]) <= 1e-10);
                    }
            }
}

TEST_CASE("what is clipped, watched or left out trains to other values than what is not", "[exchange]") {
    // So that the case above compares more than plain trainings.
    training const plain{.exchange = int8_exchange{}, .buckets = two_buckets};
    auto const usual = train_on(3, plain)[0].digests.back();
    for (variation const& how : variations()) {
        CAPTURE(how.name);
        training with = how.with;
        with.exchange = plain.exchange;
        bool const same = how.name == "four dimensions" || how.name == "capped";
        if (!same) REQUIRE(train_on(3, with)[0].digests.back() != usual);
    }
    // A matrix of four dimensions is the one of two that its rows make.
    training flat{.exchange = power_sgd_exchange{.rank = 2, .min_compression_rate = 1.1}}, four = flat;
    four.four_dimensions = true;
    REQUIRE(train_on(3, four)[0].digests == train_on(3, flat)[0].digests);
}

TEST_CASE("an exchange in a group of some ranks is that of so many ranks", "[exchange]") {
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true}) {
            CAPTURE(one.name, sharded);
            training const with{one.exchange, two_buckets, sharded};
            auto const expected = train_on(3, with);
            auto const got = run_ranks(
                4,
                [&](auto& comm) {
                    auto group = comm.subgroup({2, 0, 1});
                    return group ? train_part(*group, with, 0, steps, nullptr) : ending{};
                },
                patient());
            for (std::size_t r = 0; r < 3; ++r) {
                REQUIRE(got[r].wrong == "");
                REQUIRE(got[r].digests == expected[0].digests);
            }
            REQUIRE(got[3].digests.empty());
        }
}
