/// \file
/// The receiving half of a framed connection: reads straight into posted memory, matches, and keeps early messages.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/transport/framed/frame_checksum.hpp>
#include <ddp/transport/framed/frame_early.hpp>
#include <ddp/transport/framed/frame_header.hpp>
#include <ddp/transport/framed/frame_outbox.hpp>
#include <ddp/transport/framed/frame_requests.hpp>
#include <ddp/transport/framed/frame_urgent.hpp>

namespace ddp {

/// Parses one direction of a stream. plan() guesses what comes next (the rest of this message, then the oldest posted
/// receives), so that one scattered read puts headers and payloads where they belong; took() checks the guess and moves
/// bytes that a heartbeat or another message has shifted. Does not trust its input: lengths are checked before memory
/// is used.
template <Checksum Sum>
class frame_inbox {
public:
    static constexpr std::size_t max_segments = 16;
    static constexpr std::size_t read_ahead =
        frame_payload_bytes;  // bytes asked for beyond the frame that is being read

    /// The largest plan, which is what a wrong guess may have to move.
    static constexpr std::size_t max_read = 2 * frame_payload_bytes + read_ahead + max_segments * sizeof(frame_header);

    frame_inbox(std::uint64_t key, bool checked, std::uint32_t credit_blocks, frame_outbox<Sum>& out)
        : key_(key), checked_(checked), early_(credit_blocks), out_(out) {}

    /// Matches at once with messages that are here already; operations that end are moved to `done`.
    void post(completion& node, completion_list& done) {
        node.state = unbound;
        if (std::uint32_t const message = early_.find(node.tag.id); message != early_store::none)
            return take_early(node, message, done);
        if (auto const serial = requests_.take(node.tag.id)) {
            out_.clear_to_send(*serial);
            node.state = bound;
        }
        posted_.push_back(node);
    }

    /// Returns the receive if a guess may write to it, because no send still reads its memory; otherwise null.
    [[nodiscard]] static completion* guess(completion* node) noexcept {
        return node != nullptr && node->read_elsewhere() ? nullptr : node;
    }

    /// Where to read to next. Returns the number of buffers, none of them empty.
    std::size_t plan(std::span<mutable_bytes, max_segments> list, mutable_bytes staging) noexcept {
        planned_ = 0;
        staging = staging.first(std::min(staging.size(), frame_payload_bytes));
        if (discards_input_) return add(list, kind::raw, staging);
        completion* node = sink_ == sink::node ? node_ : nullptr;
        std::size_t at = node != nullptr ? node->moved : 0;
        if (payload_left_ != 0) {
            if (sink_ != sink::node) return add(list, kind::raw, staging);
            add(list, kind::payload, {node->data + at, payload_left_});
            at += payload_left_;
            if (at == node->size) {
                node = guess(posted_.front());
                at = 0;
            }
            add(list, kind::header, ahead(0));
        } else {
            add(list, kind::header, std::span(header_bytes_).subspan(header_have_));
            if (!in_message_) node = guess(posted_.front());
        }
        std::size_t total = 0;
        for (std::size_t k = 1; node != nullptr && total < read_ahead && planned_ + 2 <= max_segments; ++k) {
            if (std::size_t const size = std::min(frame_payload_bytes, node->size - at); size != 0) {
                add(list, kind::payload, {node->data + at, size});
                at += size;
                total += size;
            }
            if (at == node->size) {
                node = guess(node == node_ ? posted_.front() : node->next);
                at = 0;
            }
            add(list, kind::header, ahead(k));
        }
        if (total < read_ahead && planned_ < max_segments) add(list, kind::raw, staging);
        return planned_;
    }

