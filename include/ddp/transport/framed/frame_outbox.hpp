/// \file
/// The sending half of a framed connection: queues, credit, and frames that wait to be written.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/transport/framed/frame_checksum.hpp>
#include <ddp/transport/framed/frame_early.hpp>
#include <ddp/transport/framed/frame_header.hpp>

namespace ddp {

/// Cuts messages into sealed frames, at most 1 MiB ahead of the stream. Urgent frames go between data frames; data goes in
/// posting order, except that a message beyond the credit announces itself, waits for its receive, and lets others pass.
template <Checksum Sum>
class frame_outbox {
public:
    static constexpr std::size_t max_buffers = 64;
    static constexpr std::size_t max_ahead = std::size_t{1} << 20;

    frame_outbox(std::uint64_t key, bool checked, std::uint32_t credit_blocks)
        : key_(key), checked_(checked), credit_(credit_blocks) {}

    void post(completion& node) noexcept { fresh_.push_back(node); }
    void beat(mark const& last) noexcept {
        if (!beating_) mark_ = last;  // one that is half written keeps its bytes
        beat_due_ = true;
    }
    void say_goodbye() noexcept { goodbye_due_ = true; }
    void clear_to_send(std::uint64_t serial) { clears_.push_back(serial); }

    /// Takes the peer's counter of blocks given back. Returns false if it gives back blocks that were never used.
    [[nodiscard]] bool returned(std::uint32_t consumed) noexcept {
        if (consumed - returned_ > spent_ - returned_) return false;
        returned_ = consumed;
        return true;
    }
    /// The peer has posted the receive for request `serial`. Returns false if there was no such request.
    [[nodiscard]] bool cleared(std::uint64_t serial) noexcept {
        for (completion* node = waiting_.front(); node != nullptr; node = node->next)
            if (node->length == serial) {
                waiting_.erase(*node);
                --waiting_of(node->tag.id);
                cleared_.push_back(*node);
                return true;
            }
        return ended_;
    }

    /// Seals frames as far as the window goes. `consumed` is this rank's counter for the peer.
    void fill(std::uint32_t consumed) noexcept {
        consumed_ = consumed;
        while (count_ < slots_.size() && ahead_ < max_ahead && fill_one()) {
        }
    }
    /// Whether fill() would add nothing and gather() would return nothing.
    [[nodiscard]] bool idle(std::uint32_t consumed) const noexcept {
        bool const posted = current_ != nullptr || !fresh_.empty() || !cleared_.empty() || !clears_.empty();
        return count_ == 0 && !posted && !beat_due_ && !goodbye_due_ && !aborted_ && !credit_due(consumed);
    }
    /// Lists the bytes to write next. Returns the number of buffers.
    [[nodiscard]] std::size_t gather(std::span<const_bytes, max_buffers> list) const noexcept {
        std::size_t n = 0, skip = written_;
        for (std::size_t i = 0; i < count_; ++i) {
            slot const& s = slots_[(first_ + i) % slots_.size()];
            for (const_bytes const part : {bytes_of(s.header), const_bytes{s.payload, s.header.payload}}) {
                if (skip < part.size()) list[n++] = part.subspan(skip);
                skip -= std::min(skip, part.size());
            }
        }
        return n;
    }
    void wrote(std::size_t bytes, completion_list& done) noexcept {
        ahead_ -= bytes;
        written_ += bytes;
        while (count_ != 0) {
            slot& s = slots_[first_];
            std::size_t const size = sizeof(frame_header) + s.header.payload;
            if (written_ < size) break;
            written_ -= size;
            if (s.ends != nullptr) {
                sending_.erase(*s.ends);
                s.ends->status = op_status::ok;
                done.push_back(*s.ends);
            }
            if (s.header.type == frame_type::heartbeat) beating_ = false;
            if (s.header.type == frame_type::abort) aborting_ = false;
            if (s.header.type == frame_type::relay) relaying_ = false;
            first_ = (first_ + 1) % slots_.size();
            --count_;
        }
    }

    /// From now on sends only urgent frames. A half-written frame is finished from a copy, so that no posted memory is
    /// touched any more.
    void abort(failure const& record) noexcept {
        record_ = record;
        abort_due_ = true;
        if (!std::exchange(aborted_, true)) keep_only_started();
    }
    /// Forwards the record of rank `subject` to a peer that it may not reach. Sent once abort() has been called, like
    /// lost().
    void relay(int subject, failure const& record) {
        auto const same =
            std::find_if(relays_.begin(), relays_.end(), [&](relayed const& r) { return r.subject == subject; });
        if (same == relays_.end())
            relays_.push_back({subject, record});
        else
            same->record = record;
    }
    /// This rank has lost its connection to `subject`.
    void lost(int subject) { losses_.push_back(subject); }

