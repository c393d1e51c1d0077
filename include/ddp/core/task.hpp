/// \file
/// task: a lazily started coroutine that is awaited exactly once and owns its frame.
///
/// Starting a child is a plain call (`await_suspend` resumes it and returns whether it is still running), so a chain of
/// awaits costs no stack where children finish at once, with every compiler and at every optimisation level. Symmetric
/// transfer was tried: it overflows the stack at -O0, -O1 and under sanitizers of GCC 12.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <ddp/core/contract.hpp>
#include <ddp/core/separate.hpp>

#include <algorithm>
#include <bit>
#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <utility>

namespace ddp {

/// Free lists of coroutine frames and message scratch, so that a collective allocates nothing after its first run.
/// Not thread-safe: one pool belongs to one scheduler and is used by whoever drives it.
class frame_pool {
public:
    frame_pool() = default;
    frame_pool(frame_pool const&) = delete;
    frame_pool& operator=(frame_pool const&) = delete;
    ~frame_pool();

    /// The pool that coroutines started on this thread take their frames from; null means the heap.
    static frame_pool*& current() noexcept {
        thread_local frame_pool* pool = nullptr;
        return pool;
    }

    /// From here on counts what is taken, until reserve_counted().
    void count() noexcept { std::fill_n(taken_, classes, std::size_t{0}); }
    /// Makes sure that everything taken since count() could be held at once, plus one frame of each size for the
    /// awaiter; of each size above `small` bytes, at most `large_at_once` blocks. Work that repeats then allocates
    /// nothing, however its parts overlap. If memory is short it makes fewer, and the pool grows when it has to.
    void reserve_counted(std::size_t small, std::size_t large_at_once) noexcept;

    static void* allocate(std::size_t bytes);
    static void deallocate(void* frame, std::size_t bytes) noexcept;
    /// Whether allocate() returned this address. One that it did not return need not even be aligned.
    [[nodiscard]] static bool made(void* frame) noexcept {
        if (reinterpret_cast<std::uintptr_t>(frame) % alignof(header) != 0) return false;
        return (static_cast<header*>(frame) - 1)->frame == frame;
    }

private:
    struct alignas(std::max_align_t) header {
        frame_pool* pool;
        void* frame;  // right behind this header
    };
    struct node {
        node* next;
    };
    static constexpr std::size_t grain = 128;  // bytes a size class, up to 8 KiB; above, powers of two
    static constexpr std::size_t fine = 64;
    static constexpr std::size_t classes = fine + 64;

    static std::size_t class_of(std::size_t total) noexcept {
        std::size_t const c = (total + grain - 1) / grain;
        return c < fine ? c : fine + static_cast<std::size_t>(std::bit_width(total - 1));
    }
    static std::size_t bytes_of(std::size_t c) noexcept { return c < fine ? c * grain : std::size_t{1} << (c - fine); }

    void* take(std::size_t total);
    void give(void* raw, std::size_t total) noexcept;

    node* free_[classes] = {};
    std::size_t made_[classes] = {};   // blocks that exist, free or not
    std::size_t taken_[classes] = {};  // since count()
};

/// Makes `pool` the current one for a scope.
class frame_pool_scope {
public:
    explicit frame_pool_scope(frame_pool& pool) noexcept : before_(std::exchange(frame_pool::current(), &pool)) {}
    frame_pool_scope(frame_pool_scope const&) = delete;
    frame_pool_scope& operator=(frame_pool_scope const&) = delete;
    ~frame_pool_scope() { frame_pool::current() = before_; }

private:
    frame_pool* before_;
};

template <class T = void>
class task;

namespace detail {

struct promise_base {
    std::coroutine_handle<> continuation;  // set once the parent really sleeps
    std::exception_ptr error;

    static void* operator new(std::size_t bytes) { return frame_pool::allocate(bytes); }
    static void operator delete(void* frame, std::size_t bytes) noexcept { frame_pool::deallocate(frame, bytes); }

    struct final_awaiter {
        [[nodiscard]] bool await_ready() const noexcept { return false; }
        template <class P>
        void await_suspend(std::coroutine_handle<P> self) const noexcept {
            // The parent may destroy our frame while it runs: nothing of it is touched afterwards.
            if (std::coroutine_handle<> const parent = self.promise().continuation) parent.resume();
        }
        void await_resume() const noexcept {}
    };

    [[nodiscard]] std::suspend_always initial_suspend() const noexcept { return {}; }
    [[nodiscard]] final_awaiter final_suspend() const noexcept { return {}; }
    void unhandled_exception() noexcept { error = std::current_exception(); }
};

/// GCC 12 puts the promise where no handle finds it if the body's outermost scope has `co_await` in a condition,
/// `if (!co_await x)`, and declares nothing: resuming would then jump anywhere. Said here, at the first call.
template <class P>
std::coroutine_handle<P> frame_of(P& promise) {
    std::coroutine_handle<P> const frame = std::coroutine_handle<P>::from_promise(promise);
#if defined(__GNUC__) && !defined(__clang__)
    DDP_EXPECTS(frame_pool::made(frame.address()),
                "this compiler lays out a coroutine wrongly that has co_await inside a condition; name the result "
                "first: bool const ready = co_await x; if (!ready) ...");
#endif
    return frame;
}

template <class T>
struct promise : promise_base {
    std::optional<T> value;
    task<T> get_return_object();
    template <class U>
    void return_value(U&& result) {
        value.emplace(std::forward<U>(result));
    }
    T take() {
        if (error) std::rethrow_exception(std::exchange(error, nullptr));
        return std::move(*value);
    }
};

template <>
struct promise<void> : promise_base {
    task<void> get_return_object();
    void return_void() const noexcept {}
    void take() {
        if (error) std::rethrow_exception(std::exchange(error, nullptr));
    }
};

}  // namespace detail

/// A coroutine that returns a T: what the operations over a lane are. It runs when it is awaited, exactly once, and
/// awaiting it throws what its body throws. Move-only. A task that has not run may be destroyed; before a waiting task
/// is destroyed, its driver must end what it waits for.
template <class T>
class [[nodiscard]] task {
public:
    using promise_type = detail::promise<T>;

    task() = default;
    task(task&& other) noexcept : frame_(std::exchange(other.frame_, nullptr)) {}
    task& operator=(task&& other) noexcept {
        std::swap(frame_, other.frame_);
        return *this;
    }
    ~task() {
        if (frame_) frame_.destroy();
    }

    struct awaiter {
        std::coroutine_handle<promise_type> child;
        [[nodiscard]] bool await_ready() const noexcept { return false; }
        bool await_suspend(std::coroutine_handle<> parent) const noexcept {
            child.resume();
            if (child.done()) return false;
            child.promise().continuation = parent;
            return true;
        }
        T await_resume() const { return child.promise().take(); }
    };
    awaiter operator co_await() const& noexcept { return {frame_}; }

    /// For drivers: runs to the first suspension. done() and take() then give its state and its result.
    void start() const { frame_.resume(); }
    [[nodiscard]] bool done() const noexcept { return !frame_ || frame_.done(); }
    [[nodiscard]] bool valid() const noexcept { return static_cast<bool>(frame_); }
    T take() const { return frame_.promise().take(); }

private:
    friend promise_type;
    explicit task(std::coroutine_handle<promise_type> frame) noexcept : frame_(frame) {}
    std::coroutine_handle<promise_type> frame_;
};

template <class T>
task<T> detail::promise<T>::get_return_object() {
    return task<T>(frame_of(*this));
}
inline task<void> detail::promise<void>::get_return_object() {
    return task<void>(frame_of(*this));
}

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/core/impl/task.ipp>
#endif
