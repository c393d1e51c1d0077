#include <ddp/testing/archetypes.hpp>

#include <cstdint>
#include <vector>

#include <ddp/testing/conformance.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::testing;

namespace {

/// Hands out archetypes over the transports of threads.
struct archetype_world {
    std::shared_ptr<inproc_world> inner;
    std::unique_ptr<inproc_archetype<>> connect(int rank) {
        return std::make_unique<inproc_archetype<>>(inner->connect(rank));
    }
};

struct end {
    double value = 0;
    std::uint64_t steps = 0;
    bool identical = false;
    std::uint64_t sums = 0;
};

template <Element E, class X>
end train(std::unique_ptr<inproc_archetype<>> transport, update how, X const& exchange) {
    communicator<inproc_archetype<>> comm(std::move(transport), ddp::test::patient());
    model_archetype<E> model(100);
    end result;
    data_parallel trainer{model,
                          optimizer_archetype<>(0.5),
                          comm,
                          training_options{.update = how},
                          exchange,
                          bucket_policy_archetype<>(0),
                          observer_archetype<>(result.steps)};
    // Rank r brings r + 1 samples, all r: with 3 ranks their mean is (0 + 2*1 + 3*2) / 6, and each step goes half the way.
    batch_archetype const batch{std::vector<double>(static_cast<std::size_t>(comm.rank() + 1), comm.rank())};
    for (int step = 0; step < 4; ++step) trainer.step(batch);
    result.identical = trainer.replicas_identical();
    trainer.for_each_state([&](state_slice const& s) { result.sums = s.as<std::uint64_t>()[0]; });
    result.value = static_cast<double>(model.parameters()[0].value[99]);
    return result;
}

}  // namespace

TEMPLATE_TEST_CASE("a trainer made of archetypes trains", "[testing][archetypes]", float, double) {
    auto const how = GENERATE(update::replicated, update::sharded);
    archetype_world world{inproc_world::create(3)};
    std::vector<end> ends(3);
    bool const stateful = GENERATE(false, true);
    std::vector<std::thread> ranks;
    for (int r = 0; r < 3; ++r)
        ranks.emplace_back([&, r] {
            ends[static_cast<std::size_t>(r)] =
                stateful ? train<TestType>(world.connect(r), how, exchange_archetype<>(0))
                         : train<TestType>(world.connect(r), how, allreduce_archetype<>("everybody to everybody"));
        });
    for (std::thread& rank : ranks) rank.join();
    for (end const& e : ends) {
        REQUIRE(e.value == Approx(8.0 / 6.0 * 15 / 16));
        REQUIRE(e.steps == 4);
        REQUIRE(e.identical);
    }
}

TEST_CASE("the least that is a transport keeps every promise of one", "[testing][archetypes]") {
    auto const complaints = check_transport(
        3, [](int ranks) { return std::make_shared<archetype_world>(archetype_world{inproc_world::create(ranks)}); });
    REQUIRE(complaints == std::vector<std::string>{});
}
