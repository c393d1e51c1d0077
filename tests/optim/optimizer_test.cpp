#include <ddp/optim/optimizer.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include <ddp/optim/adagrad.hpp>
#include <ddp/optim/adam.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/optim/lamb.hpp>
#include <ddp/optim/lars.hpp>
#include <ddp/optim/lion.hpp>
#include <ddp/optim/rmsprop.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/testing/check_optimizer.hpp>

#include "optim/textbook.hpp"
#include "support/catch.hpp"

// What every optimizer promises, for all of the library's.

namespace {

std::vector<ddp::any_optimizer> every_kind() {
    return {ddp::sgd{.lr = 0.1},
            ddp::sgd{.lr = 0.1, .weight_decay = 0.03},
            ddp::sgd{.lr = 0.1, .momentum = 0.9},
            ddp::sgd{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.03},
            ddp::sgd{.lr = 0.1, .momentum = 0.9, .nesterov = true},
            ddp::sgd{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.03, .nesterov = true},
            ddp::adam{},
            ddp::adam{.weight_decay = 0.03},
            ddp::adamw{},
            ddp::adamw{.weight_decay = 0.0},
            ddp::rmsprop{},
            ddp::rmsprop{.momentum = 0.9},
            ddp::rmsprop{.weight_decay = 0.03, .centered = true},
            ddp::rmsprop{.weight_decay = 0.03, .momentum = 0.9, .centered = true},
            ddp::adagrad{},
            ddp::adagrad{.lr_decay = 0.1, .weight_decay = 0.03},
            ddp::lion{},
            ddp::lion{.weight_decay = 0.03}};
}

enum class without { nothing, slot_count, learning_rate, hash, step };

template <without Missing = without::nothing>
struct optimizer_archetype {
    std::size_t slot_count() const
        requires(Missing != without::slot_count);
    double learning_rate() const
        requires(Missing != without::learning_rate);
    std::uint64_t hash() const
        requires(Missing != without::hash);
    void step(ddp::step_info const&, std::span<float const>, std::span<float>, ddp::slot_spans<float>) const
        requires(Missing != without::step);
};
static_assert(ddp::OptimizerFor<optimizer_archetype<>, float>);
static_assert(!ddp::OptimizerFor<optimizer_archetype<>, double>);
static_assert(!ddp::OptimizerFor<optimizer_archetype<without::slot_count>, float>);
static_assert(!ddp::OptimizerFor<optimizer_archetype<without::learning_rate>, float>);
static_assert(!ddp::OptimizerFor<optimizer_archetype<without::hash>, float>);
static_assert(!ddp::OptimizerFor<optimizer_archetype<without::step>, float>);
static_assert(std::is_aggregate_v<ddp::sgd> && std::is_aggregate_v<ddp::adam> && std::is_aggregate_v<ddp::adamw>);
static_assert(std::is_aggregate_v<ddp::rmsprop> && std::is_aggregate_v<ddp::adagrad> && std::is_aggregate_v<ddp::lion>);

}  // namespace

TEMPLATE_TEST_CASE("a range stepped in pieces has the bits of the whole", "[optim]", float, double) {
    auto const kinds = every_kind();
    for (std::size_t kind = 0; kind < kinds.size(); ++kind)
        for (std::size_t const longest : {1u, 5u, 40u, 700u}) {
            CAPTURE(kind, longest);
            auto const& optimizer = kinds[kind];
            constexpr std::size_t elements = 2003;
            test::mixed_values random(100 * kind + longest);
            auto const start = random.vector<TestType>(elements);
            test::stepped_range<TestType> whole(start, optimizer.slot_count());
            test::stepped_range<TestType> pieces(start, optimizer.slot_count());
            for (std::uint64_t step = 1; step <= 3; ++step) {
                auto const gradient = random.vector<TestType>(elements);
                ddp::step_info const at{.step = step, .learning_rate = 0.037, .gradient_scale = 0.77};
                whole.step(optimizer, at, gradient);
                std::vector<std::pair<std::size_t, std::size_t>> cuts;
                for (std::size_t begin = 0; begin < elements;) {
                    std::size_t const count = std::min(elements - begin, 1 + random.below(longest));
                    cuts.emplace_back(begin, count);
                    begin += count;
                }
                for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut)
                    pieces.step(optimizer, at, gradient, cut->first, cut->second);
            }
            REQUIRE(test::same_bits(pieces.value, whole.value));
            for (std::size_t slot = 0; slot < optimizer.slot_count(); ++slot)
                REQUIRE(test::same_bits(pieces.slots[slot], whole.slots[slot]));
        }
}

