// Linear regression, data-parallel: the shortest complete program.
//
// Alone:              ./quick_start
// Four processes:     ddprun -n 4 ./quick_start
// Prints on rank 0:   y = 2.00 x + 1.00 (ranks: 4)
#include <cstdio>
#include <ddp/ddp.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/rendezvous/run_tcp.hpp>

int main() {
    return ddp::run_main<ddp::threads, ddp::tcp>([](auto& comm) {
        ddp::nn::sequential model{ddp::nn::linear(1, 1), ddp::nn::mean_squared_error()};
        ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm};
        for (int step = 0; step < 200; ++step) {
            float const x[2] = {0.1f * static_cast<float>(comm.rank()), 1.0f};  // every rank brings its own samples
            float const y[2] = {2 * x[0] + 1, 2 * x[1] + 1};
            trainer.step(ddp::regression_batch<float>{.inputs = x, .targets = y, .rows = 2, .features = 1});
        }
        auto const p = trainer.parameters();
        if (comm.rank() == 0) std::printf("y = %.2f x + %.2f (ranks: %d)\n", p[0].value[0], p[1].value[0], comm.size());
    });
}
