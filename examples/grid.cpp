// Groups of ranks: a grid whose columns each train a model of their own, while the rows add something up.
//
//   ddprun -n 6 ./grid        two rows of three columns
//
// Prints, once a column, the line that the column has learnt, and once a row the sum of its members' numbers.
#include <cstdio>
#include <vector>

#include <ddp/ddp.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/rendezvous/run_tcp.hpp>

namespace {

constexpr int columns = 3;

/// An ordinary function: communicator<> is over whatever transport the program was started with.
void work(ddp::communicator<> const& comm) {
    int const row = comm.rank() / columns, column = comm.rank() % columns;
    ddp::communicator<> const along_row = comm.split(row);        // ranks of one color form a group
    ddp::communicator<> const along_column = comm.split(column);  // numbered in the order of their ranks

    // Each column learns a line of its own, y = (column + 1) x + 1, from the samples of its rows.
    ddp::nn::sequential model{ddp::nn::linear(1, 1), ddp::nn::mean_squared_error()};
    ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, along_column};
    float total = 0;
    for (int step = 0; step < 300; ++step) {
        float const slope = static_cast<float>(column + 1), x[2] = {0.1f * static_cast<float>(row), 1.0f};
        float const y[2] = {slope * x[0] + 1, slope * x[1] + 1};
        trainer.forward(ddp::regression_batch<float>{.inputs = x, .targets = y, .rows = 2, .features = 1});
        trainer.backward();  // the column's gradients are on their way …
        std::vector<float> number = {static_cast<float>(comm.rank())};
        ddp::allreduce(along_row, std::span<float>(number));  // … while the row sums
        trainer.finish();
        total = number[0];
    }
    auto const p = trainer.parameters();
    if (along_column.rank() == 0) std::printf("column %d: y = %.2f x + %.2f\n", column, p[0].value[0], p[1].value[0]);
    if (along_row.rank() == 0) std::printf("row %d: %.0f\n", row, total);
}

}  // namespace

int main() {
    return ddp::run_main<ddp::threads, ddp::tcp>(work);
}
