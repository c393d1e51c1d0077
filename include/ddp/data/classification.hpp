/// \file
/// classification_data: labelled images in memory, and how to load them from a directory of IDX files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/separate.hpp>
#include <ddp/data/idx.hpp>
#include <ddp/data/source.hpp>

namespace ddp {

/// Samples with labels, in memory. Features are kept as bytes (a quarter of the memory of floats); batch_loader converts
/// those of a batch to numbers.
struct classification_data {
    std::vector<std::size_t> sample_shape;  ///< shape of one sample, such as {28, 28}
    std::size_t features = 0;               ///< numbers in each sample: the product of sample_shape
    std::size_t classes = 0;                ///< every label is less than this
    std::vector<std::uint8_t> inputs;       ///< (size, features), row-major
    std::vector<std::uint32_t> labels;      ///< (size)

    [[nodiscard]] std::size_t size() const noexcept { return labels.size(); }
};

/// Which part of a published data set to load. In MNIST's directories, the names of the test files begin with
/// "t10k".
enum class data_split { train, test };

/// Limits of load_idx_classification, independent of what the files contain.
struct idx_limits {
    std::size_t max_bytes = std::size_t{1} << 30;  ///< largest size of a file after decompression, in bytes
    std::size_t classes = 10;                      ///< every label must be less; 0: one more than the largest label
};

namespace detail {

/// The path of the file in `directory` with one of `names` and the first of `suffixes` with which one exists.
[[nodiscard]] std::string find_data_file(std::string const& directory, std::span<std::string const> names,
                                         std::span<std::string_view const> suffixes);
/// The two names that the file of a split may have, for `kind` with a dot ("images.idx3-ubyte"): some copies have a
/// dash instead of the dot, others have kept the dot, as the first archive tools unpacked them.
[[nodiscard]] std::array<std::string, 2> idx_names(data_split which, std::string_view kind);

template <FileSource Source>
[[nodiscard]] idx_array read_idx_file(std::string const& path, std::size_t max_bytes) {
    Source source(path);
    return ddp::read_idx(source, max_bytes);
}

}  // namespace detail

/// Combines the contents of an image file and a label file. The two names appear in error messages only.
///
/// images   unsigned bytes with two dimensions or more, of which the first counts samples.
/// labels   unsigned bytes with one dimension.
/// classes  every label must be less than this; 0: one more than the largest label.
/// Throws   data_error (errc::format) for other types or dimensions, no images, different numbers of images and labels,
///          or a label out of range (with its position).
[[nodiscard]] classification_data make_classification_data(idx_array images, std::string const& images_name,
                                                           idx_array const& labels, std::string const& labels_name,
                                                           std::size_t classes = 10);

/// Loads MNIST, Fashion-MNIST or another data set with the same file names from a directory:
///
///     auto const data = ddp::load_idx_classification<ddp::gzip_source>(directory, ddp::data_split::train);
///
/// Files   train-images-idx3-ubyte and train-labels-idx1-ubyte, or t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte; a
///         dot instead of the hyphen before "idx" is accepted. A sample of 28 x 28 bytes gives 784 features.
/// Source  how files are opened: file_source (the default) finds them under these names; gzip_source (data/gzip.hpp) also
///         with the suffix ".gz", and decompresses what is gzipped.
/// Throws  data_error: errc::file if the directory or a file is missing (with the names that were tried) or cannot be
///         read; errc::format if a file is not of the right form, see read_idx and make_classification_data.
template <FileSource Source = file_source>
[[nodiscard]] classification_data load_idx_classification(std::string const& directory, data_split which,
                                                          idx_limits limits = {}) {
    std::string const images =
        detail::find_data_file(directory, detail::idx_names(which, "images.idx3-ubyte"), Source::suffixes);
    std::string const labels =
        detail::find_data_file(directory, detail::idx_names(which, "labels.idx1-ubyte"), Source::suffixes);
    return make_classification_data(detail::read_idx_file<Source>(images, limits.max_bytes), images,
                                    detail::read_idx_file<Source>(labels, limits.max_bytes), labels, limits.classes);
}

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/classification.ipp>
#endif
