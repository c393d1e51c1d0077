/// \file
/// What rendezvous/job_secret.hpp declares.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include <ddp/core/error.hpp>
#include <ddp/core/secret_bytes.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/environment.hpp>
#include <ddp/rendezvous/job_secret.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL bool job_secret::given() const noexcept {
    return !matches({});
}

[[gnu::cold]] DDP_DECL bool job_secret::matches(job_secret const& other) const noexcept {
    return detail::same_secret(bytes, other.bytes);
}

[[gnu::cold]] DDP_DECL void job_secret::wipe() noexcept {
    ::explicit_bzero(bytes.data(), bytes.size());
}

[[gnu::cold]] DDP_DECL job_secret job_secret::from_environment() {
    char const* const descriptor = std::getenv("DDP_SECRET_FD");
    char const* const file = std::getenv("DDP_SECRET_FILE");
    bool const inherited = descriptor != nullptr && *descriptor != '\0';
    job_secret secret;
    if (!inherited && (file == nullptr || *file == '\0')) return secret;

    auto const refuse = [&](std::string_view why) {
        throw environment_error(
            inherited ? detail::concat({"DDP_SECRET_FD is ", std::string_view(descriptor).substr(0, 20), ", ", why,
                                        ". Programs between ddprun and this one must pass the descriptor on"})
                      : detail::concat({"DDP_SECRET_FILE is \"", std::string_view(file).substr(0, 200), "\", ", why,
                                        ". Make one with: (umask 077; head -c 32 /dev/urandom > FILE)"}));
    };
    int const fd = inherited
                       ? detail::environment_number("DDP_SECRET_FD", descriptor, 0, 1 << 20, "an inherited descriptor")
                       : ::open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) refuse(detail::concat({"which cannot be opened: ", std::strerror(errno)}));
    struct closer {
        int fd;
        ~closer() {
            if (fd >= 0) ::close(fd);
        }
    } const owned{inherited ? -1 : fd};

    struct ::stat info{};
    if (::fstat(fd, &info) != 0) refuse("which is not open");
    if (!S_ISREG(info.st_mode)) refuse("which is not a regular file");
    // A file of root's that its group can read, as Kubernetes makes for its secrets, is meant for that group.
    bool const roots = info.st_uid == 0 && ::geteuid() != 0;
    if (!inherited && info.st_uid != ::geteuid() && !roots) refuse("which belongs to another user");
    if (!inherited && (info.st_mode & (roots ? 027 : 077)) != 0)
        refuse("which other users may read or write (chmod 600)");
    std::byte more[most_bytes + 1];
    ssize_t const n = ::pread(fd, more, sizeof more, 0);  // the ranks of a host share the offset
    if (n < static_cast<ssize_t>(least_bytes) || n > static_cast<ssize_t>(most_bytes))
        refuse(detail::concat({"which holds no secret of ", least_bytes, " to ", most_bytes, " bytes"}));
    std::memcpy(secret.bytes.data(), more, static_cast<std::size_t>(n));
    ::explicit_bzero(more, sizeof more);
    if (inherited) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (!secret.given()) refuse("which holds nothing but zeros");
    return secret;
}

}  // namespace ddp
