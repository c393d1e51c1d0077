/// \file
/// call, start: what a collective does around its coroutine: identity, fingerprint, and a description for error messages.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include <ddp/collective/arguments.hpp>
#include <ddp/collective/concepts.hpp>
#include <ddp/collective/request.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/posted.hpp>

namespace ddp {
namespace detail {

/// For messages and fingerprints; "bytes" where the language has no short name for the type.
template <Movable V>
[[nodiscard]] constexpr char const* value_name() noexcept {
    if constexpr (Element<V>) {
        return element_name<V>;
    } else if constexpr (std::is_integral_v<V> && !std::is_same_v<V, bool>) {
        constexpr char const* names[] = {"uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"};
        return names[(sizeof(V) == 1   ? 0
                      : sizeof(V) == 2 ? 1
                      : sizeof(V) == 4 ? 2
                                       : 3) +
                     (std::is_signed_v<V> ? 4 : 0)];
    } else {
        return "bytes";
    }
}

/// Throws usage_error unless `root` is one of this many ranks.
inline void expect_root(char const* name, int root, int ranks) {
    DDP_EXPECTS(root >= 0 && root < ranks,
                concat({name, ": root ", root, " is not a rank: they are numbered from 0 to ", ranks - 1}));
}

/// An operation over `count` values of type V, as it stands in messages.
template <Movable V>
[[nodiscard]] operation_info about(char const* name, std::size_t count, char const* how = "", int root = -1) noexcept {
    operation_info what;
    what.name = name;
    what.element = value_name<V>();
    what.count = *what.element == 'b' ? count * sizeof(V) : count;
    what.detail = how;
    what.root = root;
    return what;
}

/// A name known at compile time.
template <std::size_t N>
struct fixed_name {
    char text[N] = {};
    constexpr fixed_name() = default;
    constexpr fixed_name(char const (&from)[N]) { std::copy_n(from, N, text); }
};
template <class Op, fixed_name Name>
[[nodiscard]] consteval auto joined() {
    constexpr std::string_view by = Op::name;
    fixed_name<by.size() + 1 + sizeof Name.text> all;
    std::copy(by.begin(), by.end(), all.text);
    all.text[by.size()] = ' ';
    std::copy(std::begin(Name.text), std::end(Name.text), all.text + by.size() + 1);
    return all;
}
template <fixed_name Name>
inline constexpr char const* name_text = Name.text;

/// "allreduce" for a sum, "minimum allreduce" for a minimum.
template <fixed_name Name, class Op>
inline constexpr char const* name_by = name_text<joined<Op, Name>()>;
template <fixed_name Name>
inline constexpr char const* name_by<Name, sum> = name_text<Name>;

/// Fills in the fingerprint, on which the ranks of a collective have to agree: a digest of name, count, element type,
/// particulars, root and `more`.
inline void fingerprint(operation_info& what, std::uint64_t more = 0) noexcept {
    std::uint64_t const root = static_cast<std::uint64_t>(what.root) + 1;  // -1: none
    what.fingerprint = agree(what.name, what.count, what.element, what.detail, more ^ root << 32);
}
template <Transport T, class Make>
task<> entered(communicator<T> const& comm, operation_info const& what, Make const& make) {
    lane<T> const over = comm.enter(what);
    return comm.size() == 1 ? nothing() : make(over);
}

/// Blocks until the task that `make(lane)` returns has ended; on one rank nothing happens.
template <Transport T, class Make>
void call(communicator<T> const& comm, operation_info what, Make const& make, std::uint64_t more = 0) {
    fingerprint(what, more);
    comm.run([&] { return entered(comm, what, make); });
}

/// A started task. Keeps the group and the driver while it is under way.
template <Transport T>
class in_flight_on final : public in_flight {
public:
    in_flight_on(communicator<T> comm, task<> body) noexcept : comm_(std::move(comm)), body_(std::move(body)) {}

    bool done() override { return comm_.driver()->has_ended(body_); }
    void wait() override {
        if (body_.valid()) comm_.driver()->wait_for(body_);
    }
    void drop(bool unwinding) noexcept override {
        if (unwinding) give_up();
        comm_.driver()->abandon(std::move(body_));
    }

private:
    void give_up() noexcept {
        try {
            time_point const until = monotonic_clock::now() + comm_.times().shutdown;
            while (!done() && monotonic_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            if (!done()) comm_.fail("its program left a request under way by an exception");
        } catch (usage_error const&) {  // in a hook, where nothing can be waited for
        }
    }

    communicator<T> comm_;
    task<> body_;
};

/// The same as call(), without waiting: what `make` captures by value, the task keeps by value.
template <Transport T, class Make>
[[nodiscard]] request start_task(communicator<T> const& comm, Make const& make) {
    return request(std::make_unique<in_flight_on<T>>(comm, comm.driver()->start(make)));
}
template <Transport T, class Make>
[[nodiscard]] request start(communicator<T> const& comm, operation_info what, Make const& make,
                            std::uint64_t more = 0) {
    fingerprint(what, more);
    return start_task(comm, [&] { return entered(comm, what, make); });
}

/// The two ways to call everything here: blocking and started. run() is for collectives, task() for what only some ranks take
/// part in.
struct blocking {
    template <Transport T, class Make>
    static void run(communicator<T> const& comm, operation_info const& what, Make const& make, std::uint64_t more = 0) {
        call(comm, what, make, more);
    }
    template <Transport T, class Make>
    static void task(communicator<T> const& comm, Make const& make) {
        comm.run(make);
    }
};
struct starting {
    template <Transport T, class Make>
    [[nodiscard]] static request run(communicator<T> const& comm, operation_info const& what, Make const& make,
                                     std::uint64_t more = 0) {
        return start(comm, what, make, more);
    }
    template <Transport T, class Make>
    [[nodiscard]] static request task(communicator<T> const& comm, Make const& make) {
        return start_task(comm, make);
    }
};

/// For an algorithm that blocks this thread instead of being a task: `f(lane)` runs while nobody drives. Cost: 0.1 us.
template <Transport T, class F>
void call_blocking(communicator<T> const& comm, operation_info what, F const& f) {
    what.fingerprint =
        std::uint64_t{what.count} << 8 | std::uint64_t{static_cast<unsigned char>(*what.element)} << 1 | 1;
    try {
        comm.exclusively([&] {
            comm.tasks().pump();  // a step that has begun was entered before this: all ranks count alike
            if (comm.tasks().failed()) return;
            lane<T> const over = comm.enter(what);
            comm.tasks().note(flight::waits, over.id.index, over.id.group, 0, what.name);
            f(over);
            comm.tasks().note(flight::finished, over.id.index, over.id.group, 0, what.name);
        });
    } catch (...) {
        comm.fail(std::current_exception());
        throw;
    }
    if (comm.tasks().failed()) comm.check();
}

}  // namespace detail
}  // namespace ddp
