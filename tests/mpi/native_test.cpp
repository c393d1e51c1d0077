// native_allreduce: the vendor's MPI_Allreduce alone and in a trainer, and failures that must not leave ranks in it.
#include <ddp/collective/algorithms/native_allreduce.hpp>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/rendezvous/run_mpi.hpp>
#include <ddp/train/data_parallel.hpp>

#include <boost/mpi/communicator.hpp>

#include "mpi/patience.hpp"
#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/tanh_mlp.hpp"

namespace {

using ddp::native_allreduce;
using comm_type = ddp::communicator<>;

comm_type connect() {
    ddp::timing times = ddp::test::patient_times();
    times.collective = std::chrono::seconds(60);  // five ranks on two cores
    return ddp::mpi_communicator(boost::mpi::communicator(), times);
}

/// "" or where the sum over all ranks is wrong: in any bit where the addends are small integers, else beyond rounding.
template <ddp::Element E>
std::string check_sum(comm_type& comm, std::size_t count, std::size_t piece, ddp::test::values kind) {
    auto const all = ddp::test::addends<E>(kind, count, comm.size(), count);
    std::vector<E> data = all[static_cast<std::size_t>(comm.rank())];
    ddp::allreduce(comm, std::span<E>(data), native_allreduce{.piece_bytes = piece});
    std::vector<E> const expected = ddp::reference_sum(all);
    if (kind == ddp::test::values::small_integers) return ddp::test::compare(data, expected);
    for (std::size_t i = 0; i < count; ++i) {
        E magnitude = 0;
        for (auto const& one : all) magnitude += std::abs(one[i]);
        E const rounding = static_cast<E>(comm.size()) * std::numeric_limits<E>::epsilon() * magnitude;
        if (!(std::abs(data[i] - expected[i]) <= rounding)) return "value " + std::to_string(i) + " is wrong";
    }
    return {};
}

/// The values after some steps, on batches that differ in size between ranks and are now and then empty on some.
template <ddp::Element E, class A>
std::vector<std::vector<E>> trained_values(comm_type& comm, A algorithm, ddp::training_options const& options) {
    ddp::test::task_data<E> const data(7, 3, 64);
    ddp::test::tanh_mlp<E> model(7, 24, 3, 5 + static_cast<std::uint64_t>(comm.rank()));
    ddp::data_parallel trainer{model,     ddp::sgd{.lr = 0.1, .momentum = 0.9},
                               comm,      options,
                               algorithm, ddp::size_capped_buckets{.cap_bytes = 256, .first_bytes = 64}};
    for (std::size_t step = 0; step < 12; ++step) {
        auto const [begin, end] = ddp::test::share(13, step, comm.rank(), comm.size());
        trainer.step(data.batch(step + begin, step + end));
        if (!trainer.replicas_identical()) return {};
    }
    while (trainer.join()) {
    }
    std::vector<std::vector<E>> values;
    for (auto const& p : trainer.parameters()) values.emplace_back(p.value.begin(), p.value.end());
    return values;
}

template <ddp::Element E>
double distance(std::vector<std::vector<E>> const& a, std::vector<std::vector<E>> const& b) {
    if (a.empty() || a.size() != b.size()) return 1e30;
    double most = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
        for (std::size_t k = 0; k < a[i].size(); ++k)
            most = std::max(most, std::abs(static_cast<double>(a[i][k]) - static_cast<double>(b[i][k])));
    return most;
}

/// What `f` threw, or "nothing".
template <class F>
std::string thrown_by(F const& f) {
    try {
        f();
    } catch (std::exception const& e) {
        return e.what();
    }
    return "nothing";
}

struct throws_on_bucket {
    bool culprit = false;
    void on(ddp::bucket_reduced const& event) const {
        if (culprit && event.step == 2) throw std::runtime_error("the observer is full");
    }
};

}  // namespace

