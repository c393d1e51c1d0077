#include <ddp/optim/any_optimizer.hpp>

#include <vector>

#include "optim/textbook.hpp"
#include "support/catch.hpp"

namespace {

template <class O>
void require_same_as_held(O const& held) {
    ddp::any_optimizer const any = held;
    REQUIRE(any.slot_count() == held.slot_count());
    REQUIRE(any.learning_rate() == held.learning_rate());
    REQUIRE(any.hash() == held.hash());

    test::mixed_values random(1);
    auto const start = random.vector<float>(50);
    auto const gradient = random.vector<float>(50);
    test::stepped_range<float> by_any(start, any.slot_count());
    test::stepped_range<float> by_held(start, held.slot_count());
    by_any.step(any, {.step = 3, .learning_rate = 0.1}, gradient);
    by_held.step(held, {.step = 3, .learning_rate = 0.1}, gradient);
    REQUIRE(test::same_bits(by_any.value, by_held.value));
    REQUIRE(by_any.slots == by_held.slots);
    REQUIRE_FALSE(test::same_bits(by_any.value, start));
}

}  // namespace

TEST_CASE("any_optimizer behaves as what it holds", "[optim]") {
    require_same_as_held(ddp::sgd{.lr = 0.3, .momentum = 0.9});
    require_same_as_held(ddp::adam{.lr = 0.2});
    require_same_as_held(ddp::adamw{.lr = 0.1});
    require_same_as_held(ddp::rmsprop{.lr = 0.1, .momentum = 0.9, .centered = true});
    require_same_as_held(ddp::adagrad{.lr = 0.2});
    require_same_as_held(ddp::lion{.lr = 0.3});
}

TEST_CASE("any_optimizer validates what it holds", "[optim]") {
    REQUIRE_THROWS_WITH(ddp::any_optimizer(ddp::sgd{.lr = -1.0}).validate(),
                        Catch::Contains("sgd: lr is -1, but must be a finite number >= 0; 0.01 to 0.1 is usual"));
    REQUIRE_THROWS_WITH(ddp::any_optimizer(ddp::adam{.lr = -1.0}).validate(),
                        Catch::Contains("adam: lr is -1, but must be a finite number >= 0; 1e-3 is usual"));
    REQUIRE_THROWS_WITH(ddp::any_optimizer(ddp::adamw{.lr = -1.0}).validate(),
                        Catch::Contains("adamw: lr is -1, but must be a finite number >= 0; 1e-3 is usual"));
    REQUIRE_THROWS_WITH(ddp::any_optimizer(ddp::rmsprop{.lr = -1.0}).validate(),
                        Catch::Contains("rmsprop: lr is -1, but must be a finite number >= 0; 0.01 is usual"));
    REQUIRE_THROWS_WITH(ddp::any_optimizer(ddp::adagrad{.lr = -1.0}).validate(),
                        Catch::Contains("adagrad: lr is -1, but must be a finite number >= 0; 0.01 is usual"));
    REQUIRE_THROWS_WITH(ddp::any_optimizer(ddp::lion{.lr = -1.0}).validate(),
                        Catch::Contains("lion: lr is -1, but must be a finite number >= 0; 1e-4 is usual"));
}
