/// \file
/// Transport: what moves bytes between ranks, and the types of its interface.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <algorithm>
#include <array>
#include <chrono>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include <ddp/core/bytes.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>

namespace ddp {

/// The clock of all deadlines.
using monotonic_clock = std::chrono::steady_clock;
/// A point in time on that clock.
using time_point = monotonic_clock::time_point;
/// A duration.
using nanoseconds = std::chrono::nanoseconds;

inline constexpr time_point never = time_point::max();  ///< No deadline.

/// What a message belongs to. Messages of one (peer, identity) are matched in order; all others are independent.
struct identity {
    std::uint32_t group = 0;    ///< the context: a number that the ranks of a group have agreed on
    std::uint32_t channel = 0;  ///< what the message is for, within the context: see channel::user
    std::uint64_t index = 0;    ///< sequence number within the channel
    friend auto operator<=>(identity const&, identity const&) = default;
};
/// A hash of peer and identity, for tables of operations in flight.
[[nodiscard]] constexpr std::uint64_t hash_of(int peer, identity const& id) noexcept {
    std::uint64_t h = static_cast<std::uint64_t>(peer) * 0x9e3779b97f4a7c15u;
    h = (h ^ id.index) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 29) ^ (std::uint64_t{id.group} << 32 | id.channel)) * 0x94d049bb133111ebu;
    return h ^ (h >> 32);
}

namespace channel {
/// The identity::channel of the collectives that a program calls on a communicator; identity::index is their number in
/// the group, from 1. Each channel has four phases, channel + 0 to channel + 3, so that messages of different stages of
/// one collective do not match each other (lane::phase). A trainer has a context of its
/// own and numbers channels in it freely.
inline constexpr std::uint32_t user = 0;
/// The identity::channel of messages between two ranks (send, receive); identity::index is the tag that the program
/// passes.
inline constexpr std::uint32_t p2p = 0xfffffffc;
}  // namespace channel

/// The identity is matched; the fingerprint (operation, count, element type, plan, …) is carried along and compared
/// above the transport.
struct tag {
    identity id;                    ///< what is matched
    std::uint64_t fingerprint = 0;  ///< what is compared
};

/// Why a posted operation ended.
enum class op_status : std::uint8_t {
    pending,  ///< posted; the node belongs to the transport
    ok,       ///< the bytes have moved
    length,   ///< the message had a different length from the receive (`length` says which); nothing may be read
    closed,   ///< the peer is gone
    aborted,  ///< abort() was called here
};

/// The caller's node for a posted operation, so that posting allocates nothing. From post_* until `run` is called it belongs
/// to the transport; only then may the results be read or the node be destroyed.
struct completion {
    using function = void (*)(completion&) noexcept;
    function run = nullptr;  ///< set by the owner; called once, from progress() or abort(), never from post_*

    // results
    op_status status = op_status::pending;  ///< how it ended
    std::uint64_t fingerprint = 0;          ///< of a receive: the sender's
    std::uint64_t length = 0;               ///< of a receive: the sender's number of bytes

    /// Of a receive into memory that a send still reads: that send, set by the caller. The matching message cannot arrive
    /// before the send has been received.
    completion const* reader = nullptr;
    /// Whether that send is still pending.
    [[nodiscard]] bool read_elsewhere() const noexcept {
        return reader != nullptr && reader->status == op_status::pending;
    }

    // For the transport: it may use all of these while the node belongs to it. None of them has to be set, nor post() called.
    completion* next = nullptr;
    completion* previous = nullptr;
    ddp::tag tag = {};
    std::byte* data = nullptr;
    std::size_t size = 0;
    std::size_t moved = 0;
    int peer = -1;
    bool sends = false;
    std::uint8_t state = 0;

