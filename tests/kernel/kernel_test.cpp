#include <ddp/kernel/kernel.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <ddp/kernel/roots.hpp>

#include "kernel/mixed_values.hpp"
#include "support/catch.hpp"

// That the probe sees a missing guard is shown by building it without; here it must see none.
TEST_CASE("kernels round every product in this build", "[kernel]") {
    REQUIRE(ddp::contraction_is_off());
    REQUIRE_NOTHROW(ddp::expect_uncontracted_kernels());
}

TEST_CASE("power agrees with the C library to rounding", "[kernel]") {
    using ddp::detail::kernels::power;
    REQUIRE(power(0.9, 0) == 1.0);
    REQUIRE(power(0.9, 1) == 0.9);
    REQUIRE(power(2.0, 10) == 1024.0);
    REQUIRE(power(0.0, 3) == 0.0);
    for (std::uint64_t const t : {2u, 3u, 7u, 100u, 999u, 12345u, 1000000u})
        REQUIRE(power(0.999, t) == Approx(std::pow(0.999, static_cast<double>(t))).epsilon(1e-9).margin(1e-300));
    REQUIRE(power(0.999, std::uint64_t{1} << 40) == 0.0);
}

TEST_CASE("cosine agrees with the C library over half a turn", "[kernel]") {
    using ddp::detail::kernels::cosine;
    REQUIRE(cosine(0.0) == 1.0);
    REQUIRE(cosine(0.5) == 0.0);
    REQUIRE(cosine(1.0) == -1.0);
    double worst = 0;
    for (int i = 0; i <= 1000; ++i) {
        double const x = i / 1000.0;
        worst = std::max(worst, std::abs(cosine(x) - std::cos(3.141592653589793238 * x)));
    }
    REQUIRE(worst < 4e-16);
}

TEMPLATE_TEST_CASE("square roots are correctly rounded at every place in a range", "[kernel]", float, double) {
    auto const count = GENERATE(0u, 1u, 3u, 4u, 7u, 8u, 63u, 513u);
    CAPTURE(count);
    test::mixed_values random(count);
    std::vector<TestType> values(count);
    for (TestType& value : values) value = static_cast<TestType>(std::abs(random.next()));
    std::vector<TestType> expected(count);
    for (std::size_t i = 0; i < count; ++i) expected[i] = std::sqrt(values[i]);
    ddp::detail::kernels::square_roots(values.data(), values.size());
    REQUIRE(test::same_bits(values, expected));
}

TEMPLATE_TEST_CASE("square roots keep zero, infinity and NaN", "[kernel]", float, double) {
    constexpr TestType infinity = std::numeric_limits<TestType>::infinity();
    std::vector<TestType> values(9, infinity);
    values[1] = 0;
    values[2] = std::numeric_limits<TestType>::quiet_NaN();
    values[8] = -1;
    ddp::detail::kernels::square_roots(values.data(), values.size());
    REQUIRE(values[0] == infinity);
    REQUIRE(values[1] == 0);
    REQUIRE(std::isnan(values[2]));
    REQUIRE(std::isnan(values[8]));
}
