// task, when_all and the pool their frames come from. Replaces operator new to count: nothing else in its program does.
#include <ddp/core/task.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/when_all.hpp"

namespace {
std::atomic<std::size_t> allocations = 0;
}

// Not inlined, or GCC takes the free() of one for a mistake in the other.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::nothrow_t const&) noexcept {
    allocations.fetch_add(1, std::memory_order_relaxed);
    return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

namespace {

using ddp::task;

/// Suspends until the test resumes it.
struct gate {
    std::coroutine_handle<> waiting;
    bool open = false;
    [[nodiscard]] bool await_ready() const noexcept { return open; }
    void await_suspend(std::coroutine_handle<> self) noexcept { waiting = self; }
    void await_resume() const noexcept {}
    void release() {
        open = true;
        if (waiting) std::exchange(waiting, nullptr).resume();
    }
};

/// How far apart the stack was at different calls.
struct stack_span {
    std::uintptr_t low = UINTPTR_MAX, high = 0;
    void look() noexcept {
        // Not the address of a variable: AddressSanitizer may put those elsewhere.
        auto const at = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
        low = std::min(low, at);
        high = std::max(high, at);
    }
    [[nodiscard]] std::size_t bytes() const noexcept { return high - low; }
};

task<int> leaf(int value, stack_span* stack) {
    stack->look();
    co_return value;
}
task<long> sum_of_leaves(int count, stack_span* stack) {
    long sum = 0;
    for (int i = 0; i < count; ++i) {
        int const one = co_await leaf(i % 3, stack);
        sum += one;
    }
    co_return sum;
}

task<int> nested(int depth) {
    if (depth == 0) co_return 1;
    int const below = co_await nested(depth - 1);
    co_return below + 1;
}

task<> wait_for(gate* at, std::vector<int>* log, int number) {
    co_await *at;
    log->push_back(number);
}
task<> fail_after(gate* at, char const* text) {
    co_await *at;
    throw std::runtime_error(text);
}
task<int> value_after(gate* at, int value) {
    co_await *at;
    co_return value;
}
task<> ping_pong(gate* at, int rounds, stack_span* stack) {
    for (int i = 0; i < rounds; ++i) {
        at->open = false;
        int const value = co_await value_after(at, i);
        stack->look();
        if (value != i) throw std::logic_error("a value was lost");
    }
}
task<int> catches(gate* at) {
    std::string seen;
    try {
        co_await fail_after(at, "inner");
    } catch (std::runtime_error const& e) {
        seen = e.what();
    }
    co_return seen == "inner" ? 1 : 0;
}
task<std::unique_ptr<int>> move_only() {
    co_return std::make_unique<int>(5);
}
task<> immediate_throw() {
    throw std::runtime_error("at once");
    co_return;
}

struct listener {
    std::vector<std::string>* heard;
    void operator()(std::exception_ptr const& e) const noexcept {
        try {
            std::rethrow_exception(e);
        } catch (std::exception const& x) {
            heard->push_back(x.what());
        }
    }
};

std::vector<task<>> three(gate* a, gate* b, gate* c, std::vector<int>* log) {
    std::vector<task<>> children;
    children.push_back(wait_for(a, log, 1));
    children.push_back(wait_for(b, log, 2));
    children.push_back(wait_for(c, log, 3));
    return children;
}

/// Frames of this coroutine are destroyed at different points of their life.
struct counted {
    explicit counted(int& alive) : alive_(alive) { ++alive_; }
    counted(counted const& other) : alive_(other.alive_) { ++alive_; }
    ~counted() { --alive_; }
    int& alive_;
};
task<> holds(counted /*thing*/, gate* at) {
    co_await *at;
}

template <class Awaitable>
task<> awaits_in_condition(Awaitable* at, int* out) {
    if (!co_await *at) co_return;
    *out = 3;
}
struct ready_bool {
    [[nodiscard]] bool await_ready() const noexcept { return true; }
    void await_suspend(std::coroutine_handle<>) const noexcept {}
    [[nodiscard]] bool await_resume() const noexcept { return true; }
};

}  // namespace

TEST_CASE("a task starts when it is awaited, and returns or throws out of the await", "[core][task]") {
    gate at;
    auto const t = value_after(&at, 7);
    CHECK_FALSE(t.done());
    t.start();
    CHECK_FALSE(t.done());
    at.release();
    REQUIRE(t.done());
    CHECK(t.take() == 7);

    gate other;
    auto const c = catches(&other);
    c.start();
    other.release();
    CHECK(c.take() == 1);

    auto const thrown = immediate_throw();
    thrown.start();
    CHECK(thrown.done());
    CHECK_THROWS_WITH(thrown.take(), "at once");

    auto const m = move_only();
    m.start();
    CHECK(*m.take() == 5);
}

