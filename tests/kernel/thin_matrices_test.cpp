// The kernels of products of thin matrices, against plain loops in the order that their comments promise.
#include <ddp/exchange/thin_matrices.hpp>

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "kernel/mixed_values.hpp"
#include "support/catch.hpp"

namespace {

namespace kernels = ddp::detail::kernels;

struct sizes {
    std::size_t rows, columns, rank;
};
/// Tall, wide, one, none, and columns around multiples of 16.
std::vector<sizes> const all_sizes = {{1, 1, 1},  {5, 3, 2},    {70, 4, 3},  {4, 70, 3},  {9, 15, 2},
                                      {9, 16, 2}, {9, 17, 2},   {3, 100, 1}, {33, 48, 4}, {8, 47, 8},
                                      {0, 20, 2}, {20, 31, 20}, {2, 5, 4}};

template <class E>
std::vector<E> numbers(test::mixed_values& random, std::size_t count) {
    std::vector<E> all(count);
    for (E& x : all) x = static_cast<E>(random.next());
    return all;
}

/// Rounded: compilers may fuse what follows with a product.
template <class E>
E times(E a, E b) {
    E const volatile rounded = a * b;
    return rounded;
}
/// The columns of left, in double.
template <class E>
std::vector<std::vector<double>> columns_of(std::vector<E> const& left, sizes const& of) {
    std::vector<std::vector<double>> all(of.rank, std::vector<double>(of.rows));
    for (std::size_t i = 0; i < of.rows; ++i)
        for (std::size_t k = 0; k < of.rank; ++k) all[k][i] = static_cast<double>(left[i * of.rank + k]);
    return all;
}
double product(std::vector<double> const& a, std::vector<double> const& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
}
template <class E>
constexpr double rounding = 8 * static_cast<double>(std::numeric_limits<E>::epsilon());

}  // namespace

TEMPLATE_TEST_CASE("products with thin matrices have the bits of plain loops", "[kernel]", float, double) {
    using E = TestType;
    test::mixed_values random(7);
    for (sizes const& of : all_sizes) {
        CAPTURE(of.rows, of.columns, of.rank);
        auto const matrix = numbers<E>(random, of.rows * of.columns);
        auto const left = numbers<E>(random, of.rows * of.rank), right = numbers<E>(random, of.rank * of.columns);
        std::vector<E> got(of.rows * of.rank, E(77)), expected(of.rows * of.rank);
        kernels::times_thin(matrix.data(), right.data(), got.data(), of.rows, of.columns, of.rank);
        for (std::size_t i = 0; i < of.rows; ++i)
            for (std::size_t k = 0; k < of.rank; ++k) {
                std::vector<E> lanes(16);
                for (std::size_t j = 0; j < of.columns; ++j) {
                    E& lane = lanes[j % 16];
                    lane = lane + times(matrix[i * of.columns + j], right[k * of.columns + j]);
                }
                while (lanes.size() > 1) {  // the tree: neighbours first
                    std::vector<E> half;
                    for (std::size_t l = 0; l < lanes.size(); l += 2) half.push_back(lanes[l] + lanes[l + 1]);
                    lanes = half;
                }
                expected[i * of.rank + k] = lanes[0];
            }
        REQUIRE(got == expected);

        std::vector<E> down(of.rank * of.columns, E(77)), by_hand(of.rank * of.columns);
        kernels::transposed_times(matrix.data(), left.data(), down.data(), of.rows, of.columns, of.rank);
        for (std::size_t k = 0; k < of.rank; ++k)
            for (std::size_t j = 0; j < of.columns; ++j)
                for (std::size_t i = 0; i < of.rows; ++i) {
                    E& sum = by_hand[k * of.columns + j];
                    sum = sum + times(left[i * of.rank + k], matrix[i * of.columns + j]);
                }
        REQUIRE(down == by_hand);

        std::vector<E> whole(of.rows * of.columns, E(77)), loops(of.rows * of.columns);
        kernels::product_of_thin(left.data(), right.data(), whole.data(), of.rows, of.columns, of.rank);
        for (std::size_t i = 0; i < of.rows; ++i)
            for (std::size_t j = 0; j < of.columns; ++j) {
                E sum = times(left[i * of.rank], right[j]);
                for (std::size_t k = 1; k < of.rank; ++k)
                    sum = sum + times(left[i * of.rank + k], right[k * of.columns + j]);
                loops[i * of.columns + j] = sum;
            }
        REQUIRE(whole == loops);
    }
}

TEMPLATE_TEST_CASE("columns become orthonormal, and span what they spanned", "[kernel]", float, double) {
    using E = TestType;
    test::mixed_values random(8);
    for (sizes const& of : all_sizes) {
        if (of.rows < of.rank) continue;
        CAPTURE(of.rows, of.rank);
        auto const before = numbers<E>(random, of.rows * of.rank);
        std::vector<E> left = before;
        kernels::orthonormalise(left.data(), of.rows, of.rank);
        auto const was = columns_of(before, of), is = columns_of(left, of);
        for (std::size_t k = 0; k < of.rank; ++k) {
            for (std::size_t other = 0; other < of.rank; ++other)
                CHECK(std::abs(product(is[k], is[other]) - (k == other ? 1 : 0)) < rounding<E>);
            CHECK(product(was[k], is[k]) > 0);
            std::vector<double> rest = was[k];  // in the span of the first k + 1
            for (std::size_t other = 0; other <= k; ++other) {
                double const along = product(was[k], is[other]);
                for (std::size_t i = 0; i < of.rows; ++i) rest[i] -= along * is[other][i];
            }
            CHECK(product(rest, rest) <= rounding<E> * rounding<E> * product(was[k], was[k]) * double(of.rank));
        }
    }
}

TEMPLATE_TEST_CASE("columns that depend on others, or are zero, become zero", "[kernel]", float, double) {
    using E = TestType;
    test::mixed_values random(9);
    constexpr sizes of{40, 0, 6};
    auto left = numbers<E>(random, of.rows * of.rank);
    for (std::size_t i = 0; i < of.rows; ++i) {
        E* const row = left.data() + i * of.rank;
        row[1] = 0;
        row[2] = -3 * row[0];
        row[4] = row[0] + 2 * row[3];
    }
    auto const before = left;
    kernels::orthonormalise(left.data(), of.rows, of.rank);
    auto const is = columns_of(left, of);
    for (std::size_t k = 0; k < of.rank; ++k) {
        CAPTURE(k);
        bool const lost = k == 1 || k == 2 || k == 4;
        CHECK(std::abs(product(is[k], is[k]) - (lost ? 0 : 1)) < rounding<E>);
        if (lost) CHECK(product(is[k], is[k]) == 0);
        for (std::size_t other = 0; other < k; ++other) CHECK(std::abs(product(is[k], is[other])) < rounding<E>);
    }
    std::vector<E> nothing(of.rows * of.rank);
    kernels::orthonormalise(nothing.data(), of.rows, of.rank);
    CHECK(nothing == std::vector<E>(of.rows * of.rank));
    // More columns than rows: those that are left over depend on the others.
    auto few = numbers<E>(random, 2 * 4);
    kernels::orthonormalise(few.data(), 2, 4);
    auto const four = columns_of(few, {2, 0, 4});
    CHECK(std::abs(product(four[0], four[0]) - 1) < rounding<E>);
    CHECK(std::abs(product(four[1], four[1]) - 1) < rounding<E>);
    CHECK(product(four[2], four[2]) == 0);
    CHECK(product(four[3], four[3]) == 0);
}
