/// \file
/// whole_file: a file that is written whole or not at all.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include <ddp/core/bytes.hpp>
#include <ddp/core/error.hpp>

namespace ddp {

/// Writes beside `path`; commit() puts the result there in one step. Whoever opens `path` meanwhile, or after a crash,
/// finds the old file or the new one. Until commit() nothing has happened, and what was written is removed at the end;
/// only a process that is killed leaves it behind, as `path.<pid>.<number>.tmp`.
///
/// Throws  data_error (errc::file) with the system's reason: directory missing, no space, no permission, or `path` is
///         there and no regular file. A symbolic link at `path` is replaced, not followed.
/// Source  the order of fsync and rename: Pillai et al., "All file systems are not created equal", OSDI 2014.
class whole_file {
public:
    explicit whole_file(std::string path) : path_(std::move(path)) {
        struct stat there{};
        if (::stat(path_.c_str(), &there) == 0 && !S_ISREG(there.st_mode))  // or rename would replace a device
            throw data_error(errc::file, path_ + ": cannot be written: it is there, and no regular file");
        static std::atomic<unsigned> count{0};
        do {  // a process that was killed may have left one of the same number behind
            temporary_ = path_ + "." + std::to_string(::getpid()) + "." + std::to_string(count++) + ".tmp";
            descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        } while (descriptor_ < 0 && errno == EEXIST);
        if (descriptor_ < 0) fail("cannot be created", errno);
    }
    whole_file(whole_file const&) = delete;
    whole_file& operator=(whole_file const&) = delete;
    ~whole_file() {
        if (descriptor_ >= 0) ::close(descriptor_);
        if (!committed_) ::unlink(temporary_.c_str());
    }

    void write(const_bytes bytes) {
        while (!bytes.empty()) {
            ssize_t const count = ::write(descriptor_, bytes.data(), std::min(bytes.size(), std::size_t{1} << 30));
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) fail("cannot be written", errno);
            bytes = bytes.subspan(static_cast<std::size_t>(count));
        }
    }

    /// To be called once. Returns when data and name are on the disk.
    void commit() {
        if (::fsync(descriptor_) != 0) fail("cannot be flushed", errno);
        if (::close(std::exchange(descriptor_, -1)) != 0) fail("cannot be closed", errno);
        if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be put in place", errno);
        committed_ = true;
        std::filesystem::path const parent = std::filesystem::path(path_).parent_path();
        int const directory = ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        int const flushed = directory < 0 ? -1 : ::fsync(directory), reason = errno;
        if (directory >= 0) ::close(directory);
        // Some file systems cannot flush a directory, and some directories may be written but not read.
        if (flushed != 0 && reason != EINVAL && reason != EACCES)
            fail("is in place, but its directory cannot be flushed", reason);
    }

private:
    [[noreturn]] void fail(char const* what, int reason) const {
        throw data_error(errc::file, path_ + ": " + what + ": " + std::generic_category().message(reason));
    }

    std::string path_, temporary_;
    int descriptor_ = -1;
    bool committed_ = false;
};

}  // namespace ddp
