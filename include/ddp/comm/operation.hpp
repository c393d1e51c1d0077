/// \file
/// operation and event: what a coroutine of a scheduler waits for.
#pragma once

#include <coroutine>
#include <cstdint>
#include <exception>

#include <ddp/comm/group.hpp>
#include <ddp/comm/transport.hpp>

namespace ddp {

/// Unwinds the coroutines of a failed communicator. The reason is the scheduler's verdict; nobody outside sees this.
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
    /// Whether there is something to collect that has to be collected before others leave mail of theirs.
    [[nodiscard]] virtual bool has_mail() const noexcept { return false; }
    /// Whether this rank is within something that the members of `ranks` do together: a step that has begun.
    [[nodiscard]] virtual bool under_way(group const& /*ranks*/) const noexcept { return false; }

protected:
    ~mailbox_client() = default;

private:
    friend class scheduler_base;
    mailbox_client* next_ = nullptr;
};

}  // namespace ddp
