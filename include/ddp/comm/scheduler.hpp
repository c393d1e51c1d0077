/// \file
/// scheduler: runs any number of collectives, written as coroutines, over one transport on one thread.
///
/// Nothing here knows a thread or a lock. Whoever drives it repeats: pump(), then transport().progress(next_deadline()).
/// A communicator does so for people, a simulation for a thousand ranks at once.
#pragma once

#include <atomic>
#include <coroutine>
#include <cstdint>
#include <exception>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/comm/verdict.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/task.hpp>

namespace ddp {

/// What a rank is doing, for people: put into words only when something fails.
struct operation_info {
    char const* name = "";     // "allreduce", "step"
    std::uint64_t count = 0;   // elements or bytes
    char const* element = "";  // "float", "bytes"
    char const* detail = "";   // algorithm or other particulars
    identity id = {};
    std::uint64_t fingerprint = 0;
    int root = -1;  // the rank that a broadcast or gather is about; -1: none

    [[nodiscard]] std::string text() const {
        std::string t = std::string(name) + " #" + std::to_string(id.index);
        if (*element != '\0') t += " of " + std::to_string(count) + " " + element;
        if (*detail != '\0') t += std::string(" (") + detail + ")";
        if (root >= 0) t += " with root " + std::to_string(root);
        return t;
    }
};

/// Unwinds the coroutines of a failed communicator. The reason is the scheduler's verdict; nobody outside sees this.
struct collective_aborted final : std::exception {
    [[nodiscard]] char const* what() const noexcept override { return "the communicator has failed"; }
};

class scheduler_base;

namespace detail {

/// A coroutine to be resumed, in an intrusive list.
struct waiter {
    std::coroutine_handle<> handle;
    waiter* next = nullptr;
};

class waiter_queue {
public:
    [[nodiscard]] bool empty() const noexcept { return head_ == nullptr; }
    void push_back(waiter& w) noexcept {
        w.next = nullptr;
        (tail_ != nullptr ? tail_->next : head_) = &w;
        tail_ = &w;
    }
    waiter* pop_front() noexcept {
        waiter* const w = head_;
        if (w == nullptr) return nullptr;
        head_ = w->next;
        if (head_ == nullptr) tail_ = nullptr;
        return w;
    }
    void splice(waiter_queue& other) noexcept {
        if (other.empty()) return;
        (tail_ != nullptr ? tail_->next : head_) = other.head_;
        tail_ = other.tail_;
        other.head_ = other.tail_ = nullptr;
    }

private:
    waiter* head_ = nullptr;
    waiter* tail_ = nullptr;
};

}  // namespace detail

/// One posted send or receive, awaitable. Lives in a coroutine's frame or in an `operations` array; a failure anywhere in
/// the scheduler has ended it before the frame unwinds.
class operation : private completion {
public:
    operation() noexcept { run = &ended; }
    ~operation();

    /// Awaiting throws collective_aborted after it has reported why: a dead peer, another length, another fingerprint.
    struct awaiter {
        operation* of;
        [[nodiscard]] bool await_ready() const noexcept { return of->done_; }
        void await_suspend(std::coroutine_handle<> self) const noexcept { of->suspend(self); }
        void await_resume() const { of->resume(); }
    };
    [[nodiscard]] awaiter operator co_await() noexcept { return {this}; }

private:
    void suspend(std::coroutine_handle<> self) noexcept;
    void resume();

    friend class scheduler_base;
    template <Transport>
    friend struct lane;

    static void ended(completion& node) noexcept;

    scheduler_base* on_ = nullptr;
    detail::waiter waiter_;
    operation* before_ = nullptr;  // among the waiting, in the order in which they were awaited
    operation* after_ = nullptr;
    time_point since_ = {};  // on a clock that stands while nobody drives
    bool done_ = true;       // false from post until it has ended
    bool waiting_ = false;   // in the scheduler's list
};

/// A one-shot local condition, awaitable by any number of coroutines of its scheduler. set() is for the driving thread.
/// It has no deadline (one's own backward may take long) but ends when the scheduler fails.
class event {
public:
    explicit event(scheduler_base& on) noexcept;
    event(event const&) = delete;
    event& operator=(event const&) = delete;
    ~event();