    /// Moves every posted message that is not done to `ended` with this status.
    void end_all(op_status status, completion_list& ended) noexcept {
        for (completion_list* const list : {&sending_, &cleared_, &waiting_, &fresh_})
            while (completion* const node = list->pop_front()) {
                node->status = status;
                ended.push_back(*node);
            }
        current_ = nullptr;
        waiting_counts_ = {};
        ended_ = true;
    }
    /// Nothing more can be written: forgets the frames. Call end_all() next.
    void drop() noexcept {
        count_ = written_ = ahead_ = 0;
        clears_.clear();
        relays_.clear();
        losses_.clear();
        beat_due_ = abort_due_ = goodbye_due_ = aborting_ = beating_ = relaying_ = false;
    }

    [[nodiscard]] bool has_messages() const noexcept {
        return !sending_.empty() || !cleared_.empty() || !waiting_.empty() || !fresh_.empty();
    }
    [[nodiscard]] bool abort_pending() const noexcept {
        return abort_due_ || aborting_ || !relays_.empty() || relaying_ || !losses_.empty();
    }

private:
    struct slot {
        frame_header header;
        std::byte const* payload = nullptr;
        completion* ends = nullptr;  // the message whose last frame this is
    };

    struct relayed {
        int subject;
        failure record;
    };

    bool fill_one() noexcept {
        if (abort_due_ && !aborting_) {
            abort_due_ = false;
            aborting_ = true;
            sent_record_ = record_;  // a newer record must not change bytes that are half written
            push_urgent({.type = frame_type::abort}, bytes_of(sent_record_));
            return true;
        }
        if (aborted_ && !losses_.empty()) {
            push({.type = frame_type::lost, .id = {.index = static_cast<std::uint64_t>(losses_.back())}}, {});
            losses_.pop_back();
            return true;
        }
        if (aborted_ && !relays_.empty() && !relaying_) {
            relaying_ = true;
            sent_relay_ = relays_.front();
            relays_.erase(relays_.begin());
            push_urgent({.type = frame_type::relay, .id = {.index = static_cast<std::uint64_t>(sent_relay_.subject)}},
                        bytes_of(sent_relay_.record));
            return true;
        }
        if (!clears_.empty() && !aborted_) {
            push({.type = frame_type::clear, .word = clears_[clears_head_]}, {});
            if (++clears_head_ == clears_.size()) {
                clears_.clear();
                clears_head_ = 0;
            }
            return true;
        }
        if (beat_due_ && !beating_) {
            beat_due_ = false;
            beating_ = true;
            push_urgent({.type = frame_type::heartbeat,
                         .id = {.group = mark_.group,
                                .channel = static_cast<std::uint32_t>(mark_.leader),
                                .index = mark_.number},
                         .fingerprint = mark_.fingerprint,
                         .length = mark_.occupied},
                        bytes_of(mark_).last<mark::text_bytes>());
            return true;
        }
        if (!aborted_ && fill_data()) return true;
        if (goodbye_due_ && !aborted_) {
            goodbye_due_ = false;
            push({.type = frame_type::goodbye}, {});
            return true;
        }
        if (credit_due(consumed_) && !aborted_) {
            push({.type = frame_type::credit}, {});
            return true;
        }
        return false;
    }

