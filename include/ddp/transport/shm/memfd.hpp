/// \file
/// memfd_sharing: memory that processes of one host share, without a name that could be left behind.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ddp/comm/shared_memory.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// A memfd of a fixed size, whose descriptor is sent over a Unix-domain datagram socket with a random abstract name. Nothing is
/// left behind when a process is killed, /dev/shm and its size do not matter, and a peer cannot shrink what others read.
///
/// Security  a descriptor is accepted only if it comes with the 128-bit number that its sender gave over the transport, and its
///           memory holds that number. Other programs on the host can make sharing fail, by filling the socket's queue, but
///           cannot take part.
/// Cost      the rank that makes the memory allocates all of its pages at once. If that would exceed what the host, or a
///           container, has left, make() fails instead. Every rank maps the memory of all others of its host.
class memfd_sharing final : public memory_sharing {
public:
    memfd_sharing() = default;
    ~memfd_sharing() override;

    std::shared_ptr<std::byte> make(std::size_t bytes, memory_offer& mine) override;
    bool give(memory_offer const& peer) noexcept override;
    void take(std::span<memory_offer const> all) noexcept override;
    std::shared_ptr<std::byte> view(memory_offer const& peer) noexcept override;
    [[nodiscard]] sharing_problem problem() const noexcept override { return problem_; }
    bool keep(std::size_t bytes) noexcept override;
    void settle() noexcept override;

private:
    /// Keeps why a call has failed; the last reason counts, but none outweighs that there is no room (1).
    void note(std::uint64_t refused, char const* what, int error) noexcept;

    struct taken {
        std::array<std::uint64_t, 2> secret;
        int descriptor;
    };

    std::vector<taken> taken_;
    std::array<std::uint64_t, 2> secret_{};
    sharing_problem problem_;
    std::byte* own_ = nullptr;  // mapped; the owner of what make() returned unmaps it
    int memory_ = -1, socket_ = -1;
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/transport/shm/impl/memfd.ipp>
#endif
