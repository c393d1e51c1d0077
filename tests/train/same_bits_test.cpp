// All ranks hold the same bits after every step; with canonical algorithms these depend on no policy.
#include <cstdint>
#include <string>
#include <type_traits>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"

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
