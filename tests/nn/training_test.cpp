// A network of this library's layers, trained on several ranks and on one.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ddp/nn/nn.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

/// The values after 50 steps on batches of 13; empty if ranks ever held different bits.
template <class Comm>
std::vector<std::vector<float>> train_network(Comm& comm, bool sharded) {
    task_data<float> const data(7, 3, 64);
    nn::sequential model{nn::linear(7, 24), nn::tanh(), nn::linear(24, 3), nn::mean_squared_error()};
    data_parallel trainer{model, sgd{.lr = 0.1, .momentum = 0.9}, comm, options_of(sharded, true)};
    for (std::size_t step = 0; step < 50; ++step) {
        auto const [begin, end] = share(13, step, comm.rank(), comm.size());
        auto const mine = data.batch(step + begin, step + end);
        trainer.step(regression_batch<float>{.inputs = mine.x, .targets = mine.y, .rows = mine.rows, .features = 7});
        if (!trainer.replicas_identical()) return {};
    }
    std::vector<std::vector<float>> values;
    for (auto const& p : trainer.parameters()) values.emplace_back(p.value.begin(), p.value.end());
    return values;
}

}  // namespace

TEST_CASE("a network of layers trains on several ranks as on one", "[nn]") {
    int const ranks = GENERATE(2, 3);
    bool const sharded = GENERATE(false, true);
    auto const alone = run_ranks(1, [&](auto& comm) { return train_network(comm, sharded); }).front();
    auto const got = run_ranks(ranks, [&](auto& comm) { return train_network(comm, sharded); }, patient());
    REQUIRE(alone.size() == 4);
    for (auto const& one : got) {
        REQUIRE(one.size() == 4);
        REQUIRE(one == got.front());
        for (std::size_t i = 0; i < 4; ++i) {
            double difference = 0, size = 0;
            for (std::size_t k = 0; k < one[i].size(); ++k) {
                double const a = static_cast<double>(one[i][k]), b = static_cast<double>(alone[i][k]);
                difference += (a - b) * (a - b);
                size += b * b;
            }
            REQUIRE(std::sqrt(difference) <= 2e-5 * std::sqrt(size));
        }
    }
}

namespace {

/// How a network is trained in what follows: with everything that a step may have in it.
struct manner {
    bool sharded = false, clipped = false, accumulates = false, freezes = false, by_messages = true;
    std::size_t slice_bytes = 0;
};

/// Digests of the values after each step. Shares are uneven, and empty on some ranks in some steps.
template <class Comm>
std::vector<std::uint64_t> digests_of_training(Comm& comm, manner const& how) {
    task_data<float> const data(7, 3, 64);
    nn::sequential model{nn::linear(7, 80), nn::tanh(),        nn::linear(80, 52),
                         nn::tanh(),        nn::linear(52, 3), nn::mean_squared_error()};
    model.report_slices(how.slice_bytes);
    training_options options = options_of(how.sharded, how.clipped);
    options.share_memory = !how.by_messages;
    if (how.freezes) options.frozen = {"2.*"};
    data_parallel trainer{model, adam{.lr = 0.01}, comm, options,
                          size_capped_buckets{.cap_bytes = 1024, .first_bytes = 512}};
    std::vector<std::uint64_t> all;
    for (std::size_t step = 0; step < 12; ++step) {
        auto const [begin, end] = share(step % 4 == 3 ? 1 : 13, step, comm.rank(), comm.size());
        auto const mine = data.batch(step + begin, step + end);
        regression_batch<float> const batch{.inputs = mine.x, .targets = mine.y, .rows = mine.rows, .features = 7};
        if (how.accumulates && step % 3 != 0) {
            trainer.forward(batch);
            trainer.accumulate();
            trainer.forward(batch);
            trainer.backward();
            trainer.finish();
        } else {
            trainer.step(batch);
        }
        if (how.freezes && step == 4) trainer.unfreeze("2.weight");
        if (how.freezes && step == 8) trainer.freeze("0.weight");
        all.push_back(trainer.digest_of_values());
    }
    return all;
}

}  // namespace

TEST_CASE("a network whose gradients are reported in slices trains to the same bits", "[nn]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    std::size_t distinct = 0;
    for (unsigned k = 0; k < 8; ++k) {
        manner how{.sharded = k % 2 == 1,
                   .clipped = k / 2 % 2 == 1,
                   .accumulates = k / 4 == 1,
                   .freezes = k % 3 == 2,
                   .by_messages = k != 3};
        CAPTURE(ranks, tcp, k);
        auto const train = [&](auto& comm) { return digests_of_training(comm, how); };
        auto const whole = ranks_over(tcp, ranks, train, patient());
        how.slice_bytes = 2048;
        auto const sliced = ranks_over(tcp, ranks, train, patient());
        for (auto const& one : sliced) REQUIRE(one == whole.front());
        distinct += whole.front().front() != whole.front().back() ? 1 : 0;
    }
    REQUIRE(distinct == 8);
}
