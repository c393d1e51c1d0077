// A program that leaves MPI to the library. Rank 1 throws while a large message is on its way to it, which nobody will
// receive: MPI_Finalize would wait for that. With an argument: a transport before there is MPI, and after it has ended.
#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_mpi.hpp>
#include <ddp/transport/mpi/mpi.hpp>

#include <mpi.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

/// Whether a transport is refused, with advice.
bool refused() {
    try {
        ddp::mpi_transport const transport(MPI_COMM_WORLD);
    } catch (ddp::usage_error const& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return std::string(e.what()).find(
                   "mpi_transport needs MPI: make a boost::mpi::environment in main() that "
                   "outlives it") != std::string::npos;
    }
    return false;
}

}  // namespace

int main(int argc, char**) {
    if (argc > 1) {
        bool const before = refused();
        MPI_Init(nullptr, nullptr);
        MPI_Finalize();
        return before && refused() ? 0 : 1;
    }
    return ddp::run_main<ddp::mpi>({.transport = "mpi", .times = ddp::timing::for_tests()}, [](auto& comm) {
        std::vector<float> data(std::size_t{1} << 22, 1.0f);
        ddp::barrier(comm);
        if (comm.rank() == 1) throw std::runtime_error("the lamp fell over");
        ddp::send(comm, data, 1);
        ddp::barrier(comm);
    });
}
