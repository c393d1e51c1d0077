/// \file
/// A barrier holds everybody until the last has come.
#include <ddp/collective/barrier.hpp>

#include <atomic>

#include "support/catch.hpp"
#include "support/ranks.hpp"

TEST_CASE("nobody leaves a barrier before everybody has come", "[collective][barrier]") {
    int const ranks = GENERATE(1, 2, 3, 5, 8);
    CAPTURE(ranks);
    std::atomic<int> arrived{0};
    auto const early = ddp::test::run_ranks(ranks, [&](auto& comm) {
        int times = 0;
        for (int round = 1; round <= 50; ++round) {
            if (comm.rank() == round % ranks) std::this_thread::yield();
            arrived.fetch_add(1);
            ddp::barrier(comm);
            if (arrived.load() < round * ranks) ++times;
        }
        return times;
    });
    CHECK(early == std::vector<int>(static_cast<std::size_t>(ranks), 0));
}

TEST_CASE("a barrier of ranks one of which is missing ends with an error that names it", "[collective][barrier]") {
    ddp::timing times = ddp::timing::for_tests();
    times.collective = std::chrono::milliseconds(300);
    auto const errors = ddp::test::errors_of_ranks(
        3,
        [](auto& comm) {
            if (comm.rank() != 1) ddp::barrier(comm);
        },
        times);
    CHECK(errors[0].find("rank 1 exited cleanly") != std::string::npos);
    CHECK(errors[2].find("rank 1 exited cleanly") != std::string::npos);
}
