/// \file
/// classification_data: labelled images in memory, and how to load them from a directory of IDX files.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/data/idx.hpp>
#include <ddp/data/source.hpp>

namespace ddp {

/// Labelled samples. Features stay bytes (a quarter of the memory of floats); batch_loader turns a batch into numbers.
struct classification_data {
    std::vector<std::size_t> sample_shape;  // of one sample, such as 28 x 28
    std::size_t features = 0;               // product of sample_shape
    std::size_t classes = 0;                // every label is below
    std::vector<std::uint8_t> inputs;       // (size, features), row-major
    std::vector<std::uint32_t> labels;      // (size)

    [[nodiscard]] std::size_t size() const noexcept { return labels.size(); }
};

/// Which half of a published data set. The files of the test half begin with "t10k".
enum class data_split { train, test };

struct idx_limits {
    std::size_t max_bytes = std::size_t{1} << 30;  // of unpacked data a file
    std::size_t classes = 10;                      // labels must be below; 0: as many as the greatest label asks for
};

namespace detail {

/// The file among `names` that `Source` can read. Looks for plain files first.
template <FileSource Source>
[[nodiscard]] std::string find_data_file(std::filesystem::path const& directory,
                                         std::vector<std::string> const& names) {
    std::error_code ignored;
    if (!std::filesystem::is_directory(directory, ignored))
        throw data_error(errc::file, directory.string() + ": is no directory. Give the one that holds " +
                                         names.front() + " and its like");
    std::string tried;
    for (std::string_view const suffix : Source::suffixes)
        for (std::string const& name : names) {
            std::string const file = name + std::string(suffix);
            if (std::filesystem::exists(directory / file, ignored)) return (directory / file).string();
            tried += (tried.empty() ? "" : ", ") + file;
        }
    std::string packed;
    for (std::string const& name : names)
        if (std::filesystem::exists(directory / (name + ".gz"), ignored))
            packed += "; " + name + ".gz is: load it with gzip_source from <ddp/data/gzip.hpp>, or unpack it";
    throw data_error(errc::file, directory.string() + ": none of " + tried + " is there" +
                                     (packed.empty() ? ". Give the directory that holds the data" : packed));
}

template <FileSource Source>
[[nodiscard]] idx_array read_idx_file(std::string const& path, std::size_t max_bytes) {
    Source source(path);
    return read_idx(source, max_bytes);
}

}  // namespace detail

/// Puts together what an image file and a label file held; the names are for errors only.
///
/// images  unsigned bytes, two dimensions or more, the first one counting samples.
/// labels  unsigned bytes, one dimension.
/// Throws  data_error (errc::format): other types or dimensions, no images, counts that differ, a label out of range
///         (with its position).
[[nodiscard]] inline classification_data make_classification_data(idx_array images, std::string const& images_name,
                                                                  idx_array const& labels,
                                                                  std::string const& labels_name,
                                                                  std::size_t classes = 10) {
    auto const expect = [](idx_array const& array, std::string const& name, bool dimensions, char const* expected) {
        if (array.type != idx_type::unsigned_byte || !dimensions)
            detail::idx_error(name, "holds " + detail::shape_text(array.shape) + " " +
                                        std::string(name_of(array.type)) + ", expected " + expected);
    };
    expect(images, images_name, images.shape.size() >= 2, "images: unsigned bytes, count x height x width");
    expect(labels, labels_name, labels.shape.size() == 1, "labels: unsigned bytes, one dimension");
    if (images.data.empty())
        detail::idx_error(images_name, "holds no images (" + detail::shape_text(images.shape) + ")");
    if (images.shape[0] != labels.shape[0])
        detail::idx_error(images_name, "holds " + std::to_string(images.shape[0]) + " images, but " + labels_name +
                                           " holds " + std::to_string(labels.shape[0]) + " labels");

    auto const greatest = std::max_element(labels.data.begin(), labels.data.end());
    if (classes == 0) classes = std::size_t{*greatest} + 1;
    if (*greatest >= classes) {
        auto const at = std::find_if(labels.data.begin(), labels.data.end(), [&](auto l) { return l >= classes; });
        detail::idx_error(labels_name, "label " + std::to_string(at - labels.data.begin()) + " is " +
                                           std::to_string(*at) + ", expected 0 to " + std::to_string(classes - 1));
    }

    classification_data data;
    data.sample_shape.assign(images.shape.begin() + 1, images.shape.end());
    data.features = images.data.size() / images.shape[0];
    data.classes = classes;
    data.inputs = std::move(images.data);
    data.labels.assign(labels.data.begin(), labels.data.end());
    return data;
}

/// Loads MNIST, Fashion-MNIST and whatever else comes under their file names (train-images-idx3-ubyte, …):
///
///     auto const data = ddp::load_idx_classification<ddp::gzip_source>(directory, ddp::data_split::train);
///
/// Source  what opens the files: file_source for plain ones, gzip_source (data/gzip.hpp) for gzipped and plain ones.
/// Throws  data_error: errc::file if the directory or a file is missing (with the names that were looked for) or cannot
///         be read, errc::format if a file is not what its name says; see read_idx and make_classification_data.
template <FileSource Source = file_source>
[[nodiscard]] classification_data load_idx_classification(std::filesystem::path const& directory, data_split which,
                                                          idx_limits limits = {}) {
    std::string const prefix = which == data_split::train ? "train" : "t10k";
    // Some copies are named with a dot, as the first archive tools unpacked them.
    std::string const images =
        detail::find_data_file<Source>(directory, {prefix + "-images-idx3-ubyte", prefix + "-images.idx3-ubyte"});
    std::string const labels =
        detail::find_data_file<Source>(directory, {prefix + "-labels-idx1-ubyte", prefix + "-labels.idx1-ubyte"});
    return make_classification_data(detail::read_idx_file<Source>(images, limits.max_bytes), images,
                                    detail::read_idx_file<Source>(labels, limits.max_bytes), labels, limits.classes);
}

}  // namespace ddp
