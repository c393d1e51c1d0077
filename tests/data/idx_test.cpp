#include <ddp/data/idx.hpp>

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/files.hpp"
#include "support/catch.hpp"

using test::bytes;
using test::memory_source;

namespace {

constexpr std::size_t limit = std::size_t{1} << 20;

test::caught error_of(bytes const& content, std::size_t max_bytes = limit) {
    return test::catch_error([&] {
        memory_source source{content, "some/file"};
        (void)ddp::read_idx(source, max_bytes);
    });
}

void check_refused(bytes const& content, std::string_view words, std::size_t max_bytes = limit) {
    test::caught const e = error_of(content, max_bytes);
    CAPTURE(e.text, words);
    CHECK(e.code == ddp::errc::format);
    CHECK(e.says("some/file: "));
    CHECK(e.says(words));
}

}  // namespace

TEST_CASE("an IDX file is read as its header says", "[data][idx]") {
    bytes const data = test::ramp(2 * 3 * 4);
    memory_source source{test::joined(test::idx_header({2, 3, 4}), data)};
    ddp::idx_array const array = ddp::read_idx(source, limit);
    CHECK(array.type == ddp::idx_type::unsigned_byte);
    CHECK(array.shape == std::vector<std::size_t>{2, 3, 4});
    CHECK(array.data == data);
}

TEST_CASE("every IDX type has its element size", "[data][idx]") {
    struct row {
        std::uint8_t code;
        std::size_t size;
    };
    for (row const r : {row{0x08, 1}, row{0x09, 1}, row{0x0b, 2}, row{0x0c, 4}, row{0x0d, 4}, row{0x0e, 8}}) {
        CAPTURE(static_cast<int>(r.code));
        bytes const file = test::joined(test::idx_header({3}, r.code), test::ramp(3 * r.size));
        memory_source source{file};
        ddp::idx_array const array = ddp::read_idx(source, limit);
        CHECK(static_cast<std::uint8_t>(array.type) == r.code);
        CHECK(array.data.size() == 3 * r.size);
        bytes shorter = file;
        shorter.pop_back();
        check_refused(shorter, "promises " + std::to_string(3 * r.size));
    }
}

TEST_CASE("an IDX file that ends anywhere too early is refused", "[data][idx]") {
    bytes const whole = test::joined(test::idx_header({3, 5}), test::ramp(15));
    for (std::size_t length = 0; length < whole.size(); ++length) {
        CAPTURE(length);
        bytes const part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
        check_refused(part, length < 4
                                ? "is not an IDX file: it has " + std::to_string(length) + " bytes, a header takes"
                            : length < 12 ? "is truncated: it ends after " + std::to_string(length) +
                                                " bytes, its header of 2 dimensions takes 12"
                                          : "is truncated: it holds " + std::to_string(length - 12) + " bytes of data");
    }
    check_refused(bytes(whole.begin(), whole.end() - 4),
                  "holds 11 bytes of data, its header (3 x 5 unsigned bytes) promises 15");
}

TEST_CASE("an IDX file with more than its header promises is refused", "[data][idx]") {
    check_refused(test::joined(test::idx_header({3, 5}), test::ramp(16)),
                  "continues after the 15 bytes of data that its header (3 x 5 unsigned bytes) promises");
    check_refused(test::joined(test::idx_header({0, 5}), test::ramp(1)), "continues after the 0 bytes");
}

TEST_CASE("what is not an IDX header is refused", "[data][idx]") {
    check_refused({0x1f, 0x8b, 8, 0, 0, 0, 0, 0},
                  "is not an IDX file: it begins with 1f8b0800, expected 0000, a type and");
    check_refused({0, 1, 8, 1, 0, 0, 0, 0}, "begins with 00010801");
    check_refused({0, 0, 0x0a, 1, 0, 0, 0, 0}, "has type code 0x0a, IDX defines 0x08, 0x09, 0x0b");
    check_refused({0, 0, 8, 0}, "has no dimensions, expected at least one");
}

