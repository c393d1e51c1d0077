/// \file
/// liveness: heartbeats and marks over MPI, when they are due, and which ranks are late.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/text.hpp>
#include <ddp/transport/mpi/mpi_envelope.hpp>
#include <ddp/transport/silences.hpp>

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
        nanoseconds const since = at - std::exchange(asked_, at);
        if (since > std::max(times_.suspect, 3 * times_.heartbeat) / 2) listens_from_ = at;
        if (since > times_.dead / 2)
            for (peer& p : peers_) p.heard = at;
        if (at < due_) return false;
        due_ = at + times_.heartbeat;
        lines_left_ = 8;
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
    void heard(int from) noexcept {
        of(from).heard = asked_;
        of(from).silent.end();
    }
    /// Processes a heartbeat or a mark.
    void heard(int from, envelope const& what) noexcept {
        peer& p = of(from);
        p.beats = p.beats || what.kind == envelope_kind::heartbeat;
        p.said.group = what.id.group;
        p.said.leader = static_cast<std::int32_t>(what.id.channel);
        p.said.number = what.id.index;
        p.said.fingerprint = what.fingerprint;
        p.said.occupied = what.length;
        std::memcpy(bytes_of(p.said).last<mark::text_bytes>().data(), what.body.data(), mark::text_bytes);
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
        std::memcpy(what.body.data(), bytes_of(mark_).last<mark::text_bytes>().data(), mark::text_bytes);
        return mark::text_bytes;
    }
    void has_gone(int to) noexcept { of(to).under_way = false; }
    /// Whether the last heartbeat to this peer is still being sent, for example because the peer does not run.
    [[nodiscard]] bool under_way(int to) const noexcept { return of(to).under_way; }

    /// Whether this peer sends heartbeats.
    [[nodiscard]] bool beats(int who) const noexcept { return of(who).beats; }
    /// Whether this peer, which does, should have sent one by now. Prints a line if it has been silent for timing.suspect and
    /// this rank is to say so (see silences): eight in one heartbeat interval at most.
    [[nodiscard]] bool is_late(int rank, int who, std::string_view process, time_point at) {
        if (at - of(who).heard >= times_.dead) return true;
        if (rank != teller_of(who)) return false;
        std::string const line = of(who).silent.told(rank, who, process, at, of(who).heard, listens_from_, times_);
        if (!line.empty() && lines_left_-- > 0) print_if_ready(line);
        return false;
    }
    [[nodiscard]] time_point last_heard(int who) const noexcept { return of(who).heard; }
    [[nodiscard]] mark const& mark_of(int who) const noexcept { return of(who).said; }

private:
    struct peer {
        bool beats = false, under_way = false;
        time_point heard = {};
        mark said = {};
        silences silent;
    };
    [[nodiscard]] peer& of(int rank) noexcept { return peers_[static_cast<std::size_t>(rank)]; }
    [[nodiscard]] peer const& of(int rank) const noexcept { return peers_[static_cast<std::size_t>(rank)]; }

    timing times_;
    std::vector<peer> peers_;
    int lines_left_ = 0;
    mark mark_;
    time_point asked_ = {}, due_ = {}, waits_since_ = {}, listens_from_ = {};
    mark told_;  // what peers were told last
};

}  // namespace ddp::detail::mpi
