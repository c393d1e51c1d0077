/// \file
/// driver: one rank's end of a job. Owns the transport, its scheduler and the communication thread; blocking calls and that
/// thread take turns to drive.
#pragma once

#include <chrono>
#include <condition_variable>  // and std::mutex, which its interface needs: <mutex> is 400 lines more
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/background_thread.hpp>
#include <ddp/comm/communication_thread.hpp>
#include <ddp/comm/driving_turns.hpp>
#include <ddp/comm/flight_recorder.hpp>
#include <ddp/comm/scheduler.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/function_ref.hpp>

namespace ddp {

/// Shared by all communicators and trainers of a process, and never seen by users: the last of them destroys it, which
/// leaves the job.
///
/// Blocking calls drive the transport on the caller's thread: no hand-over inside a collective. Between calls a
/// communication thread drives it (heartbeats, buckets during backward), where the transport allows one; where it does not
/// (MPI below THREAD_MULTIPLE), or the thread rests (see communication_thread), hooks and progress() do.
/// Destruction: says goodbye to the peers; while an exception unwinds, it tells them so instead.
template <Transport T>
class driver {
public:
    driver(std::unique_ptr<T> transport, timing const& times,
           communication_thread asked = communication_thread::automatic)
        : transport_(std::move(transport)),
          recorder_(transport_->rank(), transport_->size(), name_of(*transport_)),
          scheduler_(*transport_, times),
          unwinding_(std::uncaught_exceptions()),
          thread_(*transport_, scheduler_, turns_) {
        DDP_EXPECTS(
            asked != communication_thread::none,
            "communication_thread: ask for automatic, drives or rests; none is what thread() says of a transport "
            "that allows no thread");
        scheduler_.keep_in(&recorder_);
        communication_thread const chosen = detail::chosen_thread(asked, shares_cores(*transport_));
        if (transport_->size() > 1 && may_own_thread(*transport_)) thread_.start(chosen);
        recorder_.say_thread(ddp::name_of(thread()));
    }
    driver(driver const&) = delete;
    driver& operator=(driver const&) = delete;
    ~driver();

    [[nodiscard]] T& transport() noexcept { return *transport_; }
    [[nodiscard]] scheduler<T>& tasks() noexcept { return scheduler_; }
    /// What the communication thread does: never automatic.
    [[nodiscard]] communication_thread thread() const noexcept { return thread_.is(); }
    /// Whether it drives the communication between calls.
    [[nodiscard]] bool has_thread() const noexcept { return thread() == communication_thread::drives; }
    [[nodiscard]] flight_recorder& recorder() noexcept { return recorder_; }
    /// Processor time that the communication thread has taken so far; 0 without one.
    [[nodiscard]] nanoseconds thread_time() noexcept { return thread_.time(); }

    /// Runs the task that `make` returns to its end, and everything else in flight beside it.
    /// Throws the verdict (comm_error) if the job failed, or what the task itself threw, after the peers were told.
    /// `name` and `number`: for the flight recorder, where `make` enters no collective.
    void run(function_ref<task<>()> make, char const* name = "message", std::uint64_t number = 0);

    /// Starts the task that `make` returns. It makes progress whenever a thread drives. Throws as run() does; if the
    /// task fails by an exception of its own, the job fails at once.
    [[nodiscard]] task<> start(function_ref<task<>()> make);
    /// Drives until a started task has ended. Throws as run() does; afterwards the task is empty.
    void wait_for(task<>& body);
    /// Whether a started task has ended, successfully or not. Never waits.
    [[nodiscard]] bool has_ended(task<> const& body) {
        if (!has_thread()) progress();
        return exclusively([&] { return body.done(); });
    }
    /// Gives up a started task that was not waited for: waits for its end, because its memory may go with its owner. From a
    /// hook, where nothing can be waited for, an unfinished task fails the job, and its frame is kept.
    void abandon(task<> body) noexcept;

    /// Drives the communication without waiting. Needed only where no thread of the library does; harmless elsewhere.
    void progress() noexcept {
        if (has_thread()) return poke();
        if (turns_.mine()) return;  // in a hook: this thread drives already
        turns_.try_drive([this] { thread_.turn(time_point{}); });
    }

    /// Tells the thread that drives that there is mail for it (see mailbox_client). From any thread; never blocks for
    /// long.
    void poke() noexcept {
        turns_.poke([this] { transport_->wake(); });
    }

