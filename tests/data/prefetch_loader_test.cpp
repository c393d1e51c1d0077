// Batches that a thread prepares: what they hold, for any number of ranks, and how the thread ends.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ddp/data/prefetch_loader.hpp>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "data/files.hpp"
#include "support/catch.hpp"
#include "support/no_room_for_stacks.hpp"

using ddp::prefetch_loader;
using ddp::sampler;
using ddp::sampler_options;

namespace {

/// `samples` pictures of channels x 5 x 4 with no byte 0.
ddp::classification_data pictures(std::size_t samples, std::size_t channels) {
    ddp::classification_data data;
    data.sample_shape = {channels, 5, 4};
    data.features = channels * 20;
    data.classes = 3;
    for (std::size_t i = 0; i < samples * data.features; ++i)
        data.inputs.push_back(static_cast<std::uint8_t>(1 + i * 37 % 255));
    for (std::size_t s = 0; s < samples; ++s) data.labels.push_back(static_cast<std::uint32_t>(s % 3));
    return data;
}

/// A padded picture, cut out and then mirrored, as torchvision does it.
std::vector<std::uint8_t> by_hand(ddp::classification_data const& data, std::uint32_t sample, std::size_t pad,
                                  ddp::augmentation_draw cut) {
    std::vector<std::uint8_t> all;
    for (std::size_t c = 0; c < data.sample_shape[0]; ++c) {
        std::vector<std::vector<std::uint8_t>> padded(5 + 2 * pad, std::vector<std::uint8_t>(4 + 2 * pad, 0));
        for (std::size_t y = 0; y < 5; ++y)
            for (std::size_t x = 0; x < 4; ++x)
                padded[y + pad][x + pad] = data.inputs[sample * data.features + c * 20 + y * 4 + x];
        for (std::size_t y = 0; y < 5; ++y) {
            std::vector<std::uint8_t> line;
            for (std::size_t x = 0; x < 4; ++x) line.push_back(padded[y + cut.down][x + cut.right]);
            if (cut.flip) std::reverse(line.begin(), line.end());
            all.insert(all.end(), line.begin(), line.end());
        }
    }
    return all;
}

}  // namespace

static_assert(!std::is_constructible_v<prefetch_loader<float>, ddp::classification_data, sampler>);

TEST_CASE("prefetched batches are the loader's, epoch after epoch, and seek goes back", "[data][prefetch]") {
    ddp::classification_data const data = pictures(53, 1);
    for (std::size_t const depth : {1u, 3u}) {
        sampler plain{{.samples = 53, .global_batch = 10, .seed = 4}, 1, 3};
        ddp::batch_loader<float> load{data, 0, {.mean = 0.25, .deviation = 0.5}};
        prefetch_loader<float> ahead{data, plain, {.depth = depth, .normalise = {{.mean = 0.25, .deviation = 0.5}}}};
        std::set<float const*> places;
        auto const same = [&] {
            auto const wanted = plain.next();
            auto const got = ahead.next();
            REQUIRE(wanted.has_value() == got.has_value());
            CHECK((ahead.place().epoch() == plain.epoch() && ahead.place().position() == plain.position()));
            if (!got) return false;
            auto const batch = load(*wanted);
            CHECK(std::vector(got->inputs.begin(), got->inputs.end()) ==
                  std::vector(batch.inputs.begin(), batch.inputs.end()));
            CHECK(std::vector(got->labels.begin(), got->labels.end()) ==
                  std::vector(batch.labels.begin(), batch.labels.end()));
            CHECK(std::vector(got->samples.begin(), got->samples.end()) == std::vector(wanted->begin(), wanted->end()));
            CHECK((got->features == 20 && got->rows == wanted->size()));
            places.insert(got->inputs.data());
            return true;
        };
        for (int epoch = 0; epoch < 3; ++epoch)
            while (same()) {
            }
        CHECK(places.size() == depth + 1);  // a ring, allocated once
        plain.seek(1, 2);
        ahead.seek(1, 2);
        while (same()) {
        }
        CHECK_THROWS_WITH(ahead.seek(0, 7),
                          Catch::Contains("sampler::seek: past the epoch's end; were the options the same?"));
        same();  // it goes on
    }
}

