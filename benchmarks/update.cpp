// Times the update of a training step alone (reduce, mean, SGD with momentum), with gradients that every rank has just
// written, as after backward: nothing of it is hidden behind computation. One JSON line for each kind on rank 0.
//
//   ddprun -n 2 --prefix none -- ./benchmark_update
//
// MIB (140: train_step's wide is 147 MB) of float in each of values and gradients, in PARTS (3) parameters; ROUNDS (5) of
// STEPS (4), by turns.
//
//   fused         data_parallel with its default options: in memory that the ranks share, if they are on one host
//   own_allreduce ddp::allreduce of a shared_array, then every rank scales it and runs the optimizer over everything
//   replicated    data_parallel in that memory, where every rank runs the optimizer over everything
//   messages      data_parallel by messages
//
// memory     of all ranks, in gradients: what the kind has added to their shares of the machine's memory (Pss) beyond
//            values and momentum. 1: the gradients themselves
// update_ms  the step without the rewriting of the gradients, median; ratio: this over fused's. ok: the values of all kinds
//            have the same bits on every rank. in_memory: in memory that the ranks share; otherwise "messages" says how the
//            kind's messages travel.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ddp/collective/shared_array.hpp>
#include <ddp/ddp.hpp>
#include <ddp/kernel/combine.hpp>
#include <ddp/rendezvous/run_tcp.hpp>

#include "../tools/ddp-perf/compiler.hpp"

namespace {

using ms = std::chrono::duration<double, std::milli>;

std::size_t setting(char const* name, std::size_t otherwise) {
    char const* const value = std::getenv(name);
    return value != nullptr && *value != '\0' ? std::stoul(value) : otherwise;
}

/// How many elements a parameter has.
std::size_t part_of(std::size_t count) {
    std::size_t const parts = std::max<std::size_t>(setting("PARTS", 3), 1);
    return (count + parts - 1) / parts;
}

/// Out of line, so that no two calls become one. Another number each step: sums round.
[[gnu::noinline]] void rewrite(std::span<float> gradient, int rank, std::uint64_t step) {
    float const by = 1.0f / static_cast<float>(3 + rank + static_cast<int>(step % 5));
    std::fill(gradient.begin(), gradient.end(), by);
}

constexpr ddp::sgd optimizer{.lr = 0.01, .momentum = 0.9};

struct nothing {
    [[nodiscard]] std::size_t size() const { return 1; }
};

/// Parameters of one size whose gradients are rewritten in forward, and final at once in backward.
struct written_model {
    using element = float;
    std::vector<std::vector<float>> own, own_gradient;
    ddp::storage<float> memory;
    int rank;
    std::uint64_t step = 0;
    std::chrono::nanoseconds writing{0};

