/// \file
/// byte_ring: bytes in order from one process to another, through memory that both see.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>

namespace ddp {

/// One direction of a connection: a writer and a reader, each with an object of this class over the same memory.
/// Neither waits. A side that is about to sleep first announces this in the memory; the other side's next call then
/// returns `wakes`, and the caller must wake it.
///
/// Words  in the memory, each on a cache line of its own: bytes written so far, bytes read so far, whether the reader
///        sleeps, and whether the writer does. The other side resets the last two.
/// Trust  a counter that the other side cannot have reached makes the ring broken(); nothing outside the memory is touched.
/// Order  a side that reads a counter sees what was written before it. A side that says that it sleeps and then looks for
///        bytes, and one that moves bytes and then looks for a sleeper, never miss each other: these accesses are
///        sequentially consistent.
/// Cost   a copy on each side. Besides the bytes, at most one cache line is transferred for each `piece` bytes.
class byte_ring {
public:
    static constexpr std::size_t header_bytes = 256;
    static constexpr std::size_t piece = std::size_t{16} << 10;  ///< is shown to the other side at once

    /// What moved, and whether the other side sleeps and must be woken.
    struct result {
        std::size_t bytes = 0;
        bool wakes = false;
    };

    byte_ring() = default;
    /// `at`: header_bytes, zero at first, and then `capacity` bytes, aligned to a cache line. Throws usage_error unless the
    /// capacity is a power of two.
    byte_ring(std::byte* at, std::size_t capacity) : at_(at), capacity_(capacity) {
        DDP_EXPECTS(std::has_single_bit(capacity), "byte_ring: the capacity must be a power of two");
    }

    // The writer's side.

    /// Copies as much as there is room for.
    result write(std::span<const_bytes const> buffers) noexcept {
        result all;
        for (const_bytes from : buffers)
            while (!from.empty()) {
                if (capacity_ - (mine_ - theirs_) < from.size()) look(read);
                std::size_t const free = broken_ ? 0 : capacity_ - static_cast<std::size_t>(mine_ - theirs_);
                if (free == 0) return shown(all, written, reader_sleeps);
                std::size_t const n = std::min({from.size(), free, piece - since_shown_});
                copy<false>(const_cast<std::byte*>(from.data()), n);
                from = from.subspan(n);
                all.bytes += n;
                if (since_shown_ == piece) all.wakes |= shown({}, written, reader_sleeps).wakes;
            }
        return shown(all, written, reader_sleeps);
    }
    /// Whether write() would take any bytes.
    [[nodiscard]] bool has_room() noexcept {
        look(read);
        return broken_ || mine_ - theirs_ < capacity_;
    }
    /// How many bytes the reader has taken.
    [[nodiscard]] std::uint64_t delivered() noexcept {
        look(read);
        return theirs_;
    }
    /// Announces that this side sleeps. Returns false if the other side has moved bytes meanwhile.
    [[nodiscard]] bool writer_may_sleep() noexcept {
        word(writer_sleeps).store(1);
        return !has_room();
    }
    void writer_wakes() noexcept { word(writer_sleeps).store(0, std::memory_order_relaxed); }

    // The reader's side.

    /// Copies as much as there is.
    result take(std::span<mutable_bytes const> buffers) noexcept {
        result all;
        for (mutable_bytes to : buffers)
            while (!to.empty()) {
                if (theirs_ - mine_ < to.size()) look(written);
                std::size_t const there = broken_ ? 0 : static_cast<std::size_t>(theirs_ - mine_);
                if (there == 0) return shown(all, read, writer_sleeps);
                std::size_t const n = std::min({to.size(), there, piece - since_shown_});
                copy<true>(to.data(), n);
                to = to.subspan(n);
                all.bytes += n;
                if (since_shown_ == piece) all.wakes |= shown({}, read, writer_sleeps).wakes;
            }
        return shown(all, read, writer_sleeps);
    }
    /// Whether take() would return something.
    [[nodiscard]] bool has_bytes() noexcept {
        if (theirs_ == mine_) look(written);
        return broken_ || theirs_ != mine_;
    }
    [[nodiscard]] bool reader_may_sleep() noexcept {
        word(reader_sleeps).store(1);
        return !has_bytes();
    }
    void reader_wakes() noexcept { word(reader_sleeps).store(0, std::memory_order_relaxed); }

    /// Whether the memory holds something that the other side cannot have written.
    [[nodiscard]] bool broken() const noexcept { return broken_; }

private:
    static constexpr std::size_t written = 0, read = 64, reader_sleeps = 128, writer_sleeps = 192;  // where they are

    [[nodiscard]] std::atomic_ref<std::uint64_t> word(std::size_t offset) const noexcept {
        return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(at_ + offset));
    }
    /// Reads the other side's counter, which goes up only: a reader's to the writer's, a writer's to `capacity_` beyond.
    void look(std::size_t counter) noexcept {
        std::uint64_t const seen = word(counter).load(), most = counter == read ? mine_ : mine_ + capacity_;
        broken_ = broken_ || seen - theirs_ > most - theirs_;
        if (!broken_) theirs_ = seen;
    }
    template <bool Out>
    void copy(std::byte* memory, std::size_t n) noexcept {
        std::size_t const at = static_cast<std::size_t>(mine_) & (capacity_ - 1);
        std::size_t const first = std::min(n, capacity_ - at);
        std::byte* const ring = at_ + header_bytes;
        if constexpr (Out) {
            std::memcpy(memory, ring + at, first);
            std::memcpy(memory + first, ring, n - first);
        } else {
            std::memcpy(ring + at, memory, first);
            std::memcpy(ring, memory + first, n - first);
        }
        mine_ += n;
        since_shown_ += n;
    }
    /// Shows this side's counter, if it has moved, and looks whether the other sleeps.
    result shown(result so_far, std::size_t counter, std::size_t sleeper) noexcept {
        if (since_shown_ == 0) return so_far;
        since_shown_ = 0;
        word(counter).store(mine_);
        if (word(sleeper).load() != 0) so_far.wakes |= word(sleeper).exchange(0) != 0;
        return so_far;
    }

    std::byte* at_ = nullptr;
    std::size_t capacity_ = 0;
    std::uint64_t mine_ = 0, theirs_ = 0;  // counters: this side's, and what is known of the other's
    std::size_t since_shown_ = 0;
    bool broken_ = false;
};

}  // namespace ddp
