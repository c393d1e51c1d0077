#include <ddp/optim/clip.hpp>

#include <cmath>
#include <limits>

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
        REQUIRE_THROWS_AS(ddp::clip_by_global_norm{.max_norm = max_norm}.validate(), ddp::usage_error);
}