    written_model(std::size_t count, int of) : rank(of) {
        for (std::size_t at = 0, each = part_of(count); at < count; at += each) {
            own.emplace_back(std::min(each, count - at), 1.0f);
            own_gradient.emplace_back(own.back().size());
        }
    }
    std::vector<ddp::parameter<float>> parameters() {
        std::vector<ddp::parameter<float>> all;
        for (std::size_t i = 0; i < own.size(); ++i)
            all.push_back({"p" + std::to_string(i), {own[i].size()}, own[i], own_gradient[i]});
        return all;
    }
    void bind(ddp::storage<float> in) {
        memory = std::move(in);
        own.clear();
        own_gradient.clear();
    }
    double forward(nothing const&) {
        auto const since = std::chrono::steady_clock::now();
        ++step;
        for (std::span<float> const gradient : memory.gradients) rewrite(gradient, rank, step);
        writing = std::chrono::steady_clock::now() - since;
        return 0;
    }
    void backward(ddp::pass<float>, auto const& ready) {
        for (std::size_t i = memory.gradients.size(); i-- > 0;) ready(i);
    }
};

/// One kind: step() takes a step and returns what of it was not rewriting; digest() is that of the values.
struct kind {
    char const* name;
    std::function<double()> step;
    std::function<std::uint64_t()> digest;
    bool in_memory;
    std::vector<double> times = {};
    double memory = 0;
};

kind trainer(char const* name, ddp::communicator<> const& comm, std::size_t count,
             ddp::training_options const& options) {
    struct training {
        written_model model;
        ddp::data_parallel<written_model, ddp::any_transport> trainer;
        training(ddp::communicator<> const& over, std::size_t n, ddp::training_options const& with)
            : model(n, over.rank()), trainer(model, optimizer, over, with) {}
    };
    auto const held = std::make_shared<training>(comm, count, options);
    return {name,
            [held] {
                auto const since = std::chrono::steady_clock::now();
                held->trainer.step(nothing{});
                return ms(std::chrono::steady_clock::now() - since - held->model.writing).count();
            },
            [held] {
                ddp::digest all;
                for (std::span<float const> const value : held->model.memory.values) all.add(value);
                return all.value();
            },
            held->trainer.shares_memory()};
}

kind own_allreduce(ddp::communicator<> const& comm, std::size_t count) {
    struct training {
        ddp::shared_array<float> gradient;
        std::vector<float> value, momentum;
        std::uint64_t step = 0;
        training(ddp::communicator<> const& over, std::size_t n) : gradient(over, n), value(n, 1.0f), momentum(n) {}
    };
    auto const held = std::make_shared<training>(comm, count);
    return {"own_allreduce",
            [held, &comm] {
                ++held->step;
                rewrite(held->gradient.span(), comm.rank(), held->step);
                auto const since = std::chrono::steady_clock::now();
                ddp::allreduce(comm, held->gradient);
                ddp::scale(held->gradient.span(), static_cast<float>(1.0 / comm.size()));
                std::span<float> const slots[] = {held->momentum};
                optimizer.step(ddp::step_info{.step = held->step, .learning_rate = optimizer.learning_rate()},
                               std::span<float const>(held->gradient.span()), std::span<float>(held->value),
                               ddp::slot_spans<float>(slots));
                return ms(std::chrono::steady_clock::now() - since).count();
            },
            [held] {  // parameter by parameter, as the trainers'
                ddp::digest all;
                std::span<float const> const values = held->value;
                for (std::size_t at = 0, each = part_of(values.size()); at < values.size(); at += each)
                    all.add(values.subspan(at, std::min(each, values.size() - at)));
                return all.value();
            },
            ddp::in_memory(comm, held->gradient)};
}

/// This process's share of the machine's memory, in bytes: pages that several map count in part.
double share_of_memory() {
    std::ifstream file("/proc/self/smaps_rollup");
    for (std::string line; std::getline(file, line);)
        if (line.starts_with("Pss:")) return 1024.0 * std::strtod(line.c_str() + 4, nullptr);
    return 0;
}

double median(std::vector<double> v) {
    auto const middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
    std::nth_element(v.begin(), middle, v.end());
    return *middle;
}

}  // namespace

int main() {
    return ddp::run_main<ddp::threads, ddp::tcp>([](ddp::communicator<>& comm) {
        std::size_t const count = (setting("MIB", 140) << 20) / sizeof(float), rounds = setting("ROUNDS", 5),
                          steps = setting("STEPS", 4);
        std::vector<kind> kinds;
        auto const all_memory = [&] {
            ddp::barrier(comm);  // what others have made is there
            return ddp::allreduce(comm, share_of_memory());
        };
        auto const add = [&](bool sharded, auto const& make) {
            double const before = all_memory();
            kinds.push_back(make());
            kinds.back().step();
            double const bytes = static_cast<double>(count * sizeof(float)) * comm.size(),
                         momentum = sharded ? bytes / comm.size() : bytes;
            kinds.back().memory = (all_memory() - before - bytes - momentum) / bytes;
        };
        add(true, [&] { return trainer("fused", comm, count, {}); });
        add(false, [&] { return own_allreduce(comm, count); });
        add(false, [&] { return trainer("replicated", comm, count, {.update = ddp::update::replicated}); });
        add(false, [&] { return trainer("messages", comm, count, {.share_memory = false}); });
        for (std::size_t round = 0; round <= rounds; ++round)
            for (kind& one : kinds)
                for (std::size_t s = 0; s < steps; ++s) {
                    ddp::barrier(comm);
                    double const took = one.step();
                    if (round > 0) one.times.push_back(took);  // before, memory is touched for the first time
                }
        std::uint64_t const expected = kinds[0].digest();
        for (kind& one : kinds) {
            bool same = true;
            for (std::uint64_t const theirs : ddp::all_gather(comm, one.digest())) same = same && theirs == expected;
            if (comm.rank() == 0)
                std::printf(
                    "{\"bench\":\"update\",\"kind\":\"%s\",\"n\":%d,\"mib\":%zu,\"transport\":\"%s\",\"messages\":\"%"
                    "s\","
                    "\"in_memory\":%s,\"compiler\":\"%s\",\"update_ms\":%.3f,\"ratio\":%.3f,\"memory\":%.3f,\"ok\":%s}"
                    "\n",
                    one.name, comm.size(), count * sizeof(float) >> 20, std::string(comm.transport().name()).c_str(),
                    ddp::name_of(comm.messages()), one.in_memory ? "true" : "false", ddp_perf::compiler,
                    median(one.times), median(one.times) / median(kinds[0].times), one.memory, same ? "true" : "false");
        }
    });
}
