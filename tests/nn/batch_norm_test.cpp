// batch_norm: its gradients, its running statistics, and the same result on any number of ranks where it is synchronised.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ddp/data/batch.hpp>
#include <ddp/nn/activation.hpp>
#include <ddp/nn/batch_norm.hpp>
#include <ddp/nn/conv2d.hpp>
#include <ddp/nn/layer_norm.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/loss.hpp>
#include <ddp/nn/sequential.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/train/data_parallel.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/sanitizers.hpp"
#include "train/patience.hpp"

using namespace ddp;

namespace {

constexpr nn::batch_norm_options together{.statistics = nn::batch_statistics::synchronised};

template <class L>
std::span<double> buffer_of(L& of, std::string const& name) {
    for (model_buffer const& b : of.buffers())
        if (b.name == name) return {reinterpret_cast<double*>(b.bytes.data()), b.bytes.size() / sizeof(double)};
    throw std::logic_error("there is no buffer " + name);
}

using batch = regression_batch<double>;

/// Rows of random inputs and targets.
struct samples {
    std::size_t features, outputs;
    std::vector<double> x = test::random_numbers<double>(64 * features, 3),
                        y = test::random_numbers<double>(64 * outputs, 4);
    [[nodiscard]] batch rows(std::size_t begin, std::size_t end) const {
        return {.inputs = std::span(x).subspan(begin * features, (end - begin) * features),
                .targets = std::span(y).subspan(begin * outputs, (end - begin) * outputs),
                .rows = end - begin,
                .features = features};
    }
};

auto dense_net(nn::batch_norm_options options) {
    return nn::sequential{
        nn::linear<double>(6, 8), nn::batch_norm<double>(8, options), nn::relu<double>(),
        nn::linear<double>(8, 5), nn::batch_norm<double>(5, options), nn::mean_squared_error<double>()};
}
auto image_net(nn::batch_norm_options options) {
    nn::image_shape const in{.channels = 2, .height = 4, .width = 5};
    nn::conv2d<double> first(in, {.filters = 3, .kernel = 3, .padding = 1});
    nn::image_shape const out = first.output_shape();
    return nn::sequential{nn::batch_norm<double>(in, options),  std::move(first),
                          nn::batch_norm<double>(out, options), nn::relu<double>(),
                          nn::linear<double>(out.size(), 3),    nn::mean_squared_error<double>()};
}

/// Everything that a training leaves: values and buffers.
template <class Net>
std::vector<double> all_of(Net& net) {
    std::vector<double> all;
    for (auto const& p : net.parameters()) all.insert(all.end(), p.value.begin(), p.value.end());
    for (model_buffer const& b : net.buffers())
        if (b.type == element_type::f64) {
            auto const* const first = reinterpret_cast<double const*>(b.bytes.data());
            all.insert(all.end(), first, first + b.bytes.size() / sizeof(double));
        }
    return all;
}

/// Rank `rank`'s part of rows [first, first + count) in step `step`: uneven, and in every third step all on one rank, in turn.
batch share(samples const& data, std::size_t rank, std::size_t ranks, std::size_t first, std::size_t count,
            std::size_t step) {
    if (step % 3 == 2) return rank == step / 3 % ranks ? data.rows(first, first + count) : data.rows(first, first);
    std::size_t const cut = count / (ranks + 1);  // the last rank has about two shares
    return data.rows(first + rank * cut, rank + 1 == ranks ? first + count : first + (rank + 1) * cut);
}

enum class way { steps, accumulated, joined, under_no_sync };

/// Trains on batches of 12 rows: this rank's uneven share, in one or two passes a step. With `joined` the last rank alone has
/// rows in the last steps, and the others join.
template <class Net>
std::vector<double> train(communicator<>& comm, Net net, samples const& data, way how,
                          training_options const& options) {
    data_parallel trainer{net, sgd{.lr = 0.1, .momentum = 0.9}, comm, options};
    auto const mine = [&](std::size_t first, std::size_t count, std::size_t step) {
        return share(data, static_cast<std::size_t>(comm.rank()), static_cast<std::size_t>(comm.size()), first, count,
                     step);
    };
    for (std::size_t step = 0; step < 9; ++step) {
        std::size_t const first = step * 5;
        if (how == way::accumulated || how == way::under_no_sync) {
            trainer.forward(mine(first, 7, step));
            if (how == way::accumulated) {
                trainer.accumulate();
            } else {
                auto const guard = trainer.no_sync();
                trainer.backward();
            }
            trainer.forward(mine(first + 7, 5, step));
            trainer.backward();
            trainer.finish();
        } else if (how == way::joined && step >= 6 && comm.rank() + 1 != comm.size()) {
            if (!trainer.join()) throw std::logic_error("the last rank still trains");
        } else if (how == way::joined && step >= 6) {
            trainer.step(data.rows(first, first + 12));
        } else {
            trainer.step(mine(first, 12, step));
        }
        if (!trainer.replicas_identical()) throw std::logic_error("ranks differ");
    }
    return all_of(net);
}

/// What one process makes of local statistics: a network for each rank, whose gradients it adds up, in plain loops. By rank.
template <class Make>
std::vector<std::vector<double>> local_by_hand(std::size_t ranks, Make const& make, samples const& data,
                                               buffers policy) {
    std::vector<decltype(make())> nets;
    for (std::size_t r = 0; r < ranks; ++r) nets.push_back(make());
    std::vector<std::vector<double>> momentum;
    for (auto const& p : nets[0].parameters()) momentum.emplace_back(p.value.size());
    for (std::size_t step = 0; step < 9; ++step) {
        auto sum = momentum;
        for (auto& one : sum) std::fill(one.begin(), one.end(), 0.0);
        std::vector<std::size_t> with_samples;
        for (std::size_t r = 0; r < ranks; ++r) {
            batch const mine = share(data, r, ranks, step * 5, 12, step);
            if (mine.rows == 0) continue;
            with_samples.push_back(r);
            (void)nets[r].forward(mine);
            nets[r].backward({.scale = static_cast<double>(mine.rows)}, [](std::size_t, auto...) {});
            auto const parameters = nets[r].parameters();
            for (std::size_t i = 0; i < sum.size(); ++i)
                for (std::size_t k = 0; k < sum[i].size(); ++k) sum[i][k] += parameters[i].gradient[k];
        }
        for (std::size_t i = 0; i < sum.size(); ++i)
            for (std::size_t k = 0; k < sum[i].size(); ++k) {
                momentum[i][k] = 0.9 * momentum[i][k] + sum[i][k] / 12;
                for (auto& net : nets) net.parameters()[i].value[k] -= 0.1 * momentum[i][k];
            }
        for (model_buffer const& b : nets[0].buffers()) {
            if (policy == buffers::left_alone || b.type != element_type::f64) continue;
            std::vector<double> common(b.bytes.size() / sizeof(double));
            for (std::size_t const r : with_samples)
                for (std::size_t k = 0; k < common.size(); ++k)
                    common[k] += policy == buffers::averaged
                                     ? buffer_of(nets[r], b.name)[k] / static_cast<double>(with_samples.size())
                                 : r == with_samples[0] ? buffer_of(nets[r], b.name)[k]
                                                        : 0;
            for (auto& net : nets) std::copy(common.begin(), common.end(), buffer_of(net, b.name).begin());
        }
    }
    std::vector<std::vector<double>> all;
    for (auto& net : nets) all.push_back(all_of(net));
    return all;
}

/// Every byte of every buffer.
template <class Net>
std::vector<std::byte> bytes_of_buffers(Net& net) {
    std::vector<std::byte> all;
    for (model_buffer const& b : net.buffers()) all.insert(all.end(), b.bytes.begin(), b.bytes.end());
    return all;
}

/// A step on four rows of each rank's own, from row `first` on, in one or two passes; with `joined` rank `alone` has rows, and
/// the others join. Returns whether values were changed.
template <class Trainer>
bool short_step(Trainer& trainer, samples const& data, std::size_t first, way how, int alone) {
    std::size_t const at = first + 4 * static_cast<std::size_t>(trainer.comm().rank());
    std::uint64_t const before = trainer.completed_steps();
    if (how == way::joined && trainer.comm().rank() != alone) {
        trainer.join();
    } else if (how == way::steps || how == way::joined) {
        trainer.step(data.rows(at, at + 4));
    } else {
        trainer.forward(data.rows(at, at + 2));
        if (how == way::accumulated) {
            trainer.accumulate();
        } else {
            auto const guard = trainer.no_sync();
            trainer.backward();
        }
        trainer.forward(data.rows(at + 2, at + 4));
        trainer.backward();
        trainer.finish();
    }
    return trainer.completed_steps() != before;
}

double worst(std::vector<double> const& a, std::vector<double> const& b) {
    double most = a.size() == b.size() ? 0 : HUGE_VAL;
    for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
    return most;
}

}  // namespace

