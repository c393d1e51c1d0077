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

/// Labelled samples. Features stay bytes (a quarter of the memory of floats); batch_loader turns a batch into numbers.
struct classification_data {
    std::vector<std::size_t> sample_shape;  ///< of one sample, such as 28 x 28
    std::size_t features = 0;               ///< product of sample_shape
    std::size_t classes = 0;                ///< every label is below
    std::vector<std::uint8_t> inputs;       ///< (size, features), row-major
    std::vector<std::uint32_t> labels;      ///< (size)

    [[nodiscard]] std::size_t size() const noexcept { return labels.size(); }
};

/// Which half of a published data set. The files of the test half begin with "t10k".
enum class data_split { train, test };

/// What load_idx_classification accepts, whatever the files say.
struct idx_limits {
    std::size_t max_bytes = std::size_t{1} << 30;  ///< of unpacked data a file
    std::size_t classes = 10;                      ///< labels must be below; 0: as many as the greatest label asks for
};

namespace detail {

/// The file in `directory` that is called as one of `names`, with the first of `suffixes` under which one is there.
[[nodiscard]] std::string find_data_file(std::string const& directory, std::span<std::string const> names,
                                         std::span<std::string_view const> suffixes);
/// The two names of a file that begin with `prefix`: some copies have a dot, as the first archive tools unpacked them.
[[nodiscard]] std::array<std::string, 2> idx_names(data_split which, std::string_view kind);

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
[[nodiscard]] classification_data make_classification_data(idx_array images, std::string const& images_name,
                                                           idx_array const& labels, std::string const& labels_name,
                                                           std::size_t classes = 10);

/// Loads MNIST, Fashion-MNIST and whatever else comes under their file names (train-images-idx3-ubyte, …):
///
///     auto const data = ddp::load_idx_classification<ddp::gzip_source>(directory, ddp::data_split::train);
///
/// Files   train-images-idx3-ubyte and train-labels-idx1-ubyte, or t10k-…, or with a dot before idx; 28 x 28 bytes a
///         sample become 784 features of a batch.
/// Source  what opens the files: file_source for plain ones, gzip_source (data/gzip.hpp) for gzipped and plain ones.
/// Throws  data_error: errc::file if the directory or a file is missing (with the names that were looked for) or cannot
///         be read, errc::format if a file is not what its name says; see read_idx and make_classification_data.
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
