/// \file
/// mpi_transport: ranks are the processes of an MPI communicator.
///
/// Protocol. Everything starts with an *envelope* (at most 1,024 bytes, tag 0): identity, fingerprint, length, and the
/// bytes themselves where they fit. MPI's non-overtaking rule makes the envelopes from one rank an ordered stream; the
/// receiver always has receives posted for it, empties it in that order and matches identities itself, so any identity
/// is possible and none delays another. A longer message follows as raw bytes under a tag of its own that its envelope
/// names, in pieces below 2^31: the receiver posts them directly into the user's memory once it knows that the lengths
/// agree, otherwise into a buffer that is discarded. GOODBYE and ABORT are envelopes too: they arrive after everything
/// that was sent before them, and nothing delays them, because envelopes are always received. MPI tags made of
/// (channel, index), with the payload posted in advance, would not work: a tag cannot hold an identity, so two
/// identities may share one, and a message of the wrong length would be written to, or cut off in, memory that belongs
/// to another message. Nor would Boost.Serialization: its receives allocate a handler for each message, and its counts
/// are int.
///
/// Threads. Below MPI_THREAD_MULTIPLE every call except wake() must come from the thread that calls MPI (below
/// MPI_THREAD_SERIALIZED, the main thread), and may_own_thread() is false.
///
/// Memory. MPI cannot cancel a matched message. Posted memory must therefore stay alive until the transport is destroyed, even
/// if abort() or a peer's departure has ended the operation early; the contract of Transport allows this exception. After a
/// failure, blocking calls wait up to timing.verdict for still_writes() to become false before they throw.
///
/// Failure. When a rank is killed, mpirun ends the whole job before any peer notices, unless MPI has ULFM
/// (mpi_failures.hpp): then that peer is closed. Other errors that MPI returns become ddp::error, or close the peer
/// concerned. At MPI_THREAD_MULTIPLE ranks send heartbeats every timing.heartbeat, with what they have entered; a rank
/// that has sent one and then nothing for timing.dead is overdue. Below that level there are no heartbeats, because a
/// rank could send none while its program computes; a rank that has waited for timing.heartbeat tells its peers once what it has
/// entered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <ddp/comm/host.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/transport/mpi/mpi_envelope.hpp>
#include <ddp/transport/mpi/mpi_failures.hpp>
#include <ddp/transport/mpi/mpi_liveness.hpp>
#include <ddp/transport/mpi/mpi_matching.hpp>
#include <ddp/transport/mpi/mpi_requests.hpp>
#include <ddp/transport/mpi/mpi_session.hpp>
#include <ddp/transport/mpi/mpi_waiter.hpp>
#include <ddp/transport/shm/memfd.hpp>

#include <mpi.h>
#include <boost/mpi/communicator.hpp>

namespace ddp {

/// Options of mpi_transport.
struct mpi_options {
    timing times = {};  ///< time limits; `join` is that of construction, `shutdown` that of destruction
    /// Bytes. Longer messages are sent in pieces of this size, the same on every rank; at most INT_MAX, the largest MPI count.
    std::size_t piece_bytes = std::size_t{256} << 20;
    /// A number for this rank's host, so that one machine can stand for several: ranks with equal numbers share a host. 0:
    /// that of the machine.
    std::uint64_t host = 0;
};

/// One rank of an MPI job, over a duplicate of the user's communicator, so that messages of the library and of the
/// program never match each other.
///
/// Construction  collective over the communicator: two small collective calls, each limited by times.join. MPI cannot
///               cancel one that has timed out; end the job in this case.
/// Cost          one MPI message up to 984 bytes, two above. Nothing is allocated once as many operations have been in
///               flight as the program ever needs. A message that arrives before its receive takes 1 KiB here, with
///               contents of up to 984 bytes; longer contents stay with MPI until the receive is posted.
/// Order         as the contract of Transport says; of two messages of one identity, the second may complete first if it
///               is shorter.
/// Destruction   says goodbye and waits for the goodbyes of all ranks, for at most times.shutdown. Must come before
///               MPI_Finalize: after that, it cannot tell its peers, which then wait until their time limit.
/// Throws        ddp::error (DDP-E202) with MPI's message if MPI returns an error. The constructor: ddp::error if other ranks
///               do not make a transport within times.join (DDP-E201), or if their builds or piece_bytes differ (DDP-E205);
///               usage_error if MPI has not been initialised, or not for this thread, if `users` is no intracommunicator of
///               this process, or if options make no sense. Posting: usage_error if the peer is not another rank.
class mpi_transport {
public:
    static constexpr std::string_view name = "mpi";

    /// `users` may also be a boost::mpi::communicator, which converts to MPI_Comm.
    explicit mpi_transport(MPI_Comm users, mpi_options const& options = {});
    mpi_transport(mpi_transport const&) = delete;
    mpi_transport& operator=(mpi_transport const&) = delete;
    ~mpi_transport();

    [[nodiscard]] int rank() const noexcept { return self_.rank; }
    [[nodiscard]] int size() const noexcept { return self_.size; }
    [[nodiscard]] time_point now() const { return monotonic_clock::now(); }
    [[nodiscard]] std::span<report const> reports() const noexcept { return reports_; }
    /// Whether MPI was initialised at MPI_THREAD_MULTIPLE.
    [[nodiscard]] bool may_own_thread() const noexcept { return self_.level == MPI_THREAD_MULTIPLE; }
    /// Whether this host has fewer than two cores for each of its ranks: one that computes, and one for a thread that waits by
    /// polling.
    [[nodiscard]] bool shares_cores() const noexcept { return shares_cores_; }
    /// Whether MPI may still write to posted memory.
    [[nodiscard]] bool still_writes() const noexcept { return session_->requests.receives(); }

