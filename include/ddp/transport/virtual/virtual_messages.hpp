/// \file
/// Messages and channels of a virtual world, and the pools that they come from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ddp/comm/transport.hpp>

namespace ddp::detail::virtual_net {

inline constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();

struct message {
    completion* sender = nullptr;  // null: it has completed, or was withdrawn
    std::vector<std::byte> copy;   // of an early message; keeps its capacity
    std::uint64_t fingerprint = 0;
    std::size_t size = 0;
    identity id;
    time_point sent;  // its last byte has left the card
    std::uint32_t next = none;
    int from = -1, to = -1;
    bool stored = false;  // the bytes are in `copy`
};

/// Messages by number; those that have ended are reused. A sender's node holds its message's number in `moved`.
class message_pool {
public:
    [[nodiscard]] message& operator[](std::size_t index) noexcept { return messages_[index]; }
    [[nodiscard]] std::uint32_t take() {
        if (free_ == none) {
            messages_.emplace_back();
            return static_cast<std::uint32_t>(messages_.size() - 1);
        }
        std::uint32_t const index = free_;
        free_ = std::exchange(messages_[index].next, none);
        return index;
    }
    void drop(std::uint32_t index) noexcept {
        message& m = messages_[index];
        if (m.sender != nullptr) m.sender->moved = none;
        m.sender = nullptr;
        m.stored = false;
        m.next = std::exchange(free_, index);
    }
    /// Removes the sender's node from the message that carries it, if any does.
    void withdraw(completion const& send) noexcept {
        if (send.moved != none) messages_[send.moved].sender = nullptr;
    }

private:
    std::deque<message> messages_;
    std::uint32_t free_ = none;
};

struct channel_key {
    int peer;
    identity id;
    bool operator==(channel_key const&) const = default;
};
struct channel_hash {
    std::size_t operator()(channel_key const& k) const noexcept {
        return static_cast<std::size_t>(hash_of(k.peer, k.id));
    }
};
/// Messages of one identity from one peer, seen from the receiver.
struct channel {
    completion_list receives;                 // without a message yet
    std::uint32_t first = none, last = none;  // messages that arrived before their receive
    std::uint32_t under_way = 0;
    time_point latest = {};  // arrival of the last one sent
    [[nodiscard]] bool idle() const noexcept { return receives.empty() && first == none && under_way == 0; }
};
using channel_map = std::unordered_map<channel_key, channel, channel_hash>;

/// Nodes of channel maps for reuse: a channel lives as long as something waits in it.
class channel_pool {
public:
    channel_map::iterator find_or_make(channel_map& in, int peer, identity const& id) {
        channel_key const key{peer, id};
        auto const found = in.find(key);
        if (found != in.end()) return found;
        if (spare_.empty()) return in.try_emplace(key).first;
        channel_map::node_type node = std::move(spare_.back());
        spare_.pop_back();
        node.key() = key;
        node.mapped() = {};
        return in.insert(std::move(node)).position;
    }
    void release(channel_map& in, channel_map::iterator c) {
        if (c->second.idle()) spare_.push_back(in.extract(c));
    }

private:
    std::vector<channel_map::node_type> spare_;
};

}  // namespace ddp::detail::virtual_net
