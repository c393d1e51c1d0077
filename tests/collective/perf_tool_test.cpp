// What ddp-perf counts and subtracts, with its own headers.
#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "../tools/ddp-perf/collectives.hpp"
#include "../tools/ddp-perf/measure.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "train/patience.hpp"

namespace {

/// A collective after which this rank finds another number in element `at` of its array.
template <class C>
struct spoilt : C {
    using C::C;
    void spoil(std::size_t at) const { this->data[at] += 1; }
};
template <class C>
std::vector<std::size_t> wrong_after(std::size_t at) {
    return ddp::test::run_ranks(
        3,
        [at](ddp::communicator<>& comm) {
            ddp::any_allreduce const algorithm;
            spoilt<C> const what(comm, algorithm, 3000);
            what.fill();
            what.run(0);
            std::size_t const before = what.wrong(0);
            if (comm.rank() == 1) what.spoil(at);
            return 10 * before + what.wrong(0);
        },
        ddp::test::patient());
}

}  // namespace

TEST_CASE("ddp-perf counts an element that is wrong on one rank", "[collective]") {
    for (std::size_t const at : {std::size_t{0}, std::size_t{1999}, std::size_t{2999}}) {
        CHECK(wrong_after<ddp_perf::allreduce>(at) == std::vector<std::size_t>{0, 1, 0});
        CHECK(wrong_after<ddp_perf::all_gather>(at) == std::vector<std::size_t>{0, 1, 0});
        CHECK(wrong_after<ddp_perf::broadcast>(at) == std::vector<std::size_t>{0, 1, 0});
        CHECK(wrong_after<ddp_perf::reduce>(at) == std::vector<std::size_t>{0, 1, 0});
    }
    CHECK(wrong_after<ddp_perf::reduce_scatter>(1999) == std::vector<std::size_t>{0, 1, 0});  // rank 1's slice
    CHECK(wrong_after<ddp_perf::reduce_scatter>(2000) == std::vector<std::size_t>{0, 0, 0});  // another's
}

TEST_CASE("ddp-perf subtracts the time of what comes before each operation", "[collective]") {
    using namespace std::chrono_literals;
    auto const medians = ddp::test::run_ranks(
        1,
        [](ddp::communicator<>& comm) {
            auto const median = [&](bool prepares) {  // of a size that is warmed up once
                return ddp_perf::measure(
                           comm, {.bytes = std::size_t{16} << 20, .iterations = 3, .prepares = prepares},
                           [] { std::this_thread::sleep_for(100ms); },
                           [](std::size_t) { std::this_thread::sleep_for(60ms); })
                    .median;
            };
            return std::vector{median(true), median(false)};
        },
        ddp::test::patient());
    for (double const each : medians.front()) {
        CHECK(each > 0.02);  // sleeps end late on a busy machine
        CHECK(each < 0.14);  // with what is prepared it is 160 ms
    }
}
