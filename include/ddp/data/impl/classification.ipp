/// \file
/// What data/classification.hpp declares.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/classification.hpp>
#include <ddp/data/idx.hpp>

namespace ddp {

namespace detail {

[[gnu::cold]] DDP_DECL std::string find_data_file(std::string const& directory, std::span<std::string const> names,
                                                  std::span<std::string_view const> suffixes) {
    struct ::stat about{};
    auto const there = [&](std::string const& path) { return ::stat(path.c_str(), &about) == 0; };
    if (!there(directory) || !S_ISDIR(about.st_mode))
        throw data_error(errc::file, concat({directory, ": is not a directory. Give the one that holds ", names.front(),
                                             " and the other files"}));
    std::string tried, packed;
    for (std::string_view const suffix : suffixes)
        for (std::string const& name : names) {
            std::string path = concat({directory, directory.ends_with('/') ? "" : "/", name, suffix});
            if (there(path)) return path;
            tried += concat({tried.empty() ? "" : ", ", name, suffix});
        }
    for (std::string const& name : names)
        if (there(concat({directory, "/", name, ".gz"})))
            packed += concat({"; ", name, ".gz is: load it with gzip_source from <ddp/data/gzip.hpp>, or unpack it"});
    throw data_error(errc::file, concat({directory, ": none of ", tried, " is there",
                                         packed.empty() ? ". Give the directory that holds the data" : packed}));
}

[[gnu::cold]] DDP_DECL std::array<std::string, 2> idx_names(data_split which, std::string_view kind) {
    std::string const dotted = concat({which == data_split::train ? "train-" : "t10k-", kind});
    std::string plain = dotted;
    plain[plain.find('.')] = '-';
    return {plain, dotted};
}

}  // namespace detail

[[gnu::cold]] DDP_DECL classification_data make_classification_data(idx_array images, std::string const& images_name,
                                                                    idx_array const& labels,
                                                                    std::string const& labels_name,
                                                                    std::size_t classes) {
    auto const expect = [](idx_array const& array, std::string const& name, bool dimensions, char const* expected) {
        if (array.type != idx_type::unsigned_byte || !dimensions)
            detail::idx_error(name, detail::concat({"holds ", detail::shape_text(array.shape), " ", name_of(array.type),
                                                    ", expected ", expected}));
    };
    expect(images, images_name, images.shape.size() >= 2, "images: unsigned bytes, count x height x width");
    expect(labels, labels_name, labels.shape.size() == 1, "labels: unsigned bytes, one dimension");
    if (images.data.empty())
        detail::idx_error(images_name, detail::concat({"holds no images (", detail::shape_text(images.shape), ")"}));
    if (images.shape[0] != labels.shape[0])
        detail::idx_error(images_name, detail::concat({"holds ", images.shape[0], " images, but ", labels_name,
                                                       " holds ", labels.shape[0], " labels"}));

    auto const greatest = std::max_element(labels.data.begin(), labels.data.end());
    if (classes == 0) classes = std::size_t{*greatest} + 1;
    if (*greatest >= classes) {
        auto const at = std::find_if(labels.data.begin(), labels.data.end(), [&](auto l) { return l >= classes; });
        detail::idx_error(labels_name, detail::concat({"label ", at - labels.data.begin(), " is ", *at,
                                                       ", expected 0 to ", classes - 1}));
    }

    classification_data data;
    data.sample_shape.assign(images.shape.begin() + 1, images.shape.end());
    data.features = images.data.size() / images.shape[0];
    data.classes = classes;
    data.inputs = std::move(images.data);
    data.labels.assign(labels.data.begin(), labels.data.end());
    return data;
}

}  // namespace ddp
