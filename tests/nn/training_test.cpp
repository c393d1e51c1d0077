// A network of this library's layers, trained on several ranks and on one.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <ddp/data/prefetch_loader.hpp>
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
    nn::sequential model{nn::linear(7, 48), nn::tanh(), nn::linear(48, 3), nn::mean_squared_error()};
    if (comm.size() > 1) model.report_slices(128);  // one process reports each gradient at once
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
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true);
    CAPTURE(ranks, tcp, sharded);
    auto const alone = run_ranks(1, [&](auto& comm) { return train_network(comm, sharded); }).front();
    auto const got = ranks_over(tcp, ranks, [&](auto& comm) { return train_network(comm, sharded); }, patient());
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

TEST_CASE("sequential waits for each layer's values, and evaluation for all", "[train][nn]") {
    struct late_by_a_little {
        bool yes;
        void on(step_finished const&) const {
            if (yes) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        }
    };
    auto const losses = [](bool late) {
        training_options options = options_of(true, true);
        options.share_memory = false;
        options.overlap_gather = late;
        return ranks_over(
            true, 3,
            [&](auto& comm) {
                std::vector<float> inputs(6 * 5);
                std::vector<std::uint32_t> labels(6), samples(6);
                for (std::size_t k = 0; k < inputs.size(); ++k)
                    inputs[k] = static_cast<float>((k * 7 + static_cast<std::size_t>(comm.rank())) % 11) / 11.0f;
                for (std::uint32_t k = 0; k < 6; ++k) labels[k] = k % 4, samples[k] = k;
                nn::sequential net{
                    nn::linear(5, 16), nn::batch_norm(16, {.statistics = nn::batch_statistics::synchronised}),
                    nn::relu(),        nn::dropout(0.25),
                    nn::linear(16, 4), nn::softmax_cross_entropy()};
                data_parallel trainer{net,     sgd{.lr = 0.1, .momentum = 0.9}, comm,
                                      options, per_parameter_buckets{},         late_by_a_little{comm.rank() == 1}};
                std::vector<double> seen;
                classification_batch<float> const batch{inputs, labels, 6, 5, samples};
                for (int k = 0; k < 6; ++k) {
                    seen.push_back(trainer.step(batch).loss);
                    if (k % 3 != 1) continue;
                    trainer.prepare_evaluation();  // as evaluate() does
                    seen.push_back(trainer.model().evaluate(batch).loss_sum);
                }
                return seen;
            },
            patient());
    };
    auto const expected = losses(false), got = losses(true);
    REQUIRE(got == expected);
}

TEST_CASE("a list of samples, prepared by a thread and augmented, trains several ranks as one process", "[nn][data]") {
    classification_data data;
    data.sample_shape = {1, 6, 5};
    data.features = 30;
    data.classes = 3;
    for (std::size_t i = 0; i < 40 * data.features; ++i) data.inputs.push_back(static_cast<std::uint8_t>(i * i % 251));
    for (std::uint32_t s = 0; s < 40; ++s) data.labels.push_back(s % 3);
    std::vector<std::uint32_t> list;  // without the samples divisible by 5, and two of them twice
    for (std::uint32_t s = 0; s < 40; ++s)
        if (s % 5 != 0) list.push_back(s);
    list.insert(list.end(), {7, 31});
    sampler_options const options{.samples = list.size(), .global_batch = 9, .seed = 4};
    augmentation const cuts{.crop_padding = 1, .flip = true, .seed = 8};
    auto const net = [] {
        return nn::sequential{nn::linear<double>(30, 8), nn::tanh<double>(), nn::linear<double>(8, 3),
                              nn::softmax_cross_entropy<double>()};
    };

    // One process: the order of the whole list, each picture cut where its draw says, and plain gradient descent.
    auto alone = net();
    std::vector<std::uint32_t> order(list.size());
    for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
        shuffled_order(order, options.seed, epoch);
        for (std::size_t first = 0; first < order.size(); first += options.global_batch) {
            std::vector<double> inputs;
            std::vector<std::uint32_t> labels;
            for (std::size_t k = first; k < std::min(order.size(), first + options.global_batch); ++k) {
                std::uint32_t const sample = list[order[k]];
                augmentation_draw const cut = draw_augmentation(cuts, epoch, sample);
                for (std::size_t y = 0; y < 6; ++y)
                    for (std::size_t x = 0; x < 5; ++x) {
                        std::size_t const row = y + cut.down, column = (cut.flip ? 4 - x : x) + cut.right;
                        bool const outside = row < 1 || row > 6 || column < 1 || column > 5;
                        double const pixel = outside ? 0 : data.inputs[sample * 30 + (row - 1) * 5 + column - 1];
                        inputs.push_back((pixel / 255 - 0.5) / 0.25);
                    }
                labels.push_back(data.labels[sample]);
            }
            (void)alone.forward(classification_batch<double>{inputs, labels, labels.size(), 30});
            alone.backward({.scale = 1}, [](std::size_t, auto...) {});
            for (auto const& p : alone.parameters())
                for (std::size_t k = 0; k < p.value.size(); ++k) p.value[k] -= 0.2 * p.gradient[k];
        }
    }

    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const augmented = GENERATE(true, false);
    CAPTURE(ranks, tcp, augmented);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            auto model = net();
            data_parallel trainer{model, sgd{.lr = 0.2}, comm};
            prefetch_loader<double> load{
                data,
                sampler{options, list, comm},
                {.normalise = {{.mean = 0.5, .deviation = 0.25}}, .augment = augmented ? cuts : augmentation{}}};
            for (int epoch = 0; epoch < 2; ++epoch)
                while (auto const mine = load.next()) trainer.step(*mine);
            std::vector<double> values;
            for (auto const& p : trainer.parameters()) values.insert(values.end(), p.value.begin(), p.value.end());
            return values;
        },
        patient());
    std::vector<double> expected;
    for (auto const& p : alone.parameters()) expected.insert(expected.end(), p.value.begin(), p.value.end());
    for (auto const& one : got) {
        REQUIRE(one.size() == expected.size());
        double most = 0;
        for (std::size_t k = 0; k < one.size(); ++k) most = std::max(most, std::abs(one[k] - expected[k]));
        CHECK((most < 1e-10) == augmented);
    }
}

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