    [[nodiscard]] bool credit_due(std::uint32_t consumed) const noexcept {
        return consumed - reported_ >= std::max(credit_ / 4, std::uint32_t{1});
    }
    bool fill_data() noexcept {
        if (current_ == nullptr) {
            if (completion* const node = cleared_.pop_front()) {
                start(*node, true);
            } else if (completion* const next = fresh_.pop_front()) {
                std::uint32_t const cost = early_store::blocks_for(next->size);
                if (cost > credit_ - (spent_ - returned_) || waits(next->tag.id)) {
                    next->length = ++serials_;  // the node's field is free in a send
                    waiting_.push_back(*next);
                    ++waiting_of(next->tag.id);
                    push({.type = frame_type::request,
                          .id = next->tag.id,
                          .fingerprint = next->tag.fingerprint,
                          .length = next->size,
                          .word = next->length},
                         {});
                    return true;
                }
                spent_ += cost;
                start(*next, false);
            } else {
                return false;
            }
        }
        completion& node = *current_;
        std::size_t const size = std::min(frame_payload_bytes, node.size - node.moved);
        const_bytes const piece{node.data + node.moved, size};
        frame_header header{.id = node.tag.id, .fingerprint = node.tag.fingerprint, .length = node.size};
        if (node.moved == 0) header.flags |= frame_header::begins;
        if (current_exempt_) header.flags |= frame_header::exempt;
        if (checked_) {
            sum_.reset();
            sum_.update(piece);
            header.word = sum_.value();
            header.flags |= frame_header::has_sum;
        }
        node.moved += size;
        push(header, piece);
        if (node.moved == node.size) {
            slots_[(first_ + count_ - 1) % slots_.size()].ends = &node;
            current_ = nullptr;
        }
        return true;
    }
    void start(completion& node, bool exempt) noexcept {
        sending_.push_back(node);
        current_ = &node;
        current_exempt_ = exempt;
    }
    /// Order within an identity: what follows a waiting message waits behind it.
    [[nodiscard]] bool waits(identity const& id) noexcept {
        if (waiting_of(id) == 0) return false;
        for (completion const* node = waiting_.front(); node != nullptr; node = node->next)
            if (node->tag.id == id) return true;
        return false;
    }
    /// How many waiting messages share this counter by their identity; 0 saves a walk over the list.
    [[nodiscard]] std::uint32_t& waiting_of(identity const& id) noexcept {
        return waiting_counts_[(id.index * 31 + std::uint64_t{id.channel} * 7 + id.group) % waiting_counts_.size()];
    }
    void push_urgent(frame_header header, const_bytes payload) noexcept {
        header.word = urgent_checksum(payload);
        push(header, payload);
    }
    void push(frame_header header, const_bytes payload) noexcept {
        header.payload = static_cast<std::uint32_t>(payload.size());
        header.sequence = sequence_++;
        header.consumed = reported_ = consumed_;
        header.seal(key_);
        slots_[(first_ + count_++) % slots_.size()] = {header, payload.data(), nullptr};
        ahead_ += sizeof(frame_header) + payload.size();
    }
    void keep_only_started() noexcept {
        if (written_ == 0) {
            if (count_ != 0) sequence_ = slots_[first_].header.sequence;
            count_ = ahead_ = 0;
            beating_ = false;
            return;
        }
        slot& s = slots_[first_];
        std::size_t const left = sizeof(frame_header) + s.header.payload - written_;
        if (s.header.type == frame_type::data && s.header.payload != 0) {
            std::memcpy(copy_.get(), s.payload, s.header.payload);
            s.payload = copy_.get();
        }
        s.ends = nullptr;
        sequence_ = s.header.sequence + 1;
        count_ = 1;
        ahead_ = left;
        if (s.header.type != frame_type::heartbeat) beating_ = false;
    }

    std::uint64_t key_;
    bool checked_;
    std::uint32_t credit_;  // blocks that the peer keeps for early messages of this rank
    Sum sum_;

    completion_list fresh_;    // posted, not processed yet
    completion_list waiting_;  // requested, not cleared
    std::array<std::uint32_t, 256> waiting_counts_{};
    completion_list cleared_;  // may be sent regardless of credit
    completion_list sending_;  // at least the first frame is sealed; the last message of it is current_
    completion* current_ = nullptr;
    bool current_exempt_ = false;

    std::array<slot, max_buffers / 2> slots_;
    std::size_t first_ = 0, count_ = 0;
    std::size_t written_ = 0;  // bytes of the first slot that are out
    std::size_t ahead_ = 0;    // bytes sealed, not out
    std::uint32_t sequence_ = 0;

    std::uint32_t spent_ = 0, returned_ = 0;     // this rank's blocks at the peer, modulo 2^32
    std::uint32_t consumed_ = 0, reported_ = 0;  // the peer's blocks here
    std::uint64_t serials_ = 0;
    std::vector<std::uint64_t> clears_;
    std::size_t clears_head_ = 0;

    bool beat_due_ = false, beating_ = false, goodbye_due_ = false;
    bool ended_ = false;  // end_all was called: the peer may still clear requests that have ended
    bool aborted_ = false, abort_due_ = false, aborting_ = false;
    mark mark_;
    failure record_, sent_record_;
    std::vector<int> losses_;      // to be reported to the peer
    std::vector<relayed> relays_;  // to be passed on, at most one a rank
    relayed sent_relay_ = {};
    bool relaying_ = false;  // sent_relay_ is being written
    /// Of a frame that abort() finds half written. Reserved here: at that moment there may be no memory.
    std::unique_ptr<std::byte[]> copy_ = std::make_unique_for_overwrite<std::byte[]>(frame_payload_bytes);
};

}  // namespace ddp
