#include <ddp/data/gzip.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/random.hpp>
#include <ddp/data/idx.hpp>

#include "data/files.hpp"
#include "support/catch.hpp"

using test::bytes;

namespace {

constexpr std::size_t limit = std::size_t{1} << 24;

bytes gzipped(bytes const& content, int level = 6) {
    z_stream z{};
    if (deflateInit2(&z, level, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK)
        throw std::runtime_error("deflate");
    bytes out(deflateBound(&z, static_cast<uLong>(content.size())));
    z.next_in = const_cast<Bytef*>(content.data());
    z.avail_in = static_cast<uInt>(content.size());
    z.next_out = out.data();
    z.avail_out = static_cast<uInt>(out.size());
    int const status = deflate(&z, Z_FINISH);
    out.resize(z.total_out);
    deflateEnd(&z);
    if (status != Z_STREAM_END) throw std::runtime_error("deflate");
    return out;
}

bytes noise(std::size_t count, std::uint64_t seed = 1) {
    ddp::random_stream const stream{seed, ddp::random_use::user};
    bytes data(count);
    for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<std::uint8_t>(stream.at(i).bits());
    return data;
}

bytes idx_of(bytes const& data) {
    return test::joined(test::idx_header({static_cast<std::uint32_t>(data.size())}), data);
}

ddp::idx_array read(std::string const& path) {
    ddp::gzip_source source(path);
    return ddp::read_idx(source, limit);
}

struct counting_source {
    ddp::gzip_source source;
    std::size_t delivered = 0;
    std::size_t read(ddp::mutable_bytes out) {
        std::size_t const got = source.read(out);
        delivered += got;
        return got;
    }
    std::string const& name() const { return source.name(); }
};

}  // namespace

TEST_CASE("a gzipped file and a plain one read the same, whatever they are called", "[data][gzip]") {
    test::scratch_directory const dir;
    // Noise does not shrink: both forms are several buffers long.
    for (bytes const& data : {bytes{}, bytes{5}, test::ramp(300), noise(300'000), bytes(3'000'000, 9)}) {
        CAPTURE(data.size());
        CHECK(read(dir.write("plain.gz", idx_of(data))).data == data);
        CHECK(read(dir.write("packed", gzipped(idx_of(data)))).data == data);
        CHECK(read(dir.write("stored", gzipped(idx_of(data), 0))).data == data);
    }
}

TEST_CASE("a gzip file truncated anywhere is refused", "[data][gzip]") {
    test::scratch_directory const dir;
    bytes const whole = gzipped(idx_of(noise(500)));
    for (std::size_t length = 0; length < whole.size(); ++length) {
        CAPTURE(length);
        std::string const path =
            dir.write("cut.gz", bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)));
        test::caught const e = test::catch_error([&] { (void)read(path); });
        CAPTURE(e.text);
        CHECK(e.code == ddp::errc::format);
        CHECK(e.says(path));
        CHECK(e.says(length < 2 ? "not an IDX file"
                                : "the gzip stream breaks off before its end; the file is truncated, fetch it again"));
    }
}

TEST_CASE("a gzip file with any bit flipped is refused or reads the same", "[data][gzip]") {
    test::scratch_directory const dir;
    bytes const data = test::joined(test::ramp(100), noise(200));
    bytes file = gzipped(idx_of(data));
    int refused = 0;
    for (std::size_t at = 0; at < file.size(); ++at) {
        auto const mask = static_cast<std::uint8_t>(1u << (at * 5 + 3) % 8);
        file[at] ^= mask;
        std::string const path = dir.write("flipped.gz", file);
        file[at] ^= mask;
        bytes got;
        test::caught const e = test::catch_error([&] { got = read(path).data; });
        CAPTURE(at, e.text);
        if (e.code) {
            CHECK(e.code == ddp::errc::format);
            CHECK(e.says(path));
            ++refused;
        } else {
            CHECK(got == data);
        }
    }
    // Time stamp, operating system and the padding before a stored block mean nothing; everything else does.
    CHECK(refused >= static_cast<int>(file.size()) - 8);
}

TEST_CASE("wrong checksums and lengths in the gzip trailer are named", "[data][gzip]") {
    test::scratch_directory const dir;
    bytes const good = gzipped(idx_of(test::ramp(1000)));
    bytes crc = good, length = good;
    crc[crc.size() - 8] ^= 1;
    length[length.size() - 1] ^= 1;
    CHECK(test::catch_error([&] { (void)read(dir.write("crc.gz", crc)); }).says("CRC-32"));
    CHECK(test::catch_error([&] { (void)read(dir.write("length.gz", length)); }).says("unpacked length"));
    bytes block = good;
    block[10] |= 6;  // after the header's ten bytes: a block of the type that there is not
    CHECK(test::catch_error([&] {
              (void)read(dir.write("block.gz", block));
          }).says("block.gz: the gzip stream is damaged (zlib: invalid block type); fetch it again"));
}

TEST_CASE("what follows a gzip stream must be another one", "[data][gzip]") {
    test::scratch_directory const dir;
    bytes const data = noise(1000);
    bytes const idx = idx_of(data);
    bytes const first = gzipped(bytes(idx.begin(), idx.begin() + 400));
    bytes const second = gzipped(bytes(idx.begin() + 400, idx.end()));
    CHECK(read(dir.write("two.gz", test::joined(first, second))).data == data);
    CHECK(read(dir.write("three.gz", test::joined(test::joined(first, gzipped({})), second))).data == data);

    for (bytes const& garbage : {bytes{0}, bytes{0x1f}, bytes{0, 0, 0, 0}, test::ramp(100), bytes(100'000)}) {
        test::caught const e =
            test::catch_error([&] { (void)read(dir.write("tail.gz", test::joined(gzipped(idx), garbage))); });
        CAPTURE(e.text, garbage.size());
        CHECK(e.code == ddp::errc::format);
        CHECK(e.says("follow the end of the gzip stream"));
    }
    test::caught const e = test::catch_error(
        [&] { (void)read(dir.write("more.gz", test::joined(gzipped(idx), gzipped(test::ramp(3))))); });
    CHECK(e.says("continues after the 1000 bytes"));
}

TEST_CASE("gzip streams may meet anywhere relative to the reader's buffer", "[data][gzip]") {
    test::scratch_directory const dir;
    constexpr std::size_t buffer = std::size_t{1} << 16;
    for (std::size_t count = buffer - 60; count < buffer - 20;
         ++count) {  // stored: header, blocks and trailer take some 40
        bytes const data = noise(count);
        bytes const one = gzipped(idx_of(data), 0);
        bytes const file = test::joined(one, gzipped({}));
        CAPTURE(count, one.size());
        CHECK(read(dir.write("seam.gz", file)).data == data);
    }
}

TEST_CASE("a gzip bomb is refused after the byte that its header does not promise", "[data][gzip]") {
    test::scratch_directory const dir;
    bytes const bomb = gzipped(test::joined(test::idx_header({10}), bytes(std::size_t{64} << 20)), 9);
    REQUIRE(bomb.size() < 100'000);
    counting_source source{ddp::gzip_source(dir.write("bomb.gz", bomb))};
    test::caught const e = test::catch_error([&] { (void)ddp::read_idx(source, limit); });
    CHECK(e.says("continues after the 10 bytes"));
    CHECK(source.delivered == 4 + 4 + 10 + 1);
}

TEST_CASE("a gzip file takes no memory that is out of proportion to its size", "[data][gzip]") {
    test::scratch_directory const dir;
    // What is there and what is promised agree, and are within the caller's limit: 40 KB of file, 40 MB of zeros.
    bytes const packed = gzipped(idx_of(bytes(40'000'000)), 9);
    REQUIRE(packed.size() < 100'000);
    test::watched_source<ddp::gzip_source> source{ddp::gzip_source(dir.write("dense.gz", packed))};
    test::caught const e = test::catch_error([&] { (void)ddp::read_idx(source, std::size_t{1} << 30); });
    CHECK(e.code == ddp::errc::format);
    CHECK(e.says("promises 40000000 bytes, more than 100 times the " + std::to_string(packed.size())));
    CHECK(e.says("gunzip"));
    CHECK(source.asked_for == 4 + 4);

    // Unpacked, it is read; and a small one is read however well it packs.
    bytes const plain = idx_of(bytes(40'000'000));
    ddp::gzip_source unpacked(dir.write("dense", plain));
    CHECK(ddp::read_idx(unpacked, std::size_t{1} << 30).data.size() == 40'000'000);
    ddp::gzip_source small(dir.write("small.gz", gzipped(idx_of(bytes(16'000'000)), 9)));
    CHECK(ddp::read_idx(small, std::size_t{1} << 30).data.size() == 16'000'000);
}

TEST_CASE("a missing file is the same error through the gzip door", "[data][gzip]") {
    test::caught const e = test::catch_error([] { ddp::gzip_source source("/nowhere/at/all.gz"); });
    CHECK(e.code == ddp::errc::file);
    CHECK(e.says("/nowhere/at/all.gz: cannot be opened"));
}
