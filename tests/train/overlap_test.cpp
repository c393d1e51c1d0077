// Buckets are reduced while backward still runs.
#include <string>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

TEST_CASE("a bucket is reduced before backward reports its last gradient", "[train]") {
    int const ranks = GENERATE(2, 3, 5);
    bool const sharded = GENERATE(false, true), clipped = GENERATE(false, true);
    for (char const* const algorithm : {"auto", "direct", "halving_doubling", "ring", "naive"}) {
        recipe const by{
            .name = algorithm, .algorithm = any_allreduce::parse(algorithm), .options = options_of(sharded, clipped)};
        CAPTURE(ranks, sharded, clipped, algorithm);
        for (std::string const& wrong :
             run_ranks(ranks, [&](auto& comm) { return overlap_check::run(comm, by); }, patient()))
            REQUIRE(wrong == "");
    }
}

TEST_CASE("with one bucket in flight the first is reduced all the same", "[train]") {
    recipe by{.name = "one in flight"};
    by.options.buckets_in_flight = 1;
    for (std::string const& wrong : run_ranks(2, [&](auto& comm) { return overlap_check::run(comm, by); }, patient()))
        REQUIRE(wrong == "");
}