    /// Describes an operation that has just been posted: a transport's post_send and post_receive begin with it. A transport
    /// never writes through `data` of a send.
    void post(int to_or_from, ddp::tag const& what, std::byte const* bytes, std::size_t count, bool is_send) noexcept {
        status = op_status::pending;
        fingerprint = length = moved = 0;
        tag = what;
        data = const_cast<std::byte*>(bytes);
        size = count;
        peer = to_or_from;
        sends = is_send;
    }

    completion() = default;
    completion(completion const&) = delete;
    completion& operator=(completion const&) = delete;
};

/// An intrusive first-in first-out list of completions. Unlinks in O(1).
class completion_list {
public:
    [[nodiscard]] bool empty() const noexcept { return head_ == nullptr; }
    [[nodiscard]] completion* front() const noexcept { return head_; }
    void push_back(completion& node) noexcept {
        node.next = nullptr;
        node.previous = tail_;
        (tail_ != nullptr ? tail_->next : head_) = &node;
        tail_ = &node;
    }
    void erase(completion& node) noexcept {
        (node.previous != nullptr ? node.previous->next : head_) = node.next;
        (node.next != nullptr ? node.next->previous : tail_) = node.previous;
        node.next = node.previous = nullptr;
    }
    completion* pop_front() noexcept {
        completion* const node = head_;
        if (node != nullptr) erase(*node);
        return node;
    }

private:
    completion* head_ = nullptr;
    completion* tail_ = nullptr;
};

/// Text of at most N bytes, as part of a record. Longer text is cut between UTF-8 characters, and ends in "...".
template <std::size_t N>
struct bounded_text {
    std::array<char, N> chars{};
    bounded_text() = default;
    bounded_text(std::string_view text) noexcept {
        std::size_t const kept = text.size() > N ? detail::whole_characters(text, N - 3) : text.size();
        std::copy_n(text.begin(), kept, chars.begin());
        if (text.size() > N) std::fill_n(chars.data() + kept, 3, '.');
    }
    [[nodiscard]] std::string_view view() const noexcept {
        return {chars.data(), static_cast<std::size_t>(std::find(chars.begin(), chars.end(), '\0') - chars.begin())};
    }
};

/// The kinds of record, in the order in which they decide (see fault.hpp).
enum class failure_kind : std::uint8_t {
    threw,     ///< this rank's own user code threw
    broke,     ///< this rank's transport reported an error of its own, not of a peer
    mismatch,  ///< ranks disagree about an operation, a model, a plan; the text names both sides
    closed,    ///< `peer` is gone
    silent,    ///< `peer` sends no heartbeats
    waiting,   ///< this rank waits for `peer`
    idle,      ///< this rank waits for no other
};

/// What a rank has entered in one group: the number of collectives and steps, a fingerprint of them all, and the words for
/// the last. Ranks of a group enter the same sequence, so marks with equal numbers must have equal fingerprints.
struct mark {
    std::uint32_t group = 0;        ///< identity::group of the group
    std::int32_t leader = 0;        ///< its least rank of the job: disjoint groups may have the same number
    std::uint64_t number = 0;       ///< 0: nothing entered yet
    std::uint64_t fingerprint = 0;  ///< of everything entered so far; 0: nothing
    std::uint64_t occupied = 0;     ///< 1: the rank is in a long_operation, and `name` is its text
    bounded_text<80> name = {};     ///< "allreduce #7 of 1000 float"
    bounded_text<32> phase = {};    ///< what its program did when the mark was sent: "forward of step 57"; or empty

    /// Bytes of name and phase, with which a mark ends. They travel as its text.
    static constexpr std::size_t text_bytes = sizeof name + sizeof phase;

    [[nodiscard]] bool same_group(mark const& other) const noexcept {
        return group == other.group && leader == other.leader;
    }
    /// Whether the two ranks have entered different operations under the same number.
    [[nodiscard]] bool contradicts(mark const& other) const noexcept {
        return same_group(other) && number == other.number && fingerprint != other.fingerprint && fingerprint != 0 &&
               other.fingerprint != 0;
    }
};

