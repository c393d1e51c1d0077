#include <ddp/data/batch_loader.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include <ddp/data/sampler.hpp>

#include "data/files.hpp"
#include "support/catch.hpp"

using ddp::batch_loader;
using indices = std::vector<std::uint32_t>;

namespace {

/// Sample s has features {s, 2s, 255 - s} and label s % 3.
ddp::classification_data numbered(std::size_t samples) {
    ddp::classification_data data;
    data.sample_shape = {3};
    data.features = 3;
    data.classes = 3;
    for (std::size_t s = 0; s < samples; ++s) {
        for (std::size_t const f : {s, 2 * s, 255 - s}) data.inputs.push_back(static_cast<std::uint8_t>(f));
        data.labels.push_back(static_cast<std::uint32_t>(s % 3));
    }
    return data;
}

// A data set that dies at the end of the line would leave the loader dangling.
static_assert(!std::is_constructible_v<batch_loader<float>, ddp::classification_data>);
static_assert(std::is_constructible_v<batch_loader<float>, ddp::classification_data const&>);

}  // namespace

TEMPLATE_TEST_CASE("a batch holds the samples that were asked for, in that order", "[data][batch]", float, double) {
    ddp::classification_data const data = numbered(100);
    batch_loader<TestType> load{data};
    indices const wanted{7, 99, 0, 7};
    ddp::classification_batch<TestType> const batch = load(wanted);

    REQUIRE(batch.size() == 4);
    REQUIRE(batch.rows == 4);
    REQUIRE(batch.features == 3);
    REQUIRE(batch.inputs.size() == 12);
    REQUIRE(batch.labels.size() == 4);
    REQUIRE(indices(batch.samples.begin(), batch.samples.end()) == wanted);
    for (std::size_t row = 0; row < 4; ++row) {
        std::uint32_t const s = wanted[row];
        CHECK(batch.labels[row] == s % 3);
        CHECK(batch.inputs[3 * row] == static_cast<TestType>(s / 255.0));
        CHECK(batch.inputs[3 * row + 1] == static_cast<TestType>(2 * s / 255.0));
        CHECK(batch.inputs[3 * row + 2] == static_cast<TestType>((255 - s) / 255.0));
    }
    CHECK(batch.inputs[8] == 1);  // byte 255, exactly
    CHECK(batch.inputs[6] == 0);
}

TEST_CASE("an empty share is a batch of no rows that knows its features", "[data][batch]") {
    ddp::classification_data const data = numbered(4);
    batch_loader<float> load{data};
    auto const batch = load(indices{});
    CHECK(batch.size() == 0);
    CHECK(batch.features == 3);
    CHECK(batch.inputs.empty());
    CHECK(batch.labels.empty());
}

TEST_CASE("a loader stays in the memory it reserved, through short and empty batches", "[data][batch]") {
    ddp::classification_data const data = numbered(103);
    int const rank = GENERATE(0, 1, 4);
    ddp::sampler batches{{.samples = data.size(), .global_batch = 32, .seed = 1}, rank, 5};
    batch_loader<float> load{data, batches.largest_share()};
    float const* const inputs = load(indices{}).inputs.data();
    std::uint32_t const* const labels = load(indices{}).labels.data();
    for (int epoch = 0; epoch < 2; ++epoch)
        while (auto const share = batches.next()) {
            auto const batch = load(*share);
            CHECK(batch.inputs.data() == inputs);
            CHECK(batch.labels.data() == labels);
            CHECK(batch.size() == share->size());
        }
}

TEST_CASE("inputs are normalised by mean and deviation", "[data][batch]") {
    ddp::classification_data const data = numbered(100);
    batch_loader<double> load{data, 0, {.mean = 0.25, .deviation = 0.5}};
    auto const batch = load(indices{51});
    CHECK(batch.inputs[0] == (51 / 255.0 - 0.25) / 0.5);
    CHECK(batch.inputs[1] == (102 / 255.0 - 0.25) / 0.5);

    using loader = batch_loader<float>;
    CHECK_THROWS_WITH(
        loader(data, 0, {.deviation = 0}),
        Catch::Contains("batch_loader: mean must be finite, and deviation finite and above 0; {0, 1} keeps [0, 1]"));
    CHECK_THROWS_WITH(
        loader(data, 0, {.deviation = -1}),
        Catch::Contains("batch_loader: mean must be finite, and deviation finite and above 0; {0, 1} keeps [0, 1]"));
    CHECK_THROWS_WITH(
        loader(data, 0, {.mean = std::numeric_limits<double>::quiet_NaN()}),
        Catch::Contains("batch_loader: mean must be finite, and deviation finite and above 0; {0, 1} keeps [0, 1]"));
}

TEST_CASE("an index beyond the data set is refused by number", "[data][batch]") {
    ddp::classification_data const data = numbered(4);
    batch_loader<float> load{data};
    test::caught const e = test::catch_error([&] { (void)load(indices{3, 4}); });
    CHECK(e.code == ddp::errc::usage);
    CHECK(e.says("batch_loader: there is no sample 4; the data set holds 4, give the sampler that number"));
}
