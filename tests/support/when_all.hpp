/// \file
/// when_all: tasks of one scheduler side by side inside another task.
#pragma once

#include <coroutine>
#include <cstddef>
#include <exception>
#include <utility>
#include <vector>

#include <ddp/core/task.hpp>

namespace ddp::test {

namespace side_by_side {

/// What the children of one when_all share; lives in the parent's frame.
template <class OnError>
struct join {
    std::size_t running;
    OnError& on_error;  // void(std::exception_ptr) noexcept: told of the first error, when it happens
    std::exception_ptr first;
    std::coroutine_handle<> waiting;

    struct awaiter {
        join& self;
        [[nodiscard]] bool await_ready() const noexcept { return self.running == 0; }
        void await_suspend(std::coroutine_handle<> parent) const noexcept { self.waiting = parent; }
        void await_resume() const noexcept {}
    };
    /// A child's last await: it stays suspended here, so that the parent may destroy its frame while it runs on.
    struct leave {
        join& self;
        [[nodiscard]] bool await_ready() const noexcept { return false; }
        void await_suspend(std::coroutine_handle<>) const noexcept {
            if (--self.running == 0 && self.waiting) self.waiting.resume();
        }
        void await_resume() const noexcept {}
    };
};

template <class OnError>
task<> joined(task<> child, join<OnError>* all) {
    std::exception_ptr error;  // carried out of the handler: a report may resume siblings
    try {
        co_await child;
    } catch (...) {
        error = std::current_exception();
    }
    if (error && !all->first) {
        all->first = error;
        all->on_error(error);
    }
    child = {};
    co_await typename join<OnError>::leave{*all};
}

}  // namespace side_by_side

/// Runs all children together and returns when every one has ended. Then rethrows the error that came first in time;
/// `on_error` heard of it when it happened, so that it can end the siblings' waiting.
template <class OnError>
task<> when_all(std::vector<task<>> children, OnError on_error) {
    side_by_side::join<OnError> all{children.size(), on_error, nullptr, nullptr};
    std::vector<task<>> wrapped;
    wrapped.reserve(children.size());  // everything that can fail to allocate does so before anything starts
    for (task<>& child : children) wrapped.push_back(side_by_side::joined(std::move(child), &all));
    for (task<> const& child : wrapped) child.start();
    co_await typename side_by_side::join<OnError>::awaiter{all};
    if (all.first) std::rethrow_exception(all.first);
}

}  // namespace ddp::test
