/// \file
/// communication_thread: whether a thread of the library drives the transport between calls.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>
#include <thread>

#include <ddp/comm/transport.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// Which thread moves messages while the program computes. Results have the same bits in every case. Heartbeats are sent and
/// failures detected in the background whenever there is a thread at all.
enum class communication_thread : std::uint8_t {
    /// drives, unless the transport waits by polling (MPI) and this host has fewer than two cores for each of its ranks: then
    /// rests.
    automatic,
    drives,  ///< a thread drives whenever no call does: messages travel during backward
    /// The thread wakes twice in a heartbeat, and every 5 ms while something is in flight, to send and to listen. Otherwise
    /// `ready`, blocking calls and progress() move messages, on the caller's thread, so the thread takes little processor time.
    rests,
    none,  ///< there is none: a single rank, or a transport that allows no thread (MPI below THREAD_MULTIPLE)
};

/// The name of the value: "automatic", "drives", "rests" or "none".
[[nodiscard]] constexpr char const* name_of(communication_thread which) noexcept {
    switch (which) {
        case communication_thread::automatic: return "automatic";
        case communication_thread::drives: return "drives";
        case communication_thread::rests: return "rests";
        case communication_thread::none: break;
    }
    return "none";
}

/// Whether a thread that drives this transport takes processor time from ranks that compute. A transport says so with
/// `bool shares_cores() const`, as MPI does where its ranks and their threads outnumber the cores.
template <Transport T>
[[nodiscard]] bool shares_cores(T const& transport) {
    if constexpr (requires { transport.shares_cores(); }) return transport.shares_cores();
    return false;
}

namespace detail {
/// What DDP_COMMUNICATION_THREAD says ("automatic", "drives" or "rests"), or else `asked`; `crowded` resolves automatic.
/// Throws environment_error if the variable has another value.
[[nodiscard]] communication_thread chosen_thread(communication_thread asked, bool crowded);
/// Processor time that a thread has taken so far; 0 if the system does not say.
[[nodiscard]] std::chrono::nanoseconds processor_time(std::thread& of) noexcept;
}  // namespace detail

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/communication_thread.ipp>
#endif
