/// \file
/// frame_urgent: what a peer's urgent frames report about itself and other ranks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/transport/framed/frame_header.hpp>

namespace ddp {

/// What a peer reports about another rank after a failure.
struct word_of_peer {
    std::uint64_t subject;          ///< the rank; unchecked
    std::optional<failure> record;  ///< what it has published; nothing: the peer has lost its connection to it
};

static_assert(offsetof(mark, name) + mark::text_bytes == sizeof(mark), "a mark ends with its text");

/// Part of frame_inbox. Collects the payloads of urgent frames one by one, and keeps their contents until they are
/// taken. A record becomes a failure only if all of its values are valid for their types.
class frame_urgent {
public:
    /// Bytes of the payload of such a frame.
    [[nodiscard]] static constexpr std::size_t size_of(frame_type type) noexcept {
        if (type == frame_type::abort || type == frame_type::relay) return sizeof(failure);
        return type == frame_type::heartbeat ? mark::text_bytes : 0;
    }
    /// A piece of the payload, from byte `at` on.
    void take(std::size_t at, const_bytes piece) noexcept {
        std::memcpy(bytes_.data() + at, piece.data(), piece.size());
    }
    /// The payload of this frame is complete. Returns why the frame makes no sense, or nothing.
    [[nodiscard]] std::string_view complete(frame_header const& frame, bool in_message) {
        if (frame.payload != 0 && frame.word != urgent_checksum(std::span(bytes_).first(frame.payload)))
            return "the payload of an urgent frame fails its checksum";
        switch (frame.type) {
            case frame_type::heartbeat:
                mark_.group = frame.id.group;
                mark_.leader = static_cast<std::int32_t>(frame.id.channel);
                mark_.number = frame.id.index;
                mark_.fingerprint = frame.fingerprint;
                mark_.occupied = frame.length;
                std::memcpy(bytes_of(mark_).last<mark::text_bytes>().data(), bytes_.data(), mark::text_bytes);
                return {};
            case frame_type::goodbye:
                if (in_message) return "goodbye inside a message";
                goodbye_ = true;
                return {};
            case frame_type::abort:
                if (!is_record()) return no_record;
                std::memcpy(&record_, bytes_.data(), sizeof record_);
                has_record_ = true;
                return {};
            case frame_type::relay:
                if (!is_record()) return no_record;
                words_.push_back({frame.id.index, failure{}});
                std::memcpy(&*words_.back().record, bytes_.data(), sizeof(failure));
                return {};
            case frame_type::lost: words_.push_back({frame.id.index, std::nullopt}); return {};
            case frame_type::request:
            case frame_type::clear:
            case frame_type::credit:
            case frame_type::data: return {};
        }
        return {};
    }

    [[nodiscard]] bool said_goodbye() const noexcept { return goodbye_; }
    [[nodiscard]] mark const& last_mark() const noexcept { return mark_; }
    /// The peer's record, once for each that arrives.
    [[nodiscard]] bool take_record(failure& record) noexcept {
        if (!std::exchange(has_record_, false)) return false;
        record = record_;
        return true;
    }
    /// What the peer has reported about other ranks since the last call.
    [[nodiscard]] std::vector<word_of_peer> take_words() noexcept { return std::exchange(words_, {}); }

private:
    static constexpr std::string_view no_record = "a record of unknown kind";
    [[nodiscard]] bool is_record() const noexcept {
        auto const raw = [&](std::size_t offset) { return std::to_integer<unsigned>(bytes_[offset]); };
        return raw(offsetof(failure, kind)) <= static_cast<unsigned>(failure_kind::idle) &&
               raw(offsetof(failure, is_verdict)) <= 1 && raw(offsetof(failure, inside)) <= 1 &&
               raw(offsetof(failure, expired)) <= 1;
    }

    std::array<std::byte, sizeof(failure)> bytes_;
    mark mark_;
    failure record_;
    std::vector<word_of_peer> words_;
    bool goodbye_ = false, has_record_ = false;
};

}  // namespace ddp
