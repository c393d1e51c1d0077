// PowerSGD, post-local SGD and DiLoCo against PyTorch, as tests/oracle/networks.py has written it down: on 2 and 3 ranks,
// in double.
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/strategy/averaging.hpp>
#include <ddp/strategy/local_parallel.hpp>
#include <ddp/strategy/outer_step.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/data/sampler.hpp>
#include <ddp/nn/activation.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/loss.hpp>
#include <ddp/nn/sequential.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/train/data_parallel.hpp>
#include <ddp/train/evaluate.hpp>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/torch_record.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

auto make_wide() {
    nn::sequential net{nn::linear<double>(24, 16), nn::relu<double>(),        nn::linear<double>(16, 10),
                       nn::relu<double>(),         nn::linear<double>(10, 4), nn::softmax_cross_entropy<double>()};
    set_initial_values(net);
    return net;
}

/// Steps of this rank; after(k) follows step number k.
template <class Trainer, class After>
record train(Trainer& trainer, std::uint64_t steps, After const& after) {
    auto const& comm = trainer.comm();
    auto const [begin, end] = share_of(torch_batch::rows, comm.rank(), comm.size());
    record result;
    for (std::uint64_t step = 1; step <= steps; ++step) {
        torch_batch const all(step, 24);
        mean_metric mine;
        mine.add(trainer.step(all.rows_of(begin, end)).loss, end - begin);
        result["loss"].push_back(sum_over_ranks(comm, mine).mean());
        after(step);
    }
    for (auto const& p : trainer.model().parameters()) result[p.name].assign(p.value.begin(), p.value.end());
    return result;
}

void compare(std::string const& which, std::vector<record> const& ours) {
    static auto const expected = read_record(DDP_TEST_NETWORKS);
    CAPTURE(which);
    record const& theirs = expected.at(which);
    for (record const& rank : ours) {
        REQUIRE(rank.size() == theirs.size());
        for (auto const& [what, numbers] : theirs) {
            CAPTURE(what);
            REQUIRE(rank.count(what) == 1);
            CHECK(distance(rank.at(what), numbers) < 1e-10);
        }
    }
}

}  // namespace

TEST_CASE("PowerSGD is PyTorch's hook", "[exchange][oracle]") {
    int const ranks = GENERATE(2, 3);
    for (bool const adaptive : {false, true}) {
        any_optimizer const optimizer = adaptive
                                            ? any_optimizer(adamw{.lr = 0.01, .eps = 1e-4, .weight_decay = 0.1})
                                            : any_optimizer(sgd{.lr = 0.02, .momentum = 0.9, .weight_decay = 0.01});
        auto const ours = run_ranks(
            ranks,
            [&](communicator<>& comm) {
                auto net = make_wide();
                data_parallel trainer{net, optimizer, comm, {}, power_sgd_exchange{.rank = 2, .start_step = 2}};
                std::size_t set = 0;
                record all = train(trainer, 50, [&](std::uint64_t step) {
                    if (step != 2) return;
                    trainer.for_each_state([&](state_slice const& slice) {
                        if (slice.name != "power_sgd_q") return;
                        std::size_t const rank = slice.shape[0], columns = slice.shape[1];
                        auto const drawn = numbers_of(7000 + columns, rank * columns);
                        std::vector<double> q(drawn.size());  // torch's lies the other way round
                        for (std::size_t k = 0; k < rank; ++k)
                            for (std::size_t j = 0; j < columns; ++j) q[k * columns + j] = drawn[j * rank + k];
                        std::memcpy(slice.bytes.data(), q.data(), slice.bytes.size());
                        ++set;
                    });
                });
                if (set != 2) throw std::logic_error("two matrices are compressed, not " + std::to_string(set));
                return all;
            },
            patient());
        compare(std::string("power_sgd ") + (adaptive ? "adamw " : "momentum ") + std::to_string(ranks), ours);
    }
}

TEST_CASE("local SGD after a warm-up is PyTorch's post-local SGD", "[strategy][oracle]") {
    int const ranks = GENERATE(2, 3);
    compare("post_local " + std::to_string(ranks),
            run_ranks(
                ranks,
                [&](communicator<>& comm) {
                    auto net = make_wide();
                    local_parallel trainer{net, sgd{.lr = 0.05}, comm, local_sgd{.period = 4, .warm_up_steps = 12}};
                    return train(trainer, torch_steps, [](std::uint64_t) {});
                },
                patient()));
}

TEST_CASE("DiLoCo is algorithm 1 of its paper by PyTorch's optimizers", "[strategy][oracle]") {
    int const ranks = GENERATE(2, 3);
    compare("diloco " + std::to_string(ranks),
            run_ranks(
                ranks,
                [&](communicator<>& comm) {
                    auto net = make_wide();
                    local_parallel trainer{net, adamw{.lr = 0.01, .eps = 1e-4, .weight_decay = 0.1}, comm,
                                           diloco{.period = 10, .outer_lr = 0.7, .outer_momentum = 0.9}};
                    return train(trainer, torch_steps, [](std::uint64_t) {});
                },
                patient()));
}
