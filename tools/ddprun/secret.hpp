/// \file
/// The job's secret: 32 random bytes in memory that ranks inherit and nobody can change.
#pragma once

#include <array>
#include <cerrno>
#include <cstddef>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "posix.hpp"

namespace ddprun {

using secret_bytes = std::array<unsigned char, 32>;

[[nodiscard]] inline secret_bytes random_secret() {
    secret_bytes bytes;
    for (std::size_t got = 0; got < bytes.size();) {
        ssize_t const n = ::getrandom(bytes.data() + got, bytes.size() - got, 0);
        if (n < 0 && errno != EINTR) throw_errno("the system gives no random numbers (getrandom)");
        if (n > 0) got += static_cast<std::size_t>(n);
    }
    return bytes;
}

[[nodiscard]] inline std::string hexadecimal(unsigned char byte) {
    char const* const digits = "0123456789abcdef";
    return {digits[byte / 16], digits[byte % 16]};
}

/// A sealed memfd with these bytes. Readers share its offset: they use pread.
[[nodiscard]] inline unique_fd sealed(secret_bytes const& bytes) {
    unique_fd fd(::memfd_create("ddp-secret", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd) throw_errno("no memory file for the job's secret (memfd_create)");
    if (::pwrite(fd.get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()) ||
        ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) != 0)
        throw_errno("the job's secret cannot be stored");
    return fd;
}

}  // namespace ddprun
