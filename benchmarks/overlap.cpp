// Times one allreduce beside a computation of the same process: what overlap gains, and what the communication thread costs.
//
//   ddprun -n 2 --prefix none -- ./benchmark_overlap [MIB [COMPUTE_MS]]        64 110
//
// In turn, ROUNDS (15) times: a computation of COMPUTE_MS that stays in the first cache, alone; an allreduce of MIB MiB of float,
// alone, by the caller; and both together: the allreduce is started, the rank computes, then waits. With "thread" the caller
// sleeps instead of computing, so that the communication thread does everything. Medians in milliseconds, as a JSON line a kind:
//   ms       the time of one
//   cpu_ms   processor time of the process; thread_ms: of it the communication thread's
//   a_64_mib processor time of the process, without the computation, for 64 MiB that the rank sends
// DDP_SHARE_MEMORY=0 sends over TCP inside a host too.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_secure.hpp>

namespace {

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
double cpu_seconds() {
    ::rusage self{};
    ::getrusage(RUSAGE_SELF, &self);
    return static_cast<double>(self.ru_utime.tv_sec + self.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(self.ru_utime.tv_usec + self.ru_stime.tv_usec);
}
double median(std::vector<double> v) {
    auto const middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
    std::nth_element(v.begin(), middle, v.end());
    return *middle;
}

/// So many passes over 16 KiB.
double work(long passes) {
    static std::array<float, 4096> x{};
    for (long p = 0; p < passes; ++p)
        for (float& value : x) value = value * 0.999F + 0.001F;
    return static_cast<double>(x[17]);
}
long passes_of(double seconds) {
    long passes = 1000;
    for (;;) {
        double const since = seconds_now();
        if (!std::isfinite(work(passes))) std::abort();
        double const took = seconds_now() - since;
        if (took > 0.05) return static_cast<long>(static_cast<double>(passes) * seconds / took);
        passes *= 2;
    }
}

void measure(ddp::communicator<>& comm, std::size_t mib, double compute_ms) {
    std::vector<float> data(mib * (std::size_t{1} << 20) / sizeof(float), 1.0F);
    long const passes = passes_of(compute_ms / 1e3);
    char const* const rounds_said = std::getenv("ROUNDS");
    int const rounds = rounds_said != nullptr ? std::max(1, std::atoi(rounds_said)) : 15;
    struct kind {
        char const* name;
        std::function<void()> run;
        std::vector<double> ms = {}, cpu = {}, thread = {}, sent = {};
        bool right = true;
    };
    auto const beside = [&](auto const& other) {
        ddp::request sum = ddp::start_allreduce(comm, data);
        other();
        sum.wait();
    };
    std::array<kind, 4> kinds{
        kind{"compute", [&] { static_cast<void>(work(passes)); }},
        kind{"allreduce", [&] { ddp::allreduce(comm, data); }},
        kind{"both", [&] { beside([&] { static_cast<void>(work(passes)); }); }},
        kind{"thread", [&] {
                 beside([&] { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(compute_ms)); });
             }}};
    for (int round = 0; round < rounds + 2; ++round)
        for (kind& one : kinds) {
            std::fill(data.begin(), data.end(), 1.0F);
            ddp::barrier(comm);
            double const since = seconds_now(), cpu = cpu_seconds();
            auto const thread = comm.thread_time();
            auto const sent = comm.bytes_sent();
            one.run();
            float const expected = &one == kinds.data() ? 1.0F : static_cast<float>(comm.size());
            double const until = seconds_now(), cpu_until = cpu_seconds();
            auto const thread_until = comm.thread_time();
            one.right = one.right && std::count(data.begin(), data.end(), expected) == std::ssize(data);
            if (round < 2) continue;
            one.ms.push_back(1e3 * (until - since));
            one.cpu.push_back(1e3 * (cpu_until - cpu));
            one.thread.push_back(std::chrono::duration<double, std::milli>(thread_until - thread).count());
            one.sent.push_back(static_cast<double>(comm.bytes_sent() - sent));
        }
    if (comm.rank() != 0) return;
    double const alone = median(kinds[0].cpu);
    for (kind const& one : kinds) {
        double const sent = median(one.sent), cpu = median(one.cpu);
        double const own = std::string(one.name) == "both" ? cpu - alone : cpu;
        std::printf(
            "{\"bench\":\"overlap\",\"kind\":\"%s\",\"n\":%d,\"mib\":%zu,\"communication_thread\":\"%s\",\"ms\":%.2f,"
            "\"cpu_ms\":%.2f,\"thread_ms\":%.2f,\"a_64_mib\":%.2f,\"ok\":%s}\n",
            one.name, comm.size(), mib, name_of(comm.thread()), median(one.ms), cpu, median(one.thread),
            sent > 0 ? own * 67108864 / sent : 0, one.right ? "true" : "false");
    }
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    std::size_t const mib = argc > 1 ? static_cast<std::size_t>(std::max(1, std::atoi(argv[1]))) : 64;
    double const compute = argc > 2 ? std::atof(argv[2]) : 110;
    return ddp::run_main<ddp::threads, ddp::secure_tcp>(
        [&](ddp::communicator<>& comm) { measure(comm, mib, compute); });
}