/// One rank's record of a failure; also the form of the verdict. Trivially copyable: it is sent as its bytes, between
/// programs of one version on one kind of machine, which the handshake checks.
struct failure {
    failure_kind kind = failure_kind::idle;  ///< what has happened
    bool is_verdict = false;        ///< published by the lowest rank that has published a record, adopted by the others
    errc code = errc::deadline;     ///< of the comm_error
    std::int32_t rank = -1;         ///< the rank that publishes it
    std::int32_t peer = -1;         ///< the rank that it is about (in a verdict: the culprit); -1: none
    bool inside = false;            ///< `rank` was within an operation: what it entered last had not ended
    bool expired = false;           ///< `rank` waited until its deadline passed
    std::uint8_t reserved[2] = {};  // where padding would be
    identity operation = {};        ///< of the message during which it happened
    std::uint64_t waited_ns = 0;    ///< how long `rank` has been waiting, in nanoseconds
    mark entered = {};              ///< what `rank` has entered last, in the group that the record is about
    bounded_text<640> text = {};    ///< what happened, in words
};
static_assert(std::is_trivially_copyable_v<failure> && std::has_unique_object_representations_v<failure>,
              "no padding may travel");

/// What this rank knows about a rank.
struct report {
    /// The last thing that was heard from a rank.
    enum class state : std::uint8_t {
        silent,  ///< nothing: it is connected, and has published no record
        left,    ///< goodbye: it has exited cleanly
        spoke,   ///< it has published `record`
        closed,  ///< its connection ended without a goodbye
    };
    state is = state::silent;  ///< the last thing that was heard from it
    failure record = {};       ///< its record, if `is` is state::spoke
    /// For a closed rank: no rank that this one can reach has a connection to it. False: one of them may still forward
    /// its record.
    bool confirmed = true;
};

/// Has a rank, between 0 and size() - 1, and the number of ranks.
template <class T>
concept Ranked = requires(T const& t) {
    { t.rank() } -> std::convertible_to<int>;
    { t.size() } -> std::convertible_to<int>;
};

/// Moves bytes between ranks. Knows nothing of element types, reductions or models.
///
/// What the compiler cannot check, and every model promises:
///  1. Order    messages of one (peer, identity) are received in the order they were sent; receives match in the order
///              they were posted. Different identities are independent: a message for which no receive is posted yet
///              does not delay any other permanently.
///  2. Buffers  `out` and `in` stay untouched by the caller until the completion has run. While a receive's `reader` is
///              pending, nothing but the matching message is written to `in`; otherwise anything may be.
///  3. Length   in.size() is the sender's out.size(); otherwise the receive ends with op_status::length and the
///              sender's length. Empty messages are messages.
///  4. Ending   nothing completes inside post_*. A send may complete only when it was received, or as soon as the bytes
///              are out of `out`. Operations with a peer that has left or died end with op_status::closed, after what it
///              sent before has been received. An exception from progress(), or from post_* unless it is
///              a usage_error, ends the job as the transport's failure (DDP-E208).
///  5. Threads  one thread at a time per object, except wake(); different objects are independent.
///  6. Failure  abort() publishes this rank's record, completes every posted operation (aborted, unless it has ended)
///              before it returns, and touches no posted buffer afterwards. A transport that cannot promise the last has
///              `bool still_writes() const`; calls then wait, for timing.verdict at most, until it is false before they
///              throw. What is posted later completes as aborted. A second abort() replaces the record (by the verdict).
///              The destructor, if there was no abort(), tells the peers that this rank has left (report::state::left).
///  7. Sleep    progress() sleeps until something may move, wake() was called since the last progress(), or `until`; a
///              time in the past polls. It returns whether reports() has changed: one entry per rank, in the order of ranks,
///              this one included, whose entry shows the record of abort() as soon as that was called. Other entries
///              change in progress() only.
///  8. Clock    now() is monotonic_clock, whose times flight records hold; only a simulation has its own.
///  9. Memory   messages for which no receive is posted yet are stored up to a limit; beyond it, their sends wait.
///
/// Models: inproc_transport, virtual_transport, tcp_transport, mpi_transport.
template <class T>
concept Transport = Ranked<T> && requires(T& t, int peer, tag what, const_bytes out, mutable_bytes in, completion& done,
                                          time_point until, failure const& record) {
    t.post_send(peer, what, out, done);
    t.post_receive(peer, what, in, done);
    { t.progress(until) } -> std::convertible_to<bool>;
    t.abort(record);
    { t.reports() } -> std::convertible_to<std::span<report const>>;  // one a rank, own included
    t.wake();
    { t.now() } -> std::same_as<time_point>;
};

