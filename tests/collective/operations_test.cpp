/// \file
/// Sums, products, minima and maxima of every type of number, over algorithms, reduce and reduce_scatter.
#include <ddp/collective/allreduce.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/ranks.hpp"

namespace {

using ddp::test::check_operation;
using ddp::test::failures;

ddp::timing patient() {
    ddp::timing times = ddp::timing::for_tests();
    times.collective = std::chrono::seconds(60);
    return times;
}

/// The default, by few messages and by slices.
std::vector<ddp::automatic_allreduce> both_ways() {
    ddp::automatic_allreduce slices{.direct = {.chunk_bytes = 200, .window = 2}};
    slices.cost = ddp::test::costs_of_direct;
    ddp::automatic_allreduce halves{.halving = {.chunk_bytes = 200, .window = 2}, .cost = ddp::test::costs_of_halving};
    return {ddp::automatic_allreduce{}, slices, halves};
}

template <class... Checks>
void run(int ranks, Checks... checks) {
    CAPTURE(ranks);
    auto const failed = ddp::test::run_ranks(
        ranks,
        [&](auto& comm) {
            failures all;
            auto const take = [&](failures const& some) { all.insert(all.end(), some.begin(), some.end()); };
            (take(checks(comm)), ...);
            return all;
        },
        patient());
    for (auto const& of_rank : failed) CHECK(of_rank == failures{});
}

template <class Op, class E>
constexpr auto check = [](auto& comm) { return check_operation<Op, E>(comm, both_ways()); };

}  // namespace

TEST_CASE("operations whose order does not matter give the oracle's bits by every algorithm",
          "[collective][operations]") {
    run(GENERATE(1, 2, 3, 4, 5, 7), [](auto& comm) { return ddp::test::check_all_operations(comm); });
}

TEST_CASE("products and extremes of floats are the oracle's, in the canonical order", "[collective][operations]") {
    run(GENERATE(1, 2, 3, 4, 5, 7), check<ddp::product, float>, check<ddp::product, double>, check<ddp::maximum, float>,
        check<ddp::maximum, double>, check<ddp::minimum, float>, check<ddp::minimum, double>);
}

TEST_CASE("integers of all widths are the oracle's", "[collective][operations]") {
    run(GENERATE(1, 2, 3, 4, 5, 7), check<ddp::sum, std::uint32_t>, check<ddp::sum, std::int32_t>,
        check<ddp::product, std::int32_t>, check<ddp::product, std::int64_t>, check<ddp::maximum, std::int32_t>,
        check<ddp::maximum, std::int64_t>, check<ddp::minimum, std::int32_t>, check<ddp::minimum, std::int64_t>,
        check<ddp::minimum, std::uint64_t>);
}

TEST_CASE("reduce_scatter by an operation leaves each rank its slice", "[collective][operations]") {
    run(GENERATE(1, 2, 3, 5, 7), [](auto& comm) {
        failures all;
        for (auto const& [name, algorithm] : ddp::test::algorithms())
            for (std::size_t const count : {0u, 1u, 50u, 1003u}) {
                ddp::test::note(all, name,
                                ddp::test::check_reduce_scatter<float, ddp::minimum>(comm, algorithm, count));
                ddp::test::note(all, name,
                                ddp::test::check_reduce_scatter<std::int32_t, ddp::product>(comm, algorithm, count));
                ddp::test::note(all, name,
                                ddp::test::check_reduce_scatter<double, ddp::maximum>(comm, algorithm, count));
                ddp::test::note(all, name, ddp::test::check_reduce_scatter<std::int64_t>(comm, algorithm, count));
            }
        return all;
    });
}

namespace {

/// A user's own: bits that are set on any rank.
struct bitwise_or {
    static constexpr char const* name = "bitwise or";
    template <std::unsigned_integral E>
    static constexpr E combine(E left, E right) noexcept {
        return left | right;
    }
};
static_assert(ddp::OperationOn<bitwise_or, std::uint32_t> && !ddp::OperationOn<bitwise_or, float>);

/// One whose sides matter: what the lower ranks have.
struct leftmost {
    static constexpr char const* name = "leftmost";
    template <ddp::Number E>
    static constexpr E combine(E left, E /*right*/) noexcept {
        return left;
    }
};

/// The composition of functions x -> a x + b modulo 2^16, with a above b in the word: associative, not commutative.
struct composition {
    static constexpr char const* name = "composition";
    static constexpr std::uint32_t combine(std::uint32_t left, std::uint32_t right) noexcept {
        std::uint32_t const a = left >> 16, b = left & 0xffff;
        return a * (right >> 16) << 16 | ((a * (right & 0xffff) + b) & 0xffff);
    }
};
static_assert(composition::combine(0x0002'0001, 0x0003'0005) == 0x0006'000b);  // 2 (3 x + 5) + 1

}  // namespace

TEST_CASE("an operation of the user's own is applied", "[collective][operations]") {
    auto const got = ddp::test::run_ranks(5, [](auto& comm) {
        std::vector<std::uint32_t> flags(100, 1u << comm.rank());
        ddp::allreduce(comm, flags, bitwise_or{});
        return flags.front() + flags.back();
    });
    CHECK(got == std::vector<std::uint32_t>(5, 62));
}

TEST_CASE("reduce keeps what lower ranks have on the left, whatever the root and the way", "[collective][operations]") {
    run(GENERATE(2, 3, 6, 7), [](auto& comm) {
        failures all;
        for (int root = 0; root < comm.size(); ++root)
            for (std::size_t const count : {std::size_t{1}, std::size_t{40'000}}) {
                std::vector<std::int32_t> data(count, comm.rank() + 1);
                ddp::reduce(comm, data, root, leftmost{});
                if (comm.rank() == root && (data.front() != 1 || data.back() != 1))
                    all.push_back("root " + std::to_string(root) + " has " + std::to_string(data.front()));
            }
        return all;
    });
}

TEST_CASE("every canonical algorithm keeps what lower ranks have on the left", "[collective][operations]") {
    run(GENERATE(2, 3, 4, 5, 6, 7, 8, 9), [](auto& comm) {
        failures all;
        for (auto const& [name, algorithm] : ddp::test::algorithms())
            for (std::size_t const count : {std::size_t{1}, std::size_t{1003}})
                if (algorithm.canonical)
                    ddp::test::note(all, name + ", " + std::to_string(count),
                                    ddp::test::check_combine<composition, std::uint32_t>(comm, algorithm, count,
                                                                                         ddp::test::values::mixed));
        return all;
    });
}

TEST_CASE("reduce refuses a root that is no rank", "[collective][operations]") {
    for (int const root : {-1, 2}) {
        auto const errors = ddp::test::errors_of_ranks(2, [&](auto& comm) {
            float x = 0;
            ddp::reduce(comm, std::span<float>(&x, 1), root);
        });
        CHECK(errors[0].find("is not a rank: they are numbered from 0 to ") != std::string::npos);
    }
}