TEST_CASE("batch_norm's gradients are the slopes of its result", "[nn][gradient]") {
    nn::batch_norm<double> rows(3), images({.channels = 2, .height = 2, .width = 3});
    for (auto* const layer : {&rows, &images})
        for (std::size_t p = 0; p < 2; ++p) {
            auto const values = test::random_numbers<double>(layer->parameters()[p].size(), 5 + p);
            std::copy(values.begin(), values.end(), layer->parameters()[p].value().begin());
        }
    CHECK(test::worst_gradient_error(rows, 5, 3) < 2e-7);
    CHECK(test::worst_gradient_error(rows, 2, 3) < 2e-6);
    CHECK(test::worst_gradient_error(images, 3, 12) < 2e-7);
    CHECK(test::worst_gradient_error(images, 1, 12) < 2e-7);
    CHECK(test::worst_gradient_error(rows, 4, 3, {.training = false}) < 2e-7);
    CHECK(test::same_in_place(rows, 4, 3));
}

TEST_CASE("batch_norm keeps running statistics as PyTorch does, and evaluates by them", "[nn]") {
    nn::batch_norm<double> layer(2, {.momentum = 0.5});
    std::vector<double> const x{1, 10, 3, 10, 5, 40};
    auto const in = nn::as_matrix(std::span<double const>(x), 3, 2);
    auto const y = layer.forward(in, {});
    CHECK(y(0, 0) == Approx(-2 / std::sqrt(8.0 / 3 + 1e-5)));
    CHECK(y(1, 0) == Approx(0).margin(1e-12));
    CHECK(buffer_of(layer, "running_mean")[0] == Approx(1.5));  // half of 0, half of 3
    CHECK(buffer_of(layer, "running_var")[0] == Approx(2.5));   // half of 1, half of 4: over n - 1
    CHECK(buffer_of(layer, "running_mean")[1] == Approx(10));
    CHECK(buffer_of(layer, "running_var")[1] == Approx(150.5));
    std::int64_t count = 0;
    std::memcpy(&count, layer.buffers()[2].bytes.data(), sizeof count);
    CHECK(count == 1);
    CHECK(layer.parameters()[0].name() == "weight");
    auto const used = layer.forward(in, {.training = false});
    CHECK(used(2, 0) == Approx((5 - 1.5) / std::sqrt(2.5 + 1e-5)));
    CHECK(buffer_of(layer, "running_mean")[0] == Approx(1.5));
    layer.initialize(0, 0);
    CHECK(buffer_of(layer, "running_var")[1] == 1);
}

