// Times allreduce over TCP for a list of sizes, one JSON line each on rank 0: to stand beside other libraries' programs
// that read the same environment.
//
//   ddprun -n 2 --prefix none -- ./allreduce
//
// SIZES (bytes, separated by spaces), BUDGET (seconds a size), MINREPS, IMPL and NET (names in the output), ALGORITHM.
// DDP_SECRET_FILE, DDP_TLS and DDP_INSECURE decide about proofs and encryption, as for any program.
// COMMUNICATOR=tcp measures a communicator<tcp_transport> instead of a communicator<>, which is over any_transport.
// MODE=startup prints only the seconds from T0 (epoch seconds) to the end of the first allreduce.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ddp/ddp.hpp>
#include <ddp/rendezvous/bootstrap.hpp>
#include <ddp/rendezvous/run_secure.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::string setting(char const* name, char const* otherwise) {
    char const* const value = std::getenv(name);
    return value != nullptr && *value != '\0' ? value : otherwise;
}
double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Comm>
void measure(Comm& comm, std::size_t bytes, ddp::any_allreduce const& algorithm) {
    std::size_t const count = bytes / sizeof(float);
    auto const memory = ddp::make_arena<float>(count);
    std::span<float> const data{memory.get(), count};
    auto const once = [&] { ddp::allreduce(comm, data, algorithm); };

    // Exact in float: what comes out is checked before anything is timed.
    for (std::size_t i = 0; i < count; ++i)
        data[i] = static_cast<float>((i % 1021 + 1) * static_cast<std::size_t>(comm.rank() + 1));
    once();
    bool good = true;
    auto const ranks = static_cast<std::size_t>(comm.size());
    for (std::size_t i = 0; i < count; ++i)
        good = good && data[i] == static_cast<float>((i % 1021 + 1) * (ranks * (ranks + 1) / 2));
    std::fill(data.begin(), data.end(), 0.0f);

    int const warm = bytes >= (16u << 20) ? 1 : bytes >= (256u << 10) ? 4 : 20;
    for (int i = 0; i < warm; ++i) once();
    int const probe = bytes >= (16u << 20) ? 1 : 8;
    double const began = seconds();
    for (int i = 0; i < probe; ++i) once();
    double const each = (seconds() - began) / probe;
    std::vector<double> reps{
        std::clamp(std::stod(setting("BUDGET", "0.25")) / each, std::stod(setting("MINREPS", "4")), 4000.0)};
    ddp::broadcast(comm, std::span<double>(reps));
    std::vector<double> times(static_cast<std::size_t>(reps[0]));
    double last = seconds();
    for (double& t : times) {
        once();
        double const now = seconds();
        t = 1e6 * (now - last);
        last = now;
    }
    std::sort(times.begin(), times.end());
    double sum = 0;
    for (double const t : times) sum += t;
    auto const at = [&](double q) {
        return times[static_cast<std::size_t>(q * static_cast<double>(times.size() - 1) + 0.5)];
    };
    if (comm.rank() != 0) return;
    std::printf(
        "{\"bench\":\"allreduce\",\"net\":\"%s\",\"impl\":\"%s\",\"n\":%d,\"bytes\":%zu,\"med_us\":%.3f,\"p10_us\":%."
        "3f,"
        "\"p90_us\":%.3f,\"mean_us\":%.3f,\"min_us\":%.3f,\"reps\":%zu,\"ok\":%s}\n",
        setting("NET", "loopback").c_str(), setting("IMPL", "ddp").c_str(), comm.size(), bytes, at(0.5), at(0.1),
        at(0.9), sum / static_cast<double>(times.size()), times.front(), times.size(), good ? "true" : "false");
    std::fflush(stdout);
}

template <class Comm>
void measure_all(Comm& comm) {
    auto const algorithm = ddp::any_allreduce::parse(setting("ALGORITHM", "auto"), comm);
    if (setting("MODE", "") == "startup") {
        float one = 1;
        ddp::allreduce(comm, std::span<float>(&one, 1), algorithm);
        double const now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
        if (comm.rank() == 0) std::printf("%.3f\n", now - std::stod(setting("T0", "0")));
        return;
    }
    std::istringstream sizes(setting("SIZES", "4 4096 65536 262144 1048576 4194304 16777216 67108864"));
    for (std::size_t bytes; sizes >> bytes;) measure(comm, bytes, algorithm);
}

}  // namespace

int main() {
    auto const job = ddp::job_from_environment();
    if (setting("COMMUNICATOR", "any") == "tcp" && job) {
        ddp::communicator comm(ddp::connect_tcp(*job));
        measure_all(comm);
        return 0;
    }
    return ddp::run_main<ddp::threads, ddp::secure_tcp>([](ddp::communicator<>& comm) { measure_all(comm); });
}
