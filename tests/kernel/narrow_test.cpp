// Numbers of 16 and 8 bits, and the choice of the largest, against slow definitions.
#include <ddp/exchange/int8_groups.hpp>
#include <ddp/exchange/largest.hpp>
#include <ddp/exchange/sixteen_bit.hpp>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <ddp/core/random.hpp>
#include <ddp/kernel/finite.hpp>

#include "support/catch.hpp"

using namespace ddp;

namespace {

/// What 16 bits mean, by definition: exponent bits, mantissa bits.
double meaning(std::uint16_t x, int exponent_bits) {
    int const mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    int const e = x >> mantissa_bits & ((1 << exponent_bits) - 1), m = x & ((1 << mantissa_bits) - 1);
    double const sign = x >> 15 != 0 ? -1 : 1;
    if (e == (1 << exponent_bits) - 1)
        return m != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    if (e == 0) return sign * std::ldexp(m, 1 - bias - mantissa_bits);
    return sign * std::ldexp(m + (1 << mantissa_bits), e - bias - mantissa_bits);
}

template <class Format>
void check(int exponent_bits) {
    std::vector<double> numbers;  // the positive finite ones, ascending, as are their bits
    for (std::uint32_t x = 0; x < 0x10000; ++x) {
        double const right = meaning(static_cast<std::uint16_t>(x), exponent_bits);
        float const got = Format::widen(static_cast<std::uint16_t>(x));
        if (std::isnan(right)) {
            REQUIRE(std::isnan(got));
            REQUIRE(std::isnan(Format::widen(Format::narrow(got))));
            continue;
        }
        REQUIRE((static_cast<double>(got) == right && std::signbit(got) == (x >> 15 != 0)));
        REQUIRE(Format::narrow(got) == x);
        if (x < 0x8000 && std::isfinite(right)) numbers.push_back(right);
    }
    // Between two neighbours: to the nearer, in the middle to the even one; beyond the last as if there were one more.
    std::size_t const last = numbers.size() - 1;
    std::vector<float> tried{std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xffc12345u), -INFINITY, 65520,
                             -0.0f};
    for (std::size_t i = 0; i <= last; ++i) {
        double const low = numbers[i], high = i == last ? 2 * numbers[i] - numbers[i - 1] : numbers[i + 1];
        auto const middle = static_cast<float>((low + high) / 2);
        auto const at = static_cast<std::uint16_t>(i), above = static_cast<std::uint16_t>(i + 1);
        bool const exact = static_cast<double>(middle) == (low + high) / 2;
        tried.insert(tried.end(), {middle, std::nextafter(middle, 0.0f), -std::nextafter(middle, INFINITY)});
        if (exact) REQUIRE(Format::narrow(middle) == (i % 2 == 0 ? at : above));
        float const below_middle = std::nextafter(middle, 0.0f), above_middle = std::nextafter(middle, INFINITY);
        if (static_cast<double>(below_middle) > low) REQUIRE(Format::narrow(below_middle) == at);
        if (static_cast<double>(above_middle) < high) REQUIRE(Format::narrow(above_middle) == above);
        if (static_cast<double>(above_middle) < high) REQUIRE(Format::narrow(-above_middle) == (above | 0x8000));
    }
    REQUIRE(Format::narrow(INFINITY) == Format::narrow(std::numeric_limits<float>::max()));
    std::vector<std::uint16_t> by_kernel(tried.size());
    detail::kernels::narrow<Format>(tried.data(), by_kernel.data(), tried.size());
    for (std::size_t i = 0; i < tried.size(); ++i) REQUIRE(by_kernel[i] == Format::narrow(tried[i]));
}

/// The kernels are the functions, at every place of a vector and behind it; a double is rounded to float first.
template <class Format>
void compare_kernels() {
    namespace kernels = ddp::detail::kernels;
    CAPTURE(Format::name);
    std::vector<float> in;
    random_stream const draws{1, random_use::user, 0};
    for (std::uint32_t i = 0; i < 5003; ++i)  // any bits, some of which are NaN, and infinities at every place
        in.push_back(i % 17 == 0 ? (i % 2 == 0 ? INFINITY : -INFINITY) : std::bit_cast<float>(draws.at(i).words()[0]));
    in.push_back(-std::numeric_limits<float>::quiet_NaN());
    std::vector<double> const wide(in.begin(), in.end());
    std::vector<std::uint16_t> out(in.size()), other(in.size());
    kernels::narrow<Format>(in.data(), out.data(), in.size());
    kernels::narrow<Format>(wide.data(), other.data(), in.size());
    std::size_t odd = 0;
    for (std::size_t i = 0; i < in.size(); ++i) {
        odd += std::isnan(in[i]) ? 1 : 0;
        REQUIRE(out[i] == Format::narrow(in[i]));
        REQUIRE(other[i] == out[i]);
    }
    REQUIRE(odd > 10);
    std::vector<std::uint16_t> every(0x10000 + 3);
    for (std::size_t i = 0; i < every.size(); ++i) every[i] = static_cast<std::uint16_t>(i);
    std::vector<float> back(every.size());
    std::vector<double> wide_back(every.size());
    kernels::widen<Format>(every.data(), back.data(), every.size());
    kernels::widen<Format>(every.data(), wide_back.data(), every.size());
    auto const widened = [&](std::size_t i) {
        float const expected = Format::widen(every[i]);
        return std::bit_cast<std::uint32_t>(back[i]) == std::bit_cast<std::uint32_t>(expected) &&
               std::bit_cast<std::uint64_t>(wide_back[i]) == std::bit_cast<std::uint64_t>(double{expected});
    };
    std::size_t good = 0;
    while (good < every.size() && widened(good)) ++good;
    REQUIRE(good == every.size());
}

}  // namespace

