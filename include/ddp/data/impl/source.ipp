/// \file
/// What data/source.hpp declares.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <string>
#include <system_error>
#include <utility>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/source.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL file_source::file_source(std::string path)
    : name_(std::move(path)), file_(std::fopen(name_.c_str(), "rb")) {
    if (!file_)
        throw data_error(errc::file,
                         detail::concat({name_, ": cannot be opened: ", std::generic_category().message(errno)}));
}

[[gnu::cold]] DDP_DECL std::size_t file_source::read(mutable_bytes out) {
    if (out.empty()) return 0;
    std::size_t const got = std::fread(out.data(), 1, out.size(), file_.get());
    if (got < out.size() && std::ferror(file_.get()) != 0)
        throw data_error(errc::file,
                         detail::concat({name_, ": cannot be read: ", std::generic_category().message(errno)}));
    return got;
}

}  // namespace ddp
