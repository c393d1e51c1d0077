/// \file
/// The 64 bytes that stand before every frame on a stream, and how they are sealed and checked.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <ddp/comm/transport.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/digest.hpp>

namespace ddp {

static_assert(std::endian::native == std::endian::little,
              "frames are written as they lie in memory, little endian; a big-endian machine needs a conversion here");

/// Largest payload of a frame. A message is a run of frames, all but the last of this size; an urgent frame waits for one.
inline constexpr std::size_t frame_payload_bytes = std::size_t{256} << 10;

enum class frame_type : std::uint8_t {
    data,       ///< payload: the next piece of a message
    credit,     ///< only the counter that every header carries
    request,    ///< a message waits at the sender for its receive; word: serial
    clear,      ///< the receive for it is posted; word: serial
    heartbeat,  ///< a mark; payload: its text; index: its number, length: whether the sender is in a long_operation
    goodbye,    ///< the sender leaves: the last frame, after all its messages
    abort,      ///< payload: a failure
    relay,      ///< payload: the failure that rank `index` has published, for a peer that it may not have reached
    lost,       ///< the sender has lost its connection to rank `index`
};
inline constexpr std::uint8_t frame_types = 9;

/// Fixed layout, no padding. The check covers all the rest, so a flipped bit anywhere is found.
struct frame_header {
    static constexpr std::uint16_t magic_and_version = 0xdd01;
    static constexpr std::uint8_t begins = 1;   ///< flag: first frame of a message
    static constexpr std::uint8_t exempt = 2;   ///< flag: the message was cleared, it uses no credit
    static constexpr std::uint8_t has_sum = 4;  ///< flag: word is the payload's checksum
    static constexpr std::uint8_t all_flags = 7;

    std::uint16_t magic = magic_and_version;
    frame_type type = frame_type::data;
    std::uint8_t flags = 0;
    std::uint32_t payload = 0;   ///< bytes that follow in this frame
    std::uint32_t sequence = 0;  ///< counts the frames of one direction: a lost, doubled or replayed frame is seen
    std::uint32_t consumed = 0;  ///< blocks of early memory given back so far, modulo 2^32
    identity id = {};
    std::uint64_t fingerprint = 0;
    std::uint64_t length = 0;  ///< bytes of the whole message
    std::uint64_t word = 0;  ///< checksum of the payload (of an urgent frame: urgent_checksum), or serial of a request
    std::uint64_t check = 0;

    /// The check of the 56 bytes before `check`. Every step is a bijection of the state, so two headers that differ in one word
    /// never have the same check; `key` distinguishes directions, pairs and jobs.
    [[nodiscard]] std::uint64_t expected_check(std::uint64_t key) const noexcept {
        std::array<std::uint64_t, 7> words;
        std::memcpy(words.data(), this, sizeof words);
        std::uint64_t state = key;
        for (std::uint64_t const w : words) state = std::rotl((state ^ w) * 0x9fb21c651e98df25u, 29);
        return state ^ (state >> 32);
    }
    void seal(std::uint64_t key) noexcept { check = expected_check(key); }
    [[nodiscard]] bool intact(std::uint64_t key) const noexcept {
        return check == expected_check(key) && magic == magic_and_version &&
               static_cast<std::uint8_t>(type) < frame_types && (flags & ~all_flags) == 0 &&
               payload <= frame_payload_bytes;
    }
};
static_assert(sizeof(frame_header) == 64 && std::is_trivially_copyable_v<frame_header>);
static_assert(std::has_unique_object_representations_v<frame_header>, "no padding may travel");

/// The checksum of an urgent frame's payload, which it carries under any checksum policy of the stream.
[[nodiscard]] inline std::uint64_t urgent_checksum(const_bytes payload) noexcept {
    return digest{}.add(payload).value();
}

/// The key of the direction from one rank to another within a job.
[[nodiscard]] constexpr std::uint64_t frame_key(std::uint64_t job, int from, int to) noexcept {
    std::uint64_t z = job ^ (std::uint64_t{static_cast<std::uint32_t>(from)} << 32) ^ static_cast<std::uint32_t>(to);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

}  // namespace ddp