    void set() noexcept;
    void reset() noexcept { set_ = false; }
    [[nodiscard]] bool is_set() const noexcept { return set_; }

    struct awaiter {
        event& of;
        detail::waiter self = {};
        [[nodiscard]] bool await_ready() const noexcept;
        void await_suspend(std::coroutine_handle<> handle) noexcept {
            self.handle = handle;
            of.waiters_.push_back(self);
        }
        void await_resume() const;
    };
    [[nodiscard]] awaiter operator co_await() noexcept { return {*this}; }

private:
    friend class scheduler_base;
    scheduler_base& on_;
    bool set_ = false;
    detail::waiter_queue waiters_;
    event* before_ = nullptr;
    event* after_ = nullptr;
};

/// Work that arrives from elsewhere: collect() is called at every pump, on the driving thread, and moves on what has come.
class mailbox_client {
public:
    virtual void collect() = 0;

protected:
    ~mailbox_client() = default;

private:
    friend class scheduler_base;
    mailbox_client* next_ = nullptr;
};

/// The part of a scheduler that does not depend on the transport's type.
class scheduler_base {
public:
    explicit scheduler_base(timing const& times) : times_(times) { times_.validate(); }
    scheduler_base(scheduler_base const&) = delete;
    scheduler_base& operator=(scheduler_base const&) = delete;

    [[nodiscard]] timing const& times() const noexcept { return times_; }
    [[nodiscard]] bool failed() const noexcept { return failed_.load(); }
    [[nodiscard]] frame_pool& frames() noexcept { return frames_; }

    /// Somebody waits for a peer: there is something to drive.
    [[nodiscard]] bool busy() const noexcept { return first_ != nullptr || !ready_.empty(); }

    /// What this rank does now: a step or a collective, in the order in which the user calls them. Shown in its record
    /// should anything fail.
    void entered(operation_info const& what) noexcept {
        current_ = what;
        ++number_;
        history_ = digest().add(history_).add(what.fingerprint).value() | 1;  // 0 means "nothing entered"
        note_entered();
    }
    [[nodiscard]] operation_info const& current() const noexcept { return current_; }
    /// Of everything entered so far. The fingerprint of what may end without a word from some peer (a broadcast's root
    /// only sends): whoever differed before differs in every later one.
    [[nodiscard]] std::uint64_t history() const noexcept { return history_; }

    /// Fails this rank, once: publishes its record, ends every posted operation and every wait. The first reason stays.
    void fail(failure record) noexcept {
        if (failed_) return;
        failed_ = true;
        failed_at_ = now();
        fill(record);
        publish(record);
        for (event* e = events_; e != nullptr; e = e->after_) ready_.splice(e->waiters_);
    }
    void fail(failure_kind kind, errc code, int peer, std::string_view text) noexcept {
        failure record;
        record.kind = kind;
        record.code = code;
        record.peer = peer;
        record.text = text;
        fail(record);
    }
    /// Reports what user code threw, in its own words.
    void fail(std::exception_ptr const& thrown) noexcept {
        if (failed_) return;
        try {
            std::rethrow_exception(thrown);
        } catch (error const& e) {
            std::string_view const text = e.what();
            if (e.code() == errc::no_samples)  // every rank finds out by itself; one that left first says the same
                fail(failure_kind::mismatch, e.code(), -1, text.substr(text.find(": ") + 2));
            else
                fail(failure_kind::threw, errc::remote_exception, -1, text);
        } catch (std::exception const& e) {
            fail(failure_kind::threw, errc::remote_exception, -1, e.what());
        } catch (...) {
            fail(failure_kind::threw, errc::remote_exception, -1, "an exception that is no std::exception");
        }
    }