TEST_CASE("batch_norm refuses what has no deviation, and samples of another size", "[nn]") {
    nn::batch_norm<float> layer(3);
    std::vector<float> const x(7);
    CHECK_THROWS_WITH(layer.forward(nn::as_matrix(std::span<float const>(x).first(3), 1, 3), {}),
                      Catch::Contains("each channel has one number in this rank's share of the batch"));
    CHECK_THROWS_WITH(layer.forward(nn::as_matrix(std::span<float const>(x), 1, 7), {}),
                      Catch::Contains("batch_norm over 3 x 1 x 1 was given samples of 7 features: they must be 3"));
    CHECK_NOTHROW(layer.forward(nn::as_matrix(std::span<float const>(x).first(3), 1, 3), {.training = false}));
    CHECK_THROWS_WITH(nn::batch_norm(0),
                      Catch::Contains("batch_norm: give it a positive number of features, or of channels and pixels"));
    CHECK_THROWS_WITH(
        nn::batch_norm(3, {.momentum = 2}),
        Catch::Contains("batch_norm: momentum is the new batch's part of the running statistics, in [0, 1]"));
    CHECK_THROWS_WITH(
        nn::batch_norm(3, {.epsilon = 0}),
        Catch::Contains("batch_norm: epsilon keeps channels of equal numbers finite; pass a positive one"));
    CHECK(nn::batch_norm(3).hash() != nn::batch_norm(3, {.momentum = 0.2}).hash());
}

