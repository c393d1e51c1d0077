// Does the transport keep ddp's promises? The installed suite asks: with ranks as threads, then as processes.
//
// usage: conformance RANKS     prints nothing but complaints
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ddp/testing/conformance.hpp>
#include <memory>
#include <string>

#include "processes.hpp"
#include "uds_transport.hpp"

namespace {

ddp::timing patient() {  // a rank that gets no core for a while is not dead
    return {.dead = std::chrono::seconds(20)};
}

/// What check_transport connects by: one directory, one transport a thread.
class world {
public:
    explicit world(int ranks) : ranks_(ranks) {}
    [[nodiscard]] std::unique_ptr<uds::transport> connect(int rank) const {
        return uds::connect(where_.path(), rank, ranks_, patient());
    }

private:
    uds::job_directory where_;
    int ranks_;
};

/// One scenario with processes: here a rank can really die. Returns whether all went well.
bool with_processes(ddp::testing::scenario_info const& scenario, int ranks) {
    uds::job_directory const where;
    ddp::testing::conformance_options options;
    options.kill = [](int) { std::raise(SIGKILL); };
    std::vector<int> expected(static_cast<std::size_t>(ranks), EXIT_SUCCESS);
    if (scenario.which == ddp::testing::scenario::death) expected.back() = -SIGKILL;
    return expected == uds::fork_ranks(ranks, [&](int rank) {
               auto transport = uds::connect(where.path(), rank, ranks, patient());
               std::string const complaint = ddp::testing::run_scenario(scenario, transport, options);
               if (!complaint.empty()) std::fprintf(stderr, "%s\n", complaint.c_str());
               return complaint.empty() ? EXIT_SUCCESS : EXIT_FAILURE;
           });
}

}  // namespace

int main(int argc, char** argv) {
    int const ranks = argc > 1 ? std::atoi(argv[1]) : 2;
    bool good = ranks >= 1;
    for (ddp::testing::scenario_info const& scenario : ddp::testing::scenarios())  // processes first: see fork_ranks
        if (ranks >= scenario.least_ranks && !with_processes(scenario, ranks)) {
            std::fprintf(stderr, "%s failed with %d processes\n", scenario.name, ranks);
            good = false;
        }
    for (std::string const& complaint :
         ddp::testing::check_transport(ranks, [](int n) { return std::make_unique<world>(n); })) {
        std::fprintf(stderr, "%s (%d threads)\n", complaint.c_str(), ranks);
        good = false;
    }
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