    void add(mailbox_client& client) noexcept { client.next_ = std::exchange(clients_, &client); }
    void remove(mailbox_client& client) noexcept {
        for (mailbox_client** at = &clients_; *at != nullptr; at = &(*at)->next_)
            if (*at == &client) {
                *at = client.next_;
                return;
            }
    }

    [[nodiscard]] virtual time_point now() const noexcept = 0;

protected:
    ~scheduler_base() = default;
    virtual void publish(failure const& record) noexcept = 0;
    virtual void note_entered() noexcept {}
    [[nodiscard]] virtual int own_rank() const noexcept = 0;

    /// Deadlines that have passed, mail, then everybody who can go on. Collects first, then resumes: a resumed coroutine
    /// may end others.
    void turn() {
        try {
            for (mailbox_client* c = clients_; c != nullptr && !failed_; c = c->next_) c->collect();
        } catch (...) {
            fail(std::current_exception());
        }
        if (!failed_ && now() >= first_deadline()) {
            failure late = waiting_record(*first_);
            fail(late);
        }
        while (!ready_.empty()) {
            detail::waiter_queue going;
            going.splice(ready_);
            while (detail::waiter* const w = going.pop_front()) w->handle.resume();
        }
    }
    [[nodiscard]] time_point first_deadline() const noexcept {
        return first_ == nullptr ? never : first_->since_ + times_.collective + absent_;
    }
    /// Time in which nobody drove us, although we asked for it, counts for no deadline: own code that ran long where no
    /// thread of ours drives, a stopped process, a sleeping machine. After a long absence peers get time to be heard.
    void came_back() noexcept {
        time_point const at = now();
        time_point const expected = std::max(due_, driven_);
        driven_ = at;
        if (at <= expected) return;
        absent_ += at - expected;
        if (at - expected <= times_.verdict || first_ == favoured_) return;
        absent_ += times_.collective / 4;
        favoured_ = first_;  // once for each wait: a stall every minute must not keep a deadline from ever passing
    }
    void goes_away(time_point due) noexcept {
        driven_ = now();
        due_ = due;
    }
    /// This rank's record of what it is doing, when the failure is somebody else's.
    [[nodiscard]] failure bystander() const noexcept {
        failure record;
        if (first_ != nullptr) return waiting_record(*first_);
        record.kind = failure_kind::idle;
        return record;
    }

    std::atomic<bool> failed_{false};  // written by the driver; anybody may look
    time_point failed_at_ = {};
    std::uint64_t number_ = 0;  // of what was entered last, counted from 1

private:
    friend class operation;
    friend class event;

    [[nodiscard]] failure waiting_record(operation const& of) const noexcept {
        failure record;
        record.kind = failure_kind::waiting;
        record.code = errc::deadline;
        record.peer = of.peer;
        record.operation = of.tag.id;
        record.waited_ns = static_cast<std::uint64_t>(std::max(nanoseconds{0}, now() - absent_ - of.since_).count());
        return record;
    }
    void fill(failure& record) const noexcept {
        record.rank = own_rank();
        record.entered.index = number_;
        record.fingerprint = history_;
        if (*current_.name != '\0') {
            try {
                record.name = std::string_view(current_.text());
            } catch (...) {
                record.name = std::string_view(current_.name);
            }
        }
    }
    void wait(operation& op) noexcept {
        op.since_ = now() - absent_;
        op.waiting_ = true;
        op.before_ = last_;
        op.after_ = nullptr;
        (last_ != nullptr ? last_->after_ : first_) = &op;
        last_ = &op;
    }
    void unwait(operation& op) noexcept {
        op.waiting_ = false;
        (op.before_ != nullptr ? op.before_->after_ : first_) = op.after_;
        (op.after_ != nullptr ? op.after_->before_ : last_) = op.before_;
    }

