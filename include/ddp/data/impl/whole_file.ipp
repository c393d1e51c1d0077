/// \file
/// What data/whole_file.hpp declares.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <ulimit.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <string>
#include <system_error>
#include <utility>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/whole_file.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL whole_file::whole_file(std::string path) : path_(std::move(path)) {
    struct stat there{};
    if (::stat(path_.c_str(), &there) == 0 && !S_ISREG(there.st_mode))  // or rename would replace a device
        throw data_error(errc::file, path_ + ": cannot be written: it exists and is not a regular file");
    static std::atomic<unsigned> count{0};
    do {  // a process that was killed may have left one of the same number behind
        temporary_ = detail::concat({path_, ".", ::getpid(), ".", count++, ".tmp"});
        descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (descriptor_ < 0 && errno == EEXIST);
    if (descriptor_ < 0) fail("cannot be created", errno);
}

[[gnu::cold]] DDP_DECL whole_file::~whole_file() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!committed_) ::unlink(temporary_.c_str());
}

DDP_DECL void whole_file::write(const_bytes bytes) {
    written_ += bytes.size();
    // A write beyond `ulimit -f` would end the process.
    if (long const blocks = ::ulimit(UL_GETFSIZE);
        blocks >= 0 && (written_ + 511) / 512 > static_cast<unsigned long>(blocks))
        fail("cannot be written", EFBIG);
    while (!bytes.empty()) {
        ssize_t const count = ::write(descriptor_, bytes.data(), std::min(bytes.size(), std::size_t{1} << 30));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) fail("cannot be written", errno);
        bytes = bytes.subspan(static_cast<std::size_t>(count));
    }
}

[[gnu::cold]] DDP_DECL void whole_file::commit() {
    if (::fsync(descriptor_) != 0) fail("cannot be flushed", errno);
    if (::close(std::exchange(descriptor_, -1)) != 0) fail("cannot be closed", errno);
    if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be put in place", errno);
    committed_ = true;
    std::size_t const slash = path_.rfind('/');
    std::string const parent = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    int const directory = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int const flushed = directory < 0 ? -1 : ::fsync(directory), reason = errno;
    if (directory >= 0) ::close(directory);
    // Some file systems cannot flush a directory, and some directories may be written but not read.
    if (flushed != 0 && reason != EINVAL && reason != EACCES)
        fail("is in place, but its directory cannot be flushed", reason);
}

[[gnu::cold]] DDP_DECL void whole_file::fail(char const* what, int reason) const {
    throw data_error(errc::file, detail::concat({path_, ": ", what, ": ", std::generic_category().message(reason)}));
}

}  // namespace ddp
