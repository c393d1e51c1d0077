/// \file
/// What data/source.hpp declares.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <system_error>
#include <utility>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/source.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL detail::open_file::~open_file() {
    if (number >= 0) ::close(number);
}

[[gnu::cold]] DDP_DECL detail::open_file detail::open_regular_file(std::string const& name) {
    open_file file;
    file.number = ::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe without a writer would block
    struct stat about{};
    if (file.number < 0 || ::fstat(file.number, &about) != 0)
        throw data_error(errc::file, concat({name, ": cannot be opened: ", std::generic_category().message(errno)}));
    char const* const kind = S_ISDIR(about.st_mode)    ? "a directory"
                             : S_ISFIFO(about.st_mode) ? "a pipe"
                             : S_ISREG(about.st_mode)  ? nullptr
                                                       : "a device";
    if (kind != nullptr)
        throw data_error(errc::file, concat({name, ": is not a regular file but ", kind,
                                             "; give a file, or copy what it delivers to one"}));
    file.bytes = static_cast<std::uint64_t>(about.st_size);
    return file;
}

[[gnu::cold]] DDP_DECL file_source::file_source(std::string path) : name_(std::move(path)) {
    detail::open_file opened = detail::open_regular_file(name_);
    bytes_ = opened.bytes;
    file_.reset(::fdopen(opened.number, "rb"));
    if (!file_)
        throw data_error(errc::file,
                         detail::concat({name_, ": cannot be opened: ", std::generic_category().message(errno)}));
    opened.number = -1;
}

[[gnu::cold]] DDP_DECL void file_source::expect_more(std::uint64_t bytes) const {
    std::uint64_t const left = bytes_ - std::min(bytes_, read_);
    if (left < bytes)
        throw data_error(errc::format, detail::concat({name_, ": is truncated: its header promises ", bytes,
                                                       " bytes, but only ", left, " follow; fetch it again"}));
}

[[gnu::cold]] DDP_DECL std::size_t file_source::read(mutable_bytes out) {
    if (out.empty()) return 0;
    std::size_t const got = std::fread(out.data(), 1, out.size(), file_.get());
    if (got < out.size() && std::ferror(file_.get()) != 0)
        throw data_error(errc::file,
                         detail::concat({name_, ": cannot be read: ", std::generic_category().message(errno)}));
    read_ += got;
    return got;
}

}  // namespace ddp