    timing times_;
    frame_pool frames_;
    operation_info current_;
    std::uint64_t history_ = 0;
    time_point driven_ = {};               // when we were driven last
    time_point due_ = never;               // when we asked to be driven again
    nanoseconds absent_{0};                // in sum; an operation's since_ counts without it
    operation const* favoured_ = nullptr;  // the oldest wait when time was given last
    detail::waiter_queue ready_;
    operation* first_ = nullptr;  // the waiting, oldest first
    operation* last_ = nullptr;
    event* events_ = nullptr;
    mailbox_client* clients_ = nullptr;
};

inline operation::~operation() {
    // Only an exception between post and await gets here: ending everything is what frees our memory.
    if (!done_) on_->fail(failure_kind::threw, errc::remote_exception, -1, "a collective was left by an exception");
}
inline void operation::ended(completion& node) noexcept {
    operation& self = static_cast<operation&>(node);
    self.done_ = true;
    if (!self.waiting_) return;
    self.on_->unwait(self);
    self.on_->ready_.push_back(self.waiter_);
}
inline void operation::suspend(std::coroutine_handle<> self) noexcept {
    waiter_.handle = self;
    on_->wait(*this);
}
inline void operation::resume() {
    if (on_ == nullptr)
        throw usage_error("an operation is awaited that was never posted: lane.send or receive it first");
    if (status == op_status::ok && (sends || fingerprint == tag.fingerprint)) return;
    if (!on_->failed()) {
        failure record;
        record.operation = tag.id;
        record.peer = peer;
        std::string const who = "rank " + std::to_string(peer);
        std::string text;
        if (status == op_status::closed) {
            record.kind = failure_kind::closed;
            record.code = errc::peer_closed;
        } else {
            record.kind = failure_kind::mismatch;
            record.code = errc::mismatch;
            text =
                "rank " + std::to_string(on_->own_rank()) + " is in " + on_->current().text() + " and expects " +
                std::to_string(size) + " bytes from " + who + ", which sent " +
                (status == op_status::length ? std::to_string(length) + " bytes" : "a message of another operation") +
                ". All ranks must call the same collectives in the same order with the same counts.";
        }
        record.text = std::string_view(text);
        on_->fail(record);
    }
    throw collective_aborted();
}

inline event::event(scheduler_base& on) noexcept : on_(on), after_(on.events_) {
    if (after_ != nullptr) after_->before_ = this;
    on.events_ = this;
}
inline event::~event() {
    (before_ != nullptr ? before_->after_ : on_.events_) = after_;
    if (after_ != nullptr) after_->before_ = before_;
}
inline void event::set() noexcept {
    set_ = true;
    on_.ready_.splice(waiters_);
}
inline bool event::awaiter::await_ready() const noexcept {
    return of.set_ || of.on_.failed();
}
inline void event::awaiter::await_resume() const {
    if (of.on_.failed()) throw collective_aborted();
}

/// Coroutines over one transport. Not thread-safe: see communicator for who may drive it.
template <Transport T>
class scheduler final : public scheduler_base {
public:
    scheduler(T& transport, timing const& times) : scheduler_base(times), transport_(transport) {}

    [[nodiscard]] T& transport() noexcept { return transport_; }
    [[nodiscard]] int rank() const noexcept { return transport_.rank(); }
    [[nodiscard]] int size() const noexcept { return transport_.size(); }
    [[nodiscard]] time_point now() const noexcept override { return transport_.now(); }

    /// Moves everything on that can move without waiting. Only from the top of a driver's loop, never from a coroutine.
    void pump() {
        frame_pool_scope const pool(frames());
        came_back();
        if (!failed_) listen();
        turn();
    }
    /// Sleeps in the transport until something may move, at the latest until `until` or the next deadline.
    /// An error of the transport itself fails the scheduler: what is in flight has to end, whoever drives.
    void progress(time_point until) noexcept {
        try {
            time_point const limit = std::min(until, next_deadline());
            goes_away(limit);
            news_ |= transport_.progress(limit);
        } catch (...) {
            fail(std::current_exception());
        }
    }