    /// `bytes` were read by the last plan. Messages that are complete move to `done`. `spill` has max_read bytes.
    void took(std::size_t bytes, mutable_bytes spill, completion_list& done) {
        for (std::size_t i = 0; i < planned_ && bytes != 0; ++i) {
            segment const& s = segments_[i];
            std::size_t const n = std::min(bytes, s.where.size());
            if (discards_input_) return;
            if (!expected(s)) {
                std::size_t moved = 0;
                for (; i < planned_ && bytes != 0; ++i) {
                    std::size_t const part = std::min(bytes, segments_[i].where.size());
                    std::memcpy(spill.data() + moved, segments_[i].where.data(), part);
                    moved += part;
                    bytes -= part;
                }
                return consume(spill.first(moved), done);
            }
            bytes -= n;
            if (s.is == kind::raw) {
                consume(s.where.first(n), done);
            } else if (s.is == kind::payload) {
                if (checked_) sum_.update(s.where.first(n));
                node_->moved += n;
                advance(n, done);
            } else {
                if (s.where.data() != header_bytes_.data() + header_have_)
                    std::memcpy(header_bytes_.data(), s.where.data(), n);
                header_have_ += n;
                if (header_have_ == sizeof(frame_header)) header(done);
            }
        }
    }

    /// From now on bytes are read and thrown away, and no posted memory is touched.
    void discard_input() noexcept { discards_input_ = true; }
    /// From now on payloads of messages are thrown away; urgent frames still count.
    void discard_messages() noexcept {
        forget_message();
        discarding_ = true;
    }
    void end_all(op_status status, completion_list& ended) noexcept {
        if (node_ != nullptr) forget_message();
        while (completion* const node = posted_.pop_front()) {
            node->status = status;
            ended.push_back(*node);
        }
    }

    /// Bytes of the largest message that is arriving or that a posted receive waits for; 0: there is none.
    [[nodiscard]] std::size_t largest_awaited() const noexcept {
        std::size_t most = in_message_ ? static_cast<std::size_t>(message_.length) : 0;
        for (completion const* node = posted_.front(); node != nullptr; node = node->next)
            most = std::max(most, node->size);
        return most;
    }
    /// Blocks of early memory given back so far.
    [[nodiscard]] std::uint32_t consumed() const noexcept { return consumed_; }
    /// Empty, or the reason why the bytes were not written by this library.
    [[nodiscard]] std::string_view error() const noexcept { return error_; }
    [[nodiscard]] std::uint32_t frames() const noexcept { return sequence_; }
    [[nodiscard]] bool said_goodbye() const noexcept { return urgent_.said_goodbye(); }
    [[nodiscard]] bool in_frame() const noexcept { return header_have_ != 0 || payload_left_ != 0 || in_message_; }
    [[nodiscard]] mark const& last_mark() const noexcept { return urgent_.last_mark(); }
    /// The peer's record, once for each that arrives.
    [[nodiscard]] bool take_record(failure& record) noexcept { return urgent_.take_record(record); }
    /// What the peer has reported about other ranks since the last call.
    [[nodiscard]] std::vector<word_of_peer> take_words() noexcept { return urgent_.take_words(); }
    /// Whether a complete message of this identity is here: it can be received although its sender has gone.
    [[nodiscard]] bool has_complete(identity const& id) const noexcept {
        std::uint32_t const message = early_.find(id);
        return message != early_store::none && early_.at(message).received == early_.at(message).length &&
               message != early_message_;
    }

private:
    enum class kind : std::uint8_t { header, payload, raw };
    enum class sink : std::uint8_t { node, early, urgent, nowhere };
    enum : std::uint8_t { unbound, bound };  // completion::state: whether its sender has been cleared
    struct segment {
        kind is;
        mutable_bytes where;
    };

    std::size_t add(std::span<mutable_bytes, max_segments> list, kind is, mutable_bytes where) noexcept {
        segments_[planned_] = {is, where};
        list[planned_] = where;
        return ++planned_;
    }
    [[nodiscard]] mutable_bytes ahead(std::size_t k) noexcept {
        return std::span(ahead_bytes_).subspan(k * sizeof(frame_header), sizeof(frame_header));
    }
    [[nodiscard]] bool expected(segment const& s) const noexcept {
        if (s.is == kind::raw) return true;
        if (s.is == kind::header) return payload_left_ == 0 && s.where.size() == sizeof(frame_header) - header_have_;
        return payload_left_ == s.where.size() && sink_ == sink::node && s.where.data() == node_->data + node_->moved;
    }
    void fail(std::string_view why) noexcept {
        error_ = why;
        discard_input();
    }

