// A program that leaves MPI to the library. Rank 1 throws while a large message is on its way to it, which nobody will
// receive: MPI_Finalize would wait for that.
#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_mpi.hpp>

#include <stdexcept>
#include <vector>

int main() {
    return ddp::run_main<ddp::mpi>({.transport = "mpi", .times = ddp::timing::for_tests()}, [](auto& comm) {
        std::vector<float> data(std::size_t{1} << 22, 1.0f);
        ddp::barrier(comm);
        if (comm.rank() == 1) throw std::runtime_error("the lamp fell over");
        ddp::send(comm, data, 1);
        ddp::barrier(comm);
    });
}
