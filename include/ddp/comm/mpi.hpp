/// \file
/// mpi_transport: ranks are the processes of a Boost.MPI communicator.
///
/// Protocol. Everything starts with an *envelope* (at most 512 bytes, tag 0): identity, fingerprint, length, and the
/// bytes themselves where they fit. MPI's non-overtaking rule makes the envelopes from one rank an ordered stream; the
/// receiver always has receives posted for it, empties it in that order and matches identities itself, so any identity
/// will do and none delays another. A longer message follows as raw bytes under a tag of its own that its envelope
/// names, in pieces below 2^31: the receiver posts them straight into the user's memory once it knows that the lengths
/// agree, else into a buffer that is thrown away. GOODBYE and ABORT are envelopes too: they come after all that was
/// sent before them, and wait behind nothing, because envelopes are always taken in.
/// The road not taken: MPI tags made of (channel, index) with the payload posted up front. A tag cannot hold an
/// identity, so two of them may share one, and a peer's wrong length would be written into, or cut off at, memory that
/// another message owns.
/// Never Boost.Serialization: its receives allocate a handler a message, and its counts are int.
///
/// Threads. Below MPI_THREAD_MULTIPLE every call but wake() belongs to the thread that calls MPI (the main thread below
/// MPI_THREAD_SERIALIZED), and may_own_thread() says no.
///
/// Memory. MPI cannot take a matched message back. So posted memory must stay alive until the transport is destroyed,
/// even where abort() or a peer's departure ended the operation early: the exception that the contract allows.
///
/// Failure. A killed rank ends the whole job: mpirun does that, no peer gets to see it. Errors that MPI returns are
/// ddp::error, or close the peer concerned.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/error.hpp>

#include <mpi.h>
#include <boost/mpi/communicator.hpp>

namespace ddp {

struct mpi_options {
    timing times = {};  ///< join bounds construction, shutdown bounds destruction
    /// Longer messages travel in pieces of this size, the same on every rank; at most INT_MAX, the largest MPI count.
    std::size_t piece_bytes = std::size_t{256} << 20;
};

namespace detail::mpi {

enum class envelope_kind : std::uint32_t { message, goodbye, record };

struct envelope {
    identity id;
    std::uint64_t fingerprint = 0;
    std::uint64_t length = 0;  // bytes of the message
    std::int32_t payload = 0;  // tag under which the bytes follow; 0: they are in `body`
    envelope_kind kind = envelope_kind::message;
    std::array<std::byte, 472> body = {};
};
inline constexpr std::size_t head_bytes = offsetof(envelope, body);
static_assert(sizeof(envelope) == 512 && std::is_trivially_copyable_v<envelope>);
static_assert(sizeof(failure) <= sizeof(envelope::body));

/// What ranks tell each other when the transport is made.
struct hello {
    std::uint64_t piece_bytes = 0, layout = 0, host = 0;
};

/// An envelope on its way out, or one that came before its receive.
struct slot {
    envelope what;
    int peer = -1;
    slot* next = nullptr;
};

/// What an MPI request is for.
struct transfer {
    completion* node = nullptr;  // null: nobody waits for it (any more)
    slot* out = nullptr;         // given back when the request is done
    int peer = -1;
    bool receives = false;
    std::unique_ptr<std::byte[]> drain =
        nullptr;  // of a message of the wrong length: `drain_left` bytes are still to come
    std::size_t drain_left = 0;
    int tag = 0;
};

/// Everything that MPI may hold a pointer to. Outlives the transport where MPI does not let go in time.
struct store {
    MPI_Comm comm = MPI_COMM_NULL, second = MPI_COMM_NULL;
    std::vector<hello> hellos;
    std::array<envelope, 16> ring;  // envelopes come in here, in order
    std::array<MPI_Request, 16> ring_requests;
    std::deque<slot> slots;  // grows, never shrinks; addresses are stable
    std::vector<MPI_Request> requests;
    std::vector<transfer> transfers;  // one a request
    store* buried = nullptr;
};

/// Keeps memory that MPI may still touch reachable until the process ends.
inline std::atomic<store*> graves{nullptr};
inline void bury(std::unique_ptr<store> dead) noexcept {
    if (dead == nullptr) return;
    store* const grave = dead.release();
    grave->buried = graves.load();
    while (!graves.compare_exchange_weak(grave->buried, grave)) {
    }
}

/// Envelopes that nobody has asked for yet, first come first.
struct early_list {
    slot* first = nullptr;
    slot* last = nullptr;
};

}  // namespace detail::mpi

/// One rank's end of a duplicate of the user's communicator: our messages and the user's never match each other.
///
/// Construction  collective over the communicator: two small collective calls, each bounded by times.join. MPI cannot
///               take back one that has timed out: end the job then.
/// Cost          one MPI message up to 472 bytes, two above; nothing is allocated once as many operations have been in
///               flight as ever will be. Envelopes that come early are kept, 0.5 KiB each; MPI keeps their payload.
/// Order         as the contract says; of two messages of one identity the second, if shorter, may complete first.
/// Destruction   says goodbye and waits, up to times.shutdown, for the goodbyes of all; before MPI_Finalize, please:
///               after it nobody can be told, and the peers wait out their shutdown time.
/// Throws        ddp::error with MPI's own words where MPI fails; usage_error where MPI is not there yet.
class mpi_transport {
public:
    static constexpr std::string_view name = "mpi";