TEST_CASE("bfloat16 and half: every number, every neighbour, ties to even", "[kernel]") {
    check<bfloat16>(8);
    check<half>(5);
    compare_kernels<bfloat16>();
    compare_kernels<half>();
}

TEMPLATE_TEST_CASE("8 bits with a scale a group", "[kernel]", float, double) {
    using E = TestType;
    namespace kernels = ddp::detail::kernels;
    random_stream const draws{2, random_use::user, 0};
    for (std::size_t const count :
         {std::size_t{0}, std::size_t{1}, std::size_t{255}, std::size_t{256}, std::size_t{777}}) {
        std::vector<E> in, out(count, E(7));
        for (std::size_t i = 0; i < count; ++i)
            in.push_back(draws.at(i).symmetric<E>() *
                         static_cast<E>(std::pow(10.0, static_cast<double>(i / 256) * 3 - 4)));
        std::vector<std::byte> wire(kernels::int8_bytes(count));
        REQUIRE(wire.size() == count + 4 * ((count + 255) / 256));
        kernels::to_int8(in.data(), wire.data(), count);
        kernels::from_int8(wire.data(), out.data(), count);
        for (std::size_t group = 0; group < count; group += 256) {
            E most = 0;
            std::size_t const end = std::min(count, group + 256);
            for (std::size_t i = group; i < end; ++i) most = std::max(most, std::abs(in[i]));
            for (std::size_t i = group; i < end; ++i) {
                REQUIRE(std::abs(out[i] - in[i]) <= most / E(127) * E(0.50001));
                // By definition, but for the scale's own rounding.
                double const scale = static_cast<double>(static_cast<float>(most) / 127.0f);
                REQUIRE(std::abs(static_cast<double>(out[i]) / scale -
                                 std::nearbyint(static_cast<double>(in[i]) / scale)) < 1.0001);
                if (std::abs(in[i]) == most) REQUIRE(std::abs(out[i] - in[i]) <= most * E(1e-6));
            }
        }
    }
    for (E const odd : {std::numeric_limits<E>::quiet_NaN(), std::numeric_limits<E>::infinity()}) {
        std::vector<E> in(600, E(1)), out(600);
        in[300] = odd;
        std::vector<std::byte> wire(kernels::int8_bytes(in.size()));
        kernels::to_int8(in.data(), wire.data(), in.size());
        kernels::from_int8(wire.data(), out.data(), in.size());
        for (std::size_t i = 0; i < in.size(); ++i) {
            if (i / 256 == 1)
                REQUIRE(std::isnan(out[i]));
            else
                REQUIRE(std::abs(out[i] - E(1)) < E(1e-6));
        }
    }
    std::vector<E> most(10, static_cast<E>(std::numeric_limits<float>::max())), large(10);
    most[3] = -most[3];
    std::vector<std::byte> of_most(kernels::int8_bytes(10));
    kernels::to_int8(most.data(), of_most.data(), 10);
    kernels::from_int8(of_most.data(), large.data(), 10);
    for (std::size_t i = 0; i < 10; ++i) REQUIRE(std::abs(large[i] - most[i]) <= std::abs(most[i]) * E(1e-6));
    std::vector<E> tiny(10, std::numeric_limits<E>::denorm_min()), out(10, E(1));
    std::vector<std::byte> wire(kernels::int8_bytes(10));
    kernels::to_int8(tiny.data(), wire.data(), 10);
    kernels::from_int8(wire.data(), out.data(), 10);
    REQUIRE(out == std::vector<E>(10));
}