    /// Calls `f` while no other thread drives: for code that uses the scheduler from outside. Throws usage_error in a hook.
    template <class F>
    decltype(auto) exclusively(F&& f) {
        turn_of_caller const mine(*this);
        return std::forward<F>(f)();
    }
    /// The same from anywhere, hooks included, for an `f` that does not throw.
    template <class F>
    void exclusively_from_anywhere(F&& f) noexcept {
        if (turns_.mine()) return std::forward<F>(f)();
        turn_of_caller const mine(*this);
        std::forward<F>(f)();
    }

    /// Publishes a failure of this rank: `how` reports it to the scheduler. Throws nothing. Waits while another thread is in a
    /// blocking call.
    void fail(function_ref<void()> how) noexcept {
        if (turns_.mine()) return how();  // from a hook
        turn_of_caller const mine(*this);
        scheduler_.pump();  // a step that has begun is what this rank is in
        how();
        scheduler_.pump();
    }
    /// Takes back the rank's own exception, which a call that had to be quiet has caught: the next call throws it.
    void put_back(std::exception_ptr const& kept) noexcept {
        if (turns_.mine()) return;  // in a hook nothing is taken
        turn_of_caller const mine(*this);
        scheduler_.put_back(kept);
    }
    /// Does it where nothing may be thrown. The next collective throws a comm_error again, and the next call anything else.
    void quietly(auto const& what) noexcept {
        try {
            what();
        } catch (comm_error const&) {
        } catch (...) {
            put_back(std::current_exception());
        }
    }

    /// Keeps memory until the transport is gone: MPI may touch what was posted even after a failure.
    /// From any thread.
    void keep(std::shared_ptr<void> memory) {
        std::unique_lock const lock(keeping_);
        kept_.push_back(std::move(memory));
    }
    /// The same if the job has failed; otherwise lets go of it. From anywhere, hooks included.
    void keep_if_failed(std::shared_ptr<void> memory) noexcept {
        if (scheduler_.failed()) exclusively_from_anywhere([&] { keep(std::move(memory)); });
    }

    /// Throws the verdict (comm_error) if the job has failed; the first time, what this rank's own observer, optimizer or
    /// exchange has thrown, if that was the reason. Cheap; `step` and every collective do the same.
    void check() {
        if (!has_thread()) progress();
        if (!scheduler_.failed()) return;
        turn_of_caller const mine(*this);
        refuse_if_failed();
    }

private:
    /// The caller takes the token from the communication thread.
    class turn_of_caller {
    public:
        explicit turn_of_caller(driver& of) : of_(of) {
            DDP_EXPECTS(
                !of.turns_.mine(),
                "observers, optimizers and other hooks run while the communicator is being driven: they may not "
                "call collectives on it");
            of_.turns_.take([this] { of_.transport_->wake(); });
        }
        turn_of_caller(turn_of_caller const&) = delete;
        turn_of_caller& operator=(turn_of_caller const&) = delete;
        ~turn_of_caller() {
            bool const busy = of_.scheduler_.busy();
            of_.turns_.give_back();
            if (busy && of_.has_thread()) of_.poke();
        }

    private:
        driver& of_;
    };

    [[nodiscard]] static std::string_view name_of(T const& transport) noexcept {
        if constexpr (requires { transport.name(); })
            return transport.name();
        else if constexpr (requires { T::name; })
            return T::name;
        else
            return "transport";
    }

    void drive_until(function_ref<bool()> done) {
        turns_.count_call();
        if (done() && (scheduler_.busy() || scheduler_.neglects_transport()))  // no message was awaited
            scheduler_.progress(time_point{}), scheduler_.rests_until(scheduler_.next_deadline());
        while (!done()) {
            scheduler_.pump();
            if (!done()) poll();
        }
    }
    void poll() noexcept {
        if (!scheduler_.progress(never)) thread_.pause();
    }
    static task<> guarded(scheduler<T>& on, task<> body);
    void refuse_if_failed(std::exception_ptr const& own = nullptr) {
        if (!scheduler_.failed()) return;
        settle();
        std::exception_ptr const kept = scheduler_.take_kept();
        if (own || kept) std::rethrow_exception(own ? own : kept);
        throw comm_error(scheduler_.verdict());
    }