TEST_CASE("a million awaits of children that finish at once cost no stack", "[core][task]") {
    stack_span stack;
    auto const t = sum_of_leaves(1'000'000, &stack);
    t.start();
    REQUIRE(t.done());
    CHECK(t.take() == 999'999);
    CHECK(stack.bytes() < 4096);
}

TEST_CASE("a hundred thousand children that sleep first cost no stack", "[core][task]") {
    gate at;
    stack_span stack;
    auto const t = ping_pong(&at, 100'000, &stack);
    t.start();
    while (!t.done()) at.release();
    t.take();
    CHECK(stack.bytes() < 4096);
}

TEST_CASE("tasks nest", "[core][task]") {
    auto const t = nested(500);
    t.start();
    CHECK(t.take() == 501);
}

TEST_CASE("frames go with their tasks, whether they ran, sleep or never started", "[core][task]") {
    int alive = 0;
    gate at;
    {
        auto const never = holds(counted(alive), &at);
        auto const sleeps = holds(counted(alive), &at);
        sleeps.start();
        CHECK(alive == 2);
        task<> moved = holds(counted(alive), &at);
        moved = task<>();
        CHECK(alive == 2);
    }
    CHECK(alive == 0);
}

TEST_CASE("when_all returns when every child has ended, in whatever order", "[core][task]") {
    gate a, b, c;
    std::vector<int> log;
    std::vector<std::string> heard;
    auto const all = ddp::test::when_all(three(&a, &b, &c, &log), listener{&heard});
    all.start();
    c.release();
    a.release();
    CHECK_FALSE(all.done());
    b.release();
    REQUIRE(all.done());
    all.take();
    CHECK(log == std::vector<int>{3, 1, 2});
    CHECK(heard.empty());

    auto const none = ddp::test::when_all({}, listener{&heard});
    none.start();
    CHECK(none.done());

    gate open{.waiting = {}, .open = true};
    auto const at_once = ddp::test::when_all(three(&open, &open, &open, &log), listener{&heard});
    at_once.start();
    CHECK(at_once.done());
}

TEST_CASE("when_all reports the error that came first in time at once, and rethrows it at the end", "[core][task]") {
    gate a, b, c;
    std::vector<std::string> heard;
    std::vector<task<>> children;
    children.push_back(fail_after(&a, "first in the list"));
    children.push_back(fail_after(&b, "first in time"));
    children.push_back(fail_after(&c, "last"));
    auto const all = ddp::test::when_all(std::move(children), listener{&heard});
    all.start();
    CHECK(heard.empty());
    b.release();
    CHECK(heard == std::vector<std::string>{"first in time"});
    CHECK_FALSE(all.done());
    a.release();
    c.release();
    REQUIRE(all.done());
    CHECK_THROWS_WITH(all.take(), "first in time");
    CHECK(heard.size() == 1);
}

TEST_CASE("what on_error does may end the siblings: they are resumed while the report is made", "[core][task]") {
    struct opener {
        gate* sibling;
        void operator()(std::exception_ptr const&) const noexcept { sibling->release(); }
    };
    gate a, b;
    std::vector<int> log;
    std::vector<task<>> children;
    children.push_back(wait_for(&b, &log, 1));
    children.push_back(fail_after(&a, "ends the other"));
    auto const all = ddp::test::when_all(std::move(children), opener{&b});
    all.start();
    a.release();
    REQUIRE(all.done());
    CHECK(log == std::vector<int>{1});
    CHECK_THROWS_WITH(all.take(), "ends the other");
}

TEST_CASE("frames come from the current pool and return to it: no allocation after the first run", "[core][task]") {
    ddp::frame_pool pool;
    ddp::frame_pool_scope const scope(pool);
    stack_span stack;
    auto const run = [&] {
        auto const t = sum_of_leaves(100, &stack);
        t.start();
        auto const n = nested(50);
        n.start();
        return t.take() + n.take();
    };
    auto const first = run();
    std::size_t const before = allocations.load();
    auto const second = run();
    std::size_t const after = allocations.load();
    CHECK(first == second);
    CHECK(after == before);
}

TEST_CASE("a frame goes back to the pool it came from, whichever is current", "[core][task]") {
    ddp::frame_pool one, two;
    gate at;
    task<int> t;
    task<int> (*const volatile make)(gate*, int) = &value_after;  // called so, no compiler leaves a frame out
    {
        ddp::frame_pool_scope const scope(one);
        t = make(&at, 1);
    }
    {
        ddp::frame_pool_scope const scope(two);
        t = task<int>();
    }
    ddp::frame_pool_scope const scope(one);
    std::size_t const before = allocations.load();
    t = make(&at, 1);
    CHECK(allocations.load() == before);
}

TEST_CASE("the pool serves every size, and keeps sizes apart", "[core][task]") {
    ddp::frame_pool pool;
    ddp::frame_pool_scope const scope(pool);
    std::vector<std::pair<void*, std::size_t>> taken;
    for (int round = 0; round < 3; ++round) {
        for (std::size_t bytes = 1; bytes < (std::size_t{1} << 22); bytes = bytes * 3 / 2 + 1) {
            void* const p = ddp::frame_pool::allocate(bytes);
            CHECK(reinterpret_cast<std::uintptr_t>(p) % alignof(std::max_align_t) == 0);
            std::fill_n(static_cast<unsigned char*>(p), bytes, static_cast<unsigned char>(round));
            taken.emplace_back(p, bytes);
        }
        for (auto const& [p, bytes] : taken) ddp::frame_pool::deallocate(p, bytes);
        taken.clear();
    }
}

TEST_CASE("a coroutine that the compiler lays out wrongly is refused instead of resumed", "[core][task]") {
    ready_bool at;
    int out = 0;
    try {
        auto const t = awaits_in_condition(&at, &out);
        t.start();
        CHECK(out == 3);  // a compiler without the fault
    } catch (ddp::usage_error const& e) {
        CHECK(std::string(e.what()).find("this compiler lays out a coroutine wrongly") != std::string::npos);
    }
}