    explicit mpi_transport(boost::mpi::communicator const& users, mpi_options const& options = {});
    mpi_transport(mpi_transport const&) = delete;
    mpi_transport& operator=(mpi_transport const&) = delete;
    ~mpi_transport();

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    [[nodiscard]] time_point now() const { return clock::now(); }
    [[nodiscard]] std::span<report const> reports() const noexcept { return reports_; }
    [[nodiscard]] bool may_own_thread() const noexcept { return level_ == MPI_THREAD_MULTIPLE; }

    void post_send(int peer, tag what, const_bytes out, completion& done);
    void post_receive(int peer, tag what, mutable_bytes in, completion& done);
    bool progress(time_point until);
    void abort(failure const& record);
    void wake() {
        std::scoped_lock const lock(sleep_);
        woken_ = true;
        awake_.notify_one();
    }

    /// Another duplicate, for MPI calls beside ours: the receives that always wait on ours would slow each one down by
    /// 0.1 us. The first call is collective, and waits as MPI does, without a deadline.
    [[nodiscard]] MPI_Comm second_duplicate();
    /// Throws ddp::error in MPI's words unless `code` is MPI_SUCCESS. `call` is what returned it.
    void check(int code, char const* call) const;

private:
    using envelope = detail::mpi::envelope;
    using kind = detail::mpi::envelope_kind;
    using slot = detail::mpi::slot;
    using transfer = detail::mpi::transfer;
    using store = detail::mpi::store;
    static constexpr std::size_t lists = 256;

    // construction and the end
    void await(MPI_Request& request, char const* call, time_point until) const;
    void duplicate(MPI_Comm users);
    void agree();
    void leave();
    [[nodiscard]] bool let_go() noexcept;

    // sending
    void prepare(completion& done, int peer, tag const& what, std::byte* data, std::size_t bytes, bool sends);
    [[nodiscard]] std::size_t pieces(std::size_t bytes) const noexcept {
        return (bytes + options_.piece_bytes - 1) / options_.piece_bytes;
    }
    [[nodiscard]] slot& take_slot();
    void give_back(slot& used) noexcept { used.next = std::exchange(free_, &used); }
    void make_room(std::size_t requests);
    template <class Call>
    bool start(transfer what, Call const& call);
    bool send_envelope(slot& out, std::size_t body, completion* node);
    void tell(int peer, kind what, const_bytes body);

    // receiving
    [[nodiscard]] std::size_t list_of(int peer, identity const& id) const noexcept;
    [[nodiscard]] slot* take_early(int peer, identity const& id) noexcept;
    void match(completion& done, envelope const& what);
    bool pass();
    bool take_envelopes();
    void take(int peer, envelope const& what);
    bool test_requests();
    void next_drain(std::size_t at);

    // endings
    void finish(completion& node, op_status how) noexcept {
        node.status = how;
        ended_.push_back(node);
        ++ended_count_;
    }
    void end_receives(int peer, op_status how) noexcept;
    void end_active(int peer, bool receives_too, op_status how) noexcept;
    void gone(int peer, report::state how, std::string_view text);
    [[nodiscard]] bool has_sends(int peer) const noexcept;
    void run_ended(std::size_t most) noexcept;
    void pause(time_point until, time_point since);

