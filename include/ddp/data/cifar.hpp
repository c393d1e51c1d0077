/// \file
/// CIFAR-10 in its binary version: records of a label and three planes of 32 x 32 bytes, and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <ddp/core/bytes.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/data/classification.hpp>
#include <ddp/data/source.hpp>

namespace ddp {

namespace detail {

void append_cifar10(classification_data& to, function_ref<std::size_t(mutable_bytes)> read, std::string const& name,
                    std::size_t max_bytes);
/// The path of the file with this name and the first of `suffixes` with which it exists.
[[nodiscard]] std::string find_cifar_file(std::string const& directory, std::string const& name,
                                          std::span<std::string_view const> suffixes);

}  // namespace detail

/// Appends the records of one file such as data_batch_1.bin, each of 1 byte for the label and 3,072 bytes for an image:
/// the red, green and blue planes, row by row. A sample is 3 x 32 x 32, as nn::conv2d expects it. Any file of this form
/// can be read, not only those of CIFAR-10.
///
/// max_bytes  the largest size to accept, in bytes. Memory grows with what has been read.
/// Throws     data_error (errc::format) if there is no record, the last one is incomplete, a label is above 9 (with the
///            number of the record, from 0), or the file is larger than max_bytes; and what the source throws. `to` is
///            then unchanged. usage_error if `to` holds samples of another shape.
/// Source     Krizhevsky, "Learning multiple layers of features from tiny images", 2009; the description of the binary
///            version on the web page of the data set.
template <ByteSource S>
void append_cifar10(classification_data& to, S& source, std::size_t max_bytes = std::size_t{1} << 30) {
    detail::append_cifar10(to, [&](mutable_bytes out) { return source.read(out); }, source.name(), max_bytes);
}

/// Loads CIFAR-10 from a directory: data_batch_1.bin to data_batch_5.bin (train: 50,000 images in the published files),
/// or test_batch.bin. gzip_source also finds them with the suffix ".gz" and decompresses them.
///
/// max_bytes  the largest size of each file to accept, in bytes after decompression.
/// Throws     data_error: errc::file if the directory or a file is missing or cannot be read; errc::format as in
///            append_cifar10.
template <FileSource Source = file_source>
[[nodiscard]] classification_data load_cifar10(std::string const& directory, data_split which,
                                               std::size_t max_bytes = std::size_t{1} << 30) {
    classification_data all;
    for (int part = 1; part <= (which == data_split::train ? 5 : 1); ++part) {
        std::string const name =
            which == data_split::train ? "data_batch_" + std::to_string(part) + ".bin" : "test_batch.bin";
        Source source(detail::find_cifar_file(directory, name, Source::suffixes));
        append_cifar10(all, source, max_bytes);
    }
    return all;
}

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/cifar.ipp>
#endif
