/// \file
/// communicator: what users hold. A scheduler that blocking calls and one communication thread take turns to drive.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/comm/scheduler.hpp>
#include <ddp/core/contract.hpp>

namespace ddp {

/// One rank among the ranks of a job. Blocking calls drive the transport on the caller's thread: no hand-over inside a
/// collective. Between calls a communication thread drives it (heartbeats, buckets during backward), where the transport
/// allows one; where it does not (MPI below THREAD_MULTIPLE), hooks and progress() do.
///
/// Thread safety: collectives may be called from one thread at a time; all ranks in the same order.
/// Failure: any error is the same verdict on every rank; afterwards every call throws it again. Destroy it then.
/// Destruction: takes leave of the peers in good order; while an exception unwinds, it tells them so instead.
template <Transport T>
class communicator {
public:
    using transport_type = T;

    explicit communicator(std::unique_ptr<T> transport, timing const& times = {})
        : transport_(std::move(transport)), scheduler_(*transport_, times), unwinding_(std::uncaught_exceptions()) {
        if (size() > 1 && may_own_thread(*transport_)) thread_ = std::thread([this] { background(); });
    }
    communicator(communicator const&) = delete;
    communicator& operator=(communicator const&) = delete;
    ~communicator() {
        if (std::uncaught_exceptions() > unwinding_) fail("its program left the communicator by an exception");
        finish_started();
        leave_after_failure();
        if (thread_.joinable()) {
            stop_.store(true);
            poke();
            thread_.join();
        }
        transport_.reset();  // before the scheduler's pool and what is kept: posted memory outlives the transport
    }

    [[nodiscard]] int rank() const noexcept { return transport_->rank(); }
    [[nodiscard]] int size() const noexcept { return transport_->size(); }
    [[nodiscard]] T& transport() noexcept { return *transport_; }
    [[nodiscard]] scheduler<T>& tasks() noexcept { return scheduler_; }
    [[nodiscard]] timing const& times() const noexcept { return scheduler_.times(); }

    /// Whether a thread of ours moves things on between calls.
    [[nodiscard]] bool has_thread() const noexcept { return thread_.joinable(); }

    /// Identity for the next collective the user calls; all ranks count alike.
    [[nodiscard]] identity next_identity() noexcept { return {.channel = channel::user, .index = ++calls_}; }

