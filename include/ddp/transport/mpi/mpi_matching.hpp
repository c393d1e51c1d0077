/// \file
/// Receives that wait for their envelope, and envelopes that wait for their receive.
#pragma once

#include <array>
#include <cstddef>

#include <ddp/comm/transport.hpp>
#include <ddp/transport/mpi/mpi_envelope.hpp>

namespace ddp::detail::mpi {

/// Matches by (peer, identity), in order. Allocates nothing; a look-up walks one of 256 lists.
class match_table {
public:
    void wait(completion& receive) noexcept { at(receive.peer, receive.tag.id).receives.push_back(receive); }
    void keep(slot& early) noexcept {
        list& in = at(early.peer, early.what.id);
        (in.first != nullptr ? in.last->next : in.first) = &early;
        in.last = &early;
    }

    /// Removes and returns the receive that has waited longest for this; null if there is none.
    [[nodiscard]] completion* take_receive(int peer, identity const& id) noexcept {
        completion_list& receives = at(peer, id).receives;
        for (completion* node = receives.front(); node != nullptr; node = node->next) {
            if (node->peer != peer || node->tag.id != id) continue;
            receives.erase(*node);
            return node;
        }
        return nullptr;
    }
    /// Removes and returns the envelope that arrived first; null if there is none.
    [[nodiscard]] slot* take_early(int peer, identity const& id) noexcept {
        list& in = at(peer, id);
        slot* before = nullptr;
        for (slot* early = in.first; early != nullptr; before = early, early = early->next) {
            if (early->peer != peer || early->what.id != id) continue;
            (before != nullptr ? before->next : in.first) = early->next;
            if (in.last == early) in.last = before;
            return early;
        }
        return nullptr;
    }

    /// Removes every receive from `peer`, and calls end(completion&) with each.
    template <class End>
    void end_receives(int peer, End const& end) {
        for (list& in : lists_)
            for (completion* node = in.receives.front(); node != nullptr;) {
                completion* const next = node->next;
                if (node->peer == peer) {
                    in.receives.erase(*node);
                    end(*node);
                }
                node = next;
            }
    }
    void drop_early(slot_pool& pool) noexcept {
        for (list& in : lists_)
            while (slot* const unread = in.first) {
                in.first = unread->next;
                pool.give_back(*unread);
            }
    }

private:
    struct list {
        completion_list receives;
        slot* first = nullptr;  // early envelopes
        slot* last = nullptr;
    };
    [[nodiscard]] list& at(int peer, identity const& id) noexcept {
        return lists_[static_cast<std::size_t>(hash_of(peer, id)) % lists_.size()];
    }

    std::array<list, 256> lists_;
};

}  // namespace ddp::detail::mpi
