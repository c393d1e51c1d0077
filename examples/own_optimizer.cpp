// An optimizer of one's own (lion.hpp) trains a small network in six ways, which give the same bits.
//
// Alone:              ./own_optimizer
// Three processes:    ddprun -n 3 ./own_optimizer
// Prints on rank 0:   lion: loss 0.0…, the same bits in 6 of 6 ways (ranks: 3)
#include <cmath>
#include <cstdio>
#include <ddp/ddp.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/rendezvous/run_tcp.hpp>
#include <vector>

#include "lion.hpp"

struct sines {  // every rank's own samples of a smooth function
    static constexpr std::size_t rows = 16, features = 8;
    std::vector<float> x = std::vector<float>(rows * features), y = std::vector<float>(rows);

    ddp::regression_batch<float> batch(int rank, std::uint64_t step) {
        ddp::random_stream const draws{1, ddp::random_use::user, static_cast<std::uint64_t>(rank)};
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = draws.at(step * x.size() + i).symmetric<float>();
        for (std::size_t r = 0; r < rows; ++r) y[r] = std::sin(2 * x[r * features]) * x[r * features + 1];
        return {.inputs = x, .targets = y, .rows = rows, .features = features};
    }
};

std::pair<std::uint64_t, double> train(ddp::communicator<>& comm, ddp::update update, std::size_t bucket_bytes) {
    ddp::nn::sequential model{ddp::nn::linear(sines::features, 64), ddp::nn::tanh(), ddp::nn::linear(64, 1),
                              ddp::nn::mean_squared_error()};
    ddp::data_parallel trainer{model,
                               lion{.lr = 0.002, .weight_decay = 0.01},
                               comm,
                               {.update = update},
                               ddp::size_capped_buckets{.cap_bytes = bucket_bytes, .first_bytes = bucket_bytes}};
    sines data;
    double loss = 0;
    for (std::uint64_t step = 0; step < 400; ++step)
        loss += 0.05 * (trainer.step(data.batch(comm.rank(), step)).loss - loss);  // a running mean
    return {trainer.digest_of_values(), loss};
}

int main() {
    return ddp::run_main<ddp::threads, ddp::tcp>([](auto& comm) {
        auto const [bits, loss] = train(comm, ddp::update::replicated, 1 << 20);
        int same = 0;
        for (auto const update : {ddp::update::replicated, ddp::update::sharded})
            for (std::size_t const bytes : {64u, 1024u, 1u << 20})
                if (train(comm, update, bytes).first == bits) ++same;
        if (comm.rank() == 0)
            std::printf("lion: loss %.4f, the same bits in %d of 6 ways (ranks: %d)\n", loss, same, comm.size());
    });
}
