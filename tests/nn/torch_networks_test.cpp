// Two networks with batch normalisation against PyTorch's DistributedDataParallel, as tests/oracle/networks.py has written it
// down: 100 steps of each optimizer, clipped and not, on 2 and 3 ranks.
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ddp/data/batch.hpp>
#include <ddp/data/sampler.hpp>
#include <ddp/nn/activation.hpp>
#include <ddp/nn/batch_norm.hpp>
#include <ddp/nn/conv2d.hpp>
#include <ddp/nn/flatten.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/loss.hpp>
#include <ddp/nn/pool2d.hpp>
#include <ddp/nn/sequential.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/train/data_parallel.hpp>
#include <ddp/train/evaluate.hpp>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "train/patience.hpp"

using namespace ddp;

namespace {

constexpr std::size_t steps = 100, rows = 12;

using record = std::map<std::string, std::vector<double>>;  // what a case left, by name

/// By case; the path is from tests/CMakeLists.txt.
std::map<std::string, record> read_record() {
    std::ifstream file(DDP_TEST_NETWORKS);
    std::string line;
    std::getline(file, line);
    REQUIRE(line == "case,what,numbers");
    std::map<std::string, record> all;
    while (std::getline(file, line)) {
        std::istringstream fields(line);
        std::string name, what, number;
        std::getline(fields, name, ',');
        std::getline(fields, what, ',');
        std::vector<double>& numbers = all[name][what];
        while (std::getline(fields, number, ',')) numbers.push_back(std::stod(number));
    }
    return all;
}

/// The script's: doubles in [-1, 1) from SplitMix64.
std::vector<double> numbers_of(std::uint64_t seed, std::size_t count) {
    std::vector<double> all(count);
    for (double& one : all) {
        std::uint64_t z = seed += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        z ^= z >> 31;
        one = static_cast<double>(z >> 11) * 0x1p-52 - 1;
    }
    return all;
}

auto make_mlp() {
    return nn::sequential{nn::linear<double>(6, 8), nn::batch_norm<double>(8), nn::relu<double>(),
                          nn::linear<double>(8, 4), nn::softmax_cross_entropy<double>()};
}
auto make_cnn() {
    nn::conv2d<double> first({.channels = 2, .height = 4, .width = 4}, {.filters = 3, .kernel = 3, .padding = 1});
    nn::image_shape const out = first.output_shape();
    nn::max_pool2d<double> half(out);
    return nn::sequential{std::move(first),
                          nn::batch_norm<double>(out),
                          nn::relu<double>(),
                          std::move(half),
                          nn::flatten<double>(),
                          nn::linear<double>(12, 4),
                          nn::softmax_cross_entropy<double>()};
}

template <class Net>
record train(communicator<>& comm, Net net, std::size_t features, any_optimizer const& optimizer, bool clips) {
    auto const parameters = net.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        auto const drawn = numbers_of(100 + i, parameters[i].value.size());
        bool const ones = parameters[i].value[0] == 1 && parameters[i].shape.size() == 1;  // a batch_norm's weight
        for (std::size_t k = 0; k < drawn.size(); ++k)
            parameters[i].value[k] = parameters[i].shape.size() > 1 ? 0.5 * drawn[k]
                                     : ones                         ? 1 + 0.25 * drawn[k]
                                                                    : 0.25 * drawn[k];
    }
    training_options options;
    if (clips) options.clip = clip_by_global_norm{.max_norm = 0.5};
    data_parallel trainer{net, optimizer, comm, options};
    record result;
    auto const [begin, end] = share_of(rows, comm.rank(), comm.size());
    for (std::uint64_t step = 1; step <= steps; ++step) {
        auto const x = numbers_of(1000 + step, rows * features);
        std::vector<std::uint32_t> labels;
        for (double const one : numbers_of(5000 + step, rows))
            labels.push_back(static_cast<std::uint32_t>((one + 1) * 2));
        double const loss = trainer
                                .step(classification_batch<double>{
                                    .inputs = std::span(x).subspan(begin * features, (end - begin) * features),
                                    .labels = std::span<std::uint32_t const>(labels).subspan(begin, end - begin),
                                    .rows = end - begin,
                                    .features = features})
                                .loss;
        mean_metric mine;
        mine.add(loss, end - begin);
        mean_metric const all = sum_over_ranks(comm, mine);
        if (step <= 2 || step == 10 || step == 50 || step == 100) result["loss"].push_back(all.mean());
    }
    for (auto const& p : net.parameters()) result[p.name].assign(p.value.begin(), p.value.end());
    for (model_buffer const& b : net.buffers()) {
        std::vector<double>& to = result[b.name];
        if (b.type == element_type::f64) {
            to.resize(b.bytes.size() / sizeof(double));
            std::memcpy(to.data(), b.bytes.data(), b.bytes.size());
        } else {
            std::int64_t count = 0;
            std::memcpy(&count, b.bytes.data(), sizeof count);
            to.push_back(static_cast<double>(count));
        }
    }
    return result;
}

/// |a - b| / (1 + |b|), both as vectors.
double distance(std::vector<double> const& a, std::vector<double> const& b) {
    if (a.size() != b.size()) return HUGE_VAL;
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
    }
    return std::sqrt(difference) / (1 + std::sqrt(size));
}

}  // namespace

TEST_CASE("100 steps of networks with batch normalisation are those of PyTorch's DDP", "[nn][oracle]") {
    std::pair<char const*, any_optimizer> const optimizers[] = {
        {"sgd", sgd{.lr = 0.05}},
        {"momentum", sgd{.lr = 0.02, .momentum = 0.9, .weight_decay = 0.01}},
        {"nesterov", sgd{.lr = 0.02, .momentum = 0.8, .nesterov = true}},
        {"adam", adam{.lr = 0.01, .eps = 1e-4}},
        {"adamw", adamw{.lr = 0.01, .eps = 1e-4, .weight_decay = 0.1}},
        {"rmsprop", rmsprop{.lr = 0.002, .eps = 1e-4}},
        {"adagrad", adagrad{.lr = 0.05, .eps = 1e-4}},
    };
    auto const expected = read_record();
    std::size_t cases = 0;
    double worst = 0;
    for (int const ranks : {2, 3})
        for (auto const& [name, optimizer] : optimizers)
            for (bool const clips : {false, true})
                for (bool const images : {false, true}) {
                    std::string const which = std::string(images ? "cnn " : "mlp ") + name +
                                              (clips ? " clipped " : " ") + std::to_string(ranks);
                    CAPTURE(which);
                    record const& theirs = expected.at(which);
                    auto const ours = test::run_ranks(
                        ranks,
                        [&](communicator<>& comm) {
                            return images ? train(comm, make_cnn(), 32, optimizer, clips)
                                          : train(comm, make_mlp(), 6, optimizer, clips);
                        },
                        test::patient());
                    for (record const& rank : ours) {
                        REQUIRE(rank.size() == theirs.size());
                        for (auto const& [what, numbers] : theirs) {
                            CAPTURE(what);
                            REQUIRE(rank.count(what) == 1);
                            double const far = distance(rank.at(what), numbers);
                            worst = std::max(worst, far);
                            REQUIRE(far < 1e-10);
                        }
                    }
                    ++cases;
                }
    CHECK(cases == expected.size());
    CHECK(worst < 1e-11);  // 5e-13 when this was written
}
