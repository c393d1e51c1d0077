/// \file
/// call, start: what a collective does around its coroutine: an identity, a fingerprint, words for messages.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include <ddp/collective/arguments.hpp>
#include <ddp/collective/concepts.hpp>
#include <ddp/collective/request.hpp>
#include <ddp/comm/communicator.hpp>

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

/// A name known at compile time, as a template argument.
template <std::size_t N>
struct fixed_name {
    char text[N];
    constexpr fixed_name(char const (&from)[N]) { std::copy_n(from, N, text); }
};
template <fixed_name Name, class Op>
inline constexpr auto joined_name = [] {
    constexpr std::string_view by = Op::name;
    std::array<char, by.size() + 1 + sizeof Name.text> all{};
    std::copy(by.begin(), by.end(), all.begin());
    all[by.size()] = ' ';
    std::copy(std::begin(Name.text), std::end(Name.text), all.begin() + by.size() + 1);
    return all;
}();
/// "allreduce" for a sum, "minimum allreduce" for a minimum.
template <fixed_name Name, class Op>
[[nodiscard]] constexpr char const* name_by() noexcept {
    std::size_t const behind = std::string_view(Op::name).size() + 1;
    return joined_name<Name, Op>.data() + (std::is_same_v<Op, sum> ? behind : 0);
}

template <Transport T>
void identify(communicator<T>& comm, operation_info& what, std::uint64_t more) {
    what.id = comm.next_identity();
    std::uint64_t const root = static_cast<std::uint64_t>(what.root + 1);
    what.fingerprint = agree(what.name, what.count, what.element, what.detail, more ^ root << 32);
}
template <Transport T, class Make>
task<> entered(communicator<T>& comm, operation_info const& what, Make const& make) {
    comm.tasks().entered(what);
    return comm.size() == 1 ? nothing() : make(lane<T>{&comm.tasks(), what.id, comm.tasks().history()});
}

/// Blocks until the task that `make(lane)` returns has ended; on one rank nothing happens. `more`: what else all ranks
/// have to agree about.
template <Transport T, class Make>
void call(communicator<T>& comm, operation_info what, Make const& make, std::uint64_t more = 0) {
    identify(comm, what, more);
    comm.run([&] { return entered(comm, what, make); });
}

template <Transport T>
class in_flight_on final : public in_flight {
public:
    in_flight_on(communicator<T>& comm, std::shared_ptr<typename communicator<T>::started> handle) noexcept
        : comm_(comm), handle_(std::move(handle)) {}
    bool done() override { return handle_->done(); }
    void wait() override { handle_->wait(); }
    void abandon() noexcept override {
        time_point const until = clock::now() + comm_.times().shutdown;
        while (!handle_->done() && clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (handle_->done()) return;
        comm_.fail("its program left a request that was under way by an exception");
        try {
            handle_->wait();
        } catch (...) {  // what unwinds says more
        }
    }

private:
    communicator<T>& comm_;
    std::shared_ptr<typename communicator<T>::started> handle_;
};

template <Transport T, class Make>
[[nodiscard]] request start_task(communicator<T>& comm, Make const& make) {
    return request(std::make_unique<in_flight_on<T>>(comm, comm.start(make)));
}

/// The same as call(), without waiting: what `make` captures by value, the task keeps by value.
template <Transport T, class Make>
[[nodiscard]] request start(communicator<T>& comm, operation_info what, Make const& make, std::uint64_t more = 0) {
    identify(comm, what, more);
    return start_task(comm, [&] { return entered(comm, what, make); });
}

/// The two ways in which everything here can be called, for what they have in common: run() is for collectives, task() for
/// what only some ranks take part in.
struct blocking {
    template <Transport T, class Make>
    static void run(communicator<T>& comm, operation_info const& what, Make const& make, std::uint64_t more = 0) {
        call(comm, what, make, more);
    }
    template <Transport T, class Make>
    static void task(communicator<T>& comm, Make const& make) {
        comm.run(make);
    }
};
struct starting {
    template <Transport T, class Make>
    [[nodiscard]] static request run(communicator<T>& comm, operation_info const& what, Make const& make,
                                     std::uint64_t more = 0) {
        return start(comm, what, make, more);
    }
    template <Transport T, class Make>
    [[nodiscard]] static request task(communicator<T>& comm, Make const& make) {
        return start_task(comm, make);
    }
};

/// For what waits by itself, on this thread, instead of as a task: `f()` runs while nobody drives. Cost: 0.1 us.
template <Transport T, class F>
void call_blocking(communicator<T>& comm, operation_info what, F const& f) {
    what.id = comm.next_identity();
    what.fingerprint =
        std::uint64_t{what.count} << 8 | std::uint64_t{static_cast<unsigned char>(*what.element)} << 1 | 1;
    try {
        comm.exclusively([&] {
            comm.tasks().pump();  // a step that has begun was entered before this: all ranks count alike
            if (comm.tasks().failed()) return;
            comm.tasks().entered(what);
            f();
        });
    } catch (...) {
        comm.fail(std::current_exception());
        throw;
    }
    if (comm.tasks().failed()) comm.check();
}

}  // namespace detail
}  // namespace ddp