TEST_CASE("pictures are cut and mirrored by seed, epoch and sample, for any number of ranks", "[data][prefetch]") {
    ddp::classification_data const data = pictures(40, 3);
    ddp::augmentation const how{.crop_padding = 2, .flip = true, .seed = 9};
    std::vector<ddp::normalisation> const norms{{0.5, 0.25}, {0.4, 0.2}, {0.3, 0.5}};
    for (int const ranks : {1, 2, 3, 4}) {
        std::map<std::pair<std::uint64_t, std::uint32_t>, bool> seen;
        for (int rank = 0; rank < ranks; ++rank) {
            sampler_options const options{.samples = 40, .global_batch = 16, .seed = 3};
            prefetch_loader<double> load{data, sampler{options, rank, ranks}, {.normalise = norms, .augment = how}};
            for (std::uint64_t epoch = 0; epoch < 2; ++epoch)
                while (auto const batch = load.next())
                    for (std::size_t row = 0; row < batch->rows; ++row) {
                        std::uint32_t const sample = batch->samples[row];
                        auto const wanted = by_hand(data, sample, 2, ddp::draw_augmentation(how, epoch, sample));
                        bool right = batch->labels[row] == sample % 3;
                        for (std::size_t f = 0; f < 60; ++f)
                            right = right && batch->inputs[row * 60 + f] ==
                                                 (wanted[f] / 255.0 - norms[f / 20].mean) / norms[f / 20].deviation;
                        seen[{epoch, sample}] = right;
                    }
        }
        CAPTURE(ranks);
        CHECK(seen.size() == 80);
        for (auto const& [which, right] : seen) CHECK(right);
    }

    std::map<std::size_t, int> downs, rights;  // every place equally often, within five standard deviations
    int flips = 0, again = 0;
    for (std::uint32_t sample = 0; sample < 10'000; ++sample) {
        auto const cut = ddp::draw_augmentation(how, 7, sample);
        ++downs[cut.down];
        ++rights[cut.right];
        flips += cut.flip ? 1 : 0;
        again += cut == ddp::draw_augmentation(how, 8, sample) ? 1 : 0;
    }
    for (auto const& counts : {downs, rights}) {
        CHECK((counts.size() == 5 && counts.rbegin()->first == 4));
        for (auto const& [place, count] : counts) CHECK((count > 1800 && count < 2200));
    }
    CHECK((flips > 4750 && flips < 5250));
    CHECK((again > 100 && again < 300));  // 1 in 50
    CHECK(ddp::draw_augmentation({}, 7, 1) == ddp::augmentation_draw{});
}

TEST_CASE("what the thread throws arrives at the caller, in its place, until the loader goes elsewhere",
          "[data][prefetch]") {
    ddp::classification_data const data = pictures(6, 1);
    std::vector<std::uint32_t> const list{0, 1, 2, 3, 9, 4};
    prefetch_loader<float> load{
        data, sampler{{.samples = 6, .global_batch = 2, .shuffle = false}, list, 0, 1}, {.depth = 4}};
    for (int round = 0; round < 2; ++round) {
        REQUIRE(load.next()->samples[1] == 1);
        REQUIRE(load.next()->samples[1] == 3);
        for (int times = 0; times < 2; ++times) {
            test::caught const e = test::catch_error([&] { (void)load.next(); });
            CHECK(e.code == ddp::errc::usage);
            CHECK(e.says("prefetch_loader: there is no sample 9; the data set holds 6, give the sampler that number"));
        }
        load.seek(0, 0);
    }

    sampler const all{{.samples = 6, .global_batch = 2}, 0, 1};
    auto const refused = [&](ddp::classification_data const& of, ddp::prefetch_options options, char const* words) {
        test::caught const e = test::catch_error([&] { prefetch_loader<float> wrong(of, all, std::move(options)); });
        CAPTURE(e.text);
        CHECK(e.says(words));
    };
    ddp::classification_data flat = pictures(6, 1);
    flat.sample_shape = {20};
    refused(flat, {.augment = {.flip = true}}, "only samples of height x width or channels x height x width");
    flat.sample_shape = {5, 5};
    refused(flat, {}, "sample_shape has 25 bytes and features is 20; make them one number above 0");
    refused(data, {.depth = 0}, "prefetch_loader: depth counts batches that are prepared ahead");
    refused(data, {.normalise = {{}, {}}}, "there are 2 normalisations for 1 channels");
    refused(data, {.normalise = {{.mean = 0, .deviation = 0}}},
            "prefetch_loader: mean must be finite, and deviation finite and above 0");
    refused(data, {.augment = {.crop_padding = 5000}},
            "prefetch_loader: crop_padding is a number of pixels, at most 4,096");
}

TEST_CASE("a loader whose thread does not start says so, and goes on once there is room for one", "[data][prefetch]") {
    ddp::classification_data const data = pictures(6, 1);
    sampler const batches{{.samples = 6, .global_batch = 2, .shuffle = false}, 0, 1};
    std::optional<prefetch_loader<float>> load;
    auto const refused = [](auto const& f) {
        test::caught const e = test::catch_error(f);
        CAPTURE(e.text);
        CHECK(e.code == ddp::errc::environment);
        CHECK(e.says("the thread of prefetch_loader did not start: "));
        CHECK(e.says("Raise the limit on threads (ulimit -u)"));
    };
    {
        ddp::test::no_room_for_stacks const from_the_start;
        refused([&] { load.emplace(data, batches); });
    }
    load.emplace(data, batches);
    REQUIRE(load->next()->samples[0] == 0);
    {
        ddp::test::no_room_for_stacks const later;
        refused([&] { load->seek(0, 2); });
    }
    for (int times = 0; times < 2; ++times) refused([&] { (void)load->next(); });  // does not wait for a thread
    load->seek(0, 2);
    REQUIRE(load->next()->samples[0] == 4);
}

TEST_CASE("a loader may be destroyed at any moment", "[data][prefetch]") {
    ddp::classification_data const data = pictures(200, 3);
    for (int round = 0; round < 60; ++round) {
        sampler const batches{{.samples = 200, .global_batch = 50}, 0, 1};
        prefetch_loader<float> load{
            data, batches, {.depth = 1u + static_cast<unsigned>(round % 3), .augment = {.flip = true}}};
        for (int taken = 0; taken < round % 7; ++taken) (void)load.next();
        if (round % 5 == 4) std::this_thread::yield();
    }
}