TEST_CASE("an IDX header that promises more than the limit is refused before any memory is taken", "[data][idx]") {
    check_refused(test::idx_header({1025, 1024}), "more than the limit of 1048576");
    check_refused(test::idx_header({1024, 1024, 2}),
                  "promises 1024 x 1024 x 2 unsigned bytes, more than the limit of 1048576 bytes; raise");
    check_refused(test::idx_header({262145}, 0x0c), "more than the limit");  // 4 bytes each
    check_refused(test::idx_header({3}), "more than the limit of 2", 2);
    check_refused(test::idx_header({1}, 0x0e), "more than the limit of 7", 7);
    // Products of 2^64 and more: they must not wrap round to something small.
    check_refused(test::idx_header({0x80000000u, 0x80000000u, 4}), "more than the limit");
    check_refused(test::idx_header({0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}), "more than the limit");
    check_refused(test::idx_header(std::vector<std::uint32_t>(255, 0x01000000u)), "more than the limit");

    bytes const exact = test::joined(test::idx_header({1024, 1024}), bytes(limit));
    CHECK(!error_of(exact).code);  // the limit itself is allowed
}

TEST_CASE("an IDX array without elements is read, however large its other dimensions", "[data][idx]") {
    for (auto const& shape : {std::vector<std::uint32_t>{0}, {0, 28, 28}, {0xffffffffu, 0xffffffffu, 0xffffffffu, 0}}) {
        memory_source source{test::idx_header(shape)};
        ddp::idx_array const array = ddp::read_idx(source, limit);
        CHECK(array.data.empty());
        CHECK(array.shape.size() == shape.size());
    }
}

TEST_CASE("a short IDX file that promises much costs little memory", "[data][idx]") {
    memory_source source{test::joined(test::idx_header({0x30000000u}), test::ramp(100))};
    CHECK_THROWS_WITH(ddp::read_idx(source, std::size_t{1} << 30),
                      Catch::Contains("is truncated: it holds 100 bytes of data, its header ("));
    CHECK(source.largest_request <= std::size_t{1} << 20);
}

TEST_CASE("an IDX array larger than the pieces it is read in is whole", "[data][idx]") {
    bytes const data = test::ramp(5'000'003);
    memory_source source{test::joined(test::idx_header({5'000'003}), data)};
    CHECK(ddp::read_idx(source, std::size_t{1} << 30).data == data);
}

TEST_CASE("a file that cannot be opened or read is named, with the system's reason", "[data][source]") {
    test::scratch_directory const dir;
    std::string const missing = (dir.path() / "missing").string();
    test::caught e = test::catch_error([&] { ddp::file_source source(missing); });
    CHECK(e.code == ddp::errc::file);
    CHECK(e.says(missing + ": cannot be opened: No such file"));

    std::string const pipe = (dir.path() / "pipe").string();
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);  // nobody writes: opened as a file is, it would wait for ever
    for (auto const& [path, kind] : {std::pair{dir.path().string(), "a directory"}, std::pair{pipe, "a pipe"},
                                     std::pair{std::string("/dev/zero"), "a device"}}) {
        e = test::catch_error([&] { ddp::file_source source(path); });
        CAPTURE(e.text);
        CHECK(e.code == ddp::errc::file);
        CHECK(e.says(path + ": is not a regular file but " + kind));
    }

    ddp::file_source memory("/proc/self/mem");  // a regular file, whose first page is nobody's
    e = test::catch_error([&] {
        std::byte one{};
        (void)memory.read({&one, 1});
    });
    CHECK(e.code == ddp::errc::file);
    CHECK(e.says("/proc/self/mem: cannot be read: Input/output error"));
}

TEST_CASE("a file shorter than its IDX header promises is refused before memory is taken for it", "[data][source]") {
    test::scratch_directory const dir;
    std::string const path = dir.write("short", test::joined(test::idx_header({0x70000000u}), test::ramp(100)));
    test::watched_source<ddp::file_source> source{ddp::file_source(path)};
    test::caught const e = test::catch_error([&] { (void)ddp::read_idx(source, std::size_t{1} << 40); });
    CHECK(e.code == ddp::errc::format);
    CHECK(e.says("is truncated: its header promises 1879048192 bytes, but only 100 follow"));
    CHECK(source.asked_for == 4 + 4);
}

TEST_CASE("a plain file is read from disk", "[data][source]") {
    test::scratch_directory const dir;
    bytes const data = test::ramp(200'000);
    ddp::file_source source(dir.write("a", test::joined(test::idx_header({1000, 200}), data)));
    CHECK(ddp::read_idx(source, limit).data == data);
}
