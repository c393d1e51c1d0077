/// \file
/// Every allreduce algorithm against the oracle.
#include <ddp/collective/allreduce.hpp>

#include <chrono>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/ranks.hpp"

namespace {

/// Many ranks on few cores, under a sanitizer: patient.
ddp::timing patient() {
    ddp::timing times = ddp::timing::for_tests();
    times.collective = std::chrono::seconds(60);
    return times;
}

}  // namespace

TEST_CASE("every algorithm sums as the reference, whatever the ranks, size and element", "[collective][allreduce]") {
    int const ranks = GENERATE(1, 2, 3, 4, 5, 6, 7, 8, 9);
    CAPTURE(ranks);
    auto const failed = ddp::test::run_ranks(
        ranks,
        [](auto& comm) {
            auto all = ddp::test::check_all_sums<float>(comm);
            for (auto const& f : ddp::test::check_all_sums<double>(comm)) all.push_back(f);
            return all;
        },
        patient());
    for (auto const& of_rank : failed) CHECK(of_rank == ddp::test::failures{});
}

TEST_CASE("the ring adds from the rank after the owner on round to the owner", "[collective][allreduce]") {
    for (int const ranks : {2, 3, 5, 6}) {
        CAPTURE(ranks);
        std::size_t const p = static_cast<std::size_t>(ranks), each = 16;  // even cuts fall on 64 bytes
        auto const terms = ddp::test::addends<float>(ddp::test::values::mixed, 1, ranks, p * each);
        std::vector<float> expected(p * each);
        for (std::size_t i = 0; i < expected.size(); ++i) {
            std::size_t const owner = i / each;
            expected[i] = terms[(owner + 1) % p][i];
            for (std::size_t k = 2; k <= p; ++k) expected[i] += terms[(owner + k) % p][i];
        }
        auto const got = ddp::test::run_ranks(ranks, [&](auto& comm) {
            auto data = terms[static_cast<std::size_t>(comm.rank())];
            ddp::allreduce(comm, std::span<float>(data), ddp::any_allreduce(ddp::ring_allreduce{.segment_bytes = 24}));
            return data;
        });
        for (auto const& data : got) CHECK(ddp::test::compare(data, expected) == "");
    }
}
