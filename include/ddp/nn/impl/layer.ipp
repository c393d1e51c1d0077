/// \file
/// What nn/layer.hpp declares.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <span>
#include <string>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/nn/layer.hpp>

namespace ddp::nn::detail {

DDP_DECL void no_memory_for(std::string const& name, std::span<std::size_t const> shape, std::size_t element_bytes) {
    std::string extents;
    double bytes = static_cast<double>(element_bytes);
    for (std::size_t const extent : shape) {
        extents += (extents.empty() ? "" : " x ") + std::to_string(extent);
        bytes *= static_cast<double>(extent);
    }
    char size[32];
    std::snprintf(size, sizeof size, "%.3g GB", bytes / 1e9);
    throw usage_error(ddp::detail::concat({"a layer's '", name, "' of ", extents, " elements takes ", size,
                                           ", and its gradient as much again: this machine does not have the memory; "
                                           "make the layer smaller"}));
}

DDP_DECL std::size_t elements_of(std::string const& name, std::span<std::size_t const> shape,
                                 std::size_t element_bytes) {
    std::size_t most = std::numeric_limits<std::ptrdiff_t>::max() / element_bytes, count = 1;
    if (long const pages = ::sysconf(_SC_PHYS_PAGES), size = ::sysconf(_SC_PAGESIZE); pages > 0 && size > 0)
        most = std::min(most, static_cast<std::size_t>(pages) * static_cast<std::size_t>(size) / (2 * element_bytes));
    for (std::size_t const extent : shape) {
        if (extent != 0 && count > most / extent) no_memory_for(name, shape, element_bytes);
        count *= extent;
    }
    return count;
}

}  // namespace ddp::nn::detail
