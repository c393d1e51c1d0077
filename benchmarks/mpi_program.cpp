// Times an MPI program and what it becomes when it is converted: the steps of a network 784-HIDDEN-10 (ReLU, softmax
// cross-entropy, float, SGD) whose passes are written by hand with Eigen.
//
//   mpirun -n 2 ./benchmark_mpi_program [funneled|multiple] [HIDDEN]...        HIDDEN: 512 1024
//
// plain    forward, backward, MPI_Allreduce of the flat gradient in place, a loop that subtracts it; on the user's communicator
// ddp      the same passes in a data_parallel trainer with its default options
// messages the same, with shared memory switched off
// native   the same, with native_allreduce
// alone    the passes and the loop, without any communication
//
// All in turn, in one process, ROUNDS (5) times for about BUDGET (1) seconds; medians of a round's steps, then of the rounds, in
// milliseconds, and processor time of a rank a step. 64 samples a rank and step. DDP_COMMUNICATION_THREAD decides what the
// communication thread does at "multiple".
#include <mpi.h>
#include <sys/resource.h>

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <boost/mpi/communicator.hpp>
#include <boost/mpi/environment.hpp>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/collective/algorithms/native_allreduce.hpp>
#include <ddp/core/random.hpp>
#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_mpi.hpp>

namespace {

constexpr Eigen::Index inputs = 784, outputs = 10, rows = 64;
constexpr float rate = 0.01F;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using matrix_map = Eigen::Map<matrix>;
using vector_map = Eigen::Map<Eigen::RowVectorXf>;

/// One batch again and again; another on each rank.
struct samples {
    matrix x{rows, inputs};
    std::array<int, rows> label{};
    explicit samples(int rank) {
        ddp::random_stream const draws{100 + static_cast<std::uint64_t>(rank), ddp::random_use::user};
        for (Eigen::Index i = 0; i < x.size(); ++i)
            x.data()[i] = draws.at(static_cast<std::uint64_t>(i)).symmetric<float>();
        for (std::size_t i = 0; i < label.size(); ++i) label[i] = static_cast<int>(draws.at(i).below(outputs));
    }
    [[nodiscard]] static std::size_t size() { return rows; }
};

/// The program's own network. Values and gradient: (hidden, inputs), hidden, (outputs, hidden), outputs.
struct network {
    using element = float;

    explicit network(Eigen::Index size) : hidden(size), own_values(count()), own_gradients(count()) {
        ddp::random_stream const start{7, ddp::random_use::initial_values};
        for (std::size_t i = 0; i < own_values.size(); ++i) own_values[i] = 0.03F * start.at(i).symmetric<float>();
        std::size_t first = 0;
        for (std::size_t i = 0; i < 4; first += sizes()[i++]) {
            value[i] = std::span(own_values).subspan(first, sizes()[i]);
            gradient[i] = std::span(own_gradients).subspan(first, sizes()[i]);
        }
    }
    [[nodiscard]] std::array<std::size_t, 4> sizes() const {
        auto const h = static_cast<std::size_t>(hidden);
        return {h * inputs, h, h * outputs, outputs};
    }
    [[nodiscard]] std::size_t count() const {
        std::size_t sum = 0;
        for (std::size_t const size : sizes()) sum += size;
        return sum;
    }
    std::vector<ddp::parameter<float>> parameters() {
        auto const h = static_cast<std::size_t>(hidden);
        return {{"w1", {h, inputs}, value[0], gradient[0]},
                {"b1", {h}, value[1], gradient[1]},
                {"w2", {outputs, h}, value[2], gradient[2]},
                {"b2", {outputs}, value[3], gradient[3]}};
    }
    void bind(ddp::storage<float> memory) {
        for (std::size_t i = 0; i < 4; ++i) value[i] = memory.values[i], gradient[i] = memory.gradients[i];
        owner = memory.owner;
    }

    double forward(samples const& batch) {
        at = &batch;
        a.noalias() = batch.x * matrix_map(value[0].data(), hidden, inputs).transpose();
        a = (a.rowwise() + vector_map(value[1].data(), hidden)).cwiseMax(0.0F);
        p.noalias() = a * matrix_map(value[2].data(), outputs, hidden).transpose();
        p.rowwise() += vector_map(value[3].data(), outputs);
        double loss = 0;
        for (Eigen::Index r = 0; r < rows; ++r) {
            p.row(r).array() -= p.row(r).maxCoeff();
            p.row(r) = p.row(r).array().exp().matrix();
            p.row(r) /= p.row(r).sum();
            loss -= std::log(static_cast<double>(p(r, batch.label[static_cast<std::size_t>(r)])));
        }
        return loss / rows;
    }
    template <class Ready>
    void backward(ddp::pass<float> how, Ready const& ready) {
        for (Eigen::Index r = 0; r < rows; ++r) p(r, at->label[static_cast<std::size_t>(r)]) -= 1;
        p *= how.scale / static_cast<float>(rows);
        matrix_map(gradient[2].data(), outputs, hidden).noalias() = p.transpose() * a;
        vector_map(gradient[3].data(), outputs) = p.colwise().sum();
        ready(3);
        ready(2);
        da.noalias() = p * matrix_map(value[2].data(), outputs, hidden);
        da = (a.array() > 0).select(da, 0.0F);
        vector_map(gradient[1].data(), hidden) = da.colwise().sum();
        ready(1);
        matrix_map(gradient[0].data(), hidden, inputs).noalias() = da.transpose() * at->x;
        ready(0);
    }

