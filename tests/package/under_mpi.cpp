// Uses the component mpi: the ranks that mpirun has started, or one.
#include <cstdio>
#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_mpi.hpp>

int main() {
    return ddp::run_main<ddp::mpi>({.transport = "mpi"}, [](auto& comm) {
        float sum = 1;
        ddp::allreduce(comm, std::span<float>(&sum, 1));
        if (comm.rank() == 0) std::printf("ranks: %.0f, transport %s\n", double{sum}, ddp::mpi::name.data());
    });
}