TEST_CASE("synchronised, any number of ranks trains as one process with the whole batch", "[nn][train]") {
    way const how = GENERATE(way::steps, way::accumulated, way::joined, way::under_no_sync);
    bool const images = GENERATE(false, true);
    bool const sharded = GENERATE(false, true);
    CAPTURE(static_cast<int>(how), images, sharded);
    samples const data{images ? std::size_t{40} : std::size_t{6}, images ? std::size_t{3} : std::size_t{5}};
    training_options const options{.update = sharded ? update::sharded : update::replicated,
                                   .share_memory = sharded,
                                   .buffers = sharded ? buffers::left_alone : buffers::from_rank_0};
    auto const body = [&](communicator<>& comm) {
        return images ? train(comm, image_net(together), data, how, options)
                      : train(comm, dense_net(together), data, how, options);
    };
    auto const expected = test::run_ranks(1, body, test::patient()).front();
    for (int const ranks : {1, 2, 3, 4}) {
        CAPTURE(ranks);
        for (auto const& got : test::run_ranks(ranks, body, test::patient())) CHECK(worst(got, expected) < 1e-10);
        if (ranks != 3 && test::sanitizers_leave_out("synchronised over TCP", ranks)) continue;
        for (auto const& got : test::on_ranks(ranks, body)) CHECK(worst(got, expected) < 1e-10);  // over TCP
    }
}

TEST_CASE("groups that train at the same time keep their statistics apart", "[nn][train]") {
    bool const tcp = GENERATE(false, true);
    int const ranks = GENERATE(2, 3, 4);
    CAPTURE(tcp, ranks);
    samples const data{6, 5};
    training_options const options{.share_memory = ranks != 3, .buffers = buffers::left_alone};
    auto const body = [&](communicator<>& comm, way how) {
        return train(comm, dense_net(together), data, how, options);
    };
    std::vector<double> expected[2];
    for (int const odd : {0, 1})
        expected[odd] =
            test::run_ranks(
                1, [&](communicator<>& comm) { return body(comm, odd == 1 ? way::accumulated : way::steps); },
                test::patient())
                .front();
    REQUIRE(worst(expected[0], expected[1]) > 1e-3);
    auto const got = test::ranks_over(
        tcp, ranks,
        [&](communicator<>& comm) {
            int const odd = comm.rank() % 2;
            communicator<> mine = comm.split(odd, -comm.rank());
            return body(mine, odd == 1 ? way::accumulated : way::steps);
        },
        test::patient());
    for (std::size_t rank = 0; rank < got.size(); ++rank) CHECK(worst(got[rank], expected[rank % 2]) < 1e-10);
}

