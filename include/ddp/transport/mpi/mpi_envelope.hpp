/// \file
/// The envelope that precedes every message of an mpi_transport, and the pool of envelopes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <type_traits>
#include <utility>

#include <ddp/comm/transport.hpp>

namespace ddp::detail::mpi {

enum class envelope_kind : std::uint32_t {
    message,
    goodbye,
    record,
    heartbeat,  // id, fingerprint and body: the sender's mark
    mark        // likewise, of a rank that sends no heartbeats
};

struct envelope {
    identity id;
    std::uint64_t fingerprint = 0;
    std::uint64_t length = 0;  // bytes of the message
    std::int32_t payload = 0;  // tag under which the bytes follow; 0: they are in `body`
    envelope_kind kind = envelope_kind::message;
    std::array<std::byte, 984> body = {};
};
inline constexpr std::size_t head_bytes = offsetof(envelope, body);
static_assert(sizeof(envelope) == 1024 && std::has_unique_object_representations_v<envelope>);
static_assert(sizeof(failure) <= sizeof(envelope::body) && mark::text_bytes <= sizeof(envelope::body));

/// An envelope that is being sent, or one that arrived before its receive.
struct slot {
    envelope what;
    int peer = -1;
    slot* next = nullptr;
};

/// Slots for reuse; allocates when more are out than ever before. Addresses are stable: MPI reads from them.
class slot_pool {
public:
    [[nodiscard]] slot& take() {
        if (free_ == nullptr) give_back(slots_.emplace_back());
        slot& taken = *free_;
        free_ = std::exchange(taken.next, nullptr);
        return taken;
    }
    void give_back(slot& used) noexcept { used.next = std::exchange(free_, &used); }
    void add(std::size_t count) {
        for (; count > 0; --count) give_back(slots_.emplace_back());
    }

private:
    std::deque<slot> slots_;
    slot* free_ = nullptr;
};

}  // namespace ddp::detail::mpi