    mpi_options options_;
    int rank_ = 0, size_ = 1, level_ = MPI_THREAD_SINGLE, tags_ = 32767;
    int exceptions_ = std::uncaught_exceptions();
    bool aborted_ = false;
    bool changed_ = false;  // reports, since progress() last returned
    bool crowded_ = false;  // more threads than cores on this host
    std::vector<report> reports_;
    std::vector<char> gone_;              // by peer: it left, or is out of reach; nothing more comes
    std::vector<std::int32_t> next_tag_;  // by peer
    std::vector<time_point> linger_;      // by peer that left: when unfinished sends to it are closed
    int lingering_ = 0;
    std::array<completion_list, lists> waiting_;  // receives without a message, by hash of (peer, identity)
    std::array<detail::mpi::early_list, lists> early_;
    completion_list active_;  // operations that MPI works on
    completion_list ended_;   // to be run
    std::size_t ended_count_ = 0;
    slot* free_ = nullptr;
    std::size_t head_ = 0;  // of the ring
    std::vector<int> indices_;
    std::vector<MPI_Status> statuses_;
    std::unique_ptr<store> store_ = std::make_unique<store>();
    std::mutex sleep_;
    std::condition_variable awake_;
    bool woken_ = false;
};

inline mpi_transport::mpi_transport(boost::mpi::communicator const& users, mpi_options const& options)
    : options_(options) {
    options_.times.validate();
    DDP_EXPECTS(options_.piece_bytes > 0 && options_.piece_bytes <= std::numeric_limits<int>::max(),
                "mpi_options::piece_bytes must be between 1 and INT_MAX, the largest MPI count");
    int initialised = 0;
    int finalised = 0;
    int main_thread = 0;
    int between = 0;
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalised);
    DDP_EXPECTS(initialised != 0 && finalised == 0,
                "mpi_transport needs MPI: make a boost::mpi::environment in main() that outlives it");
    check(MPI_Query_thread(&level_), "MPI_Query_thread");
    check(MPI_Is_thread_main(&main_thread), "MPI_Is_thread_main");
    DDP_EXPECTS(level_ >= MPI_THREAD_SERIALIZED || main_thread != 0,
                "below MPI_THREAD_SERIALIZED only the thread that initialised MPI may make an mpi_transport");
    MPI_Comm const comm = users;
    DDP_EXPECTS(comm != MPI_COMM_NULL, "mpi_transport needs a communicator that this process belongs to");
    check(MPI_Comm_test_inter(comm, &between), "MPI_Comm_test_inter");
    DDP_EXPECTS(between == 0, "mpi_transport needs an intracommunicator; merge the two groups first");
    check(MPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(comm, &size_), "MPI_Comm_size");
    auto const ranks = static_cast<std::size_t>(size_);
    reports_.resize(ranks);
    gone_.resize(ranks);
    next_tag_.resize(ranks);
    linger_.resize(ranks);
    gone_[static_cast<std::size_t>(rank_)] = 1;
    int* tags = nullptr;
    int known = 0;
    check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &tags, &known), "MPI_Comm_get_attr");
    if (known != 0) tags_ = *tags;
    for (std::size_t i = 0; i < 2 * ranks; ++i) give_back(store_->slots.emplace_back());  // abort() finds some
    make_room(64 + 2 * ranks);
    store_->ring_requests.fill(MPI_REQUEST_NULL);
    try {
        duplicate(comm);
        agree();
        for (std::size_t i = 0; i < store_->ring.size(); ++i)
            check(MPI_Recv_init(&store_->ring[i], sizeof(envelope), MPI_BYTE, MPI_ANY_SOURCE, 0, store_->comm,
                                &store_->ring_requests[i]),
                  "MPI_Recv_init");
        for (MPI_Request& request : store_->ring_requests) check(MPI_Start(&request), "MPI_Start");
    } catch (...) {
        detail::mpi::bury(std::move(store_));  // a collective call that never ended writes there one day
        throw;
    }
}

inline mpi_transport::~mpi_transport() {
    int finalised = 0;
    MPI_Finalized(&finalised);
    bool clean = finalised != 0;
    if (finalised == 0) {
        try {
            leave();
        } catch (...) {  // MPI is broken: let go of what there is, and keep the memory
        }
        clean = let_go();
    }
    if (!clean) detail::mpi::bury(std::move(store_));
    for (int peer = 0; peer < size_; ++peer) end_receives(peer, op_status::aborted);
    while (completion* const node = active_.front()) {
        active_.erase(*node);
        finish(*node, op_status::aborted);
    }
    while (!ended_.empty()) run_ended(ended_count_);
}