TEST_CASE("with local statistics ranks train as one process with a network for each rank's part of the batch",
          "[nn][train]") {
    auto const [ranks, tcp] = GENERATE(test::ways_to_run());
    bool const images = GENERATE(false, true);
    if (ranks > 4) return;  // no deviation of a single number
    samples const data{images ? std::size_t{40} : std::size_t{6}, images ? std::size_t{3} : std::size_t{5}};
    for (buffers const policy : {buffers::from_rank_0, buffers::averaged, buffers::left_alone}) {
        CAPTURE(ranks, tcp, images, static_cast<int>(policy));
        auto const p = static_cast<std::size_t>(ranks);
        auto const expected = images ? local_by_hand(
                                           p, [] { return image_net({}); }, data, policy)
                                     : local_by_hand(p, [] { return dense_net({}); }, data, policy);
        auto const got = test::ranks_over(
            tcp, ranks,
            [&](communicator<>& comm) {
                training_options const options{.buffers = policy};
                return images ? train(comm, image_net({}), data, way::steps, options)
                              : train(comm, dense_net({}), data, way::steps, options);
            },
            test::patient());
        for (std::size_t rank = 0; rank < got.size(); ++rank) CHECK(worst(got[rank], expected[rank]) < 1e-10);
        if (ranks > 1 && policy == buffers::left_alone) CHECK(worst(got[0], got[1]) > 1e-3);
    }
}

TEST_CASE("a step that is refused or skipped leaves buffers as they were before its first forward", "[nn][train]") {
    auto const [ranks, tcp] = GENERATE(test::ways_to_run());
    nn::batch_norm_options const by = GENERATE(nn::batch_norm_options{}, together);
    if (ranks != 3 && test::sanitizers_leave_out("steps that leave buffers", ranks)) return;
    samples const data{6, 5};
    auto const body = [&](communicator<>& comm, training_options const& options, way how) {
        std::string wrong;
        auto const expect = [&](bool right, char const* what) {
            if (!right) wrong += std::string(what) + "; ";
        };
        auto disturbed = dense_net(by), whole = dense_net(by);
        data_parallel one{disturbed, sgd{.lr = 0.1, .momentum = 0.9}, comm, options};
        data_parallel other{whole, sgd{.lr = 0.1, .momentum = 0.9}, comm, options};
        for (std::size_t k = 0; k < 3; ++k) {
            int const culprit = k == 1 ? comm.size() - 1 : 0;
            // The first or the last of the culprit's rows: in the first or in the second of two passes.
            samples broken = data;
            std::size_t const row = 20 + k + 4 * static_cast<std::size_t>(culprit) + (k == 1 ? 3 : 0);
            broken.x[row * broken.features + 2] = NAN;
            bool changed = true, thrown = false;
            try {
                changed = short_step(one, broken, 20 + k, how, culprit);
            } catch (error const& e) {
                thrown = e.code() == errc::nonfinite;
                changed = false;
            }
            expect(!changed && thrown == (options.nonfinite == nonfinite::stop), "not refused or skipped");
            expect(bytes_of_buffers(disturbed) == bytes_of_buffers(whole), "other buffers");
            expect(one.replicas_identical(), "ranks differ");
            expect(short_step(one, data, 8 * k, how, culprit) && short_step(other, data, 8 * k, how, culprit),
                   "no step");
            expect(bytes_of_buffers(disturbed) == bytes_of_buffers(whole), "other buffers after the next step");
            expect(one.digest_of_values() == other.digest_of_values(), "other values");
        }
        one.prepare_evaluation(), other.prepare_evaluation();
        expect(bytes_of_buffers(disturbed) == bytes_of_buffers(whole), "other buffers for evaluation");
        return wrong;
    };
    auto const got = test::ranks_over(
        tcp, ranks,
        [&](communicator<>& comm) {
            std::string all;
            for (buffers const policy :
                 {buffers::from_rank_0, buffers::averaged, buffers::left_alone, buffers::from_rank_0_at_evaluation})
                for (nonfinite const decision : {nonfinite::stop, nonfinite::skip})
                    for (way const how : {way::steps, way::accumulated, way::joined, way::under_no_sync}) {
                        bool const late = decision == nonfinite::skip;  // then by messages, and values come in forward
                        std::string const wrong = body(comm,
                                                       {.update = late ? update::sharded : update::automatic,
                                                        .nonfinite = decision,
                                                        .share_memory = !late,
                                                        .buffers = policy,
                                                        .overlap_gather = late},
                                                       how);
                        if (!wrong.empty())
                            all += "policy " + std::to_string(static_cast<int>(policy)) +
                                   (decision == nonfinite::stop ? ", stop" : ", skip") + ", way " +
                                   std::to_string(static_cast<int>(how)) + ": " + wrong + "\n";
                    }
            return all;
        },
        test::patient());
    CAPTURE(ranks, tcp, by.statistics == nn::batch_statistics::synchronised);
    for (std::string const& wrong : got) CHECK(wrong == "");
}

