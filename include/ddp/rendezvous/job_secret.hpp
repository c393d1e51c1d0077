/// \file
/// job_secret: what a rank sends, or proves that it knows, to join a job.
#pragma once

#include <array>
#include <cstddef>

#include <ddp/core/separate.hpp>

namespace ddp {

/// A secret that the launcher has given only to the ranks of a job; all zeros: none.
///
/// secure_tcp proves that it knows the secret, and never sends it. tcp sends it, but over loopback only, where other users of
/// the machine cannot read it.
struct job_secret {
    static constexpr std::size_t least_bytes = 16, most_bytes = 64;
    std::array<std::byte, most_bytes> bytes = {};  ///< the secret, and zeros after it

    /// Whether there is a secret.
    [[nodiscard]] bool given() const noexcept;
    /// Compares in a time that does not depend on where the two differ.
    [[nodiscard]] bool matches(job_secret const& other) const noexcept;
    /// Makes it all zeros, also where a compiler sees that nothing reads them.
    void wipe() noexcept;

    /// Reads it from DDP_SECRET_FD, an inherited descriptor, or DDP_SECRET_FILE, a regular file that only its owner can read
    /// (a file owned by root may be readable by its group): 16 to 64 bytes of any value, not all zero. None if neither
    /// is set. The descriptor is not passed on to programs that this process starts. Throws environment_error
    /// (DDP-E101) for any other file.
    [[nodiscard]] static job_secret from_environment();
};

namespace detail {
/// A secret that is wiped with the object that has it.
struct kept_secret : job_secret {
    ~kept_secret() { wipe(); }
};
}  // namespace detail

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/job_secret.ipp>
#endif
