// A learning rate that the program changes while it trains: when it falls, and that all ranks step with the same one.
#include <ddp/train/reduce_on_plateau.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/optim/adam.hpp>
#include <ddp/optim/parameter_groups.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

using model = scripted_model<true, false>;

std::vector<model::part> two_parts() {
    return {{"a", {3}}, {"b", {2}}};
}

/// The updates, counted from 1, that lowered the factor.
std::vector<std::size_t> falls_at(reduce_on_plateau plateau, std::vector<double> const& metrics) {
    std::vector<std::size_t> at;
    double before = 1;
    for (double const metric : metrics) {
        double const now = plateau.update(metric);
        if (now < before) at.push_back(plateau.updates());
        before = now;
    }
    return at;
}

}  // namespace

static_assert(std::is_trivially_copyable_v<reduce_on_plateau>);

TEST_CASE("the rate falls when a metric has not improved for longer than the patience", "[train]") {
    using falls = std::vector<std::size_t>;
    // optim/torch_oracle_test.cpp compares the same cases, and longer ones, with what PyTorch does.
    CHECK(falls_at(reduce_on_plateau{{.patience = 1}}, {5, 5, 5, 5, 5, 4, 4, 4, 4}) == falls{3, 5, 8});
    CHECK(falls_at(reduce_on_plateau{{.patience = 0}}, {5, 4, 4, 3, not_a_number, infinity}) == falls{3, 5, 6});
    CHECK(falls_at(reduce_on_plateau{{.patience = 0, .cooldown = 2}}, {5, 5, 5, 5, 5, 5, 5, 5}) == falls{2, 5, 8});
    CHECK(falls_at(reduce_on_plateau{{.patience = 0, .threshold = 0.1}}, {10, 9.5, 9.0, 8.9}) == falls{2, 3});
    CHECK(falls_at(reduce_on_plateau{{.patience = 0, .threshold = 0.5, .relative = false}}, {10, 9.6, 9.4, 9}) ==
          falls{2, 4});
    CHECK(falls_at(reduce_on_plateau{{.patience = 0, .threshold = 0.1, .better = better::higher}}, {1, 1.05, 1.2}) ==
          falls{2});

    reduce_on_plateau low{{.factor = 0.5, .patience = 0, .floor = 0.2}};
    std::vector<double> factors;
    for (int k = 0; k < 5; ++k) factors.push_back(low.update(1));
    CHECK(factors == std::vector<double>{1, 0.5, 0.25, 0.2, 0.2});
    CHECK((low.reduced() && low.best() == 1 && low.updates() == 5));

    for (double const factor : {1.0, -0.5, not_a_number, infinity})
        CHECK_THROWS_WITH(reduce_on_plateau({.factor = factor}),
                          Catch::Contains("; it must lie in [0, 1), and 0.1 is usual"));
    for (double const threshold : {1.0, -1e-4, not_a_number})
        CHECK_THROWS_WITH(reduce_on_plateau({.threshold = threshold}),
                          Catch::Contains("; it must be a finite number >= 0, below 1 where it is relative"));
    for (double const floor : {1.5, -1.0, not_a_number})
        CHECK_THROWS_WITH(reduce_on_plateau({.floor = floor}),
                          Catch::Contains("reduce_on_plateau: floor is " + ddp::detail::decimal(floor) +
                                          "; it must lie in [0, 1], and 0 is usual"));
}

TEST_CASE("ranks with different metrics lower the rate together, by rank 0's", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const got = ranks_over(
        tcp, ranks,
        [](auto& comm) {
            reduce_on_plateau plateau{
                {.factor = comm.rank() == 0 ? 0.5 : 0.1, .patience = static_cast<std::size_t>(comm.rank())}};
            std::vector<double> factors;
            for (double const metric : {5, 5, 4, 4, 4})
                factors.push_back(plateau.update(comm, comm.rank() == 0 ? metric : -metric * comm.rank()));
            return factors;
        },
        patient());
    for (auto const& factors : got) CHECK(factors == std::vector<double>{1, 0.5, 0.5, 0.25, 0.125});
}

TEST_CASE("a rate factor is the schedule's of the same numbers, for every update policy and group", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    update const policy = GENERATE(update::replicated, update::sharded);
    bool const shared = GENERATE(false, true);
    CAPTURE(ranks, tcp, static_cast<int>(policy), shared);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            auto const groups = [] {
                return parameter_groups{adamw{.lr = 0.3}, {{"a", adamw{.lr = 0.1, .weight_decay = 0.1}}}};
            };
            model by_schedule(two_parts()), by_factor(two_parts());
            training_options options{.update = policy, .share_memory = shared};
            data_parallel second{by_factor, groups(), comm, options};
            options.schedule = step_decay{.every = 1, .factor = 0.5};  // powers of 2: no product rounds
            data_parallel first{by_schedule, groups(), comm, options};
            double factor = 1;
            std::vector<std::uint64_t> digests;
            for (int step = 0; step < 6; ++step, factor /= 2) {
                numbers const batch{{1.0 + comm.rank(), 2.5 - step}};
                if (step > 0) second.set_rate_factor(factor);
                if (second.rate_factor() != factor) digests.push_back(0);
                first.step(batch);
                second.step(batch);
                digests.push_back(first.digest_of_values());
                digests.push_back(second.digest_of_values());
            }
            return digests;
        },
        patient());
    for (auto const& digests : got) {
        REQUIRE(digests.size() == 12);
        CHECK(digests == got.front());
        for (std::size_t i = 0; i < digests.size(); i += 2) CHECK(digests[i] == digests[i + 1]);
        CHECK(digests[2] != digests[4]);
    }
}

TEST_CASE("ranks that pass different rate factors are told so alike, and train on as before", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    if (ranks == 1) return;
    CAPTURE(ranks, tcp);
    auto const got = ranks_over(
        tcp, ranks,
        [](auto& comm) {
            model small(two_parts()), plain(two_parts());
            data_parallel trainer{small, sgd{.lr = 0.5}, comm}, untouched{plain, sgd{.lr = 0.5}, comm};
            std::vector<std::string> said;
            auto const attempt = [&](double factor) {
                try {
                    trainer.set_rate_factor(factor);
                    said.emplace_back("nothing");
                } catch (usage_error const& e) {
                    said.emplace_back(e.what());
                }
            };
            attempt(comm.rank() + 1 == comm.size() ? 0.25 : 0.5);
            attempt(comm.rank() == 1 ? -1 : 0.5);
            attempt(comm.rank() == 0 ? not_a_number : 0.5);
            numbers const batch{{1.0 + comm.rank()}};
            trainer.forward(batch);
            trainer.backward();
            attempt(0.5);  // local: no rank asks the others
            trainer.finish();
            untouched.step(batch);
            if (trainer.digest_of_values() != untouched.digest_of_values() || trainer.rate_factor() != 1)
                said.emplace_back("another rate");
            return said;
        },
        patient());
    for (auto const& said : got) {
        REQUIRE(said.size() == 4);
        CHECK(said == got.front());
        CHECK(said[0].find("set_rate_factor: rank 0 passes 0.5 and rank " + std::to_string(ranks - 1) +
                           " 0.25; nothing was changed") != std::string::npos);
        CHECK(said[1].find("rank 1 passes -1; a factor of the learning rate is a finite number >= 0") !=
              std::string::npos);
        CHECK(said[2].find("rank 0 passes nan") != std::string::npos);
        CHECK(said[3].find("set_rate_factor: a step is under way; finish() it first") != std::string::npos);
    }
}
