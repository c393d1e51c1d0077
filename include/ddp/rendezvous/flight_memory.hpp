/// \file
/// use_flight_memory: this process's flight record goes to memory that ddprun can still read when the process is gone.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include <ddp/comm/flight_recorder.hpp>

namespace ddp::detail {

/// If DDP_FLIGHT_FD names such memory (ddprun makes it), the next flight recorder of this process takes it. Only
/// the first call does something. Memory that cannot be used is reported on stderr, and the recorder has its own.
inline void use_flight_memory() noexcept {
    static std::atomic<bool> called{false};
    char const* const text = std::getenv("DDP_FLIGHT_FD");
    if (text == nullptr || *text == '\0' || called.exchange(true)) return;
    int const fd = std::atoi(text);
    struct ::stat info{};
    void* memory = MAP_FAILED;
    if (fd > STDERR_FILENO && ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
        info.st_size == static_cast<off_t>(sizeof(flight_ring)))
        memory = ::mmap(nullptr, sizeof(flight_ring), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        std::fprintf(stderr,
                     "ddp: warning: DDP_FLIGHT_FD is %.20s, which is not the memory that ddprun of this version hands "
                     "down: if this rank crashes, nobody can say what it was doing\n",
                     text);
        return;
    }
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    lasting_ring.store(static_cast<flight_ring*>(memory));
}

}  // namespace ddp::detail