    void settle() {
        while (!scheduler_.settle()) {
            scheduler_.pump();
            if (!scheduler_.progress(transport_->now() + std::chrono::milliseconds(20))) thread_.pause();
        }
        scheduler_.pump();
    }
    /// The others may wait for this rank to publish the verdict, although it has an exception of its own to throw.
    void leave_after_failure() noexcept {
        if (!scheduler_.failed()) return;
        try {
            turn_of_caller const mine(*this);
            settle();
        } catch (...) {  // the others find a verdict without this rank, a little later
        }
    }

    std::unique_ptr<T> transport_;
    flight_recorder recorder_;
    scheduler<T> scheduler_;
    int unwinding_;
    std::mutex keeping_;
    std::vector<std::shared_ptr<void>> kept_;

    detail::driving_turns turns_;
    detail::background_thread<T> thread_;
};

// Defined out of the class, so that one source file can compile them for any_transport.

template <Transport T>
driver<T>::~driver() {
    if (std::uncaught_exceptions() > unwinding_)
        fail([&] {
            scheduler_.fail(failure_kind::threw, errc::remote_exception, -1,
                            "its program left the communicator by an exception");
        });
    leave_after_failure();
    thread_.stop();
    transport_.reset();  // before the scheduler's pool and what is kept: posted memory outlives the transport
}
template <Transport T>
void driver<T>::wait_for(task<>& body) {
    turn_of_caller const mine(*this);
    std::exception_ptr own;
    {
        frame_pool_scope const pool(scheduler_.frames());
        task<> const last = std::move(body);
        recorder_.record(flight::waits, 0, 0, 0, "request");
        drive_until([&] { return last.done(); });
        if (!scheduler_.failed()) recorder_.record(flight::finished, 0, 0, 0, "request");
        try {
            last.take();
        } catch (collective_aborted const&) {
        } catch (...) {
            own = std::current_exception();
        }
    }
    refuse_if_failed(own);
}
template <Transport T>
void driver<T>::abandon(task<> body) noexcept {
    if (turns_.mine()) {
        if (body.done()) return;
        scheduler_.fail(failure_kind::threw, errc::remote_exception, -1, "a hook has dropped a request under way");
        static_cast<void>(new (std::nothrow) task<>(std::move(body)));
        return;
    }
    turn_of_caller const mine(*this);
    frame_pool_scope const pool(scheduler_.frames());
    task<> const last = std::move(body);
    drive_until([&] { return last.done(); });
}
template <Transport T>
void driver<T>::run(function_ref<task<>()> make, char const* name, std::uint64_t number) {
    turn_of_caller const mine(*this);
    std::exception_ptr own;
    {
        frame_pool_scope const pool(scheduler_.frames());
        scheduler_.pump();  // a step that has begun was entered before this: all ranks count alike
        refuse_if_failed();
        std::uint64_t const entered_before = scheduler_.entered();
        task<> const body = make();
        std::uint32_t const in = scheduler_.last_entered().id();
        bool const collective = scheduler_.entered() != entered_before;
        if (collective) {
            name = scheduler_.last_entered().current().name;
            number = scheduler_.last_entered().current().id.index;
        }
        // Of a collective the time of the turn is exact enough; only in memory may one turn be all of it (flag_barrier).
        // Others may run a whole step.
        auto const note = [&](flight what) {
            collective ? scheduler_.note_driven(what, number, in, 0, name) : scheduler_.note(what, number, in, 0, name);
        };
        note(flight::waits);
        body.start();
        scheduler_.count_calls(1);
        if (!body.done() && !scheduler_.can_continue()) poll();  // pump() has just run
        drive_until([&] { return body.done(); });
        scheduler_.count_calls(-1);
        if (!scheduler_.failed()) note(flight::finished);
        try {
            body.take();
        } catch (collective_aborted const&) {
        } catch (...) {
            own = std::current_exception();
        }
    }
    if (own) scheduler_.fail(own);
    refuse_if_failed(own);
}
template <Transport T>
task<> driver<T>::start(function_ref<task<>()> make) {
    turn_of_caller const mine(*this);
    frame_pool_scope const pool(scheduler_.frames());
    scheduler_.pump();
    refuse_if_failed();
    task<> body = guarded(scheduler_, make());
    body.start();
    return body;
}
template <Transport T>
task<> driver<T>::guarded(scheduler<T>& on, task<> body) {
    std::exception_ptr own;
    try {
        co_await body;
    } catch (collective_aborted const&) {
        throw;
    } catch (...) {
        own = std::current_exception();
    }
    body = {};
    if (!own) co_return;
    on.fail(own);
    std::rethrow_exception(own);
}

}  // namespace ddp
