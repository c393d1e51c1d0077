/// \file
/// call: what a blocking collective does around its coroutine: an identity, a fingerprint, words for messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <type_traits>

#include <ddp/collective/concepts.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/small_gather.hpp>

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

/// What the ranks of a collective have to agree about. `more`: besides name, count, element type, particulars and root.
inline void fingerprint(operation_info& what, std::uint64_t more = 0) noexcept {
    std::uint64_t const root = static_cast<std::uint64_t>(what.root + 1);
    what.fingerprint = agree(what.name, what.count, what.element, what.detail, more ^ root << 32);
}

/// Blocks until the task that `make(lane)` returns has ended; on one rank nothing happens.
template <Transport T, class Make>
void call(communicator<T> const& comm, operation_info what, Make const& make, std::uint64_t more = 0) {
    fingerprint(what, more);
    comm.run([&] {
        lane<T> const over = comm.enter(what);
        return comm.size() == 1 ? nothing() : make(over);
    });
}

/// The same for what waits by itself, on this thread, instead of as a task: `f(lane)` runs while nobody drives. Cost:
/// 0.1 us.
template <Transport T, class F>
void call_blocking(communicator<T> const& comm, operation_info what, F const& f) {
    what.fingerprint =
        std::uint64_t{what.count} << 8 | std::uint64_t{static_cast<unsigned char>(*what.element)} << 1 | 1;
    try {
        comm.exclusively([&] {
            comm.tasks().pump();  // a step that has begun was entered before this: all ranks count alike
            if (comm.tasks().failed()) return;
            f(comm.enter(what));
        });
    } catch (...) {
        comm.fail(std::current_exception());
        throw;
    }
    if (comm.tasks().failed()) comm.check();
}

}  // namespace detail
}  // namespace ddp
