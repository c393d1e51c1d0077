// Every transport that can live in one process, against the conformance suite; and the suite against a broken one.
#include <ddp/testing/conformance.hpp>

#include <chrono>
#include <string>
#include <vector>

#include <ddp/comm/inproc.hpp>

#include "support/catch.hpp"

using namespace std::chrono_literals;

TEST_CASE("inproc keeps every promise of a transport", "[comm][conformance]") {
    int const ranks = GENERATE(1, 2, 3, 5);
    CAPTURE(ranks);
    auto const complaints = ddp::testing::check_transport(ranks, [](int n) { return ddp::inproc_world::create(n); });
    CHECK(complaints == std::vector<std::string>{});
}

TEST_CASE("virtual time keeps every promise of a transport", "[comm][conformance]") {
    int const ranks = GENERATE(1, 2, 3, 4, 5, 9);
    std::size_t const early_bytes = GENERATE(std::size_t{0}, std::size_t{65536}, std::size_t{1} << 40);
    ddp::nanoseconds const extra = GENERATE(ddp::nanoseconds{0}, ddp::nanoseconds{500'000});
    CAPTURE(ranks, early_bytes, extra.count());
    ddp::network_model const network{.extra_delay = extra, .early_bytes = early_bytes, .seed = 17};
    CHECK(ddp::testing::check_virtual_transport(ranks, network) == std::vector<std::string>{});
}
