// A network of this library's layers, trained on several ranks and on one.
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <ddp/nn/nn.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
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
