// Times ddp::allreduce(…, native_allreduce{}) beside bare MPI_Allreduce loops, in one process and taking turns, so that what
// else the machine does hits all alike. Prints a Markdown table: medians of about a millisecond's calls, a call in µs.
//
//   mpirun -n 2 ./benchmark_native_allreduce [multiple]      FUNNELED, or THREAD_MULTIPLE with a communication thread
//
// ROUNDS (301, and a third of that above 1 MiB) of each.
#include <mpi.h>

#include <algorithm>
#include <array>
#include <boost/mpi/communicator.hpp>
#include <boost/mpi/environment.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ddp/collective/algorithms/native_allreduce.hpp>
#include <ddp/collective/allreduce.hpp>
#include <ddp/rendezvous/run_mpi.hpp>
#include <ddp/train/data_parallel.hpp>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

int main(int argc, char** argv) {
    bool const multiple = argc > 1 && std::string_view(argv[1]) == "multiple";
    namespace threading = boost::mpi::threading;
    boost::mpi::environment const mpi(argc, argv, multiple ? threading::multiple : threading::funneled);
    boost::mpi::communicator const world;
    MPI_Comm bare = MPI_COMM_NULL;
    MPI_Comm_dup(world, &bare);
    {
        auto comm = ddp::mpi_communicator(world);
        if (comm.rank() == 0)
            std::printf(
                "%d ranks, %s a communication thread\n\n| bytes | bare, in place | bare, two buffers | ddp | "
                "ddp / in place | ddp / faster bare |\n|---|---|---|---|---|---|\n",
                comm.size(), comm.has_thread() ? "with" : "without");
        char const* const wanted = std::getenv("ROUNDS");
        std::size_t const rounds = wanted == nullptr ? 301 : std::max<std::size_t>(std::stoul(wanted), 1);
        for (std::size_t bytes = std::size_t{4} << 10; bytes <= std::size_t{16} << 20; bytes *= 4) {
            std::size_t const count = bytes / sizeof(float);
            auto const in = ddp::make_arena<float>(count), out = ddp::make_arena<float>(count);
            int const n = static_cast<int>(count);
            std::array<std::function<void()>, 3> const ways{
                [&] { MPI_Allreduce(MPI_IN_PLACE, in.get(), n, MPI_FLOAT, MPI_SUM, bare); },
                [&] { MPI_Allreduce(in.get(), out.get(), n, MPI_FLOAT, MPI_SUM, bare); },
                [&] { ddp::allreduce(comm, std::span<float>(in.get(), count), ddp::native_allreduce{}); }};
            std::size_t const calls = std::max<std::size_t>(1, (std::size_t{4} << 20) / bytes / 4);
            std::array<std::vector<double>, 3> times;
            for (std::size_t round = 0; round < (bytes > (std::size_t{1} << 20) ? (rounds + 2) / 3 : rounds); ++round)
                for (std::size_t turn = 0; turn < ways.size(); ++turn) {
                    std::size_t const which = (round + turn) % ways.size();
                    ways[which]();
                    auto const began = std::chrono::steady_clock::now();
                    for (std::size_t i = 0; i < calls; ++i) ways[which]();
                    std::chrono::duration<double, std::micro> const took = std::chrono::steady_clock::now() - began;
                    times[which].push_back(took.count() / static_cast<double>(calls));
                }
            std::array<double, 3> median{};
            for (std::size_t k = 0; k < times.size(); ++k) {
                auto const middle = times[k].begin() + static_cast<std::ptrdiff_t>(times[k].size() / 2);
                std::nth_element(times[k].begin(), middle, times[k].end());
                median[k] = *middle;
            }
            if (comm.rank() == 0)
                std::printf("| %zu | %.2f | %.2f | %.2f | %.3f | %.3f |\n", bytes, median[0], median[1], median[2],
                            median[2] / median[0], median[2] / std::min(median[0], median[1]));
            std::fflush(stdout);
        }
    }
    MPI_Comm_free(&bare);
}