TEMPLATE_TEST_CASE("the largest elements are those of a sort", "[kernel]", float, double) {
    using E = TestType;
    random_stream const draws{3, random_use::user, 0};
    // 40000 of them: with room for candidates little more than one pass, where a sample tells how large they are.
    for (std::size_t const count :
         {std::size_t{1}, std::size_t{2}, std::size_t{97}, std::size_t{3000}, std::size_t{40003}})
        for (int const kind : {0, 1, 2, 3, 4}) {
            if (kind > 2 && count < 40000) continue;
            std::vector<E> data;
            for (std::size_t i = 0; i < count; ++i) {
                auto const words = draws.at(i).words();
                E const drawn = kind == 1 || kind == 2
                                    ? static_cast<E>(words[0] % 5) * (words[1] % 2 == 0 ? E(-1) : E(1))
                                    : draws.at(i).symmetric<E>();
                data.push_back(kind == 2 && words[2] % 50 == 0 ? std::numeric_limits<E>::quiet_NaN() : drawn);
                if (kind == 3) data.back() *= i % 2048 < 32 ? E(1e-3) : E(1);  // the sample sees small ones only
                if (kind == 4) data.back() *= i % 2048 < 32 ? E(1e3) : E(1);   // or the large ones only
            }
            if (count > 40000) data.back() = E(50);  // in what is no whole block
            std::vector<std::uint32_t> order(count);
            std::iota(order.begin(), order.end(), 0u);
            auto const magnitude = [&](std::uint32_t i) {
                return std::isnan(data[i]) ? std::numeric_limits<E>::infinity() : std::abs(data[i]);
            };
            std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
                return magnitude(a) != magnitude(b) ? magnitude(a) > magnitude(b) : a < b;
            });
            for (std::size_t const k :
                 {std::size_t{0}, std::size_t{1}, count / 100, count / 9, count / 3, count - 1, count}) {
                std::vector<std::uint32_t> expected(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k)),
                    got(k);
                std::sort(expected.begin(), expected.end());
                CAPTURE(count, kind, k);
                largest_elements(std::span<E const>(data), got);
                REQUIRE(got == expected);
                std::size_t const room = largest_elements_room(count, k);
                REQUIRE((room != 0) == (count > 40000 && k <= count / 8));
                std::vector<std::uint32_t> indices(room);
                std::vector<E> values(room);
                std::fill(got.begin(), got.end(), 0u);
                largest_elements(std::span<E const>(data), got, indices, values);
                REQUIRE(got == expected);
            }
        }
    std::vector<E> const few(3);
    std::vector<std::uint32_t> many(4);
    REQUIRE_THROWS_WITH(
        largest_elements(std::span<E const>(few), many),
        Catch::Contains("largest_elements: as many elements as are asked for, and no more than 2^32 - 1"));
    REQUIRE_THROWS_WITH(largest_elements(std::span<E const>(few), std::span(many).first(2), many),
                        Catch::Contains("largest_elements: room for as many indices as values"));
}

TEST_CASE("how fast floats are converted and selected", "[.][kernel][measure]") {
    std::vector<float> in(std::size_t{1} << 24), copy(in.size());
    std::vector<std::uint16_t> narrow(in.size());
    std::vector<std::byte> whole(detail::kernels::int8_bytes(in.size()));
    std::vector<std::uint32_t> largest(in.size() / 100);
    random_stream const draws{1, random_use::initial_values, 0};
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = draws.at(i).symmetric<float>();
    auto const measure = [&](std::string const& what, auto const& run) {
        double best = 1e9;
        for (int round = 0; round < 12; ++round) {
            auto const since = std::chrono::steady_clock::now();
            run();
            std::chrono::duration<double> const taken = std::chrono::steady_clock::now() - since;
            best = std::min(best, taken.count());
        }
        WARN(what << ": " << static_cast<double>(in.size() * sizeof(float)) / best / 1e9 << " GB/s of floats");
    };
    measure("memcpy", [&] { std::memcpy(copy.data(), in.data(), in.size() * sizeof(float)); });
    measure("reading, for what is not finite",
            [&] { REQUIRE(first_nonfinite(std::span<float const>(in)) == in.size()); });
    measure("to bfloat16", [&] { detail::kernels::narrow<bfloat16>(in.data(), narrow.data(), in.size()); });
    measure("to half", [&] { detail::kernels::narrow<half>(in.data(), narrow.data(), in.size()); });
    measure("to int8", [&] { detail::kernels::to_int8(in.data(), whole.data(), in.size()); });
    measure("of bfloat16", [&] { detail::kernels::widen<bfloat16>(narrow.data(), copy.data(), in.size()); });
    measure("of half", [&] { detail::kernels::widen<half>(narrow.data(), copy.data(), in.size()); });
    measure("of int8", [&] { detail::kernels::from_int8(whole.data(), copy.data(), in.size()); });
    std::vector<std::uint32_t> indices(largest_elements_room(in.size(), largest.size()));
    std::vector<float> values(indices.size());
    std::vector<float> normal(in);  // nearer to what gradients are
    for (std::size_t i = 0; i < normal.size(); ++i)
        for (std::uint64_t k = 1; k < 6; ++k) normal[i] += draws.at(k * normal.size() + i).symmetric<float>();
    for (std::vector<float> const* const of : {&in, &normal}) {
        std::string const drawn = of == &in ? " of uniform numbers" : " of normal numbers";
        measure("largest 1 %" + drawn, [&] {
            largest_elements(std::span<float const>(*of), std::span(largest), std::span(indices), std::span(values));
        });
        measure("the same without room" + drawn,
                [&] { largest_elements(std::span<float const>(*of), std::span(largest)); });
    }
}
