// Four simulated ranks on virtual time: each computes for a stated time and sums 1 MiB in a ring, ten times over. Then
// with a rank that is slow, and with one that dies. docs/virtual_time.md explains it.
//
//     ./virtual_time
//
// prints, in every run and on every machine:
//
//     four ranks alike: 115.6 ms, no error
//     rank 3 computes for 25 ms a step: 265.1 ms, no error
//     rank 2 dies after 45 ms: 46.1 ms, DDP-E202 peer closed: rank 2 is gone while rank 3 was in allreduce #4 …
#include <chrono>
#include <cstdio>
#include <ddp/collective/algorithms/ring_allreduce.hpp>
#include <ddp/comm/verdict.hpp>
#include <ddp/sim/cluster.hpp>
#include <string>
#include <vector>

using namespace std::chrono_literals;
using on_rank = ddp::virtual_cluster::scheduler_type;  // runs the coroutines of one rank

/// What communicator::enter() does in a real job: this rank enters its next collective.
ddp::lane<ddp::virtual_transport> enter(on_rank& on, std::size_t count) {
    ddp::group& all = on.world();
    ddp::operation_info what{.name = "allreduce", .count = count, .element = "float"};
    what.id = {.group = all.id(), .channel = ddp::channel::user, .index = all.next_call()};
    all.enter(what);
    return {on, all, what.id, all.history()};
}

/// One rank's program. `length`: of its computation in a step.
ddp::task<> train(ddp::virtual_cluster* cluster, on_rank* on, std::vector<float>* gradient, ddp::nanoseconds length) {
    for (int step = 0; step < 10; ++step) {
        co_await cluster->compute(on->rank(), length);
        ddp::lane<ddp::virtual_transport> const over = enter(*on, gradient->size());
        co_await ddp::ring_allreduce::sum(ddp::ring_allreduce{}, over, std::span<float>(*gradient));
    }
}

void simulate(char const* title, ddp::nanoseconds length_of_rank_3, int victim = -1) {
    ddp::virtual_cluster cluster(4, {.latency = 50us, .bytes_per_second = 1.25e9});  // 10 Gbit/s
    if (victim >= 0) cluster.world().kill(victim, 45ms);
    std::vector<std::vector<float>> gradients(4, std::vector<float>(262'144, 1.0f));
    ddp::cluster_outcome const outcome = cluster.run([&](int rank, on_rank& on) {
        return train(&cluster, &on, &gradients.at(static_cast<std::size_t>(rank)), rank == 3 ? length_of_rank_3 : 10ms);
    });
    double const milliseconds = static_cast<double>(outcome.elapsed.count()) / 1e6;
    auto const& verdict = outcome.ranks[0].verdict;  // what rank 0's calls would throw
    std::string const error = verdict ? ddp::comm_error(*verdict).what() : "no error";
    std::printf("%s: %.1f ms, %s\n", title, milliseconds, error.c_str());
}

int main() {
    simulate("four ranks alike", 10ms);
    simulate("rank 3 computes for 25 ms a step", 25ms);
    simulate("rank 2 dies after 45 ms", 10ms, 2);
}