TEMPLATE_TEST_CASE("the gradient's scale is a multiplication in the element's type, before all else", "[optim]", float,
                   double) {
    for (auto const& optimizer : every_kind()) {
        test::mixed_values random(4);
        auto const start = random.vector<TestType>(101);
        auto const gradient = random.vector<TestType>(101);
        auto scaled = gradient;
        for (TestType& g : scaled) g = g * static_cast<TestType>(0.3);
        test::stepped_range<TestType> by_optimizer(start, optimizer.slot_count());
        test::stepped_range<TestType> by_hand(start, optimizer.slot_count());
        by_optimizer.step(optimizer, {.step = 1, .learning_rate = 0.1, .gradient_scale = 0.3}, gradient);
        by_hand.step(optimizer, {.step = 1, .learning_rate = 0.1}, scaled);
        REQUIRE(test::same_bits(by_optimizer.value, by_hand.value));
    }
}

TEMPLATE_TEST_CASE("the check of users' optimizers finds nothing", "[optim]", float, double) {
    for (auto const& optimizer : every_kind())
        REQUIRE(ddp::testing::check_optimizer<TestType>(optimizer) == std::vector<std::string>{});
}

TEST_CASE("an empty range is a range", "[optim]") {
    for (auto const& optimizer : every_kind()) {
        test::stepped_range<float> range({}, optimizer.slot_count());
        REQUIRE_NOTHROW(range.step(optimizer, {.step = 1, .learning_rate = 0.1}, {}));
    }
}

TEST_CASE("NaN in a gradient stays in its element", "[optim]") {
    for (auto const& optimizer : every_kind()) {
        test::stepped_range<float> range(std::vector<float>(33, 1.0F), optimizer.slot_count());
        std::vector<float> gradient(33, 0.5F);
        gradient[17] = std::numeric_limits<float>::quiet_NaN();
        range.step(optimizer, {.step = 1, .learning_rate = 0.1}, gradient);
        for (std::size_t i = 0; i < range.value.size(); ++i) REQUIRE(std::isnan(range.value[i]) == (i == 17));
    }
}

TEST_CASE("the hash tells every hyper-parameter and every algorithm apart", "[optim]") {
    std::vector<std::uint64_t> const hashes{
        ddp::sgd{}.hash(),
        ddp::sgd{.lr = 0.02}.hash(),
        ddp::sgd{.momentum = 0.9}.hash(),
        ddp::sgd{.weight_decay = 0.9}.hash(),
        ddp::sgd{.nesterov = true}.hash(),
        ddp::adam{}.hash(),
        ddp::adam{.lr = 0.02}.hash(),
        ddp::adam{.beta1 = 0.8}.hash(),
        ddp::adam{.beta2 = 0.8}.hash(),
        ddp::adam{.eps = 1e-7}.hash(),
        ddp::adam{.weight_decay = 0.01}.hash(),
        ddp::adamw{}.hash(),
        ddp::adamw{.lr = 0.02}.hash(),
        ddp::adamw{.beta1 = 0.8}.hash(),
        ddp::adamw{.beta2 = 0.8}.hash(),
        ddp::adamw{.eps = 1e-7}.hash(),
        ddp::adamw{.weight_decay = 0.02}.hash(),
        ddp::rmsprop{}.hash(),
        ddp::rmsprop{.lr = 0.02}.hash(),
        ddp::rmsprop{.alpha = 0.8}.hash(),
        ddp::rmsprop{.eps = 1e-7}.hash(),
        ddp::rmsprop{.weight_decay = 0.02}.hash(),
        ddp::rmsprop{.momentum = 0.02}.hash(),
        ddp::rmsprop{.centered = true}.hash(),
        ddp::adagrad{}.hash(),
        ddp::adagrad{.lr = 0.02}.hash(),
        ddp::adagrad{.lr_decay = 0.02}.hash(),
        ddp::adagrad{.eps = 1e-7}.hash(),
        ddp::adagrad{.weight_decay = 0.02}.hash(),
        ddp::lion{}.hash(),
        ddp::lion{.lr = 0.02}.hash(),
        ddp::lion{.beta1 = 0.8}.hash(),
        ddp::lion{.beta2 = 0.8}.hash(),
        ddp::lion{.weight_decay = 0.02}.hash(),
    };
    REQUIRE(std::set<std::uint64_t>(hashes.begin(), hashes.end()).size() == hashes.size());
    REQUIRE(ddp::sgd{.lr = 0.02}.hash() == ddp::sgd{.lr = 0.02}.hash());
}

