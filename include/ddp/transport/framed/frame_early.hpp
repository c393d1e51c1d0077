/// \file
/// Bounded memory for messages that arrived before their receive was posted.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include <ddp/comm/transport.hpp>

namespace ddp {

/// A fixed pool of 1 KiB blocks; a message is a chain of them. Messages leave in any order without fragmenting it. The
/// sender counts the same blocks as its credit, so the pool never runs out unless the peer breaks the protocol. Its
/// memory becomes resident as blocks are first used.
class early_store {
public:
    static constexpr std::uint32_t none = ~std::uint32_t{0};
    static constexpr std::size_t data_bytes = 960;

    struct block {
        std::uint32_t next_block;  // of the same message
        std::uint32_t last_block;  // this and what follows: of the first block only
        std::uint32_t next_message, previous_message;
        identity id;
        std::uint64_t fingerprint, length, received;
        std::uint64_t unused;
        std::array<std::byte, data_bytes> data;
    };
    static_assert(sizeof(block) == 1024 && std::is_trivially_copyable_v<block>);

    /// Bytes, which create blocks without writing to them: a block's own constructor would touch every page.
    explicit early_store(std::uint32_t blocks)
        : memory_(std::make_unique_for_overwrite<std::byte[]>(std::size_t{blocks} * sizeof(block))),
          blocks_(reinterpret_cast<block*>(memory_.get())),
          capacity_(blocks) {}
    early_store(early_store&&) = delete;

    /// Blocks that a message of this length takes; an empty one takes one. More than 2^32 - 1 count as that.
    [[nodiscard]] static constexpr std::uint32_t blocks_for(std::uint64_t length) noexcept {
        std::uint64_t const count = length / data_bytes + (length % data_bytes != 0 ? 1 : 0);
        return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(count, 1, none));
    }

    /// Opens an empty message behind all others. The caller has checked that there are blocks_for(length) free blocks.
    std::uint32_t open(identity const& id, std::uint64_t fingerprint, std::uint64_t length) noexcept {
        std::uint32_t const at = take_block();
        block& b = blocks_[at];
        b.last_block = at;
        b.next_message = none;
        b.previous_message = last_;
        b.id = id;
        b.fingerprint = fingerprint;
        b.length = length;
        b.received = 0;
        (last_ != none ? blocks_[last_].next_message : first_) = at;
        last_ = at;
        return at;
    }
    void append(std::uint32_t message, const_bytes bytes) noexcept {
        block& head = blocks_[message];
        while (!bytes.empty()) {
            std::size_t const offset = head.received % data_bytes;
            if (offset == 0 && head.received != 0) {
                std::uint32_t const more = take_block();
                blocks_[head.last_block].next_block = more;
                head.last_block = more;
            }
            std::size_t const count = std::min(bytes.size(), data_bytes - offset);
            std::memcpy(blocks_[head.last_block].data.data() + offset, bytes.data(), count);
            head.received += count;
            bytes = bytes.subspan(count);
        }
    }
    /// The oldest message of this identity, or none. Cost: a walk over the messages that are here.
    [[nodiscard]] std::uint32_t find(identity const& id) const noexcept {
        std::uint32_t at = first_;
        while (at != none && blocks_[at].id != id) at = blocks_[at].next_message;
        return at;
    }
    [[nodiscard]] block const& at(std::uint32_t message) const noexcept { return blocks_[message]; }

    /// Copies what has been received to `out` (null: nowhere), and frees the blocks.
    void take(std::uint32_t message, std::byte* out) noexcept {
        block const& head = blocks_[message];
        (head.previous_message != none ? blocks_[head.previous_message].next_message : first_) = head.next_message;
        (head.next_message != none ? blocks_[head.next_message].previous_message : last_) = head.previous_message;
        std::uint64_t left = head.received;
        for (std::uint32_t b = message; b != none;) {
            std::size_t const count = static_cast<std::size_t>(std::min<std::uint64_t>(left, data_bytes));
            if (out != nullptr && count != 0) {
                std::memcpy(out, blocks_[b].data.data(), count);
                out += count;
            }
            left -= count;
            std::uint32_t const next = blocks_[b].next_block;
            blocks_[b].next_block = free_;
            free_ = b;
            b = next;
        }
    }
    [[nodiscard]] std::uint32_t capacity() const noexcept { return capacity_; }

private:
    std::uint32_t take_block() noexcept {
        std::uint32_t const at = free_ != none ? free_ : fresh_++;
        if (free_ != none) free_ = blocks_[at].next_block;
        blocks_[at].next_block = none;
        return at;
    }

    std::unique_ptr<std::byte[]> memory_;
    block* blocks_;
    std::uint32_t capacity_;
    std::uint32_t fresh_ = 0;  // blocks never used yet start here
    std::uint32_t free_ = none;
    std::uint32_t first_ = none, last_ = none;
};

}  // namespace ddp
