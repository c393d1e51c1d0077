// The entry point of test programs that run under mpirun: every rank runs every test, and the job fails if any rank
// does. Rank 0 prints as usual; the others print only what failed.
// DDP_TEST_MPI_THREADS: single (default), funneled, serialized or multiple. DDP_TEST_LIMIT: seconds, 300 by default.
#include "support/run_catch.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include <boost/mpi/collectives.hpp>
#include <boost/mpi/communicator.hpp>
#include <boost/mpi/environment.hpp>

#if defined(__SANITIZE_ADDRESS__)
#define DDP_TEST_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DDP_TEST_ASAN
#endif
#endif
#ifdef DDP_TEST_ASAN
// What Open MPI leaks is suppressed by name (lsan.supp, through LSAN_OPTIONS): its plugins must still be loaded when the
// leaks are named, and its libraries, built without frame pointers, need the slow unwinder.
extern "C" int dlclose(void*) noexcept {
    return 0;
}
extern "C" char const* __asan_default_options() {
    return "fast_unwind_on_malloc=0:malloc_context_size=6";
}
#endif

namespace {

boost::mpi::threading::level wanted_level() {
    char const* const text = std::getenv("DDP_TEST_MPI_THREADS");
    std::string const name = text != nullptr ? text : "single";
    if (name == "multiple") return boost::mpi::threading::multiple;
    if (name == "serialized") return boost::mpi::threading::serialized;
    if (name == "funneled") return boost::mpi::threading::funneled;
    return boost::mpi::threading::single;
}

}  // namespace

int main(int argc, char** argv) {
    char const* const limit = std::getenv("DDP_TEST_LIMIT");
    alarm(limit != nullptr ? static_cast<unsigned>(std::atoi(limit)) : 300u);  // a hang ends the job
    boost::mpi::environment const mpi(argc, argv, wanted_level());
    if (boost::mpi::environment::thread_level() < wanted_level()) {
        std::cerr << "this MPI does not offer the thread level that DDP_TEST_MPI_THREADS asks for\n";
        return 1;
    }
    boost::mpi::communicator const world;
    std::vector<std::string> words(argv, argv + argc);
    words.insert(words.end(), {"--order", "decl"});  // tests are collective: the same one everywhere
    std::string const output =
        "/tmp/ddp_mpi_test_" + std::to_string(getpid()) + "_" + std::to_string(world.rank()) + ".txt";
    if (world.rank() != 0) words.insert(words.end(), {"--out", output});
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());

    int const failures = ddp::test::run_catch(static_cast<int>(arguments.size()), arguments.data());
    if (world.rank() != 0) {
        if (failures != 0) {
            std::ostringstream text;
            text << "rank " << world.rank() << " of " << world.size() << " failed:\n"
                 << std::ifstream(output).rdbuf() << '\n';
            std::cerr << text.str() << std::flush;
        }
        std::remove(output.c_str());
    }
    int worst = 0;
    boost::mpi::all_reduce(world, failures, worst, boost::mpi::maximum<int>());
    if (worst != 0 && world.rank() == 0) std::cerr << "the test failed on some rank of " << world.size() << '\n';
    return worst == 0 ? 0 : 1;
}
