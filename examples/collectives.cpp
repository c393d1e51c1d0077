// Collectives and messages: numbers of all ranks combined, handed out, exchanged, passed on; several under way at once.
//
// Alone:              ./collectives
// Four processes:     ddprun -n 4 ./collectives
// Under MPI:          mpirun -n 4 ./collectives
// Prints on rank 0, with four ranks:
//   7 samples each on average, between 4 and 10
//   rank 0 learnt with rate 0.1; the rates of all ranks: 0.1 0.2 0.3 0.4
//   every gradient is 2.0; the ninth message has come through 9 ranks
//   transposed: 0 10 20 30
#include <cstdint>
#include <cstdio>
#include <vector>

#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_tcp.hpp>
#ifdef EXAMPLE_WITH_MPI
#include <ddp/rendezvous/run_mpi.hpp>
#endif

namespace {

void numbers(ddp::communicator<> const& comm) {
    std::int64_t const mine = 4 + 2 * comm.rank();  // samples of this rank
    std::int64_t const all = ddp::allreduce(comm, mine);
    std::int64_t const least = ddp::allreduce(comm, mine, ddp::minimum{});
    std::int64_t const most = ddp::allreduce(comm, mine, ddp::maximum{});
    if (comm.rank() == 0)
        std::printf("%.0f samples each on average, between %.0f and %.0f\n", static_cast<double>(all) / comm.size(),
                    static_cast<double>(least), static_cast<double>(most));
}

void moves(ddp::communicator<> const& comm) {
    struct settings {
        int layers;
        double factor;
    } common{};
    std::vector<double> rates;  // one for each rank, known to rank 0
    if (comm.rank() == 0) {
        common = {.layers = 3, .factor = 0.1};
        for (int r = 0; r < comm.size(); ++r) rates.push_back(common.factor * (r + 1));
    }
    ddp::broadcast(comm, common);                   // any type that is its bytes
    double const rate = ddp::scatter(comm, rates);  // each rank its own
    std::vector<double> const known = ddp::all_gather(comm, rate);
    if (comm.rank() != 0) return;
    std::printf("rank 0 learnt with rate %.1f; the rates of all ranks:", rate);
    for (double const each : known) std::printf(" %.1f", each);
    std::printf("\n");
}

void under_way(ddp::communicator<> const& comm) {
    int const right = (comm.rank() + 1) % comm.size(), left = (comm.rank() + comm.size() - 1) % comm.size();
    std::vector<double> gradient(1000, 0.5);
    ddp::request sum = ddp::start_allreduce(comm, gradient);  // goes on while we do something else

    int passed_on = 0;
    for (int step = 0; step < 9; ++step) {
        int from_left = 0;
        ddp::send_receive(comm, passed_on + 1, right, from_left, left);
        passed_on = from_left;
    }
    sum.wait();  // only now may gradient be read
    if (comm.rank() == 0)
        std::printf("every gradient is %.1f; the ninth message has come through %d ranks\n", gradient.back(),
                    passed_on);
}

void transposed(ddp::communicator<> const& comm) {
    std::vector<int> row(static_cast<std::size_t>(comm.size()));  // of a matrix with a row and a column for each rank
    for (std::size_t column = 0; column < row.size(); ++column)
        row[column] = 10 * comm.rank() + static_cast<int>(column);
    std::vector<int> const column = ddp::all_to_all(comm, row);
    if (comm.rank() != 0) return;
    std::printf("transposed:");
    for (int const entry : column) std::printf(" %d", entry);
    std::printf("\n");
}

}  // namespace

int main() {
    auto const work = [](ddp::communicator<> const& comm) {
        numbers(comm);
        moves(comm);
        under_way(comm);
        transposed(comm);
    };
#ifdef EXAMPLE_WITH_MPI
    return ddp::run_main<ddp::threads, ddp::tcp, ddp::mpi>(work);
#else
    return ddp::run_main<ddp::threads, ddp::tcp>(work);
#endif
}
