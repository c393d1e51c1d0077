/// \file
/// Every operation on every type of number, by the kernels, against loops that share no code with them.
#include <ddp/kernel/combine.hpp>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <tuple>
#include <vector>

#include <ddp/collective/reference.hpp>

#include "kernel/mixed_values.hpp"
#include "support/catch.hpp"

namespace {

template <class E, class Op>
struct operation_on {
    using element = E;
    using operation = Op;
};

template <class E>
std::vector<E> numbers(test::mixed_values& random, std::size_t count) {
    std::vector<E> all(count);
    for (E& x : all) {
        if constexpr (std::is_integral_v<E>)
            x = static_cast<E>(random.bits());
        else if (random.below(4) == 0)
            x = std::vector<E>{E(0), -E(0), std::numeric_limits<E>::infinity(), -std::numeric_limits<E>::infinity(),
                               std::numeric_limits<E>::denorm_min()}[random.below(5)];
        else
            x = static_cast<E>(random.next());
    }
    return all;
}
template <class E>
bool same(std::vector<E> const& got, std::vector<E> const& expected) {
    for (std::size_t i = 0; i < got.size(); ++i) {
        if constexpr (std::is_floating_point_v<E>)
            if (std::isnan(got[i]) && std::isnan(expected[i]))
                continue;  // inf - inf: of a sign that depends on the processor
        if (std::memcmp(&got[i], &expected[i], sizeof(E)) != 0) return false;
    }
    return true;
}

}  // namespace

TEMPLATE_PRODUCT_TEST_CASE("kernels combine as the reference does", "[kernel][combine]", (operation_on),
                           ((float, ddp::sum), (float, ddp::product), (float, ddp::minimum), (float, ddp::maximum),
                            (double, ddp::sum), (double, ddp::product), (double, ddp::minimum), (double, ddp::maximum),
                            (std::int32_t, ddp::sum), (std::int32_t, ddp::product), (std::int32_t, ddp::minimum),
                            (std::int32_t, ddp::maximum), (std::int64_t, ddp::sum), (std::int64_t, ddp::product),
                            (std::int64_t, ddp::minimum), (std::int64_t, ddp::maximum), (std::uint32_t, ddp::sum),
                            (std::uint32_t, ddp::product), (std::uint32_t, ddp::minimum), (std::uint32_t, ddp::maximum),
                            (std::uint64_t, ddp::sum), (std::uint64_t, ddp::product), (std::uint64_t, ddp::minimum),
                            (std::uint64_t, ddp::maximum))) {
    using E = typename TestType::element;
    using Op = typename TestType::operation;
    test::mixed_values random(17);
    for (std::size_t ranks = 1; ranks <= 20; ++ranks)
        for (std::size_t const count : {0u, 1u, 7u, 64u, 513u, 1100u}) {
            CAPTURE(ranks, count);
            std::vector<std::vector<E>> inputs;
            std::vector<E const*> sources;
            for (std::size_t r = 0; r < ranks; ++r) inputs.push_back(numbers<E>(random, count));
            for (auto const& in : inputs) sources.push_back(in.data());
            auto const expected = ddp::reference_reduce<Op>(inputs);
            std::vector<E> out(count);
            ddp::combine_tree<Op>(std::span<E>(out), sources);
            REQUIRE(same(out, expected));
            if (ranks == 2) {  // in place, on either side
                auto left = inputs[0];
                ddp::combine<Op>(std::span<E>(left), std::span<E const>(left), std::span<E const>(inputs[1]));
                REQUIRE(same(left, expected));
            }
            ddp::combine_tree<Op>(std::span<E>(inputs.back()), sources);
            REQUIRE(same(inputs.back(), expected));
        }
}

TEMPLATE_TEST_CASE("minimum and maximum order zeros, and a NaN anywhere gives one and the same NaN",
                   "[kernel][combine]", float, double) {
    using E = TestType;
    E const nan = std::numeric_limits<E>::quiet_NaN(), inf = std::numeric_limits<E>::infinity();
    auto const bits = [](E x) {
        return std::bit_cast<std::conditional_t<sizeof(E) == 4, std::uint32_t, std::uint64_t>>(x);
    };
    auto const least = [&](E a, E b) { return bits(ddp::minimum::combine(a, b)); };
    auto const most = [&](E a, E b) { return bits(ddp::maximum::combine(a, b)); };
    for (bool const swapped : {false, true}) {
        auto const check = [&](E a, E b, E smaller, E greater) {
            if (swapped) std::swap(a, b);
            CHECK(least(a, b) == bits(smaller));
            CHECK(most(a, b) == bits(greater));
        };
        check(-E(0), E(0), -E(0), E(0));
        check(E(-3), E(2), E(-3), E(2));
        check(E(-3), E(-2), E(-3), E(-2));
        check(-inf, inf, -inf, inf);
        check(std::numeric_limits<E>::denorm_min(), E(0), E(0), std::numeric_limits<E>::denorm_min());
        for (E const other : {E(1), inf, -inf, -nan, E(0)}) {
            check(nan, other, nan, nan);
            check(-nan, other, nan, nan);
            check(std::numeric_limits<E>::signaling_NaN(), other, nan, nan);
        }
    }
}

TEST_CASE("integers wrap as unsigned arithmetic does", "[kernel][combine]") {
    CHECK(ddp::sum::combine(std::numeric_limits<std::int32_t>::max(), 1) == std::numeric_limits<std::int32_t>::min());
    CHECK(ddp::product::combine(std::int64_t{1} << 62, std::int64_t{4}) == 0);
    CHECK(ddp::sum::combine(std::uint64_t{0} - 1, std::uint64_t{3}) == 2);
    CHECK(ddp::minimum::combine(-1, 1) == -1);
    CHECK(ddp::minimum::combine(~0u, 1u) == 1);
}
