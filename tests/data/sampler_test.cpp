#include <ddp/data/sampler.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

#include "data/files.hpp"
#include "support/catch.hpp"

using ddp::sampler;
using ddp::sampler_options;
using indices = std::vector<std::uint32_t>;

namespace {

/// One epoch as one rank sees it: a vector of shares.
std::vector<indices> epoch_of(sampler& s) {
    std::vector<indices> steps;
    while (auto const batch = s.next()) steps.emplace_back(batch->begin(), batch->end());
    return steps;
}

/// The order that all ranks walk together.
indices global_order(sampler_options options, int ranks, std::uint64_t epoch = 0) {
    std::vector<std::vector<indices>> seen;
    for (int rank = 0; rank < ranks; ++rank) {
        sampler s{options, rank, ranks};
        s.set_epoch(epoch);
        seen.push_back(epoch_of(s));
    }
    indices order;
    for (std::size_t step = 0; step < seen.front().size(); ++step)
        for (auto const& rank : seen) order.insert(order.end(), rank.at(step).begin(), rank.at(step).end());
    return order;
}

indices flat(std::vector<indices> const& steps) {
    indices all;
    for (indices const& step : steps) all.insert(all.end(), step.begin(), step.end());
    return all;
}

indices iota(std::size_t count) {
    indices all(count);
    std::iota(all.begin(), all.end(), 0u);
    return all;
}

struct ranked {
    int rank() const noexcept { return 2; }
    int size() const noexcept { return 3; }
};

}  // namespace