TEST_CASE("local statistics differ, and buffers become alike as the options say", "[nn][train]") {
    samples const data{6, 5};
    auto const after_a_step = [&](training_options const& options, bool asks) {
        return test::run_ranks(
            2,
            [&](communicator<>& comm) {
                auto net = dense_net({});
                for (double& one : buffer_of(net, "1.running_mean"))
                    one = comm.rank() + 1;  // rank 0's are to start with
                data_parallel trainer{net, sgd{.lr = 0.1}, comm, options};
                double const start = buffer_of(net, "1.running_mean")[0];
                std::size_t const r = static_cast<std::size_t>(comm.rank());
                trainer.step(data.rows(r * 6, r * 6 + 6));
                if (asks) trainer.synchronise_buffers();
                return std::array{start, buffer_of(net, "1.running_mean")[0], trainer.replicas_identical() ? 1.0 : 0.0};
            },
            test::patient());
    };
    auto const alone = after_a_step({.buffers = buffers::left_alone}, false);
    CHECK(alone[0][0] == 1);
    CHECK(alone[1][0] == 1);
    CHECK(alone[0][1] != alone[1][1]);
    CHECK(alone[0][2] == 1);  // not compared
    auto const from_0 = after_a_step({}, false);
    CHECK(from_0[0][1] == alone[0][1]);
    CHECK(from_0[1][1] == alone[0][1]);
    CHECK(from_0[1][2] == 1);
    auto const mean = after_a_step({.buffers = buffers::averaged}, false);
    CHECK(mean[0][1] == Approx((alone[0][1] + alone[1][1]) / 2).epsilon(1e-14));
    CHECK(mean[1][1] == mean[0][1]);
    auto const asked = after_a_step({.buffers = buffers::left_alone}, true);
    CHECK(asked[1][1] == alone[0][1]);
}

TEST_CASE("ranks with other buffers are told so when they begin", "[nn][train]") {
    auto const said = test::errors_of_ranks(
        2,
        [](communicator<>& comm) {
            auto net =
                nn::sequential{nn::linear<double>(6, 8), nn::batch_norm<double>(8), nn::mean_squared_error<double>()};
            auto other =
                nn::sequential{nn::linear<double>(6, 8), nn::layer_norm<double>(8), nn::mean_squared_error<double>()};
            if (comm.rank() == 0)
                data_parallel trainer{net, sgd{.lr = 0.1}, comm};
            else
                data_parallel trainer{other, sgd{.lr = 0.1}, comm};
        },
        test::patient());
    CHECK(said[0] == said[1]);
    CHECK(said[0].find("DDP-E102") == 0);
    CHECK(said[0].find("their buffers differ: buffer '1.running_mean' F64 [8] on rank 0 and absent on rank 1") !=
          std::string::npos);
}
