/// \file
/// The memory of a rank's flight recorder: shared with the rank, so that it is still there when the rank is gone.
#pragma once

#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <ddp/comm/flight_recorder.hpp>

#include "posix.hpp"

namespace ddprun {

/// Memory that a rank inherits as a descriptor, DDP_FLIGHT_FD. Its size is sealed: no rank can take it from ddprun.
class flight_memory {
public:
    /// Not there if the system has none to give: then a rank that crashes leaves nothing.
    flight_memory() {
        using ring = ddp::detail::flight_ring;
        unique_fd fd(::memfd_create("ddp-flight", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        if (!fd || ::ftruncate(fd.get(), sizeof(ring)) != 0 ||
            ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW) != 0)
            return;
        void* const at = ::mmap(nullptr, sizeof(ring), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
        if (at == MAP_FAILED) return;
        ring_ = static_cast<ring*>(at);
        fd_ = std::move(fd);
    }
    flight_memory(flight_memory const&) = delete;
    flight_memory& operator=(flight_memory const&) = delete;
    flight_memory(flight_memory&& other) noexcept
        : ring_(std::exchange(other.ring_, nullptr)), fd_(std::move(other.fd_)) {}
    ~flight_memory() {
        if (ring_ != nullptr) ::munmap(ring_, sizeof *ring_);
    }

    /// -1: there is none.
    [[nodiscard]] int fd() const noexcept { return fd_.get(); }
    /// The rank has it; nobody else needs to inherit it.
    void handed_down() noexcept { fd_.reset(); }

    /// Writes what a rank that is gone has left there, as the rank would have written it. `directory`: absolute.
    void dump(int rank, int ranks, std::string const& directory) {
        if (ring_ == nullptr || ring_->next.load() == 0) return;  // it never had a recorder
        ddp::flight_recorder of_the_rank(rank, ranks, ring_, directory.c_str());
        of_the_rank.say_thread("unknown");
        of_the_rank.dump("gone");
    }

private:
    ddp::detail::flight_ring* ring_ = nullptr;
    unique_fd fd_;
};

}  // namespace ddprun