    /// The rest of the arriving message is discarded. Its receive is posted again, so that end_all() finds it.
    void forget_message() noexcept {
        if (node_ != nullptr) posted_.push_back(*node_);
        (sink_ == sink::urgent ? resume_ : sink_) = sink::nowhere;
        node_ = nullptr;
        early_message_ = early_store::none;
    }
    void consume(const_bytes bytes, completion_list& done) {
        while (!bytes.empty() && !discards_input_) {
            if (payload_left_ == 0) {
                std::size_t const n = std::min(bytes.size(), sizeof(frame_header) - header_have_);
                std::memcpy(header_bytes_.data() + header_have_, bytes.data(), n);
                header_have_ += n;
                bytes = bytes.subspan(n);
                if (header_have_ == sizeof(frame_header)) header(done);
                continue;
            }
            const_bytes const piece = bytes.first(std::min<std::size_t>(bytes.size(), payload_left_));
            bytes = bytes.subspan(piece.size());
            if (checked_ && frame_.type == frame_type::data) sum_.update(piece);
            if (sink_ == sink::node) {
                std::memcpy(node_->data + node_->moved, piece.data(), piece.size());
                node_->moved += piece.size();
            } else if (sink_ == sink::early) {
                early_.append(early_message_, piece);
            } else if (sink_ == sink::urgent) {
                urgent_.take(frame_.payload - payload_left_, piece);
            }
            advance(piece.size(), done);
        }
    }

    void header(completion_list& done) {
        header_have_ = 0;
        std::memcpy(&frame_, header_bytes_.data(), sizeof frame_);
        if (!frame_.intact(key_)) return fail("a header fails its check");
        if (frame_.sequence != sequence_) return fail("a frame is missing, doubled or out of order");
        ++sequence_;
        if (urgent_.said_goodbye()) return fail("a frame after goodbye");
        if (!out_.returned(frame_.consumed)) return fail("credit is given back that was never used");
        if (frame_.type == frame_type::data) return data_header(done);
        if (frame_.flags != 0) return fail("an urgent frame has flags");
        std::size_t const size = frame_urgent::size_of(frame_.type);
        if (frame_.payload != size) return fail("an urgent frame has another length than its type");
        resume_ = sink_;
        sink_ = sink::urgent;
        payload_left_ = frame_.payload;
        if (size == 0) urgent_complete();
    }

    void data_header(completion_list& done) {
        bool const begins = (frame_.flags & frame_header::begins) != 0;
        if (begins == in_message_) return fail("a message is cut short, or continues without a beginning");
        if (((frame_.flags & frame_header::has_sum) != 0) != checked_)
            return fail(checked_ ? "a frame without a checksum" : "a frame with a checksum that was not agreed on");
        if (begins) {
            message_ = frame_;
            message_received_ = 0;
        } else if (frame_.id != message_.id || frame_.length != message_.length ||
                   ((frame_.flags ^ message_.flags) & frame_header::exempt) != 0) {
            return fail("a frame of another message inside a message");
        }
        if (frame_.payload != std::min<std::uint64_t>(frame_payload_bytes, message_.length - message_received_))
            return fail("a frame of impossible length");
        if (begins && !begin_message(done)) return;
        if (checked_) sum_.reset();
        payload_left_ = frame_.payload;
        if (payload_left_ == 0) frame_complete(done);
    }