    Eigen::Index hidden;
    std::vector<float> own_values, own_gradients;
    std::array<std::span<float>, 4> value, gradient;
    std::shared_ptr<void> owner;
    samples const* at = nullptr;
    matrix a, p, da;
};

double median(std::vector<double> v) {
    auto const middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
    std::nth_element(v.begin(), middle, v.end());
    return *middle;
}
double number(char const* name, double otherwise) {
    char const* const value = std::getenv(name);
    return value != nullptr ? std::atof(value) : otherwise;
}
double cpu_seconds() {
    ::rusage self{};
    ::getrusage(RUSAGE_SELF, &self);
    return static_cast<double>(self.ru_utime.tv_sec + self.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(self.ru_utime.tv_usec + self.ru_stime.tv_usec);
}

void measure(MPI_Comm users, ddp::communicator<>& comm, Eigen::Index hidden) {
    samples const mine(comm.rank());
    std::vector<std::unique_ptr<network>> nets;
    for (int i = 0; i < 5; ++i) nets.push_back(std::make_unique<network>(hidden));
    auto const passes = [&](network& net) {
        double const loss = net.forward(mine);
        net.backward({.scale = 1, .accumulate = false}, [](std::size_t) {});
        return loss;
    };
    auto const descend = [](network& net, float factor) {
        for (std::size_t i = 0; i < net.own_values.size(); ++i)
            net.own_values[i] -= rate * (factor * net.own_gradients[i]);
    };
    ddp::sgd const how{.lr = rate};
    ddp::data_parallel ours{*nets[1], how, comm};
    ddp::data_parallel messages{*nets[2], how, comm, ddp::training_options{.share_memory = false}};
    ddp::data_parallel native{*nets[3], how, comm, ddp::training_options{.share_memory = false},
                              ddp::native_allreduce{}};
    struct way {
        char const* name;
        std::function<double()> step;
        std::vector<double> rounds = {}, cpu = {};
    };
    std::array<way, 5> ways{
        way{"plain",
            [&] {
                double const loss = passes(*nets[0]);
                MPI_Allreduce(MPI_IN_PLACE, nets[0]->own_gradients.data(), static_cast<int>(nets[0]->count()),
                              MPI_FLOAT, MPI_SUM, users);
                descend(*nets[0], 1.0F / static_cast<float>(comm.size()));
                return loss;
            }},
        way{"ddp", [&] { return ours.step(mine).loss; }}, way{"messages", [&] { return messages.step(mine).loss; }},
        way{"native", [&] { return native.step(mine).loss; }}, way{"alone", [&] {
                                                                       double const loss = passes(*nets[4]);
                                                                       descend(*nets[4], 1);
                                                                       return loss;
                                                                   }}};
    double const budget = number("BUDGET", 1);
    for (int round = 0; round < static_cast<int>(number("ROUNDS", 5)); ++round)
        for (way& one : ways) {
            MPI_Barrier(users);
            std::vector<double> times;
            int steps = static_cast<int>(budget * 250);
            for (int warm = 0; warm < 5; ++warm) one.step();
            double const before = cpu_seconds();
            for (int i = 0; i < steps; ++i) {
                auto const since = std::chrono::steady_clock::now();
                if (!(one.step() > 0)) std::exit(1);
                times.push_back(
                    std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since).count());
            }
            one.cpu.push_back(1e3 * (cpu_seconds() - before) / steps);
            one.rounds.push_back(median(std::move(times)));
        }
    double const plain = median(ways[0].rounds);
    if (comm.rank() != 0) return;
    std::printf("784-%ld-10, %d ranks, communication thread: %s\n%-10s %8s %8s %14s\n", static_cast<long>(hidden),
                comm.size(), name_of(comm.thread()), "ms", "step", "cpu", "plain : this");
    for (way const& one : ways)
        std::printf("%-10s %8.3f %8.3f %14.2f\n", one.name, median(one.rounds), median(one.cpu),
                    plain / median(one.rounds));
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> words(argv + 1, argv + argc);
    bool const named = !words.empty() && (words[0] == "multiple" || words[0] == "funneled");
    bool const multiple = named && words[0] == "multiple";
    if (named) words.erase(words.begin());
    if (words.empty()) words = {"512", "1024"};
    namespace threading = boost::mpi::threading;
    boost::mpi::environment const mpi(argc, argv, multiple ? threading::multiple : threading::funneled);
    boost::mpi::communicator const world;
    ddp::communicator<> comm = ddp::mpi_communicator(world);
    for (std::string const& hidden : words) measure(world, comm, std::atol(hidden.c_str()));
}
