/// \file
/// scheduler_base: who waits, for how long, and what this rank says when something fails; for any transport.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/comm/operation.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/task.hpp>

namespace ddp {

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
    [[nodiscard]] bool busy() const noexcept { return first_ != nullptr || !ready_.empty() || !yielded_.empty(); }

    struct yield_awaiter {
        scheduler_base& on;
        detail::waiter self = {};
        [[nodiscard]] bool await_ready() const noexcept { return on.failed(); }
        void await_suspend(std::coroutine_handle<> handle) noexcept {
            self.handle = handle;
            if (on.yielded_.empty()) on.polled_ = false;
            on.yielded_.push_back(self);
        }
        void await_resume() const {
            if (on.failed()) throw collective_aborted();
        }
    };
    /// Awaitable, for long work: the driver goes through the transport once before the coroutine goes on. Where several
    /// wait, each round lets the first of them go on. Ends with collective_aborted when the scheduler fails.
    [[nodiscard]] yield_awaiter yield() noexcept { return {*this}; }

    /// Whether some client has mail that nobody has collected. Asked by the thread that adds and removes clients.
    [[nodiscard]] bool has_mail() const noexcept {
        for (mailbox_client const* c = clients_; c != nullptr; c = c->next_)
            if (c->has_mail()) return true;
        return false;
    }

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
        ready_.splice(yielded_);
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
        if (!yielded_.empty() && std::exchange(polled_, false)) ready_.push_back(*yielded_.pop_front());
        while (!ready_.empty()) {
            detail::waiter_queue going;
            going.splice(ready_);
            while (detail::waiter* const w = going.pop_front()) w->handle.resume();
        }
    }
    /// Somebody goes on as soon as the transport has been driven.
    [[nodiscard]] bool yielded() const noexcept { return !yielded_.empty(); }
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
        polled_ = true;
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
    detail::waiter_queue yielded_;
    bool polled_ = false;         // since somebody yielded, or went on after that
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

}  // namespace ddp
