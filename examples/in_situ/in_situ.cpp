// A surrogate learns from a running simulation, inside the same MPI program: the solver (solver.hpp) runs on the user's own
// communicator, a network on the library's duplicate of it learns where the temperature will be eight time steps later from
// the 5 x 5 temperatures around a point now. The solver's steps run while gradients are being summed.
//
//   mpirun -n 4 ./in_situ [single|funneled|serialized|multiple]
// Prints on rank 0:
//   after 600 steps of training: error 0.0017 on 12800 points it has not seen, bound 0.0020 (nothing changes: 0.0105)
#include <boost/mpi/collectives.hpp>
#include <boost/mpi/communicator.hpp>
#include <boost/mpi/environment.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ddp/ddp.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/rendezvous/run_mpi.hpp>
#include <functional>
#include <string>
#include <string_view>

#include "solver.hpp"

namespace {

constexpr int ahead = 8;  // time steps that the surrogate leaps over
constexpr double bound = 0.002;

/// Points of the plate, each a sample of the rank that holds it: ranks bring different numbers of them.
struct samples {
    static constexpr std::size_t features = 25, points = 256;
    std::vector<std::size_t> where;  // row * n + column
    std::vector<float> inputs,
        targets;  // temperatures around each point, less its own; how its own will change, times 10

    void look(heat_solver const& solver, std::uint64_t round) {
        where.clear(), inputs.clear();
        ddp::random_stream const places{12, ddp::random_use::user, round};
        for (std::uint64_t i = 0; i < points; ++i) {
            auto const place = places.at(i).below(heat_solver::n * heat_solver::n);
            std::size_t const row = place / heat_solver::n, column = place % heat_solver::n;
            if (!solver.owns(row)) continue;
            where.push_back(place);
            for (int down = -2; down <= 2; ++down)
                for (int right = -2; right <= 2; ++right) {
                    bool const centre = down == 0 && right == 0;
                    float const around = solver.at(row, column, down, right);
                    inputs.push_back(centre ? around : 4 * (around - solver.at(row, column)));
                }
        }
    }
    void look_again(heat_solver const& solver) {
        targets.clear();
        for (std::size_t i = 0; i < where.size(); ++i)
            targets.push_back(10 * (solver.at(where[i] / heat_solver::n, where[i] % heat_solver::n) -
                                    inputs[i * features + features / 2]));
    }
    [[nodiscard]] ddp::regression_batch<float> batch() const {
        return {.inputs = inputs, .targets = targets, .rows = where.size(), .features = features};
    }
};

boost::mpi::threading::level level_of(std::string_view name) {
    namespace threading = boost::mpi::threading;
    if (name == "single") return threading::single;
    if (name == "funneled") return threading::funneled;
    if (name == "serialized") return threading::serialized;
    if (name == "multiple") return threading::multiple;
    std::fprintf(stderr, "in_situ [single|funneled|serialized|multiple], not '%s'\n", std::string(name).c_str());
    std::exit(2);
}

/// Trains, prints, and says whether the error is below the bound.
bool run(boost::mpi::communicator const& world) {
    heat_solver solver(world);
    auto comm = ddp::mpi_communicator(world);  // a duplicate: the user's messages and the library's never meet

    ddp::nn::sequential surrogate{ddp::nn::linear(samples::features, 48), ddp::nn::tanh(), ddp::nn::linear(48, 1),
                                  ddp::nn::mean_squared_error()};
    constexpr int rounds = 600, held_out = 50;
    ddp::data_parallel trainer{surrogate, ddp::adam{.lr = 3e-3}, comm,
                               ddp::training_options{.schedule = ddp::cosine_decay{.steps = rounds}}};

    samples known, coming;
    double sums[3] = {0, 0, 0};  // of the squared errors of the surrogate and of "nothing changes"; of the points
    for (int round = 0; round <= rounds + held_out; ++round) {
        bool const learn = round > 0 && round <= rounds;
        if (learn) {
            trainer.forward(known.batch());
            trainer.backward();  // from here on gradients are being summed
        }
        solver.pulse(static_cast<std::uint64_t>(round));
        coming.look(solver, static_cast<std::uint64_t>(round));
        for (int t = 0; t < ahead; ++t) {
            solver.step();    // the user's own messages, meanwhile
            comm.progress();  // moves ours on where no thread of the library may: below MPI_THREAD_MULTIPLE
        }
        coming.look_again(solver);
        if (learn) trainer.finish();  // the new values are there
        std::swap(known, coming);
        if (round <= rounds) continue;

        sums[0] += surrogate.evaluate(known.batch()).loss_sum;
        for (float const change : known.targets) sums[1] += change * change;
        sums[2] += static_cast<double>(known.where.size());
    }

    double all[3];
    boost::mpi::all_reduce(world, sums, 3, all, std::plus<double>());  // the user's own again
    double const error = std::sqrt(all[0] / all[2]) / 10, still = std::sqrt(all[1] / all[2]) / 10;
    bool const same = trainer.replicas_identical();
    if (world.rank() == 0)
        std::printf(
            "after %d steps of training: error %.4f on %.0f points it has not seen, bound %.4f "
            "(nothing changes: %.4f)\n",
            rounds, error, all[2], bound, still);
    return same && error < bound;
}

}  // namespace

int main(int argc, char** argv) {
    boost::mpi::environment const mpi(argc, argv, level_of(argc > 1 ? argv[1] : "multiple"));
    boost::mpi::communicator const world;
    try {
        return run(world) ? EXIT_SUCCESS : EXIT_FAILURE;
    } catch (std::exception const& e) {  // of a ddp::error every rank hears, and they all end here
        std::fprintf(stderr, "rank %d: %s\n", world.rank(), e.what());
        boost::mpi::environment::abort(EXIT_FAILURE);
    }
}