    /// When pump() has something to do even if no message comes.
    [[nodiscard]] time_point next_deadline() const noexcept {
        time_point next = first_deadline();
        if (failed_)
            next = settled_ ? never : std::max(failed_at_ + times().verdict, now() + std::chrono::milliseconds(5));
        if constexpr (requires { transport_.next_timer(); }) next = std::min(next, transport_.next_timer());
        return next;
    }

    /// After a failure: whether the verdict is known. Every rank has spoken or is gone, or times().verdict has passed;
    /// then the least rank that has spoken publishes its verdict, and the others adopt that.
    bool settle() {
        if (!failed_) return false;
        if (settled_) return true;
        std::span<report const> const all = transport_.reports();
        bool complete = true;
        int speaker = -1;
        for (std::size_t r = 0; r < all.size(); ++r) {
            if (all[r].is == report::state::silent) complete = false;
            if (all[r].is != report::state::spoke) continue;
            if (speaker < 0) speaker = static_cast<int>(r);
            if (all[r].record.is_verdict) return adopt(all[r].record);
        }
        time_point const patience = failed_at_ + times().verdict;
        if (!complete && now() < patience) return false;
        if (speaker >= 0 && speaker != rank() && now() < patience + times().verdict) return false;
        failure mine = decide(all, times().collective);
        mine.rank = mine.rank < 0 ? rank() : mine.rank;
        transport_.abort(mine);
        return adopt(mine);
    }
    [[nodiscard]] failure const& verdict() const noexcept { return verdict_; }

private:
    bool adopt(failure const& v) {
        verdict_ = v;
        return settled_ = true;
    }
    void publish(failure const& record) noexcept override { transport_.abort(record); }
    static constexpr bool has_marks = requires(T& t) { t.mark_of(0).number; };

    /// What heartbeats say we are in.
    void note_entered() noexcept override {
        if constexpr (has_marks) {
            std::remove_cvref_t<decltype(transport_.mark_of(0))> mine;
            mine.number = number_;
            mine.fingerprint = history();
            mine.name = std::string_view(current().name);
            transport_.entered(mine);
        }
    }
    /// A peer whose heartbeats name the same number and another operation: no need to wait for the deadline.
    void compare_marks() {
        if constexpr (has_marks) {
            if (first_deadline() == never || now() < first_deadline() - times().collective + 2 * times().heartbeat)
                return;
            for (int peer = 0; peer < size() && !failed_; ++peer) {
                if (peer == rank()) continue;
                auto const& theirs = transport_.mark_of(peer);
                if (theirs.number != number_ || theirs.fingerprint == 0 || theirs.fingerprint == history()) continue;
                fail(failure_kind::mismatch, errc::mismatch, peer,
                     "rank " + std::to_string(rank()) + " is in " + current().text() + ", rank " +
                         std::to_string(peer) + " in " + std::string(theirs.name.view()) +
                         " of the same number. All ranks must call the same collectives in the same order with the "
                         "same counts.");
            }
        }
    }
    [[nodiscard]] int own_rank() const noexcept override { return transport_.rank(); }

    /// What others have said, and who has fallen silent.
    void listen() {
        std::span<report const> const all = transport_.reports();
        std::size_t const count = std::exchange(news_, false) ? all.size() : 0;
        for (std::size_t r = 0; r < count && !failed_; ++r) {
            if (static_cast<int>(r) == rank()) continue;
            if (all[r].is == report::state::spoke) fail(bystander());
            if (all[r].is == report::state::closed) {
                failure record = bystander();
                record.kind = failure_kind::closed;
                record.code = all[r].record.code == errc::frame ? errc::frame : errc::peer_closed;
                record.peer = static_cast<int>(r);
                record.text = all[r].record.text;
                fail(record);
            }
        }
        if constexpr (requires { transport_.overdue_peer(); }) {
            if (failed_) return;
            if (auto const peer = transport_.overdue_peer()) {
                failure record = bystander();
                record.kind = failure_kind::silent;
                record.code = errc::peer_silent;
                record.peer = *peer;
                record.waited_ns =
                    static_cast<std::uint64_t>((transport_.now() - transport_.last_heard(*peer)).count());
                fail(record);
            }
        }
        if (!failed_) compare_marks();
    }

