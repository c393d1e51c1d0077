/// \file
/// operation and event: what a scheduler's coroutines await.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <coroutine>
#include <cstdint>
#include <exception>

#include <ddp/comm/group.hpp>
#include <ddp/comm/transport.hpp>

namespace ddp {

/// Unwinds the coroutines of a failed communicator. The reason is the scheduler's verdict; callers never see this.
struct collective_aborted final : std::exception {
    [[nodiscard]] char const* what() const noexcept override { return "the communicator has failed"; }
};

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

/// One posted send or receive, for co_await: it must be in the frame of a coroutine or in an `operations` array. If the
/// scheduler fails for whatever reason, the operation has ended before the frame is unwound. Awaiting it throws
/// collective_aborted if it failed, for example because a peer died or sent another length or fingerprint; the reason is
/// then in this rank's record.
class operation : private completion {
public:
    operation() noexcept { run = &ended; }
    ~operation();

    /// What co_await uses. If the operation failed (a dead peer, another length, another fingerprint), it reports the
    /// reason and throws collective_aborted.
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
    [[noreturn]] void refuse();

    friend class scheduler_base;
    template <Transport>
    friend struct lane;

    static void ended(completion& node) noexcept;

    group* of_ = nullptr;
    scheduler_base* on_ = nullptr;
    detail::waiter waiter_;
    operation* before_ = nullptr;  // among the waiting, in the order in which they were awaited
    operation* after_ = nullptr;
    time_point since_ = {};  // on a clock that stops while no thread drives
    bool done_ = true;       // false from post until it has ended
    bool waiting_ = false;   // in the scheduler's list
};

/// A one-shot local condition, awaitable by any number of coroutines of its scheduler; only the driving thread calls set().
/// Waiting for it has no deadline, because this rank's own backward may take long; it throws collective_aborted when the
/// scheduler fails.
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

/// Receives work from other threads: every pump calls collect(), on the thread that drives, which processes what has
/// arrived.
class mailbox_client {
public:
    virtual void collect() = 0;
    /// Whether there is mail that has to be collected before other clients are given theirs.
    [[nodiscard]] virtual bool has_mail() const noexcept { return false; }
    /// Whether this rank is within an operation of all members of `ranks`: a step that has begun.
    [[nodiscard]] virtual bool under_way(group const& /*ranks*/) const noexcept { return false; }

protected:
    ~mailbox_client() = default;

private:
    friend class scheduler_base;
    mailbox_client* next_ = nullptr;
};

}  // namespace ddp