    void post_send(int peer, tag what, const_bytes out, completion& done);
    void post_receive(int peer, tag what, mutable_bytes in, completion& done);
    bool progress(time_point until);
    void abort(failure const& record);
    void wake() { waiter_.wake(); }

    /// The number of this rank's host (see host_of).
    [[nodiscard]] std::uint64_t host() const noexcept { return options_.host; }
    /// See SharingTransport.
    [[nodiscard]] static std::unique_ptr<memory_sharing> share_memory() { return std::make_unique<memfd_sharing>(); }

    /// When progress() has to run next even if no call waits.
    [[nodiscard]] time_point next_timer() const noexcept { return beats() ? life_.due() : never; }
    /// "pid 4711 on node3", its host as MPI names it.
    [[nodiscard]] std::string_view process_of(int rank) const noexcept { return session_->process_of(rank); }
    /// Sets what this rank's heartbeats report as entered.
    void entered(mark const& last) noexcept { life_.entered(last); }
    /// What this peer has reported last, by a heartbeat or while it waited.
    [[nodiscard]] mark const& mark_of(int peer) const { return life_.mark_of(peer); }
    /// When anything last arrived from this peer, or this process last continued after being stopped.
    [[nodiscard]] time_point last_heard(int peer) const {
        return life_.beats(peer) ? life_.last_heard(peer) : time_point{};  // none: it sends no heartbeats
    }
    /// The lowest rank that has sent heartbeats and then nothing for timing.dead, if there is one.
    [[nodiscard]] std::optional<int> overdue_peer() const noexcept {
        return overdue_ < 0 || !watched(overdue_) ? std::nullopt : std::optional<int>(overdue_);
    }

    /// A communicator of the ranks of group `id`, for MPI calls other than the transport's: the receives that are always
    /// posted on the transport's would slow down each call by 0.1 us. The first call for a group is collective over it, and
    /// waits without a deadline, as MPI does. Throws ddp::error (DDP-E202) with MPI's message.
    [[nodiscard]] MPI_Comm second_duplicate(std::uint32_t id, std::span<int const> members) {
        return session_->second_duplicate(self_, id, members);
    }
    /// Throws ddp::error (DDP-E202) with MPI's message unless `code` is MPI_SUCCESS. `call` is the name of the MPI function.
    void check(int code, char const* call) const { self_.check(code, call); }

private:
    using envelope = detail::mpi::envelope;
    using kind = detail::mpi::envelope_kind;
    using slot = detail::mpi::slot;
    using transfer = detail::mpi::transfer;

    void prepare(completion& done, int peer, tag const& what, std::byte const* data, std::size_t bytes, bool sends);
    [[nodiscard]] std::size_t pieces(std::size_t bytes) const noexcept {
        return (bytes + options_.piece_bytes - 1) / options_.piece_bytes;
    }

    // sending
    template <class Call>
    bool start(transfer what, Call const& call);
    bool send_envelope(slot& out, std::size_t body, completion* node);
    void tell(int peer, kind what, const_bytes body);

    // heartbeats
    [[nodiscard]] bool beats() const noexcept { return may_own_thread() && size() > 1 && !aborted_; }
    [[nodiscard]] bool watched(int peer) const noexcept {
        auto const at = static_cast<std::size_t>(peer);
        return life_.beats(peer) && !gone_[at] && reports_[at].is == report::state::silent;
    }
    void look_at_the_time(time_point at, bool moved);
    void beat(int peer, kind as);

    // receiving
    void match(completion& done, envelope const& what);
    bool pass();
    bool take_envelopes();
    void take(int peer, envelope const& what);
    bool test_requests();
    bool hear_of_failures();

    // endings
    void finish(completion& node, op_status how) noexcept {
        node.status = how;
        ended_.push_back(node);
        ++ended_count_;
    }
    void end_receives(int peer, op_status how) noexcept {
        matching_.end_receives(peer, [&](completion& node) { finish(node, how); });
    }
    void end_active(int peer, bool receives_too, op_status how) noexcept;
    void gone(int peer, report::state how, std::string_view text);
    [[nodiscard]] bool has_sends(int peer) const noexcept;
    void run_ended(std::size_t most) noexcept;
    void pause(time_point until, time_point since);
    void leave();

    mpi_options options_;
    detail::mpi::place self_;
    int exceptions_ = std::uncaught_exceptions();
    bool aborted_ = false;
    bool shares_cores_ = false;
    bool changed_ = false;  // reports, since progress() last returned
    std::vector<report> reports_;
    detail::mpi::liveness life_;
    int overdue_ = -1;
    std::vector<char> gone_;              // by peer: it left (1) or is unreachable (2); nothing more arrives
    std::vector<std::int32_t> next_tag_;  // by peer
    std::vector<time_point> linger_;      // by peer that left: when unfinished sends to it are closed
    int lingering_ = 0;
    detail::mpi::match_table matching_;
    completion_list active_;  // operations that MPI works on
    completion_list ended_;   // to be run
    std::size_t ended_count_ = 0;
    std::size_t head_ = 0;    // of the ring
    std::size_t failed_ = 0;  // processes that MPI has told of
    std::unique_ptr<detail::mpi::session> session_ = std::make_unique<detail::mpi::session>();
    detail::mpi::waiter waiter_;
};

static_assert(WatchfulTransport<mpi_transport> && TimedTransport<mpi_transport>);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/transport/mpi/impl/mpi.ipp>
#endif