inline void mpi_transport::check(int code, char const* call) const {
    if (code == MPI_SUCCESS) return;
    std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
    int length = 0;
    MPI_Error_string(code, text.data(), &length);
    throw error(errc::peer_closed, "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + ": " + call +
                                       " failed: " + text.data() +
                                       ". MPI cannot be relied on after this: end the job and start it again.");
}

/// Waits for a request of the construction; MPI has no deadlines of its own.
inline void mpi_transport::await(MPI_Request& request, char const* call, time_point until) const {
    for (int done = 0; done == 0;) {
        check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), call);
        if (done != 0) return;
        if (now() >= until)
            throw error(errc::rendezvous, "rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
                                              " waited in " + call +
                                              " for the other ranks of its communicator: every one of them must make "
                                              "an mpi_transport, in the same order, within timing::join");
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

inline void mpi_transport::duplicate(MPI_Comm users) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Comm_idup(users, &store_->comm, &request), "MPI_Comm_idup");
    await(request, "MPI_Comm_idup", now() + options_.times.join);
    check(MPI_Comm_set_errhandler(store_->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

inline MPI_Comm mpi_transport::second_duplicate() {
    if (store_->second == MPI_COMM_NULL) {
        check(MPI_Comm_dup(store_->comm, &store_->second), "MPI_Comm_dup");
        check(MPI_Comm_set_errhandler(store_->second, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    }
    return store_->second;
}

/// Refuses what would corrupt memory later, and learns how many ranks share this host.
inline void mpi_transport::agree() {
    using detail::mpi::hello;
    auto const self = static_cast<std::size_t>(rank_);
    std::array<char, MPI_MAX_PROCESSOR_NAME + 1> host{};
    int length = 0;
    check(MPI_Get_processor_name(host.data(), &length), "MPI_Get_processor_name");
    std::uint64_t hash = 14695981039346656037u;  // FNV-1a
    for (int i = 0; i < length; ++i)
        hash = (hash ^ static_cast<unsigned char>(host[static_cast<std::size_t>(i)])) * 1099511628211u;
    std::vector<hello>& all = store_->hellos;
    all.resize(static_cast<std::size_t>(size_) + 1);  // the last is our own: MPI forbids sending from where it receives
    hello& own = all.back();
    own = {.piece_bytes = options_.piece_bytes, .layout = sizeof(envelope) << 16 | sizeof(failure), .host = hash};
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Iallgather(&own, sizeof(hello), MPI_BYTE, all.data(), sizeof(hello), MPI_BYTE, store_->comm, &request),
          "MPI_Iallgather");
    await(request, "MPI_Iallgather", now() + options_.times.join);
    std::size_t neighbours = 0;
    for (std::size_t peer = 0; peer + 1 < all.size(); ++peer) {
        if (all[peer].piece_bytes != all[0].piece_bytes || all[peer].layout != all[0].layout)
            throw error(errc::mismatch,
                        "rank " + std::to_string(peer) + " and rank 0 made mpi_transports that differ: piece_bytes " +
                            std::to_string(all[peer].piece_bytes) + " and " + std::to_string(all[0].piece_bytes) +
                            ", record layout " + std::to_string(all[peer].layout) + " and " +
                            std::to_string(all[0].layout) + ". Use one build and the same mpi_options on every rank.");
        if (all[peer].host == all[self].host) ++neighbours;
    }
    std::size_t const busy = neighbours * (may_own_thread() ? 2 : 1);
    crowded_ = busy > std::max(1u, std::thread::hardware_concurrency());
}

inline void mpi_transport::prepare(completion& done, int peer, tag const& what, std::byte* data, std::size_t bytes,
                                   bool sends) {
    DDP_EXPECTS(peer >= 0 && peer < size_ && peer != rank_, "post to another rank of this communicator");
    make_room(1 + pieces(bytes));
    done.status = op_status::pending;
    done.peer = peer;
    done.tag = what;
    done.data = data;
    done.size = bytes;
    done.sends = sends;
    done.moved = 0;  // here: MPI requests still in flight
    done.fingerprint = 0;
    done.length = 0;
}

/// `out` is sent before this returns where it fits an envelope; the completion still runs in progress().
inline void mpi_transport::post_send(int peer, tag what, const_bytes out, completion& done) {
    prepare(done, peer, what, const_cast<std::byte*>(out.data()), out.size(), true);
    if (aborted_) return finish(done, op_status::aborted);
    auto const to = static_cast<std::size_t>(peer);
    if (gone_[to]) return finish(done, op_status::closed);
    slot& head = take_slot();
    head.peer = peer;
    bool const fits = out.size() <= head.what.body.size();
    if (!fits) next_tag_[to] = next_tag_[to] == tags_ ? 1 : next_tag_[to] + 1;
    head.what.id = what.id;
    head.what.fingerprint = what.fingerprint;
    head.what.length = out.size();
    head.what.payload = fits ? 0 : next_tag_[to];
    head.what.kind = kind::message;
    if (fits && !out.empty()) std::memcpy(head.what.body.data(), out.data(), out.size());
    int const payload = head.what.payload;
    done.moved = 1 + (fits ? 0 : pieces(out.size()));
    active_.push_back(done);
    if (!send_envelope(head, fits ? out.size() : 0, &done) || fits) return;
    for (std::size_t at = 0; at < out.size(); at += options_.piece_bytes) {
        int const count = static_cast<int>(std::min(options_.piece_bytes, out.size() - at));
        bool const started = start({.node = &done, .peer = peer, .tag = payload}, [&](MPI_Request* request) {
            return MPI_Isend(out.data() + at, count, MPI_BYTE, peer, payload, store_->comm, request);
        });
        if (!started) return;
    }
}

inline void mpi_transport::post_receive(int peer, tag what, mutable_bytes in, completion& done) {
    prepare(done, peer, what, in.data(), in.size(), false);
    if (aborted_) return finish(done, op_status::aborted);
    if (slot* const early = take_early(peer, what.id)) {
        match(done, early->what);
        return give_back(*early);
    }
    if (gone_[static_cast<std::size_t>(peer)]) return finish(done, op_status::closed);
    waiting_[list_of(peer, what.id)].push_back(done);
}

/// Returns whether reports() has changed. Sleeps by polling with back-off: MPI has nothing to sleep on. An answer is
/// seen after at most an eighth of the time it took, and never later than a millisecond.
inline bool mpi_transport::progress(time_point until) {
    time_point since = now();
    while (true) {
        bool const moved = pass();
        bool const done = !ended_.empty() || changed_;
        run_ended(ended_count_);
        bool woken = false;
        {
            std::scoped_lock const lock(sleep_);
            woken = std::exchange(woken_, false);
        }
        if (done || woken || now() >= until) return std::exchange(changed_, false);
        if (moved) since = now();
        pause(until, since);
    }
}

/// Spins while an answer may be near (yields at once if others need the core), then sleeps an eighth of the time idled.
inline void mpi_transport::pause(time_point until, time_point since) {
    using std::chrono::microseconds;
    time_point const at = now();
    nanoseconds const idle = at - since;
    if (idle < microseconds(200)) {
        if (crowded_ || idle > microseconds(50)) std::this_thread::yield();
        return;
    }
    // a payload on its way moves only while somebody calls MPI
    nanoseconds const longest = store_->requests.empty() ? microseconds(1000) : microseconds(100);
    nanoseconds const step = std::min(longest, std::max<nanoseconds>(microseconds(20), idle / 8));
    std::unique_lock lock(sleep_);
    if (!woken_) awake_.wait_until(lock, std::min(until, at + step));
}

inline void mpi_transport::abort(failure const& record) {
    reports_[static_cast<std::size_t>(rank_)] = {.is = report::state::spoke, .record = record};
    for (int peer = 0; peer < size_; ++peer) tell(peer, kind::record, bytes_of(record));
    if (!std::exchange(aborted_, true)) {
        for (int peer = 0; peer < size_; ++peer) {
            end_receives(peer, op_status::aborted);
            end_active(peer, true, op_status::aborted);
        }
        for (std::size_t i = 0; i < store_->requests.size(); ++i)  // no effect where bytes are already coming in
            if (store_->transfers[i].receives && !store_->transfers[i].drain) MPI_Cancel(&store_->requests[i]);
        for (detail::mpi::early_list& list : early_)
            while (slot* const unread = list.first) {
                list.first = unread->next;
                give_back(*unread);
            }
    }
    while (!ended_.empty()) run_ended(ended_count_);
}

inline mpi_transport::slot& mpi_transport::take_slot() {
    if (free_ == nullptr) give_back(store_->slots.emplace_back());
    slot& taken = *free_;
    free_ = taken.next;
    taken.next = nullptr;
    return taken;
}

/// After this so many requests can be started without an allocation that might throw between two of them.
inline void mpi_transport::make_room(std::size_t requests) {
    std::size_t const needed = store_->requests.size() + requests;
    if (needed <= store_->requests.capacity() && needed <= store_->transfers.capacity()) return;
    std::size_t const grown = std::max(needed, 2 * store_->requests.capacity());
    store_->requests.reserve(grown);
    store_->transfers.reserve(grown);
    indices_.resize(store_->requests.capacity());
    statuses_.resize(store_->requests.capacity());
}

/// Starts one MPI operation. Where MPI refuses, the peer is closed, with every operation that involves it.
template <class Call>
bool mpi_transport::start(transfer what, Call const& call) {
    make_room(1);
    int const peer = what.peer;
    slot* const out = what.out;
    store_->requests.push_back(MPI_REQUEST_NULL);
    store_->transfers.push_back(std::move(what));
    int const code = call(&store_->requests.back());
    if (code == MPI_SUCCESS) return true;
    store_->requests.pop_back();
    store_->transfers.pop_back();
    if (out != nullptr) give_back(*out);
    std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
    int length = 0;
    MPI_Error_string(code, text.data(), &length);
    gone(peer, report::state::closed, text.data());
    return false;
}

inline bool mpi_transport::send_envelope(slot& out, std::size_t body, completion* node) {
    return start({.node = node, .out = &out, .peer = out.peer}, [&](MPI_Request* request) {
        return MPI_Isend(&out.what, static_cast<int>(detail::mpi::head_bytes + body), MPI_BYTE, out.peer, 0,
                         store_->comm, request);
    });
}

/// GOODBYE or ABORT. A peer that has left still listens: it waits for our goodbye.
inline void mpi_transport::tell(int peer, kind what, const_bytes body) {
    if (peer == rank_ || reports_[static_cast<std::size_t>(peer)].is == report::state::closed) return;
    slot& out = take_slot();
    out.peer = peer;
    out.what.kind = what;
    out.what.id = {};
    out.what.fingerprint = 0;
    out.what.payload = 0;
    out.what.length = body.size();
    if (!body.empty()) std::memcpy(out.what.body.data(), body.data(), body.size());
    send_envelope(out, body.size(), nullptr);
}

inline std::size_t mpi_transport::list_of(int peer, identity const& id) const noexcept {
    std::uint64_t hash = id.index * 0x9e3779b97f4a7c15u ^ (std::uint64_t{id.group} << 32 | id.channel);
    hash = (hash ^ static_cast<std::uint64_t>(peer) << 17) * 0xbf58476d1ce4e5b9u;
    return static_cast<std::size_t>(hash >> 32) % lists;
}

inline mpi_transport::slot* mpi_transport::take_early(int peer, identity const& id) noexcept {
    detail::mpi::early_list& list = early_[list_of(peer, id)];
    slot* before = nullptr;
    for (slot* at = list.first; at != nullptr; before = at, at = at->next) {
        if (at->peer != peer || at->what.id != id) continue;
        (before != nullptr ? before->next : list.first) = at->next;
        if (list.last == at) list.last = before;
        return at;
    }
    return nullptr;
}

/// A receive meets its envelope: takes the bytes from it, or asks MPI for them.
inline void mpi_transport::match(completion& done, envelope const& what) {
    done.fingerprint = what.fingerprint;
    done.length = what.length;
    int const peer = done.peer;
    auto const length = static_cast<std::size_t>(what.length);
    if (length != done.size) {
        finish(done, op_status::length);
        if (what.payload == 0) return;
        transfer waste{.peer = peer, .receives = true, .drain_left = length, .tag = what.payload};
        waste.drain = std::make_unique<std::byte[]>(std::min(length, options_.piece_bytes));
        make_room(1);
        store_->requests.push_back(MPI_REQUEST_NULL);
        store_->transfers.push_back(std::move(waste));
        return next_drain(store_->requests.size() - 1);
    }
    if (what.payload == 0) {
        if (length > 0) std::memcpy(done.data, what.body.data(), length);
        return finish(done, op_status::ok);
    }
    done.moved = pieces(length);
    active_.push_back(done);
    for (std::size_t at = 0; at < length; at += options_.piece_bytes) {
        int const count = static_cast<int>(std::min(options_.piece_bytes, length - at));
        bool const started =
            start({.node = &done, .peer = peer, .receives = true, .tag = what.payload}, [&](MPI_Request* request) {
                return MPI_Irecv(done.data + at, count, MPI_BYTE, peer, what.payload, store_->comm, request);
            });
        if (!started) return;
    }
}

/// Asks for the next piece of a message that nobody can read. One that MPI refuses stays null and is swept away.
inline void mpi_transport::next_drain(std::size_t at) {
    transfer& waste = store_->transfers[at];
    int const count = static_cast<int>(std::min(options_.piece_bytes, waste.drain_left));
    waste.drain_left -= static_cast<std::size_t>(count);
    if (MPI_Irecv(waste.drain.get(), count, MPI_BYTE, waste.peer, waste.tag, store_->comm, &store_->requests[at]) !=
        MPI_SUCCESS)
        store_->requests[at] = MPI_REQUEST_NULL;
}

/// One look at everything. Returns whether anything moved.
inline bool mpi_transport::pass() {
    bool const finished = test_requests();
    bool const came = take_envelopes();
    if (lingering_ == 0) return finished || came;
    time_point const at = now();
    bool over = false;
    for (int peer = 0; peer < size_; ++peer) {
        time_point& until = linger_[static_cast<std::size_t>(peer)];
        if (until == time_point{} || (at < until && has_sends(peer))) continue;
        end_active(peer, false, op_status::closed);
        until = {};
        --lingering_;
        over = true;
    }
    return finished || came || over;
}

/// Takes in what has come, in the order of the ring, which is the order in which MPI matched it.
inline bool mpi_transport::take_envelopes() {
    for (std::size_t taken = 0; taken < store_->ring.size(); ++taken) {
        int ready = 0;
        MPI_Status status;
        check(MPI_Test(&store_->ring_requests[head_], &ready, &status), "MPI_Test");
        if (ready == 0) return taken > 0;
        take(status.MPI_SOURCE, store_->ring[head_]);
        check(MPI_Start(&store_->ring_requests[head_]), "MPI_Start");
        head_ = (head_ + 1) % store_->ring.size();
    }
    return true;
}

inline void mpi_transport::take(int peer, envelope const& what) {
    if (what.kind == kind::record) {
        report& told = reports_[static_cast<std::size_t>(peer)];
        told.is = report::state::spoke;
        std::memcpy(&told.record, what.body.data(), sizeof(failure));
        changed_ = true;
    } else if (what.kind == kind::goodbye) {
        gone(peer, report::state::left, {});
    } else if (!aborted_) {
        std::size_t const where = list_of(peer, what.id);
        for (completion* node = waiting_[where].front(); node != nullptr; node = node->next) {
            if (node->peer != peer || node->tag.id != what.id) continue;
            waiting_[where].erase(*node);
            return match(*node, what);
        }
        slot& early = take_slot();
        early.what = what;
        early.peer = peer;
        detail::mpi::early_list& list = early_[where];
        (list.first != nullptr ? list.last->next : list.first) = &early;
        list.last = &early;
    }
}

inline bool mpi_transport::test_requests() {
    std::vector<MPI_Request>& requests = store_->requests;
    std::vector<transfer>& transfers = store_->transfers;
    if (requests.empty()) return false;
    int count = 0;
    int const code =
        MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count, indices_.data(), statuses_.data());
    if (code != MPI_ERR_IN_STATUS) check(code, "MPI_Testsome");
    if (count == 0) return false;
    for (std::size_t k = 0; k < static_cast<std::size_t>(std::max(count, 0)); ++k) {  // MPI_UNDEFINED: all are null
        auto const at = static_cast<std::size_t>(indices_[k]);
        transfer& over = transfers[at];
        slot* const out = std::exchange(over.out, nullptr);
        completion* const node = std::exchange(over.node, nullptr);
        if (out != nullptr) give_back(*out);
        bool const failed = code == MPI_ERR_IN_STATUS && statuses_[k].MPI_ERROR != MPI_SUCCESS;
        if (failed && (node != nullptr || out != nullptr)) {
            std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
            int length = 0;
            MPI_Error_string(statuses_[k].MPI_ERROR, text.data(), &length);
            requests[at] = MPI_REQUEST_NULL;
            gone(over.peer, report::state::closed, text.data());  // ends `node` too: it is in active_
        } else if (failed) {                                      // of a receive that nobody waits for
            requests[at] = MPI_REQUEST_NULL;
        } else if (over.drain_left > 0) {
            next_drain(at);
        } else if (node != nullptr && --node->moved == 0) {
            active_.erase(*node);
            finish(*node, op_status::ok);
        }
    }
    std::size_t kept = 0;
    for (std::size_t at = 0; at < requests.size(); ++at) {
        if (requests[at] == MPI_REQUEST_NULL) continue;
        if (kept != at) {
            requests[kept] = requests[at];
            transfers[kept] = std::move(transfers[at]);
        }
        ++kept;
    }
    requests.resize(kept);
    transfers.resize(kept);
    return true;
}

/// Receives from `peer` that no message has met.
inline void mpi_transport::end_receives(int peer, op_status how) noexcept {
    for (completion_list& list : waiting_)
        for (completion* node = list.front(); node != nullptr;) {
            completion* const next = node->next;
            if (node->peer == peer) {
                list.erase(*node);
                finish(*node, how);
            }
            node = next;
        }
}

/// Operations with `peer` that MPI works on: their requests go on without them.
inline void mpi_transport::end_active(int peer, bool receives_too, op_status how) noexcept {
    for (transfer& each : store_->transfers)
        if (each.peer == peer && (receives_too || !each.receives)) each.node = nullptr;
    for (completion* node = active_.front(); node != nullptr;) {
        completion* const next = node->next;
        if (node->peer == peer && (receives_too || node->sends)) {
            active_.erase(*node);
            finish(*node, how);
        }
        node = next;
    }
}

/// A peer that said goodbye has received all it will, but what it sent is still on its way. So may be MPI's word that
/// it has received what we sent (it does not keep to the order of messages): sends wait for that a little longer.
inline void mpi_transport::gone(int peer, report::state how, std::string_view text) {
    auto const at = static_cast<std::size_t>(peer);
    if (reports_[at].is == report::state::silent) {
        reports_[at].is = how;
        if (how == report::state::closed) {
            failure& record = reports_[at].record;
            record.kind = failure_kind::closed;
            record.code = errc::peer_closed;
            record.rank = rank_;
            record.peer = peer;
            record.text = text;
        }
        changed_ = true;
    }
    gone_[at] = 1;
    end_receives(peer, op_status::closed);
    if (how == report::state::closed) {
        end_active(peer, true, op_status::closed);
    } else if (linger_[at] == time_point{}) {
        linger_[at] = now() + options_.times.end_of_file;
        ++lingering_;
    }
}

inline bool mpi_transport::has_sends(int peer) const noexcept {
    for (completion const* node = active_.front(); node != nullptr; node = node->next)
        if (node->peer == peer && node->sends) return true;
    return false;
}

/// At most `most`: what a callback posts and what ends at once waits for the next round.
inline void mpi_transport::run_ended(std::size_t most) noexcept {
    for (; most > 0 && !ended_.empty(); --most) {
        completion& node = *ended_.pop_front();
        --ended_count_;
        node.run(node);
    }
}

/// Says goodbye once no message that a peer has sent us is being read from its memory: then no goodbye is followed by
/// MPI touching the memory of the rank that hears it.
inline void mpi_transport::leave() {
    if (std::uncaught_exceptions() > exceptions_ && !aborted_) {
        failure record;
        record.kind = failure_kind::threw;
        record.code = errc::remote_exception;
        record.rank = rank_;
        record.text = std::string_view("its program left the transport by an exception");
        abort(record);
    }
    for (int peer = 0; peer < size_; ++peer) end_receives(peer, op_status::aborted);
    time_point const until = now() + options_.times.shutdown;
    time_point since = now();
    auto const drive = [&](auto const& over) {
        while (!over() && now() < until) {
            if (pass()) since = now();
            if (!over()) pause(until, since);
        }
    };
    std::vector<transfer> const& transfers = store_->transfers;
    drive([&] { return std::none_of(transfers.begin(), transfers.end(), [](auto const& t) { return t.receives; }); });
    for (int peer = 0; peer < size_; ++peer) tell(peer, kind::goodbye, {});
    drive([&] { return lingering_ == 0 && std::find(gone_.begin(), gone_.end(), char{0}) == gone_.end(); });
    test_requests();
}

/// Takes our receives back from MPI and frees the communicator, where nothing is left on it.
inline bool mpi_transport::let_go() noexcept {
    bool clean = store_->transfers.empty();
    for (MPI_Request& request : store_->ring_requests) {
        if (request == MPI_REQUEST_NULL) continue;
        MPI_Cancel(&request);
        int done = 0;
        for (int tries = 0; done == 0 && tries < 1000; ++tries)
            if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
        if (done != 0)
            MPI_Request_free(&request);
        else
            clean = false;
    }
    for (char const is_gone : gone_) clean = clean && is_gone != 0;
    if (clean && store_->second != MPI_COMM_NULL) MPI_Comm_free(&store_->second);
    if (clean) MPI_Comm_free(&store_->comm);
    return clean;
}

static_assert(Transport<mpi_transport>);

}  // namespace ddp
