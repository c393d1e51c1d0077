/// \file
/// job_secret: what a rank shows, or proves to know, to be let into a job.
#pragma once

#include <array>
#include <cstddef>

#include <ddp/core/separate.hpp>

namespace ddp {

/// A secret that the launcher has given to every rank of a job, and to nobody else; all zeros: none.
///
/// secure_tcp proves it, and it never travels. tcp shows it as it is, on loopback alone, where other users of the machine
/// cannot read what passes.
struct job_secret {
    static constexpr std::size_t least_bytes = 16, most_bytes = 64;
    std::array<std::byte, most_bytes> bytes = {};  ///< as they were read; zeros after them

    /// Whether there is one.
    [[nodiscard]] bool given() const noexcept;
    /// Compares in a time that does not depend on where the two differ.
    [[nodiscard]] bool matches(job_secret const& other) const noexcept;

    /// From DDP_SECRET_FD, an inherited descriptor, or DDP_SECRET_FILE, a regular file that only its owner can read, or
    /// root's, which a group may read; none if neither is set. Takes 16 to 64 bytes, whatever they are. The descriptor is
    /// not passed on to programs that this process starts. Throws environment_error.
    [[nodiscard]] static job_secret from_environment();
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/job_secret.ipp>
#endif