    T& transport_;
    bool news_ = false;
    bool settled_ = false;
    failure verdict_;
};

/// A communicator with an identity and a fingerprint, by value: what a collective is written over.
template <Transport T>
struct lane {
    scheduler<T>* on = nullptr;
    identity id = {};
    std::uint64_t fingerprint = 0;

    [[nodiscard]] int rank() const noexcept { return on->rank(); }
    [[nodiscard]] int size() const noexcept { return on->size(); }

    /// The same collective's p-th stream of messages: phases of one collective never match each other's. p < 4.
    [[nodiscard]] lane phase(std::uint32_t p) const noexcept {
        lane other = *this;
        other.id.channel += p;
        return other;
    }

    void send(operation& op, int peer, const_bytes out) const {
        begin(op);
        if (op.done_) return;
        on->transport().post_send(peer, {id, fingerprint}, out, op);
    }
    /// `reader`: the send that still reads `in`, where there is one.
    void receive(operation& op, int peer, mutable_bytes in, operation const* reader = nullptr) const {
        begin(op);
        op.reader = reader;
        if (op.done_) return;
        on->transport().post_receive(peer, {id, fingerprint}, in, op);
    }

private:
    void begin(operation& op) const {
        op.on_ = on;
        op.done_ = on->failed();
        op.waiting_ = false;
        op.status = op.done_ ? op_status::aborted : op_status::pending;
    }
};

/// A fixed number of operations from the scheduler's frame pool.
class operations {
public:
    explicit operations(std::size_t count) : count_(count) {
        if (count == 0) return;
        first_ = static_cast<operation*>(frame_pool::allocate(count * sizeof(operation)));
        for (std::size_t i = 0; i < count; ++i) ::new (first_ + i) operation();
    }
    operations(operations const&) = delete;
    operations& operator=(operations const&) = delete;
    ~operations() {
        for (std::size_t i = 0; i < count_; ++i) first_[i].~operation();
        if (first_ != nullptr) frame_pool::deallocate(first_, count_ * sizeof(operation));
    }
    operation& operator[](std::size_t i) noexcept { return first_[i]; }
    [[nodiscard]] std::size_t size() const noexcept { return count_; }

private:
    std::size_t count_;
    operation* first_ = nullptr;
};

/// Uninitialised memory for messages from the scheduler's pool, 64-byte aligned.
class scratch {
public:
    explicit scratch(std::size_t bytes) : bytes_(bytes), raw_(bytes == 0 ? nullptr : frame_pool::allocate(bytes + 64)) {
        auto const at = reinterpret_cast<std::uintptr_t>(raw_);
        data_ = reinterpret_cast<std::byte*>((at + 63) & ~std::uintptr_t{63});
    }
    scratch(scratch const&) = delete;
    scratch& operator=(scratch const&) = delete;
    ~scratch() {
        if (raw_ != nullptr) frame_pool::deallocate(raw_, bytes_ + 64);
    }
    [[nodiscard]] mutable_bytes bytes() const noexcept { return {data_, bytes_}; }
    template <class E>
    [[nodiscard]] std::span<E> as() const noexcept {
        return {reinterpret_cast<E*>(data_), bytes_ / sizeof(E)};
    }

private:
    std::size_t bytes_;
    void* raw_;
    std::byte* data_;
};

}  // namespace ddp