TEST_CASE("all ranks together walk one order that does not depend on how many they are", "[data][sampler]") {
    std::size_t const samples = GENERATE(1u, 5u, 103u, 128u);
    std::size_t const batch = GENERATE(1u, 3u, 10u, 64u, 1000u);
    bool const shuffle = GENERATE(false, true);
    bool const drop_last = GENERATE(false, true);
    CAPTURE(samples, batch, shuffle, drop_last);
    if (drop_last && batch > samples) return;  // refused: see below

    sampler_options const options{samples, batch, 11, shuffle, drop_last};
    indices const alone = global_order(options, 1, 4);
    for (int const ranks : {2, 3, 4, 7}) {
        CAPTURE(ranks);
        CHECK(global_order(options, ranks, 4) == alone);
    }

    std::size_t const expected = drop_last ? samples / batch * batch : samples;
    CHECK(alone.size() == expected);
    CHECK(sampler(options, 0, 1).samples_per_epoch() == expected);
    indices sorted = alone;
    std::sort(sorted.begin(), sorted.end());
    if (!drop_last) CHECK(sorted == iota(samples));  // every sample exactly once
    CHECK(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
    if (!shuffle) CHECK(alone == sorted);
    if (shuffle && samples > 100 && expected > 20) CHECK(alone != sorted);
}

TEST_CASE("every rank takes the same number of steps, with shares that differ by at most one", "[data][sampler]") {
    int const ranks = GENERATE(1, 2, 3, 4, 7);
    std::size_t const batch = GENERATE(1u, 5u, 32u, 1000u);
    constexpr std::size_t samples = 101;
    CAPTURE(ranks, batch);

    std::vector<sampler> each;
    for (int rank = 0; rank < ranks; ++rank)
        each.emplace_back(sampler_options{.samples = samples, .global_batch = batch}, rank, ranks);
    std::size_t const steps = (samples + batch - 1) / batch;
    for (std::size_t step = 0; step < steps; ++step) {
        std::size_t least = samples, most = 0, sum = 0;
        for (sampler& s : each) {
            CHECK(s.steps_per_epoch() == steps);
            CHECK(s.position() == step);
            auto const share = s.next();
            REQUIRE(share.has_value());  // an empty share is a step, too
            CHECK(share->size() <= s.largest_share());
            least = std::min(least, share->size());
            most = std::max(most, share->size());
            sum += share->size();
        }
        CHECK(most - least <= 1);
        CHECK(sum == (step + 1 < steps ? std::min(batch, samples) : samples - step * batch));
    }
    for (sampler& s : each) CHECK(!s.next().has_value());
}

TEST_CASE("the largest share counts a short batch that gives a rank more than a full one does", "[data][sampler]") {
    // Of three samples rank 2 of 5 gets none, of the two in the last batch it gets one.
    sampler s{{.samples = 5, .global_batch = 3, .shuffle = false}, 2, 5};
    CHECK(epoch_of(s) == std::vector<indices>{{}, {3}});
    CHECK(s.largest_share() == 1);
}

TEST_CASE("shares are contiguous, nest when ranks double, and do not overflow", "[data][sampler]") {
    for (std::size_t count = 0; count < 70; ++count)
        for (int ranks = 1; ranks <= 9; ++ranks) {
            CAPTURE(count, ranks);
            std::size_t end = 0;
            for (int rank = 0; rank < ranks; ++rank) {
                auto const share = ddp::share_of(count, rank, ranks);
                CHECK(share.begin == end);
                end = share.end;
                CHECK(share.begin == ddp::share_of(count, 2 * rank, 2 * ranks).begin);
                CHECK(share.end == ddp::share_of(count, 2 * rank + 1, 2 * ranks).end);
            }
            CHECK(end == count);
        }
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    CHECK(ddp::share_of(most, 999, 1000).end == most);
    CHECK(ddp::share_of(most, 999, 1000).size() - most / 1000 <= 1);
    CHECK_THROWS_WITH(ddp::share_of(10, 3, 3), Catch::Contains("share_of: the rank must be in [0, ranks)"));
    CHECK_THROWS_WITH(ddp::share_of(10, -1, 3), Catch::Contains("share_of: the rank must be in [0, ranks)"));
}

TEST_CASE("epochs advance by themselves and by set_epoch to the same orders", "[data][sampler]") {
    sampler_options const options{.samples = 50, .global_batch = 8, .seed = 3};
    sampler counting{options, 1, 3};
    sampler told{options, 1, 3};
    std::vector<indices> orders;
    for (std::uint64_t epoch = 0; epoch < 4; ++epoch) {
        CHECK(counting.epoch() == epoch);
        CHECK(counting.position() == 0);
        told.set_epoch(epoch);
        auto const steps = epoch_of(counting);
        CHECK(steps == epoch_of(told));
        orders.push_back(flat(steps));
    }
    std::sort(orders.begin(), orders.end());
    CHECK(std::adjacent_find(orders.begin(), orders.end()) == orders.end());  // no order is repeated

    told.set_epoch(0);  // back again, from the far end
    sampler fresh{options, 1, 3};
    CHECK(epoch_of(told) == epoch_of(fresh));
}

TEST_CASE("seeds give different orders, options in their own order ignore them", "[data][sampler]") {
    auto const order = [](std::uint64_t seed, bool shuffle) {
        return global_order({.samples = 40, .global_batch = 8, .seed = seed, .shuffle = shuffle}, 2);
    };
    CHECK(order(1, true) == order(1, true));
    CHECK(order(1, true) != order(2, true));
    CHECK(order(1, true) != order(std::uint64_t{1} << 32, true));
    CHECK(order(1, false) == order(2, false));
}

TEST_CASE("an epoch that was left in the middle goes on where it was, on any number of ranks", "[data][sampler]") {
    sampler_options const options{.samples = 103, .global_batch = 10, .seed = 5};
    indices const whole = global_order(options, 1, 2);

    sampler first{options, 0, 2};
    first.set_epoch(2);
    for (int step = 0; step < 4; ++step) REQUIRE(first.next());
    CHECK(first.position() == 4);

    indices rest;
    std::array<sampler, 3> each{sampler{options, 0, 3}, sampler{options, 1, 3}, sampler{options, 2, 3}};
    for (sampler& s : each) s.seek(first.epoch(), first.position());
    for (std::size_t step = 4; step < first.steps_per_epoch(); ++step)
        for (sampler& s : each) {
            auto const share = s.next();
            REQUIRE(share);
            rest.insert(rest.end(), share->begin(), share->end());
        }
    CHECK(rest == indices(whole.begin() + 40, whole.end()));

    first.set_epoch(2);  // begins anew instead
    CHECK(first.position() == 0);
    CHECK(epoch_of(first).size() == 11);
    CHECK_THROWS_WITH(first.set_epoch(std::uint64_t{1} << 48),
                      Catch::Contains("sampler: epochs are numbered from zero, below 2^48"));
    CHECK_THROWS_WITH(first.seek(0, 12),
                      Catch::Contains("sampler::seek: past the epoch's end; were the options the same?"));
}

TEST_CASE("the shuffle gives every permutation equally often", "[data][sampler]") {
    std::map<std::array<std::uint32_t, 4>, int> seen;
    constexpr int rounds = 24'000;
    for (std::uint64_t epoch = 0; epoch < rounds; ++epoch) {
        std::array<std::uint32_t, 4> order{};
        ddp::shuffled_order(order, 9, epoch);
        ++seen[order];
    }
    CHECK(seen.size() == 24);
    for (auto const& [order, count] : seen) CHECK(std::abs(count - 1000) < 160);  // five standard deviations
}

TEST_CASE("shuffles are what they were in earlier versions", "[data][sampler]") {
    indices order(10);
    ddp::shuffled_order(order, 7, 1);
    CHECK(order == indices{7, 0, 9, 3, 4, 5, 1, 8, 2, 6});
}

TEST_CASE("a sampler asks a communicator for rank and size", "[data][sampler]") {
    sampler s{{.samples = 9, .global_batch = 9, .shuffle = false}, ranked{}};
    auto const share = s.next();
    REQUIRE(share);
    CHECK(indices(share->begin(), share->end()) == indices{6, 7, 8});
}

TEST_CASE("a list of samples is walked as its positions would be, on any number of ranks", "[data][sampler]") {
    indices const list{40, 3, 17, 3, 99, 0, 8, 21, 5, 4000000000u, 6};
    for (bool const shuffle : {false, true}) {
        sampler_options const options{.samples = list.size(), .global_batch = 4, .seed = 2, .shuffle = shuffle};
        for (int const ranks : {1, 2, 3, 5}) {
            indices walked;
            std::vector<sampler> each;
            for (int rank = 0; rank < ranks; ++rank) each.emplace_back(options, list, rank, ranks);
            for (sampler& s : each) s.seek(3, 1);
            for (std::size_t step = 1; step < each.front().steps_per_epoch(); ++step)
                for (sampler& s : each) {
                    auto const share = s.next();
                    REQUIRE(share);
                    walked.insert(walked.end(), share->begin(), share->end());
                }
            indices wanted;  // of the positions, from the second batch on
            indices const positions = global_order(options, 1, 3);
            for (std::size_t k = 4; k < positions.size(); ++k) wanted.push_back(list[positions[k]]);
            CAPTURE(shuffle, ranks);
            CHECK(walked == wanted);
        }
    }
    sampler third{{.samples = 11, .global_batch = 11, .shuffle = false}, list, ranked{}};
    CHECK(flat(epoch_of(third)) == indices{21, 5, 4000000000u, 6});
    auto const e = test::catch_error([&] { sampler wrong({.samples = 12, .global_batch = 4}, list, 0, 1); });
    CHECK(e.says("the list has 11 samples and options.samples is 12; give the list's size"));
}

TEST_CASE("options that would train on nothing are refused with advice", "[data][sampler]") {
    CHECK_THROWS_WITH(sampler({.samples = 0, .global_batch = 8}, 0, 1),
                      Catch::Contains("sampler: there are no samples; load a data set that holds some"));
    CHECK_THROWS_WITH(sampler({.samples = 8, .global_batch = 0}, 0, 1),
                      Catch::Contains("sampler: global_batch is zero; it counts samples a step over all ranks"));
    CHECK_THROWS_WITH(sampler({.samples = 8, .global_batch = 9, .drop_last = true}, 0, 1),
                      Catch::Contains("sampler: drop_last leaves no batch: global_batch is 9 and there are 8 samples; "
                                      "make global_batch smaller"));
    CHECK_THROWS_WITH(sampler({.samples = std::size_t{1} << 32, .global_batch = 9}, 0, 1),
                      Catch::Contains("sampler: indices have 32 bits; split a data set of 2^32 samples or more"));
    CHECK_THROWS_WITH(sampler({.samples = 8, .global_batch = 8}, 2, 2),
                      Catch::Contains("sampler: rank 2 of 2 ranks: ranks are numbered from 0"));
    CHECK_THROWS_WITH(sampler({.samples = 8, .global_batch = 8}, -1, 2),
                      Catch::Contains("sampler: rank -1 of 2 ranks: ranks are numbered from 0"));
    CHECK_NOTHROW(sampler({.samples = 8, .global_batch = std::numeric_limits<std::size_t>::max()}, 0, 2).next());
}
