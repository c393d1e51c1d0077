#include <ddp/optim/clip.hpp>

#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "kernel/mixed_values.hpp"
#include "support/catch.hpp"

TEST_CASE("gradients within the norm are left alone, exactly", "[optim][clip]") {
    REQUIRE(ddp::clip_factor(0.0, 1.0) == 1.0);
    REQUIRE(ddp::clip_factor(0.5, 1.0) == 1.0);
    REQUIRE(ddp::clip_by_global_norm{.max_norm = 5.0}.factor(4.9) == 1.0);
}

TEST_CASE("longer gradients shrink to the norm", "[optim][clip]") {
    REQUIRE(ddp::clip_factor(4.0, 1.0) == 1.0 / (4.0 + 1e-6));
    REQUIRE(ddp::clip_by_global_norm{.max_norm = 5.0}.factor(10.0) == Approx(0.5).epsilon(1e-6));
    REQUIRE(ddp::clip_factor(1.0, 1.0) < 1.0);
}

TEST_CASE("a norm that is not finite stays visible", "[optim][clip]") {
    REQUIRE(std::isnan(ddp::clip_factor(std::numeric_limits<double>::quiet_NaN(), 1.0)));
    REQUIRE(ddp::clip_factor(std::numeric_limits<double>::infinity(), 1.0) == 0.0);
}

TEST_CASE("a maximum that is no length is refused", "[optim][clip]") {
    REQUIRE_NOTHROW(ddp::clip_by_global_norm{}.validate());
    for (double const max_norm : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()})
        REQUIRE_THROWS_WITH(
            ddp::clip_by_global_norm{.max_norm = max_norm}.validate(),
            Catch::Contains(
                "clip_by_global_norm: max_norm must be a finite number > 0; leave clipping out to have none"));
}

TEMPLATE_TEST_CASE("elements beyond the limit become the limit, the others keep their bits", "[optim][clip]", float,
                   double) {
    using limits = std::numeric_limits<TestType>;
    TestType const limit = TestType(0.7), next = std::nextafter(limit, limits::infinity());
    std::vector<TestType> const before = {0,     -TestType(0),         limit,  -limit, next, -next, TestType(1e30),
                                          -1000, limits::denorm_min(), -limit, 0.25,   7,    -7,    1};
    std::vector<TestType> data, expected;
    for (std::size_t length = 0; length <= 40; ++length) {  // vector bodies and scalar tails
        data.clear();
        for (std::size_t i = 0; i < length; ++i) data.push_back(before[(i * 5 + length) % before.size()]);
        expected = data;
        for (TestType& x : expected)
            if (x > limit || x < -limit) x = std::copysign(limit, x);
        ddp::clip_by_value{.limit = 0.7}.apply(std::span(data));
        REQUIRE(test::same_bits(data, expected));
    }
}

TEMPLATE_TEST_CASE("clipping by value turns infinities into the limit and leaves NaN", "[optim][clip]", float, double) {
    using limits = std::numeric_limits<TestType>;
    for (std::size_t at = 0; at < 20; ++at) {
        std::vector<TestType> data(20, TestType(3));
        data[at] = limits::quiet_NaN();
        data[(at + 1) % 20] = -limits::infinity();
        data[(at + 2) % 20] = limits::infinity();
        ddp::clip_by_value{.limit = 2}.apply(std::span(data));
        REQUIRE(std::isnan(data[at]));
        REQUIRE(data[(at + 1) % 20] == -2);
        REQUIRE(data[(at + 2) % 20] == 2);
        REQUIRE(data[(at + 3) % 20] == 2);
    }
}

TEST_CASE("a limit that clips nothing, or everything, is refused", "[optim][clip]") {
    REQUIRE_NOTHROW(ddp::clip_by_value{}.validate());
    for (double const limit :
         {0.0, -1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
        REQUIRE_THROWS_WITH(
            ddp::clip_by_value{.limit = limit}.validate(),
            Catch::Contains("clip_by_value: limit must be a finite number > 0; leave clipping out to have none"));
}

TEST_CASE("a limit that the model's element type does not hold is refused for that type", "[optim][clip]") {
    for (double const limit : {1e-40, 1e39}) {
        REQUIRE_NOTHROW(ddp::clip_by_value{.limit = limit}.validate_for<double>());
        REQUIRE_THROWS_WITH(ddp::clip_by_value{.limit = limit}.validate_for<float>(),
                            Catch::Contains("clip_by_value: the model's element type does not hold this limit"));
    }
}

TEST_CASE("kinds of clipping, and their numbers, have hashes of their own", "[optim][clip]") {
    REQUIRE(ddp::clip_by_value{.limit = 1}.hash() != ddp::clip_by_global_norm{.max_norm = 1}.hash());
    REQUIRE(ddp::clip_by_value{.limit = 1}.hash() != ddp::clip_by_value{.limit = 2}.hash());
    REQUIRE(ddp::clip_by_global_norm{.max_norm = 1}.hash() != ddp::clip_by_global_norm{.max_norm = 2}.hash());
}
