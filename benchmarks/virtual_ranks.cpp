// What an allreduce costs as ranks grow in number: on virtual time, so that neither the cores of this machine nor its mood
// count. One JSON line for each algorithm, number of ranks and size. The figures are exact, and the same on every machine.
//
//   ./benchmark_virtual_ranks
//
// RANKS ("2 4 8 16 32 64"), SIZES ("4096 4194304": bytes of float); the network (network_model): LATENCY_US (25) from card to
// card, GBIT (10), the rate of each card in each direction, OVERHEAD_US (2) that each message holds up its sender's card.
// Additions take no time.
//
// time_us     from the call on all ranks to its end on the last
// messages    that a rank sends, in the mean of the ranks; sent_bytes: likewise, their bytes
// automatic   what automatic_allreduce would use here, with a network_cost of this network
// ok          all ranks have the exact sum
//
// hierarchical_allreduce is left out: in this network ranks of one host are no nearer to each other than to others.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/collective/algorithms/halving_doubling_allreduce.hpp>
#include <ddp/collective/algorithms/recursive_doubling_allreduce.hpp>
#include <ddp/collective/algorithms/ring_allreduce.hpp>
#include <ddp/collective/network_cost.hpp>
#include <ddp/sim/cluster.hpp>

#include "../tools/ddp-perf/compiler.hpp"

namespace {

std::string setting(char const* name, char const* otherwise) {
    char const* const value = std::getenv(name);
    return value != nullptr && *value != '\0' ? value : otherwise;
}
template <class Number>
std::vector<Number> numbers(std::string const& words) {
    std::istringstream in(words);
    std::vector<Number> all;
    for (Number one; in >> one;) all.push_back(one);
    return all;
}

using on_type = ddp::virtual_cluster::scheduler_type;

/// One call of a rank, as allreduce() makes it from a communicator.
template <class A>
ddp::task<> call(A algorithm, on_type& on, std::span<float> data) {
    ddp::operation_info what{.name = "allreduce", .count = data.size(), .element = "float", .detail = A::name};
    what.id = {.group = on.world().id(), .channel = ddp::channel::user, .index = on.world().next_call()};
    what.fingerprint = 1;
    on.world().enter(what);
    return A::sum(algorithm, ddp::lane<ddp::virtual_transport>(on, on.world(), what.id, on.world().history()), data);
}

/// Whether the sum was right.
template <class A>
bool print(A algorithm, int ranks, std::size_t bytes) {
    double const latency = std::stod(setting("LATENCY_US", "25")), gbit = std::stod(setting("GBIT", "10")),
                 overhead = std::stod(setting("OVERHEAD_US", "2"));
    auto const time = [](double us) { return ddp::nanoseconds(static_cast<std::int64_t>(1e3 * us)); };
    ddp::virtual_cluster cluster(
        ranks, {.latency = time(latency), .bytes_per_second = gbit * 1e9 / 8, .overhead = time(overhead)});
    ddp::automatic_allreduce const automatic{.cost = ddp::network_cost{
                                                 .message = latency + overhead,
                                                 .post = overhead,
                                                 .byte = 8e-3 / gbit,
                                                 .addition = 0,
                                             }};
    std::vector<std::vector<float>> data;
    for (int r = 0; r < ranks; ++r) data.emplace_back(bytes / sizeof(float), static_cast<float>(r + 1));
    ddp::cluster_outcome const outcome =
        cluster.run([&](int rank, on_type& on) { return call(algorithm, on, data[static_cast<std::size_t>(rank)]); });

    std::vector<float> const expected(bytes / sizeof(float), static_cast<float>(ranks * (ranks + 1) / 2));
    bool ok = true;
    double sent = 0;
    for (int r = 0; r < ranks; ++r) {
        ok = ok && outcome.ranks[static_cast<std::size_t>(r)].finished && data[static_cast<std::size_t>(r)] == expected;
        sent += static_cast<double>(cluster.scheduler_of(r).bytes_sent());
    }
    double const messages =
        static_cast<double>(cluster.world().events()) / 2;  // one leaves, and arrives; no timer goes off
    std::printf(
        "{\"bench\":\"virtual_ranks\",\"transport\":\"virtual\",\"latency_us\":%g,\"gbit\":%g,\"overhead_us\":%g,"
        "\"compiler\":\"%s\","
        "\"algorithm\":\"%s\",\"n\":%d,\"bytes\":%zu,\"time_us\":%.3f,\"messages\":%.2f,\"sent_bytes\":%.1f,"
        "\"automatic\":\"%s\",\"ok\":%s}\n",
        latency, gbit, overhead, ddp_perf::compiler, A::name, ranks, bytes,
        std::chrono::duration<double, std::micro>(outcome.elapsed).count(), messages / ranks, sent / ranks,
        automatic.choice(bytes, ranks), ok ? "true" : "false");
    return ok;
}

}  // namespace

int main() {
    bool ok = true;
    for (std::size_t const bytes : numbers<std::size_t>(setting("SIZES", "4096 4194304")))
        for (int const ranks : numbers<int>(setting("RANKS", "2 4 8 16 32 64"))) {
            ok = print(ddp::ring_allreduce{}, ranks, bytes) && ok;
            ok = print(ddp::direct_allreduce{}, ranks, bytes) && ok;
            ok = print(ddp::recursive_doubling_allreduce{}, ranks, bytes) && ok;
            ok = print(ddp::halving_doubling_allreduce{}, ranks, bytes) && ok;
        }
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
