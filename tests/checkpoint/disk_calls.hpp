// The disk's calls of a test program, which a test may refuse, or die at: write() and mkdir() for all of its files.
#pragma once

#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <string>
#include <string_view>

#include "train/patience.hpp"

namespace ddp::test {

inline std::string path_of(int descriptor) {
    char path[4096];
    ssize_t const size = ::readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path, sizeof path);
    return {path, size > 0 ? static_cast<std::size_t>(size) : 0};
}

/// A call that a disk refuses, for files with this in their path.
struct disk_fault {
    std::string call, path;
    int reason = 0;
};
inline std::atomic<disk_fault const*> refusing = nullptr;

/// errno is then the reason.
inline bool refuses(std::string_view call, std::string_view path) {
    disk_fault const* const fault = refusing;
    if (fault == nullptr || call != fault->call || path.find(fault->path) == path.npos) return false;
    errno = fault->reason;
    return true;
}

inline std::string watched;               // a directory; empty: none
inline std::atomic<bool> mortal = false;  // this process is to be killed, at the last of these calls there
inline std::atomic<int> calls_left = 0;

inline bool is_watched(std::string const& path) {
    return !watched.empty() && path.starts_with(watched);
}
/// Whether a mortal process dies at this call.
inline bool is_last(std::string const& path) {
    return mortal && is_watched(path) && calls_left.fetch_sub(1) == 1;
}
[[noreturn]] inline void die() {
    ::kill(::getpid(), SIGKILL);
    for (;;) ::pause();
}

}  // namespace ddp::test

// The program's own come before the C library's. Each file that includes this has them; in a program of several, those of the one that
// defines DISK_CALLS_ARE_STRONG count, which a sanitizer's own do not replace either.
#if defined(DISK_CALLS_ARE_STRONG)
#define DISK_CALL extern "C"
#else
#define DISK_CALL extern "C" [[gnu::weak]]
#endif
DISK_CALL ssize_t write(int descriptor, void const* bytes, std::size_t count) {
    using namespace ddp::test;
#if !defined(DDP_TEST_SANITIZED)  // a sanitizer's own threads write, too
    if (mortal && is_last(path_of(descriptor))) {
        static_cast<void>(::syscall(SYS_write, descriptor, bytes, count / 2));
        die();
    }
#endif
    if (refusing.load() != nullptr && refuses("write", path_of(descriptor))) {
        if (count < 2) return -1;
        count /= 2;  // a disk takes what it has room for, and no more
    }
    return ::syscall(SYS_write, descriptor, bytes, count);
}
DISK_CALL int mkdir(char const* path, mode_t mode) noexcept {
    using namespace ddp::test;
    if (mortal && is_last(path)) die();
    if (refuses("mkdir", path)) return -1;
    return static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}
