/// \file
/// printed_by: what a function prints on stderr.
#pragma once

#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <string>

namespace ddp::test {

/// What `f`, which does not throw, prints on stderr; of that, 4,096 bytes.
template <class F>
std::string printed_by(F&& f) {
    int const memory = ::memfd_create("stderr", MFD_CLOEXEC), kept = ::dup(STDERR_FILENO);
    ::dup2(memory, STDERR_FILENO);
    f();
    ::dup2(kept, STDERR_FILENO);
    ::close(kept);
    char text[4096];
    ::ssize_t const n = ::pread(memory, text, sizeof text, 0);
    ::close(memory);
    return {text, static_cast<std::size_t>(n > 0 ? n : 0)};
}

}  // namespace ddp::test
