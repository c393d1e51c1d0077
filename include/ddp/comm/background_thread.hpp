/// \file
/// background_thread: the thread that drives a job between the program's calls, continuously or at intervals.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <string_view>
#include <system_error>
#include <thread>

#include <ddp/comm/communication_thread.hpp>
#include <ddp/comm/driving_turns.hpp>
#include <ddp/comm/scheduler.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

/// Part of driver, whose transport, scheduler and turns outlive it.
template <Transport T>
class background_thread {
public:
    background_thread(T& transport, scheduler<T>& tasks, driving_turns& turns) noexcept
        : transport_(transport), scheduler_(tasks), turns_(turns) {}
    background_thread(background_thread const&) = delete;
    background_thread& operator=(background_thread const&) = delete;
    ~background_thread() { stop(); }

    /// `chosen`: drives or rests. Throws environment_error, after the peers were told, if the system starts no thread.
    void start(communication_thread chosen);
    /// Ends the thread, if there is one.
    void stop() noexcept {
        if (!thread_.joinable()) return;
        turns_.stop([this] { transport_.wake(); });
        thread_.join();
    }

    /// none before start(), and if it was never called.
    [[nodiscard]] communication_thread is() const noexcept { return is_; }
    /// Processor time that it has taken so far; 0 without a thread.
    [[nodiscard]] nanoseconds time() noexcept { return thread_.joinable() ? processor_time(thread_) : nanoseconds{}; }

    /// One round of driving, for a thread that holds the token. An error of the transport fails the job and is not thrown.
    void turn(time_point until) noexcept;
    /// A pause after a round in which the transport reported an error: it may report one in every round, without waiting.
    static void pause() noexcept { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

private:
    /// While no call waits, messages may arrive in batches (see framed::pace).
    static constexpr std::chrono::milliseconds between_batches{1};
    void pace(nanoseconds least) noexcept {
        if constexpr (requires { transport_.pace(least); }) transport_.pace(least);
    }
    void drive();
    void rest_and_listen();

    T& transport_;
    scheduler<T>& scheduler_;
    driving_turns& turns_;
    communication_thread is_ = communication_thread::none;
    std::thread thread_;
};

// Defined out of the class, so that one source file can compile them for any_transport.

template <Transport T>
void background_thread<T>::start(communication_thread chosen) {
    bool const drives = chosen == communication_thread::drives;
    try {
        thread_ = std::thread([this, drives] { drives ? drive() : rest_and_listen(); });
        is_ = chosen;
    } catch (std::system_error const& e) {
        std::string_view const why = e.what();
        scheduler_.fail(failure_kind::threw, errc::remote_exception, -1, "its communication thread did not start");
        throw environment_error(concat(
            {"the communication thread did not start: ", why,
             ". Raise the limit on threads (ulimit -u) or memory (ulimit -v), or start fewer ranks on this host."}));
    }
}
template <Transport T>
void background_thread<T>::turn(time_point until) noexcept {
    try {
        scheduler_.pump();
        if (scheduler_.failed()) scheduler_.settle();
        if (!scheduler_.progress(until) && until == never) pause();
        scheduler_.pump();
    } catch (...) {
        scheduler_.fail(std::current_exception());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it may throw again at once
    }
}
template <Transport T>
void background_thread<T>::rest_and_listen() {
    nanoseconds const longest = nanoseconds(std::min(scheduler_.times().heartbeat, scheduler_.times().verdict)) / 2;
    nanoseconds const shortest = std::min<nanoseconds>(longest, std::chrono::milliseconds(5));
    for (nanoseconds interval = longest; !turns_.stopped();) {
        turns_.rest(interval);
        if (turns_.stopped() || turns_.wanted()) continue;  // callers drive themselves
        auto const token = turns_.hold();
        turns_.drive_briefly([&] {
            turn(time_point{});
            time_point const now = transport_.now();
            time_point const due =
                scheduler_.busy()  // without this, operations in flight would move only once in `longest`
                    ? now + shortest
                    : std::clamp(scheduler_.next_deadline(), now + shortest, now + longest);
            scheduler_.rests_until(due);
            interval = due - now;
        });
    }
}
template <Transport T>
void background_thread<T>::drive() {
    auto token = turns_.hold();
    pace(between_batches);
    while (!turns_.stopped()) {
        turns_.drive([this] { turn(never); });
        if (!turns_.wanted()) continue;
        pace(nanoseconds{0});  // a caller waits: no batches
        turns_.park(token);
        pace(between_batches);
    }
    pace(nanoseconds{0});
}

}  // namespace ddp::detail