    /// Runs the task that `make` returns to its end, and everything else in flight beside it.
    /// Throws the verdict (comm_error) if the job failed, or what the task itself threw, after the peers were told.
    template <class Make>
    void run(Make const& make) {
        turn_of_caller const mine(*this);
        std::exception_ptr own;
        {
            frame_pool_scope const pool(scheduler_.frames());
            scheduler_.pump();  // a step that has begun was entered before this: all ranks count alike
            refuse_if_failed();
            task<> const body = make();
            body.start();
            while (!body.done()) {
                scheduler_.pump();
                if (!body.done()) scheduler_.progress(never);
            }
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

    /// Starts the task that `make` returns and comes back at once. It moves on while anybody drives: in blocking calls, on
    /// the communication thread, in progress(). The handle's done() tells whether it has ended (and moves things on where
    /// no thread of ours does), wait() drives to its end and throws as run() does. Whatever the task refers to outlives it;
    /// it has ended, at the latest by its deadlines, when the communicator's destructor returns.
    class started;
    template <class Make>
    std::shared_ptr<started> start(Make const& make) {
        turn_of_caller const mine(*this);
        frame_pool_scope const pool(scheduler_.frames());
        scheduler_.pump();
        refuse_if_failed();
        forget_ended();
        auto handle = std::make_shared<started>(*this);
        started_.push_back(tracked(make(), handle, this));
        started_.back().start();
        return handle;
    }

    /// Moves things on without waiting. Needed only where no thread of ours does; harmless elsewhere.
    void progress() noexcept {
        if (thread_.joinable()) return poke();
        if (driver_.load() == std::this_thread::get_id()) return;  // a hook: we are being driven
        std::unique_lock lock(token_, std::try_to_lock);
        if (!lock) return;  // somebody drives already
        driver_.store(std::this_thread::get_id());
        turn(time_point{});
        driver_.store({});
    }

    /// Tells whoever drives that there is mail for it (see mailbox_client). From any thread; never blocks for long.
    void poke() noexcept {
        {
            std::scoped_lock lock(park_);
            poked_ = true;
        }
        parked_.notify_one();
        if (driving_.load()) transport_->wake();
    }

    /// Calls `f` while nobody drives: for what touches the scheduler from outside.
    template <class F>
    decltype(auto) exclusively(F&& f) {
        turn_of_caller const mine(*this);
        return std::forward<F>(f)();
    }

    /// Publishes that this rank's own code failed; its peers throw that. Never throws. Waits while another thread is in a
    /// blocking call.
    void fail(std::string_view text) noexcept {
        fail_as([&] { scheduler_.fail(failure_kind::threw, errc::remote_exception, -1, text); });
    }
    void fail(std::exception_ptr const& thrown) noexcept {
        fail_as([&] { scheduler_.fail(thrown); });
    }

    /// Keeps memory until the transport is gone: MPI may touch what was posted even after a failure.
    void keep(std::shared_ptr<void> memory) { kept_.push_back(std::move(memory)); }

    /// One step at a time: trainers that share a communicator take turns. Says whether `who` may begin one.
    [[nodiscard]] bool claim_step(void const* who) noexcept {
        void const* nobody = nullptr;
        return stepping_.compare_exchange_strong(nobody, who);
    }
    void release_step(void const* who) noexcept { stepping_.compare_exchange_strong(who, nullptr); }

    /// Throws the verdict if the job has failed. Cheap; `step` and every collective do it anyway.
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
        explicit turn_of_caller(communicator& of) : of_(of) {
            DDP_EXPECTS(
                of.driver_.load() != std::this_thread::get_id(),
                "observers, optimizers and other hooks run while the communicator is being driven: they may not "
                "call collectives on it");
            of_.callers_.fetch_add(1);
            if (of_.driving_.load()) of_.transport_->wake();
            of_.token_.lock();
            of_.driver_.store(std::this_thread::get_id());
        }
        turn_of_caller(turn_of_caller const&) = delete;
        turn_of_caller& operator=(turn_of_caller const&) = delete;
        ~turn_of_caller() {
            bool const busy = of_.scheduler_.busy();
            of_.driver_.store({});
            of_.token_.unlock();
            of_.callers_.fetch_sub(1);
            if (busy && of_.thread_.joinable()) of_.poke();
        }

    private:
        communicator& of_;
    };

    /// Runs a started task; its error is its handle's, and the job's.
    static task<> tracked(task<> body, std::shared_ptr<started> handle, communicator* self) {
        try {
            co_await body;
        } catch (collective_aborted const&) {
            handle->aborted_ = true;
        } catch (...) {
            handle->error_ = std::current_exception();
        }
        body = {};
        if (handle->error_) self->scheduler_.fail(handle->error_);
        ++self->ended_;
        handle->done_.store(true);
    }
    /// Frees the frames of started tasks that have ended, once they are half of all.
    void forget_ended() {
        if (ended_ == 0 || 2 * ended_ < started_.size()) return;
        std::erase_if(started_, [](task<> const& body) { return body.done(); });
        ended_ = 0;
    }
    void finish_started() noexcept {
        if (started_.empty()) return;
        try {
            turn_of_caller const mine(*this);
            frame_pool_scope const pool(scheduler_.frames());
            while (ended_ < started_.size()) {
                scheduler_.pump();
                if (ended_ < started_.size()) scheduler_.progress(never);
            }
            started_.clear();
        } catch (...) {
            std::terminate();  // memory of tasks that nobody can end
        }
    }

    template <class F>
    void fail_as(F const& how) noexcept {
        if (driver_.load() == std::this_thread::get_id()) return how();  // from a hook
        turn_of_caller const mine(*this);
        scheduler_.pump();  // a step that has begun is what we are in
        how();
        scheduler_.pump();
    }
    void refuse_if_failed(std::exception_ptr const& own = nullptr) {
        if (!scheduler_.failed()) return;
        settle();
        if (own) std::rethrow_exception(own);
        throw comm_error(scheduler_.verdict());
    }

    void settle() {
        while (!scheduler_.settle()) {
            scheduler_.pump();
            scheduler_.progress(transport_->now() + std::chrono::milliseconds(20));
        }
        scheduler_.pump();
    }
    /// The others may wait for this rank to publish the verdict, although it has an exception of its own to throw.
    void leave_after_failure() noexcept {
        if (!scheduler_.failed()) return;
        try {
            turn_of_caller const mine(*this);
            settle();
        } catch (...) {  // they find one themselves, a little later
        }
    }

    /// One round of the loop, where an error of the transport itself has nobody to be thrown at.
    void turn(time_point until) noexcept {
        try {
            scheduler_.pump();
            if (scheduler_.failed()) scheduler_.settle();
            scheduler_.progress(until);
            scheduler_.pump();
        } catch (...) {
            scheduler_.fail(std::current_exception());
        }
    }
    void background() {
        std::unique_lock token(token_);
        while (!stop_.load()) {
            driving_.store(true);
            driver_.store(std::this_thread::get_id());
            if (callers_.load() == 0 && !stop_.load()) turn(never);  // whoever comes later sees driving_, and wakes us
            driver_.store({});
            driving_.store(false);
            if (callers_.load() > 0) park(token);
        }
    }
    /// Stays away while callers drive, and a little longer: most calls are followed by another.
    void park(std::unique_lock<std::mutex>& token) {
        token.unlock();
        {
            std::unique_lock lock(park_);
            do {
                parked_.wait_for(lock, std::chrono::milliseconds(5), [this] { return poked_ || stop_.load(); });
                poked_ = false;
            } while (callers_.load() > 0 && !stop_.load());
        }
        token.lock();
    }

    std::unique_ptr<T> transport_;
    scheduler<T> scheduler_;
    int unwinding_;
    std::uint64_t calls_ = 0;

    std::vector<task<>> started_;  // tasks that are waited for later
    std::size_t ended_ = 0;        // of them

    std::vector<std::shared_ptr<void>> kept_;
    std::atomic<void const*> stepping_{nullptr};  // the trainer whose step is under way

    std::mutex token_;  // held by whoever drives
    std::atomic<std::thread::id> driver_{};
    std::atomic<int> callers_{0};       // threads that hold the token or want it: they go first
    std::atomic<bool> driving_{false};  // the communication thread may be asleep in the transport
    std::atomic<bool> stop_{false};
    std::mutex park_;
    std::condition_variable parked_;
    bool poked_ = false;
    std::thread thread_;
};

/// A task that start() has started. For the thread that calls collectives.
template <Transport T>
class communicator<T>::started {
public:
    explicit started(communicator& on) noexcept : on_(on) {}

    [[nodiscard]] bool done() noexcept {
        if (!done_.load() && !on_.has_thread()) on_.progress();
        return done_.load();
    }
    void wait() {
        if (!done_.load()) {
            turn_of_caller const mine(on_);
            frame_pool_scope const pool(on_.scheduler_.frames());
            while (!done_.load()) {
                on_.scheduler_.pump();
                if (!done_.load()) on_.scheduler_.progress(never);
            }
            on_.forget_ended();
        }
        if (!error_ && !aborted_) return;
        turn_of_caller const mine(on_);
        on_.refuse_if_failed(error_);
    }

private:
    friend communicator;
    communicator& on_;
    std::exception_ptr error_;  // these two are written before done_
    bool aborted_ = false;
    std::atomic<bool> done_{false};
};

}  // namespace ddp
