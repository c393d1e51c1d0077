/// \file
/// liveness: heartbeats and marks over MPI, when they are due, and which ranks are late.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/transport/mpi/mpi_envelope.hpp>

namespace ddp::detail::mpi {

/// Makes no MPI calls: the transport reports arrivals and sends to it. A peer that has never sent a heartbeat is never
/// late, because its MPI may not allow a thread that sends them.
class liveness {
public:
    liveness(std::size_t ranks, timing const& times) : times_(times), peers_(ranks) {}

    /// Sets what this rank's heartbeats report as entered.
    void entered(mark const& last) noexcept { mark_ = last; }
    /// When the next heartbeat is due.
    [[nodiscard]] time_point due() const noexcept { return due_; }
    /// Whether heartbeats are due; the next are after another timing.heartbeat. Call it often: after a long interval
    /// between calls, this process is taken to have been stopped, and no peer is late.
    [[nodiscard]] bool has_come(time_point at) noexcept {
        if (at - std::exchange(asked_, at) > times_.dead / 2)
            for (peer& p : peers_) p.heard = at;
        if (at < due_) return false;
        due_ = at + times_.heartbeat;
        return true;
    }

    /// Of a rank that sends no heartbeats: whether it is to tell its peers what it has entered, since it has waited in that
    /// for timing.heartbeat and has not said so before. Call it while waiting; `moved`: something has arrived or ended.
    [[nodiscard]] bool is_to_tell(time_point at, bool moved) noexcept {
        bool const waited = at - std::exchange(asked_, at) < times_.heartbeat / 4;
        if (moved || !waited) waits_since_ = at;
        bool const told =
            told_.same_group(mark_) && told_.number == mark_.number && told_.fingerprint == mark_.fingerprint;
        if (told || at - waits_since_ < times_.heartbeat) return false;
        told_ = mark_;
        return true;
    }

    /// Something has arrived from a peer, at the time of the last has_come().
    void heard(int from) noexcept { of(from).heard = asked_; }
    /// Processes a heartbeat or a mark.
    void heard(int from, envelope const& what) noexcept {
        peer& p = of(from);
        p.beats = p.beats || what.kind == envelope_kind::heartbeat;
        p.said.group = what.id.group;
        p.said.leader = static_cast<std::int32_t>(what.id.channel);
        p.said.number = what.id.index;
        p.said.fingerprint = what.fingerprint;
        p.said.occupied = what.length;
        std::memcpy(p.said.name.chars.data(), what.body.data(), sizeof p.said.name.chars);
    }
    /// Writes the next heartbeat or mark to a peer, and returns the number of its bytes after the head. Once it has been
    /// sent, call has_gone().
    std::size_t write(int to, envelope_kind kind, envelope& what) noexcept {
        of(to).under_way = true;
        what.kind = kind;
        what.id = {.group = mark_.group, .channel = static_cast<std::uint32_t>(mark_.leader), .index = mark_.number};
        what.fingerprint = mark_.fingerprint;
        what.payload = 0;
        what.length = mark_.occupied;
        std::memcpy(what.body.data(), mark_.name.chars.data(), sizeof mark_.name.chars);
        return sizeof mark_.name.chars;
    }
    void has_gone(int to) noexcept { of(to).under_way = false; }
    /// Whether the last heartbeat to this peer is still being sent, for example because the peer does not run.
    [[nodiscard]] bool under_way(int to) const noexcept { return of(to).under_way; }

    /// Whether this peer sends heartbeats, and whether it should have sent one by now.
    [[nodiscard]] bool beats(int who) const noexcept { return of(who).beats; }
    [[nodiscard]] bool late(int who, time_point at) const noexcept {
        return of(who).beats && at - of(who).heard >= times_.dead;
    }
    [[nodiscard]] time_point last_heard(int who) const noexcept { return of(who).heard; }
    [[nodiscard]] mark const& mark_of(int who) const noexcept { return of(who).said; }

private:
    struct peer {
        bool beats = false, under_way = false;
        time_point heard = {};
        mark said = {};
    };
    [[nodiscard]] peer& of(int rank) noexcept { return peers_[static_cast<std::size_t>(rank)]; }
    [[nodiscard]] peer const& of(int rank) const noexcept { return peers_[static_cast<std::size_t>(rank)]; }

    timing times_;
    std::vector<peer> peers_;
    mark mark_;
    time_point asked_ = {}, due_ = {}, waits_since_ = {};
    mark told_;  // what peers were told last
};

}  // namespace ddp::detail::mpi
