#include <ddp/data/classification.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/data/gzip.hpp>

#include "data/files.hpp"
#include "support/catch.hpp"

using ddp::data_split;
using test::bytes;

namespace {

bytes images(std::uint32_t count) {
    return test::joined(test::idx_header({count, 2, 3}), test::ramp(6 * count));
}
bytes labels(bytes const& values) {
    return test::joined(test::idx_header({static_cast<std::uint32_t>(values.size())}), values);
}

/// A directory with four images in its training half.
struct small_set : test::scratch_directory {
    small_set() {
        write("train-images-idx3-ubyte", images(4));
        write("train-labels-idx1-ubyte", labels({3, 0, 9, 1}));
    }
    template <class Source = ddp::file_source>
    test::caught error(ddp::idx_limits limits = {}, data_split which = data_split::train) const {
        return test::catch_error([&] { (void)ddp::load_idx_classification<Source>(path(), which, limits); });
    }
};

/// A FileSource of the user's own, in no namespace of the library's.
class own_source {
public:
    static constexpr std::array<std::string_view, 1> suffixes = {""};
    explicit own_source(std::string const& path) : file_(path) {}
    std::size_t read(std::span<std::byte> out) { return file_.read(out); }
    [[nodiscard]] std::string const& name() const { return file_.name(); }

private:
    ddp::file_source file_;
};
static_assert(ddp::FileSource<own_source>);

}  // namespace

TEST_CASE("images and labels are loaded from a directory", "[data][classification]") {
    small_set const dir;
    CHECK(ddp::load_idx_classification<own_source>(dir.path(), data_split::train).inputs == test::ramp(24));
    ddp::classification_data const data = ddp::load_idx_classification(dir.path(), data_split::train);
    CHECK(data.size() == 4);
    CHECK(data.features == 6);
    CHECK(data.sample_shape == std::vector<std::size_t>{2, 3});
    CHECK(data.classes == 10);
    CHECK(data.inputs == test::ramp(24));
    CHECK(data.labels == std::vector<std::uint32_t>{3, 0, 9, 1});
}

TEST_CASE("the test half has files of its own, and names with a dot are found", "[data][classification]") {
    test::scratch_directory const dir;
    dir.write("t10k-images.idx3-ubyte", images(2));
    dir.write("t10k-labels.idx1-ubyte", labels({1, 2}));
    CHECK(ddp::load_idx_classification(dir.path(), data_split::test).size() == 2);
    CHECK(ddp::load_idx_classification<ddp::gzip_source>(dir.path(), data_split::test).size() == 2);
}

TEST_CASE("a missing directory or file says what was looked for", "[data][classification]") {
    small_set const dir;
    test::caught e = dir.error({}, data_split::test);
    CAPTURE(e.text);
    CHECK(e.code == ddp::errc::file);
    CHECK(e.says(dir.path().string()));
    CHECK(e.says("none of t10k-images-idx3-ubyte, t10k-images.idx3-ubyte is there"));

    e = dir.error<ddp::gzip_source>({}, data_split::test);
    CHECK(
        e.says("t10k-images-idx3-ubyte, t10k-images.idx3-ubyte, t10k-images-idx3-ubyte.gz, t10k-images.idx3-ubyte.gz"));

    std::filesystem::remove(dir.path() / "train-labels-idx1-ubyte");
    CHECK(dir.error().says("none of train-labels-idx1-ubyte"));

    dir.write("train-labels-idx1-ubyte.gz", bytes{0x1f, 0x8b});
    CHECK(dir.error().says("train-labels-idx1-ubyte.gz is: load it with gzip_source"));

    e = test::catch_error([] { (void)ddp::load_idx_classification("/nowhere/at/all", data_split::train); });
    CHECK(e.code == ddp::errc::file);
    CHECK(e.says("/nowhere/at/all: is not a directory"));
}

TEST_CASE("a label out of range names file and position", "[data][classification]") {
    small_set const dir;
    test::caught const e = dir.error({.classes = 9});
    CAPTURE(e.text);
    CHECK(e.code == ddp::errc::format);
    CHECK(e.says((dir.path() / "train-labels-idx1-ubyte").string() + ": label 2 is 9, expected 0 to 8"));

    dir.write("train-labels-idx1-ubyte", labels({3, 0, 255, 254}));
    CHECK(dir.error().says("label 2 is 255, expected 0 to 9"));
    CHECK(!dir.error({.classes = 256}).code);
    CHECK(ddp::load_idx_classification(dir.path(), data_split::train, {.classes = 0}).classes == 256);
}

TEST_CASE("images and labels that do not belong together are refused", "[data][classification]") {
    small_set const dir;
    dir.write("train-labels-idx1-ubyte", labels({1, 2, 3}));
    test::caught e = dir.error();
    CAPTURE(e.text);
    CHECK(e.code == ddp::errc::format);
    CHECK(e.says("holds 4 images, but "));
    CHECK(e.says("train-labels-idx1-ubyte holds 3 labels"));

    dir.write("train-labels-idx1-ubyte", images(4));  // mislabelled: images under the name of labels
    e = dir.error();
    CHECK(e.says("train-labels-idx1-ubyte: holds 4 x 2 x 3 unsigned bytes, expected labels"));

    dir.write("train-labels-idx1-ubyte", labels({1, 2, 3, 4}));
    dir.write("train-images-idx3-ubyte", labels({1, 2, 3, 4}));
    CHECK(dir.error().says("train-images-idx3-ubyte: holds 4 unsigned bytes, expected images"));

    dir.write("train-images-idx3-ubyte", test::joined(test::idx_header({4, 1, 1}, 0x0d), bytes(16)));
    CHECK(dir.error().says("holds 4 x 1 x 1 32-bit floats, expected images: unsigned bytes"));
}

TEST_CASE("a data set without images or pixels is refused", "[data][classification]") {
    small_set const dir;
    dir.write("train-images-idx3-ubyte", test::idx_header({0, 2, 3}));
    dir.write("train-labels-idx1-ubyte", labels({}));
    CHECK(dir.error().says("holds no images (0 x 2 x 3)"));

    dir.write("train-images-idx3-ubyte", test::idx_header({4, 0, 3}));
    dir.write("train-labels-idx1-ubyte", labels({1, 2, 3, 4}));
    CHECK(dir.error().says("holds no images (4 x 0 x 3)"));
}

TEST_CASE("damage inside a data set's files reaches the caller by the file's name", "[data][classification]") {
    small_set const dir;
    bytes cut = images(4);
    cut.pop_back();
    dir.write("train-images-idx3-ubyte", cut);
    CHECK(dir.error().says("train-images-idx3-ubyte: is truncated"));
    CHECK(small_set().error({.max_bytes = 23}).says("more than the limit of 23"));
}

TEST_CASE("Fashion-MNIST is loaded as it is published", "[data][classification]") {
    std::filesystem::path const directory = "/usr/share/datasets/fashion-mnist";
    if (!std::filesystem::exists(directory)) {
        WARN("not tried: " << directory << " is not there (Debian package dataset-fashion-mnist)");
        return;
    }
    for (data_split const which : {data_split::train, data_split::test}) {
        auto const data = ddp::load_idx_classification<ddp::gzip_source>(directory, which);
        std::size_t const each = which == data_split::train ? 6000 : 1000;
        CHECK(data.size() == 10 * each);
        CHECK(data.sample_shape == std::vector<std::size_t>{28, 28});
        std::array<std::size_t, 10> count{};
        for (std::uint32_t const label : data.labels) ++count.at(label);
        for (std::size_t const c : count) CHECK(c == each);  // the set is balanced
    }
}