TEST_CASE("hyper-parameters that make no sense are refused by name", "[optim]") {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    for (auto const& optimizer : every_kind()) REQUIRE_NOTHROW(optimizer.validate());
    REQUIRE_NOTHROW(ddp::sgd{.lr = 0.0}.validate());
    REQUIRE_THROWS_WITH(ddp::sgd{.lr = -0.1}.validate(),
                        Catch::Contains("sgd: lr is -0.1, but must be a finite number >= 0; 0.01 to 0.1 is usual"));
    REQUIRE_THROWS_WITH(ddp::sgd{.lr = nan}.validate(), Catch::Contains("sgd: lr is nan, but must be a finite number"));
    REQUIRE_THROWS_WITH(ddp::sgd{.momentum = 1.0}.validate(),
                        Catch::Contains("sgd: momentum must lie in [0, 1); 0.9 is usual"));
    REQUIRE_THROWS_WITH(ddp::sgd{.weight_decay = -1.0}.validate(),
                        Catch::Contains("sgd: weight_decay must be a finite number >= 0; 1e-4 is usual, 0 means none"));
    REQUIRE_THROWS_WITH(ddp::sgd{.nesterov = true}.validate(),
                        Catch::Contains("sgd: nesterov needs momentum; set .momentum = 0.9, say"));
    REQUIRE_THROWS_WITH(ddp::adam{.beta1 = 1.0}.validate(),
                        Catch::Contains("adam: beta1 must lie in [0, 1); 0.9 is usual"));
    REQUIRE_THROWS_WITH(ddp::adam{.beta2 = -0.1}.validate(),
                        Catch::Contains("adam: beta2 must lie in [0, 1); 0.999 is usual"));
    REQUIRE_THROWS_WITH(ddp::adamw{.eps = 0.0}.validate(),
                        Catch::Contains("adamw: eps must be a finite number > 0; 1e-8 is usual"));
    REQUIRE_THROWS_WITH(
        ddp::adamw{.weight_decay = nan}.validate(),
        Catch::Contains("adamw: weight_decay must be a finite number >= 0; 0.01 is usual, 0 means none"));
    REQUIRE_THROWS_WITH(ddp::adamw{.lr = -1.0}.validate(),
                        "DDP-E100 usage: adamw: lr is -1, but must be a finite number >= 0; 1e-3 is usual");
    REQUIRE_THROWS_WITH(ddp::lars{.lr = nan}.validate(),
                        "DDP-E100 usage: lars: lr is nan, but must be a finite number >= 0; 0.1 to 10 are usual");
    REQUIRE_THROWS_WITH(ddp::lars{.momentum = 1.0}.validate(),
                        "DDP-E100 usage: lars: momentum must lie in [0, 1); 0.9 is usual");
    REQUIRE_THROWS_WITH(ddp::lars{.weight_decay = -1.0}.validate(),
                        "DDP-E100 usage: lars: weight_decay must be a finite number >= 0; 5e-4 is usual, 0 means none");
    REQUIRE_THROWS_WITH(ddp::lars{.trust = nan}.validate(),
                        "DDP-E100 usage: lars: trust must be a finite number > 0; 1e-3 is usual");
    REQUIRE_THROWS_WITH(ddp::lars{.eps = -1.0}.validate(),
                        "DDP-E100 usage: lars: eps must be a finite number >= 0; 1e-8 is usual");
}

TEST_CASE("spans of different lengths are refused", "[optim]") {
    struct kind {
        ddp::any_optimizer optimizer;
        std::string gradients,
            slots;  // what is said of too few, and of slots that are too short if that is something else
    };
    kind const kinds[] = {
        {ddp::sgd{}, "sgd: step needs as many gradients as values, and slot_count() slots", ""},
        {ddp::sgd{.momentum = 0.9}, "sgd: step needs as many gradients as values, and slot_count() slots",
         "sgd: step needs a slot as long as the values"},
        {ddp::adam{}, "adam: step needs as many gradients as values, and two slots of that length", ""},
        {ddp::adamw{}, "adamw: step needs as many gradients as values, and two slots of that length", ""},
        {ddp::lamb{}, "lamb: step needs as many gradients as values, and two slots of that length", ""},
        {ddp::lars{}, "lars: step needs as many gradients as values, and one slot of that length", ""},
        {ddp::rmsprop{.momentum = 0.9}, "rmsprop: step needs as many gradients as values, and slot_count() slots",
         "rmsprop: step needs slots as long as the values"},
        {ddp::adagrad{}, "adagrad: step needs as many gradients as values, and one slot of that length", ""},
        {ddp::lion{}, "lion: step needs as many gradients as values, and one slot of that length", ""}};
    for (auto const& [optimizer, gradients, slots] : kinds) {
        std::string const too_few = "DDP-E100 usage: " + gradients;
        std::string const too_short = slots.empty() ? too_few : "DDP-E100 usage: " + slots;
        test::stepped_range<float> range(std::vector<float>(3), optimizer.slot_count());
        std::vector<float> const gradient(3);
        std::vector<std::span<float>> whole(range.slots.begin(), range.slots.end()),
            cut(optimizer.slot_count(), std::span(range.value).first(2));
        auto const step = [&, &by = optimizer](std::size_t count, std::vector<std::span<float>> const& state) {
            by.step({.step = 1, .learning_rate = 0.1}, std::span<float const>(gradient).first(count),
                    std::span(range.value), ddp::slot_spans<float>(state));
        };
        REQUIRE_THROWS_WITH(step(2, whole), too_few);
        REQUIRE_NOTHROW(step(3, whole));
        if (!cut.empty()) REQUIRE_THROWS_WITH(step(3, cut), too_short);
        if (!cut.empty()) REQUIRE_THROWS_WITH(step(3, {}), too_few);
    }
}
