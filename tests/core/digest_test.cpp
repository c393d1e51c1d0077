#include <ddp/core/digest.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/catch.hpp"

namespace {

std::vector<std::byte> ramp(std::size_t count) {
    std::vector<std::byte> bytes(count);
    for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 37 + 11);
    return bytes;
}

std::uint64_t digest_of(std::span<std::byte const> bytes) {
    return ddp::digest{}.add(bytes).value();
}

}  // namespace

TEST_CASE("a digest sees every single bit, whatever the length", "[core][digest]") {
    // Lengths around one word, one round of four words, and several rounds with a tail.
    auto const count = GENERATE(std::size_t{1}, 7u, 8u, 9u, 31u, 32u, 33u, 40u, 63u, 64u, 65u, 203u);
    CAPTURE(count);
    std::vector<std::byte> bytes = ramp(count);
    std::uint64_t const before = digest_of(bytes);
    CHECK(digest_of(bytes) == before);

    std::vector<std::uint64_t> changed{before};
    int flipped = 0;
    for (std::size_t bit = 0; bit < 8 * count; ++bit) {
        std::byte const mask{static_cast<unsigned char>(1u << bit % 8)};
        bytes[bit / 8] ^= mask;
        changed.push_back(digest_of(bytes));
        flipped += std::popcount(changed.back() ^ before);
        bytes[bit / 8] ^= mask;
    }
    std::sort(changed.begin(), changed.end());
    CHECK(std::adjacent_find(changed.begin(), changed.end()) == changed.end());
    // A change reaches every bit of the value: half of them on average.
    double const average = flipped / (8.0 * static_cast<double>(count));
    CHECK(average > 28);
    CHECK(average < 36);
}

TEST_CASE("a digest sees order, length and trailing zeros", "[core][digest]") {
    std::vector<std::byte> const bytes = ramp(160);
    std::uint64_t const before = digest_of(bytes);
    for (std::size_t const word : {1u, 4u, 5u, 16u}) {  // within one lane (4, 16) and across lanes
        CAPTURE(word);
        std::vector<std::byte> swapped = bytes;
        std::swap_ranges(swapped.begin(), swapped.begin() + 8, swapped.begin() + 8 * static_cast<std::ptrdiff_t>(word));
        CHECK(digest_of(swapped) != before);
    }

    std::vector<std::uint64_t> zeros;
    for (std::size_t count = 0; count <= 100; ++count) zeros.push_back(digest_of(std::vector<std::byte>(count)));
    std::sort(zeros.begin(), zeros.end());
    CHECK(std::adjacent_find(zeros.begin(), zeros.end()) == zeros.end());
}

TEST_CASE("a digest sees the order and the borders of its pieces", "[core][digest]") {
    using namespace std::string_view_literals;
    auto const two = [](std::string_view a, std::string_view b) { return ddp::digest{}.add(a).add(b).value(); };
    CHECK(two("weight"sv, "bias"sv) == two("weight"sv, "bias"sv));
    CHECK(two("weight"sv, "bias"sv) != two("bias"sv, "weight"sv));
    CHECK(two("weight"sv, "bias"sv) != two("weightb"sv, "ias"sv));
    CHECK(two("weight"sv, ""sv) != ddp::digest{}.add("weight"sv).value());
    CHECK(ddp::digest{}.value() != ddp::digest{}.add(std::uint64_t{0}).value());
}

TEST_CASE("a digest compares bits, not values", "[core][digest]") {
    std::vector<float> const plus{0.0f}, minus{-0.0f};
    CHECK(ddp::digest{}.add(std::span<float const>(plus)).value() !=
          ddp::digest{}.add(std::span<float const>(minus)).value());
    CHECK(ddp::digest{}.add(std::span<float const>(plus)).value() == digest_of(std::vector<std::byte>(4)));
}

TEST_CASE("digests are what they were in earlier versions", "[core][digest]") {
    if constexpr (std::endian::native == std::endian::little) {
        CHECK(digest_of({}) == 0xb34c61e2ef7b869cu);
        CHECK(digest_of(ramp(203)) == 0x43bbb3c27ce6933au);
    }
}

TEST_CASE("a quick digest sees every bit, order and length", "[core][digest]") {
    auto const of = [](std::string_view name, std::uint64_t count, std::string_view type) {
        return ddp::quick_digest().add(name).add(count).add(type).value();
    };
    std::vector<std::uint64_t> values;
    for (std::string_view const name : {"", "sum", "allreduc", "allreduce", "minimum allreduce", "maximum allreduce"})
        for (std::uint64_t const count : {0u, 1u, 2u, 3u, 1024u})
            for (std::string_view const type : {"", "float", "double"}) values.push_back(of(name, count, type));
    for (int bit = 0; bit < 64; ++bit) values.push_back(of("allreduce", std::uint64_t{1} << bit, "bytes"));
    std::string text(17, '\0');
    for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
        text[bit / 8] = static_cast<char>(1u << bit % 8);
        values.push_back(ddp::quick_digest().add(text).value());
        text[bit / 8] = '\0';
    }
    for (std::size_t length = 0; length <= text.size(); ++length)
        values.push_back(ddp::quick_digest().add(std::string_view(text).substr(0, length)).value());
    values.push_back(ddp::quick_digest().add(1u).add(2u).value());
    values.push_back(ddp::quick_digest().add(2u).add(1u).value());
    std::sort(values.begin(), values.end());
    CHECK(std::adjacent_find(values.begin(), values.end()) == values.end());
}