TEST_CASE("native allreduce sums what the ranks bring, whole or in pieces", "[mpi][native]") {
    comm_type comm = connect();
    auto const ranks = static_cast<std::size_t>(comm.size());
    for (std::size_t const count :
         {std::size_t{0}, std::size_t{1}, ranks - 1, ranks, std::size_t{63}, std::size_t{1000}, std::size_t{70'001}})
        for (std::size_t const piece : {std::size_t{100}, std::size_t{1} << 20})
            for (auto const kind : {ddp::test::values::small_integers, ddp::test::values::mixed}) {
                CAPTURE(count, piece, kind == ddp::test::values::mixed);
                CHECK(check_sum<float>(comm, count, piece, kind) == "");
                CHECK(check_sum<double>(comm, count, piece, kind) == "");
            }
    comm_type part = comm.split(comm.rank() % 2, -comm.rank());
    CHECK(check_sum<float>(part, 1000, 100, ddp::test::values::small_integers) == "");
    CHECK(check_sum<double>(comm, 1000, 100, ddp::test::values::mixed) == "");
}

TEST_CASE("a trainer with native allreduce comes to the values of the automatic one, to rounding", "[mpi][native]") {
    comm_type comm = connect();
    for (bool const sharded : {false, true})
        for (bool const clipped : {false, true}) {
            CAPTURE(sharded, clipped);
            ddp::training_options const options = ddp::test::options_of(sharded, clipped);
            native_allreduce const native{.piece_bytes = 128};
            CHECK(distance(trained_values<double>(comm, native, options),
                           trained_values<double>(comm, ddp::automatic_allreduce{}, options)) < 1e-13);
            CHECK(distance(trained_values<float>(comm, native, options),
                           trained_values<float>(comm, ddp::automatic_allreduce{}, options)) < 1e-5);
        }
}

TEST_CASE("between backward and finish nobody has to come: other collectives may run", "[mpi][native]") {
    comm_type comm = connect();
    ddp::test::task_data<float> const data(7, 3, 16);
    ddp::test::tanh_mlp<float> model(7, 24, 3, 1);
    ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm, ddp::training_options{}, native_allreduce{}};
    for (int step = 0; step < 300; ++step) {
        trainer.forward(data.batch(0, 4));
        trainer.backward();
        std::vector<float> ones(10, 1.0f);
        ddp::allreduce(comm, std::span<float>(ones), native_allreduce{});  // first: nothing else has fetched the mail
        ddp::allreduce(comm, std::span<float>(ones));
        CHECK(ones.back() == static_cast<float>(comm.size() * comm.size()));
        CHECK(trainer.finish().weight == 4 * static_cast<std::uint64_t>(comm.size()));
    }
    CHECK(trainer.replicas_identical());
}

TEST_CASE("ranks that disagree about native allreduce hear so when the trainer is made", "[mpi][native]") {
    comm_type comm = connect();
    if (comm.size() == 1) return;
    bool const other = comm.rank() == comm.size() - 1;
    bool const by_options = GENERATE(true, false);
    ddp::test::tanh_mlp<float> model(7, 24, 3, 1);
    auto const with = [&](auto algorithm) {
        return thrown_by(
            [&] { ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm, ddp::training_options{}, algorithm}; });
    };
    std::string const what = by_options ? with(native_allreduce{.piece_bytes = other ? 4096u : 8192u})
                             : other    ? with(native_allreduce{})
                                        : with(ddp::automatic_allreduce{});
    CAPTURE(what);
    CHECK(what.find("rank " + std::to_string(comm.size() - 1) + " differs from rank 0: another allreduce") !=
          std::string::npos);
}

TEST_CASE("what one rank throws in a step reaches the others before they wait in MPI_Allreduce", "[mpi][native]") {
    comm_type comm = connect();
    if (comm.size() == 1) return;
    bool const culprit = comm.rank() == comm.size() - 1;
    bool const in_observer =
        GENERATE(false, true);  // which speaks between buckets; otherwise between backward and finish
    ddp::test::task_data<float> const data(7, 3, 16);
    ddp::test::tanh_mlp<float> model(7, 24, 3, 1);
    std::string const what = thrown_by([&] {
        ddp::data_parallel trainer{model,
                                   ddp::sgd{.lr = 0.1},
                                   comm,
                                   ddp::training_options{},
                                   native_allreduce{},
                                   ddp::per_parameter_buckets{},
                                   throws_on_bucket{culprit && in_observer}};
        for (int step = 1; step <= 3; ++step) {  // who needs nothing more from the culprit hears of it one step later
            trainer.forward(data.batch(0, 4));
            trainer.backward();
            if (culprit && !in_observer && step == 2) throw std::runtime_error("the solver diverged");
            trainer.finish();
        }
    });
    CAPTURE(what);
    if (!culprit) CHECK(what.find("rank " + std::to_string(comm.size() - 1)) != std::string::npos);
    std::string const reason = in_observer ? "the observer is full"
                               : culprit   ? "the solver diverged"
                                           : "left a training step";
    CHECK(what.find(reason) != std::string::npos);
    float one = 1;
    CHECK_THROWS_WITH(ddp::allreduce(comm, std::span<float>(&one, 1), native_allreduce{}),
                      Catch::Contains(in_observer ? reason : "left a training step"));
}

TEST_CASE("who comes too late to finish() hears that it was, and does not wait in MPI_Allreduce", "[mpi][native]") {
    boost::mpi::communicator const world;
    if (world.size() == 1) return;
    ddp::timing times = ddp::test::patient_times();
    times.collective = std::chrono::milliseconds(400);
    comm_type comm = ddp::mpi_communicator(world, times);
    ddp::test::task_data<float> const data(7, 3, 16);
    ddp::test::tanh_mlp<float> model(7, 24, 3, 1);
    std::string const what = thrown_by([&] {
        ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm, ddp::training_options{}, native_allreduce{}};
        for (int step = 0; step < 3; ++step) {
            trainer.forward(data.batch(0, 4));
            trainer.backward();
            if (step == 1 && comm.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
            trainer.finish();
        }
    });
    CAPTURE(what);
    CHECK(what.find("DDP-E204 deadline: rank 0 did not take part in step") == 0);
}

TEST_CASE("native allreduce is refused over anything but MPI, and with pieces of less than an element",
          "[mpi][native]") {
    for (std::string const& said : ddp::test::errors_of_ranks(2, [](auto& comm) {
             std::vector<float> data(3);
             ddp::allreduce(comm, data, native_allreduce{});
         }))
        CHECK(
            said.find("native_allreduce sums by MPI: it needs a communicator over MPI, and this one is over inproc") !=
            std::string::npos);
    comm_type const comm = connect();
    double one = 1;
    CHECK_THROWS_WITH(ddp::allreduce(comm, std::span(&one, 1), native_allreduce{.piece_bytes = sizeof(double) - 1}),
                      Catch::Contains("native_allreduce::piece_bytes must be at least one element"));
}
