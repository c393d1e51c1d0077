// Networks with batch normalisation against PyTorch's DistributedDataParallel, as tests/oracle/networks.py has written it down:
// the losses of 100 steps of each optimizer and what they leave, not clipped, by norm and by value, on 2 and 3 ranks.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/torch_record.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

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
record train(communicator<>& comm, Net net, std::size_t features, any_optimizer const& optimizer,
             training_options options, bool shares) {
    set_initial_values(net);
    options.share_memory = shares;
    data_parallel trainer{net, optimizer, comm, options};
    if (trainer.shares_memory() != shares) throw std::logic_error("gradients travel in another way");
    record result;
    auto const [begin, end] = share_of(torch_batch::rows, comm.rank(), comm.size());
    for (std::uint64_t step = 1; step <= torch_steps; ++step) {
        torch_batch const all(step, features);
        double const loss = trainer.step(all.rows_of(begin, end)).loss;
        mean_metric mine;
        mine.add(loss, end - begin);
        result["loss"].push_back(sum_over_ranks(comm, mine).mean());
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

}  // namespace

TEST_CASE("100 steps of networks are those of PyTorch's DDP", "[nn][oracle]") {
    std::pair<char const*, any_optimizer> const optimizers[] = {
        {"sgd", sgd{.lr = 0.05}},
        {"momentum", sgd{.lr = 0.02, .momentum = 0.9, .weight_decay = 0.01}},
        {"nesterov", sgd{.lr = 0.02, .momentum = 0.8, .nesterov = true}},
        {"adam", adam{.lr = 0.01, .eps = 1e-4}},
        {"adamw", adamw{.lr = 0.01, .eps = 1e-4, .weight_decay = 0.1}},
        {"rmsprop", rmsprop{.lr = 0.002, .eps = 1e-4}},
        {"adagrad", adagrad{.lr = 0.05, .eps = 1e-4}},
        {"lamb", lamb{.lr = 0.01, .eps = 1e-4, .weight_decay = 0.1}},
        {"lars", lars{.lr = 0.3, .weight_decay = 0.1, .trust = 0.05, .eps = 1e-4}},
        {"lion", lion{.lr = 0.002, .weight_decay = 0.1}},
    };
    std::pair<char const*, std::optional<clipping>> const clippings[] = {
        {" ", {}},
        {" clipped ", clip_by_global_norm{.max_norm = 0.5}},
        {" clipped by value ", clip_by_value{.limit = 0.05}}};
    auto const expected = read_record(DDP_TEST_NETWORKS);
    std::size_t cases = 0;
    double worst = 0;
    for (int const ranks : {2, 3})
        for (auto const& [name, optimizer] : optimizers)
            for (auto const& [how, clip] : clippings)
                for (std::string const net : {"mlp ", "cnn "}) {
                    training_options options{.clip = clip};
                    if (name == std::string("lars") || name == std::string("lion"))
                        options.frozen = {"0.bias"};  // see networks.py
                    std::string const which = net + name + how + std::to_string(ranks);
                    CAPTURE(which);
                    record const& theirs = expected.at(which);
                    auto const body = [&](bool shares) {
                        return [&, shares](communicator<>& comm) {
                            return net == "cnn " ? train(comm, make_cnn(), 32, optimizer, options, shares)
                                                 : train(comm, make_mlp(), 6, optimizer, options, shares);
                        };
                    };
                    auto ours = run_ranks(ranks, body(true), patient());
                    for (bool const shares : {true, false}) {  // over TCP, and by messages
                        bool const common = name == std::string("momentum") || name == std::string("adam");
                        if (!common && sanitizers_leave_out("over TCP, other optimizers")) continue;
                        for (record& one : on_ranks(ranks, body(shares), !shares)) ours.push_back(std::move(one));
                    }
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
    CHECK(cases == std::size_t(std::ranges::count_if(expected, [](auto const& one) {
              return one.first.starts_with("mlp ") || one.first.starts_with("cnn ");
          })));
    CHECK(worst < 1e-11);  // 5e-13 when this was written
}
