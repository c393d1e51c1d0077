// An allreduce of one's own (binomial_tree.hpp) sums the bits that the library's do, and a model is trained with it.
//
// Alone:              ./own_allreduce
// Five processes:     ddprun -n 5 ./own_allreduce
// Under MPI:          mpirun -n 5 ./own_allreduce
// Prints on rank 0:   binomial_tree: the library's bits, and a training that ends at 1.5000 (ranks: 5)
#include <cstdio>
#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_tcp.hpp>
#include <vector>
#ifdef EXAMPLE_WITH_MPI
#include <ddp/rendezvous/run_mpi.hpp>
#endif

#include "binomial_tree.hpp"
#include "toy_model.hpp"

void show(ddp::communicator<>& comm) {
    std::vector<float> mine(10'001);
    ddp::random_stream const draws{1, ddp::random_use::user, static_cast<std::uint64_t>(comm.rank())};
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = draws.at(i).normal<float>();
    std::vector<float> theirs = mine;
    ddp::allreduce(comm, std::span<float>(mine), binomial_tree_allreduce{});
    ddp::allreduce(comm, std::span<float>(theirs));

    toy_model model({1000, 300});
    ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.5}, comm, binomial_tree_allreduce{}};
    toy_batch const batch{static_cast<float>(comm.rank()), 1.0f};
    for (int step = 0; step < 40; ++step) trainer.step(batch);
    if (comm.rank() == 0)
        std::printf("%s: %s bits, and a training that ends at %.4f (ranks: %d)\n", binomial_tree_allreduce::name,
                    mine == theirs ? "the library's" : "other", trainer.parameters()[0].value[0], comm.size());
}

int main() {
#ifdef EXAMPLE_WITH_MPI
    return ddp::run_main<ddp::threads, ddp::tcp, ddp::mpi>([](auto& comm) { show(comm); });
#else
    return ddp::run_main<ddp::threads, ddp::tcp>([](auto& comm) { show(comm); });
#endif
}
