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

/// A memfd of a fixed size, which travels over a Unix-domain datagram socket with a random abstract name. Nothing stays
/// behind when a process is killed, /dev/shm and its size do not matter, and a peer cannot shrink what others read.
///
/// Security  a descriptor counts only if it comes with the 128-bit number that its sender gave over the transport, and the
///           memory behind it shows that number. Other programs of the host can make sharing fail, by filling the
///           socket's queue; they cannot take part.
/// Cost      pages are allocated at once, at the rank that makes them, unless this would leave the host or a container less
///           memory than it needs: make() then fails. Every rank maps the memory of all others of its host.
class memfd_sharing final : public memory_sharing {
public:
    memfd_sharing() = default;
    ~memfd_sharing() override;

    std::shared_ptr<std::byte> make(std::size_t bytes, memory_offer& mine) override;
    bool give(memory_offer const& peer) noexcept override;
    void take(std::span<memory_offer const> all) noexcept override;
    std::shared_ptr<std::byte> view(memory_offer const& peer) noexcept override;
    bool keep(std::size_t bytes) noexcept override;
    void settle() noexcept override;

private:
    struct taken {
        std::array<std::uint64_t, 2> secret;
        int descriptor;
    };

    std::vector<taken> taken_;
    std::array<std::uint64_t, 2> secret_{};
    std::byte* own_ = nullptr;  // mapped; whoever make() gave it to unmaps it
    int memory_ = -1, socket_ = -1;
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/transport/shm/impl/memfd.ipp>
#endif
