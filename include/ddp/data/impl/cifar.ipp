/// \file
/// What data/cifar.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/cifar.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL std::string find_cifar_file(std::string const& directory, std::string const& name,
                                                   std::span<std::string_view const> suffixes) {
    return find_data_file(directory, std::span(&name, 1), suffixes);
}

[[gnu::cold]] DDP_DECL void append_cifar10(classification_data& to, function_ref<std::size_t(mutable_bytes)> read,
                                           std::string const& name, std::size_t max_bytes) {
    constexpr std::size_t image = std::size_t{3} * 32 * 32, record = 1 + image;
    std::vector<std::size_t> const shape{3, 32, 32};
    DDP_EXPECTS(
        to.size() == 0 || to.sample_shape == shape,
        "append_cifar10: the data set holds samples of another shape than 3 x 32 x 32; begin with an empty one");
    std::vector<std::uint8_t> records(256 * record), inputs;
    std::vector<std::uint32_t> labels;
    std::size_t bytes = 0;
    for (bool ended = false; !ended;) {
        std::size_t const got = read(as_mutable_bytes(std::span(records)));
        ended = got < records.size();
        bytes += got;
        if (bytes > max_bytes)
            throw data_error(errc::format, concat({name, ": is longer than the limit of ", max_bytes,
                                                   " bytes; raise the limit if that is what it holds"}));
        if (got % record != 0)
            throw data_error(errc::format, concat({name, ": is truncated, or no CIFAR-10 file: record ", bytes / record,
                                                   " has ", got % record, " bytes, expected ", record}));
        for (std::size_t at = 0; at < got; at += record) {
            if (records[at] > 9)
                throw data_error(errc::format, concat({name, ": the label of record ", labels.size(), " is ",
                                                       records[at], ", expected 0 to 9"}));
            labels.push_back(records[at]);
            auto const from = records.begin() + static_cast<std::ptrdiff_t>(at + 1);
            inputs.insert(inputs.end(), from, from + static_cast<std::ptrdiff_t>(image));
        }
    }
    if (bytes == 0)
        throw data_error(errc::format, concat({name, ": is empty, expected records of ", record, " bytes"}));
    to.inputs.insert(to.inputs.end(), inputs.begin(), inputs.end());
    to.labels.insert(to.labels.end(), labels.begin(), labels.end());
    to.sample_shape = shape;
    to.features = image;
    to.classes = 10;
}

}  // namespace ddp::detail
