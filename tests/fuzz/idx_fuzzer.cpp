// Throws arbitrary bytes at the readers of IDX files, plain and gzipped: they refuse them with a data_error, or what they
// make of them is sound. What both can read they read alike. Anything else, and whatever a sanitizer sees, ends the program.
//
// The input is taken as a plain file, as a gzipped file, and as the content of gzip streams that are made here (a fuzzer
// would never find their checksums), cut and damaged as its first bytes say.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ddp/data/classification.hpp>
#include <ddp/data/gzip.hpp>
#include <ddp/data/idx.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "input.hpp"

namespace {

using fuzz::expect;

using bytes = std::vector<std::uint8_t>;
constexpr std::size_t limit = std::size_t{1} << 16;

// Bytes in memory, a few at a time.
struct memory_source {
    std::span<std::uint8_t const> content;
    std::string called = "memory";
    std::size_t read(ddp::mutable_bytes out) {
        std::size_t const count = std::min(out.size(), content.size());
        std::copy_n(ddp::as_const_bytes(content).data(), count, out.data());
        content = content.subspan(count);
        return count;
    }
    std::string const& name() const { return called; }
};

// A file that is nowhere on a disk.
class file {
public:
    explicit file(std::span<std::uint8_t const> content) : number_(::memfd_create("idx", MFD_CLOEXEC)) {
        expect(number_ >= 0, "there is a file");
        for (std::size_t at = 0; at < content.size();) {
            ssize_t const count = ::write(number_, content.data() + at, content.size() - at);
            expect(count > 0, "the file takes what it is given");
            at += static_cast<std::size_t>(count);
        }
    }
    file(file const&) = delete;
    file& operator=(file const&) = delete;
    ~file() { ::close(number_); }
    std::string path() const { return "/proc/self/fd/" + std::to_string(number_); }

private:
    int number_;
};

template <class Source>
std::optional<ddp::idx_array> read(Source&& source, std::size_t most) {
    try {
        ddp::idx_array array = ddp::read_idx(source, most);
        std::size_t count = ddp::size_of(array.type);
        expect(count != 0, "the type is one that IDX has");
        expect(!array.shape.empty(), "there are dimensions");
        for (std::size_t const extent : array.shape) count *= extent;  // cannot overflow: the limit was kept
        if (std::find(array.shape.begin(), array.shape.end(), 0u) != array.shape.end()) count = 0;
        expect(array.data.size() == count && count <= most, "data are as large as the shape says, within the limit");
        std::byte more{};
        expect(source.read({&more, 1}) == 0, "nothing is left");
        return array;
    } catch (ddp::data_error const&) {
        return std::nullopt;
    }
}
template <class Source>
std::optional<ddp::idx_array> read_file(std::span<std::uint8_t const> content, std::size_t most) {
    file const made(content);
    try {
        return read(Source(made.path()), most);
    } catch (ddp::data_error const&) {
        return std::nullopt;
    }
}
bool same(std::optional<ddp::idx_array> const& a, std::optional<ddp::idx_array> const& b) {
    if (!a || !b) return a.has_value() == b.has_value();
    return a->type == b->type && a->shape == b->shape && a->data == b->data;
}

void gzip(std::span<std::uint8_t const> content, int level, bytes& out) {
    z_stream z{};
    expect(deflateInit2(&z, level, Z_DEFLATED, 9 + 16, 1, Z_DEFAULT_STRATEGY) == Z_OK, "zlib starts");
    std::size_t const before = out.size();
    out.resize(before + deflateBound(&z, static_cast<uLong>(content.size())));
    z.next_in = const_cast<Bytef*>(content.data());
    z.avail_in = static_cast<uInt>(content.size());
    z.next_out = out.data() + before;
    z.avail_out = static_cast<uInt>(out.size() - before);
    expect(deflate(&z, Z_FINISH) == Z_STREAM_END, "zlib packs");
    out.resize(before + z.total_out);
    deflateEnd(&z);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    std::span<std::uint8_t const> const input(data, size);
    auto const plain = read(memory_source{input}, limit);
    expect(same(plain, read_file<ddp::file_source>(input, limit)), "a file reads as its bytes in memory");
    auto const either = read_file<ddp::gzip_source>(input, limit);
    if (size < 2 || input[0] != 0x1f || input[1] != 0x8b)
        expect(same(plain, either), "a plain file reads the same through the gzip door");

    if (size < 4) return 0;
    std::span<std::uint8_t const> const content = input.subspan(4);
    auto const expected = read(memory_source{content}, limit);
    std::size_t const seam = content.size() * input[0] / 256;
    bytes packed;
    gzip(content.first(seam), input[1] % 10, packed);
    gzip(content.subspan(seam), input[1] / 10 % 10, packed);
    expect(same(expected, read_file<ddp::gzip_source>(packed, limit)), "gzipped, it reads the same");
    if (input[2] % 2 == 0)
        packed.resize(packed.size() * input[3] / 256);
    else
        packed[packed.size() * input[3] / 256] ^= input[2];
    auto const damaged = read_file<ddp::gzip_source>(packed, limit);
    if (damaged && expected)  // flags, time and system in its head mean nothing; everything else is checked
        expect(damaged->data == expected->data, "what is damaged is refused, or reads the same");

    std::size_t const half = content.size() * input[3] / 256;
    auto const images = read(memory_source{content.first(half)}, limit);
    auto const labels = read(memory_source{content.subspan(half)}, limit);
    if (images && labels) try {
            auto const set = ddp::make_classification_data(*images, "images", *labels, "labels", input[2] % 12);
            expect(set.inputs.size() == set.size() * set.features, "every sample has its features");
            for (std::uint32_t const label : set.labels) expect(label < set.classes, "every label is below classes");
        } catch (ddp::data_error const&) {
        }
    return 0;
}
