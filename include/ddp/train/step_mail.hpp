/// \file
/// step_mail: what the compute side of a step leaves for the communication side.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <ddp/train/bucket.hpp>

namespace ddp::detail {

/// A mailbox with one writer and one reader: "the step begins", "bucket b is full", "backward is done", in the order in which
/// they happened. Never more than one step's messages, so it has a fixed size.
class step_mail {
public:
    static constexpr std::size_t begun = std::numeric_limits<std::size_t>::max();
    static constexpr std::size_t released = begun - 1;

    explicit step_mail(bucket_map const& buckets)
        : pending_(buckets.count()),
          touched_(buckets.parameters()),
          open_(buckets.parameters()),
          messages_(buckets.count() + 4) {
        for (std::size_t i = 0; i < touched_.size(); ++i) touched_[i] = buckets.touches(i).size();
    }

    // The writer: none of these throws, blocks or allocates.

    /// Buckets b with silent[b] != 0 are never reported.
    void begin(bucket_map const& buckets, std::span<std::uint8_t const> silent) noexcept {
        for (std::size_t b = 0; b < pending_.size(); ++b) pending_[b] = buckets.members(b);
        std::copy(touched_.begin(), touched_.end(), open_.begin());
        post(begun);
        for (std::size_t b = 0; b < pending_.size(); ++b)
            if (pending_[b] == 0 && silent[b] == 0) post(b);
    }
    /// The elements of parameter i at or behind `from` in the arena are final; 0: all of them. Returns whether a bucket
    /// became full.
    bool ready(bucket_map const& buckets, std::span<std::uint8_t const> silent, std::size_t i,
               std::size_t from) noexcept {
        bool mail = false;
        for (std::size_t& left = open_[i]; left > 0; --left) {
            std::size_t const b = buckets.touches(i)[left - 1];  // in the arena's order
            if (buckets.begin(b) < from) break;                  // holds elements that are not final
            if (--pending_[b] == 0 && silent[b] == 0) {
                post(b);
                mail = true;
            }
        }
        return mail;
    }
    void release() noexcept { post(released); }

    // The reader.

    [[nodiscard]] bool empty() const noexcept {
        return taken_.load(std::memory_order_acquire) == posted_.load(std::memory_order_relaxed);
    }
    /// Calls f(message) for each message: `begun`, `released`, or a bucket that is full.
    template <class F>
    void take(F&& f) {
        std::size_t const end = posted_.load(std::memory_order_acquire);
        for (std::size_t at = taken_.load(std::memory_order_relaxed); at != end; ++at) {
            f(messages_[at % messages_.size()]);
            taken_.store(at + 1, std::memory_order_release);
        }
    }

private:
    void post(std::size_t message) noexcept {
        std::size_t const at = posted_.load(std::memory_order_relaxed);
        messages_[at % messages_.size()] = message;
        posted_.store(at + 1, std::memory_order_release);
    }

    std::vector<std::size_t> pending_;  // parameters that bucket b still waits for
    std::vector<std::size_t> touched_;  // how many buckets hold some of parameter i
    std::vector<std::size_t> open_;     // how many of them, the first ones, still wait for it
    std::vector<std::size_t> messages_;
    std::atomic<std::size_t> posted_{0}, taken_{0};
};

}  // namespace ddp::detail