    bool begin_message(completion_list& done) {
        in_message_ = true;
        sink_ = sink::nowhere;
        if (discarding_) return true;
        bool const exempt = (message_.flags & frame_header::exempt) != 0;
        completion* node = posted_.front();
        while (node != nullptr && (node->tag.id != message_.id || (node->state == bound) != exempt)) node = node->next;
        std::uint32_t const cost = early_store::blocks_for(message_.length);
        if (exempt) {
            if (node == nullptr) return fail("a message was sent without permission"), false;
        } else {
            if (cost > early_.capacity() - (spent_ - consumed_))
                return fail("the peer exceeds its credit for early messages"), false;
            spent_ += cost;
        }
        if (node == nullptr) {
            early_message_ = early_.open(message_.id, message_.fingerprint, message_.length);
            sink_ = sink::early;
            return true;
        }
        posted_.erase(*node);
        if (!exempt) consumed_ += cost;
        accept(*node, message_.fingerprint, message_.length, done);
        return true;
    }
    /// The message that is arriving belongs to this receive; one of another length ends it.
    void accept(completion& node, std::uint64_t fingerprint, std::uint64_t length, completion_list& done) noexcept {
        node.fingerprint = fingerprint;
        node.length = length;
        if (length != node.size) {
            node.status = op_status::length;
            done.push_back(node);
            sink_ = sink::nowhere;
        } else {
            node_ = &node;
            sink_ = sink::node;
        }
    }
    void take_early(completion& node, std::uint32_t message, completion_list& done) noexcept {
        early_store::block const& head = early_.at(message);
        bool const arriving = in_message_ && message == early_message_;
        std::uint64_t const received = head.received;
        consumed_ += early_store::blocks_for(head.length);
        sink const before = sink_;
        node.moved = static_cast<std::size_t>(received);
        node.fingerprint = head.fingerprint;
        node.length = head.length;
        bool const fits = head.length == node.size;
        early_.take(message, fits ? node.data : nullptr);
        if (!arriving) {
            node.status = fits ? op_status::ok : op_status::length;
            done.push_back(node);
            return;
        }
        early_message_ = early_store::none;
        accept(node, node.fingerprint, node.length, done);
        if (before == sink::urgent) {  // an urgent frame is arriving inside the message: it goes on after it
            resume_ = sink_;
            sink_ = sink::urgent;
        }
    }

    void advance(std::size_t bytes, completion_list& done) {
        payload_left_ -= static_cast<std::uint32_t>(bytes);
        if (payload_left_ != 0) return;
        if (sink_ == sink::urgent && frame_.type != frame_type::data)
            urgent_complete();
        else
            frame_complete(done);
    }
    void frame_complete(completion_list& done) {
        if (checked_ && sum_.value() != frame_.word) return fail("a payload fails its checksum");
        message_received_ += frame_.payload;
        if (message_received_ != message_.length) return;
        in_message_ = false;
        if (sink_ == sink::node) {
            node_->status = op_status::ok;
            done.push_back(*node_);
            node_ = nullptr;
        }
        early_message_ = early_store::none;
        sink_ = sink::nowhere;
    }

    void urgent_complete() {
        sink_ = resume_;
        if (std::string_view const why = urgent_.complete(frame_, in_message_); !why.empty()) return fail(why);
        if (frame_.type == frame_type::request) requested();
        if (frame_.type == frame_type::clear && !out_.cleared(frame_.word))
            fail("permission is given for a message that did not ask for it");
    }
    void requested() {
        if (discarding_) return;
        completion* node = posted_.front();
        while (node != nullptr && (node->tag.id != frame_.id || node->state == bound)) node = node->next;
        if (node != nullptr) {
            out_.clear_to_send(frame_.word);
            node->state = bound;
        } else if (!requests_.keep(frame_.id, frame_.word)) {
            fail("too many messages wait for their receives");
        }
    }

    std::uint64_t key_;
    bool checked_;
    early_store early_;
    frame_outbox<Sum>& out_;
    Sum sum_;

    completion_list posted_;  // in posting order
    frame_requests requests_;

    std::array<std::byte, sizeof(frame_header)> header_bytes_;
    std::size_t header_have_ = 0;
    frame_header frame_;
    std::uint32_t payload_left_ = 0;  // of the frame
    std::uint32_t sequence_ = 0;
    frame_header message_;  // the first header of the message that is arriving
    std::uint64_t message_received_ = 0;
    bool in_message_ = false;
    sink sink_ = sink::nowhere, resume_ = sink::nowhere;
    completion* node_ = nullptr;  // the receive that the arriving message fills
    std::uint32_t early_message_ = early_store::none;
    frame_urgent urgent_;

    std::uint32_t spent_ = 0, consumed_ = 0;  // the peer's blocks here, modulo 2^32
    std::array<segment, max_segments> segments_;
    std::size_t planned_ = 0;
    std::array<std::byte, max_segments * sizeof(frame_header)> ahead_bytes_;

    bool discards_input_ = false, discarding_ = false;
    std::string_view error_;
};

}  // namespace ddp