/// Refinement: a transport that must be driven at certain times, even if no call waits, to send heartbeats.
///
///  next_timer()   when progress() has to run next
template <class T>
concept TimedTransport = Transport<T> && requires(T const& t) {
    { t.next_timer() } -> std::same_as<time_point>;
};

/// Refinement: a transport whose peers say, in their heartbeats, what they have entered.
///
///  entered(mark)      sets this rank's own mark, which heartbeats carry
///  mark_of(peer)      the last mark heard from a peer
///  overdue_peer()     a connected peer that has been silent for timing.dead, if there is one
///  last_heard(peer)   when the peer was last heard from; {} if it sends no heartbeats
template <class T>
concept WatchfulTransport = Transport<T> && requires(T& t, mark const& mine, int peer) {
    t.entered(mine);
    { t.mark_of(peer) } -> std::convertible_to<mark>;
    { t.overdue_peer() } -> std::same_as<std::optional<int>>;
    { t.last_heard(peer) } -> std::same_as<time_point>;
};

/// Whether a driver may drive this transport from a thread of its own. A transport says no with
/// `bool may_own_thread() const`, as MPI below THREAD_MULTIPLE does; then hooks, blocking calls and progress() drive it.
template <Transport T>
[[nodiscard]] bool may_own_thread(T const& transport) {
    if constexpr (requires { transport.may_own_thread(); }) return transport.may_own_thread();
    return true;
}

/// The process of a rank in words, such as "pid 4711 on node3", for errors that concern it. A transport that knows says so
/// with `std::string_view process_of(int rank) const`, which is valid as long as the transport; empty if it does not.
template <Transport T>
[[nodiscard]] std::string_view process_of([[maybe_unused]] T const& transport, [[maybe_unused]] int rank) {
    if constexpr (requires { transport.process_of(rank); }) return transport.process_of(rank);
    return {};
}

/// How messages between some ranks travel. Over TCP two ranks count as connected through memory if they see each other's memory
/// and that of the same other ranks. If one pair of a host could not share, its ranks therefore count as connected by sockets,
/// although other pairs of them use memory.
enum class message_path : std::uint8_t {
    unknown,  ///< the transport does not say (MPI: what its library does)
    memory,   ///< any two of them are connected through memory of their host
    sockets,  ///< no two of them count as connected through memory; single pairs of a host may still use it
    mixed,    ///< some pairs are connected through memory, others by sockets
};
/// The name of the value: "memory", "sockets", "mixed" or "unknown".
[[nodiscard]] constexpr char const* name_of(message_path path) noexcept {
    switch (path) {
        case message_path::memory: return "memory";
        case message_path::sockets: return "sockets";
        case message_path::mixed: return "mixed";
        case message_path::unknown: break;
    }
    return "unknown";
}

/// Refinement: a transport that knows which messages go through memory.
///
///  through_memory(a, b)   whether those between ranks a and b do (see message_path): the same answer on every rank, and
///                         transitive; std::nullopt: not known
template <class T>
concept PathTransport = Transport<T> && requires(T const& t, int rank) {
    { t.through_memory(rank, rank) } -> std::same_as<std::optional<bool>>;
};

class any_transport;  // transport/any.hpp: any of them, chosen at run time

}  // namespace ddp
