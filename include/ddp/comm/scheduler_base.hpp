/// \file
/// scheduler_base: what waits, for how long, and what this rank reports when something fails; for any transport.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/flight_recorder.hpp>
#include <ddp/comm/group.hpp>
#include <ddp/comm/operation.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/task.hpp>

namespace ddp {

/// The part of a scheduler that does not depend on the type of the transport.
class scheduler_base {
public:
    explicit scheduler_base(timing const& times) : times_(times) { times_.validate(); }
    scheduler_base(scheduler_base const&) = delete;
    scheduler_base& operator=(scheduler_base const&) = delete;

    /// The time limits of the job.
    [[nodiscard]] timing const& times() const noexcept { return times_; }
    /// Whether the job has failed: operations that are posted now end at once.
    [[nodiscard]] bool failed() const noexcept { return failed_.load(); }
    [[nodiscard]] frame_pool& frames() noexcept { return frames_; }

    /// Whether an operation waits for a peer, so that there is something to drive.
    [[nodiscard]] bool busy() const noexcept { return first_ != nullptr || !ready_.empty() || !yielded_.empty(); }

    /// The group of all ranks.
    [[nodiscard]] group& world() noexcept { return *world_; }

    /// The group into which something was entered last.
    [[nodiscard]] group const& last_entered() const noexcept { return *last_entered_; }
    /// How many times this rank has entered a collective or a step, in any group.
    [[nodiscard]] std::uint64_t entered() const noexcept { return entered_; }

    /// Bytes that this rank has sent to others in messages, in all groups.
    [[nodiscard]] std::uint64_t bytes_sent() const noexcept { return bytes_sent_; }
    void count_sent(std::size_t bytes) noexcept { bytes_sent_ += bytes; }

    /// The flight recorder, which outlives the scheduler. Null, as in simulations: nothing is recorded.
    void keep_in(flight_recorder* recorder) noexcept { recorder_ = recorder; }
    [[nodiscard]] flight_recorder* recorder() const noexcept { return recorder_; }
    void note(flight what, std::uint64_t number = 0, std::int64_t whose = 0, std::uint64_t count = 0,
              char const* name = "") const noexcept {
        if (recorder_ != nullptr) recorder_->record(what, number, whose, count, name);
    }
    /// Records an event as of the beginning of this turn: reads no clock.
    void note_driven(flight what, std::uint64_t number, std::int64_t whose, std::uint64_t count,
                     char const* name) const noexcept {
        if (recorder_ != nullptr) recorder_->record_at(driven_, what, number, whose, count, name);
    }

    /// The least context id that is free on this rank; ranks that make a group take the largest of theirs.
    [[nodiscard]] std::uint32_t next_context() const noexcept { return next_context_; }
    void take_contexts_below(std::uint32_t next) noexcept { next_context_ = std::max(next_context_, next); }

    /// Fails this rank: publishes its record, and ends every posted operation and every wait. Only the first call
    /// counts.
    void fail(failure record) noexcept;
    void fail(failure_kind kind, errc code, int peer, std::string_view text, group const* about = nullptr) noexcept;
    /// The same for an exception of user code, with its own text; or of the transport (failure_kind::broke).
    void fail(std::exception_ptr const& thrown, failure_kind kind = failure_kind::threw) noexcept;
    /// Like fail(), for an exception that no caller can catch: the rank's next call throws it instead of the verdict.
    void fail_and_keep(std::exception_ptr const& thrown) noexcept;
    /// Returns what fail_and_keep() has stored, and forgets it.
    [[nodiscard]] std::exception_ptr take_kept() noexcept { return std::exchange(kept_, nullptr); }
    /// Stores an exception that a noexcept call has caught: the next call throws it.
    void put_back(std::exception_ptr const& kept) noexcept { kept_ = failed_ && !kept_ ? kept : kept_; }

    /// The long_operation that this rank's marks announce: its text, and when it ends (never: there is none).
    using occupation = std::pair<char const*, time_point>;
    /// Announces another one. Returns the one before.
    occupation occupy(occupation with) noexcept;

    /// A blocking call begins (+1) or ends (-1). Between the two, what this rank entered last is under way.
    void count_calls(int change) noexcept { calls_under_way_ += change; }

    void add(mailbox_client& client) noexcept { client.next_ = std::exchange(clients_, &client); }
    void remove(mailbox_client& client) noexcept;

    /// What yield() returns.
    struct yielder {
        scheduler_base& on;
        detail::waiter self = {};
        [[nodiscard]] bool await_ready() const noexcept { return on.failed(); }
        void await_suspend(std::coroutine_handle<> handle) noexcept {
            self.handle = handle;
            if (on.yielded_.empty()) on.polled_ = false;  // what was polled before this does not count
            on.yielded_.push_back(self);
        }
        void await_resume() const {
            if (on.failed()) throw collective_aborted();
        }
    };
    /// `co_await over.on->yield()`: the coroutine continues after the driver has gone through the transport once. For
    /// long computations, so that messages and heartbeats are sent between their pieces.
    [[nodiscard]] yielder yield() noexcept { return {*this}; }

    /// Whether a client is within an operation of all members of `ranks`: a step that has begun.
    [[nodiscard]] bool under_way(group const& ranks) const noexcept {
        for (mailbox_client const* c = clients_; c != nullptr; c = c->next_)
            if (c->under_way(ranks)) return true;
        return false;
    }

    /// Whether a coroutine can continue without the transport.
    [[nodiscard]] bool can_continue() const noexcept { return !ready_.empty() || !yielded_.empty(); }

    /// Whether turns have for a while done without the transport, which has heartbeats to send and records to hear.
    [[nodiscard]] bool neglects_transport() const noexcept {
        return driven_ - moved_ > std::min(times_.heartbeat, times_.verdict) / 4;
    }

    /// Whether any client has mail that has not been collected yet. Called by the thread that adds and removes clients.
    [[nodiscard]] bool has_mail() const noexcept {
        for (mailbox_client const* c = clients_; c != nullptr; c = c->next_)
            if (c->has_mail()) return true;
        return false;
    }

    /// The time on the transport's clock.
    [[nodiscard]] virtual time_point now() const noexcept = 0;

protected:
    ~scheduler_base() = default;
    void make_world(int rank, int size);
    virtual void publish(failure const& record) noexcept = 0;
    virtual void note_mark(mark const& /*mine*/) noexcept {}
    [[nodiscard]] virtual bool peer_is_occupied() const noexcept { return false; }
    [[nodiscard]] virtual int own_rank() const noexcept = 0;

    /// Tells this rank's heartbeats what the program is doing; the next time is due after another timing.heartbeat.
    void say_phase() noexcept;

    /// Handles mail, then deadlines that have passed, then resumes every coroutine that can continue. All of them are
    /// collected before one is resumed, because a resumed coroutine may end others.
    void turn();
    void resume_ready();
    /// When the oldest wait began, on a clock that stops while this is not driven. It identifies the wait.
    [[nodiscard]] time_point oldest_wait() const noexcept { return first_ == nullptr ? never : first_->since_; }
    [[nodiscard]] time_point first_began() const noexcept {
        return first_ == nullptr ? never : first_->since_ + absent_;
    }
    [[nodiscard]] time_point first_deadline() const noexcept {
        return first_ == nullptr ? never : std::max(first_->since_ + times_.collective, granted_) + absent_;
    }
    /// Time in which the scheduler should have been driven but was not does not count towards deadlines. Examples are
    /// long user code when no thread of the library drives, a stopped process, and a machine that slept. After a long
    /// absence, deadlines are extended, so that peers can be heard.
    void came_back() noexcept { came_back(due_); }
    void came_back(time_point expected) noexcept;
    /// A wait is interrupted four times before its deadline, so that a process that was stopped meanwhile notices it.
    [[nodiscard]] time_point next_look() const noexcept {
        return first_ == nullptr ? never : std::min(first_deadline(), driven_ + times_.collective / 4);
    }
    void goes_away(time_point due) noexcept {
        time_point const at = now();
        if (at - driven_ > times_.verdict) came_back(driven_);  // the process was stopped within a turn
        moved_ = driven_ = std::max(driven_, at);
        due_ = due;
        polled_ = true;
    }
    /// When this turn began, or was last interrupted.
    [[nodiscard]] time_point driven() const noexcept { return driven_; }
    [[nodiscard]] bool yielding() const noexcept { return !yielded_.empty(); }
    /// This rank's record after another rank's failure: what it waits for in the group that `heard` is about, if it is
    /// a member and waits there; otherwise what it waits for in any group, or entered last. With it, chains of waiting
    /// ranks can be followed from group to group. `heard` is {} if no rank has published anything (a death, or
    /// silence). If this rank has entered another operation under the number that was heard, the record says so, as it
    /// may have continued since.
    [[nodiscard]] failure bystander(mark const& heard) const noexcept;
    /// The group that a peer's mark is about; null if this rank is not a member.
    [[nodiscard]] group const* find(mark const& theirs) const noexcept;

    std::atomic<bool> failed_{false};  // written by the thread that drives, read by any
    time_point failed_at_ = {};
    occupation occupied_{"", never};
    time_point says_ = {};  // when to say_phase() next
    int calls_under_way_ = 0;

private:
    [[nodiscard]] mark mark_in(group const& last) const noexcept;
    void add_phase(mark& to) const noexcept {
        if (recorder_ != nullptr) to.phase = recorder_->phase();
    }

    friend class operation;
    friend class event;
    friend class group;

    /// Text that names what an operation belongs to: a collective or a step, or the message itself if it is one between
    /// two ranks.
    [[nodiscard]] static std::string words_of(operation const& op);
    [[nodiscard]] static mark mark_of(operation const& op) noexcept;
    [[nodiscard]] failure waiting_record(operation const& of, bool expired) const noexcept;
    void wait(operation& op) noexcept {
        op.since_ = now() - absent_;
        op.waiting_ = true;
        op.before_ = last_;
        op.after_ = nullptr;
        (last_ != nullptr ? last_->after_ : first_) = &op;
        last_ = &op;
    }
    void unwait(operation& op) noexcept {
        op.waiting_ = false;
        (op.before_ != nullptr ? op.before_->after_ : first_) = op.after_;
        (op.after_ != nullptr ? op.after_->before_ : last_) = op.before_;
    }

    timing times_;
    frame_pool frames_;
    group* groups_ = nullptr;              // all that exist
    group const* last_entered_ = nullptr;  // into which something was entered last
    std::unique_ptr<group> world_;
    std::exception_ptr kept_;  // see fail_and_keep
    flight_recorder* recorder_ = nullptr;
    std::uint64_t entered_ = 0;
    std::uint64_t bytes_sent_ = 0;
    std::uint32_t next_context_ = 1;
    time_point driven_ = {}, moved_ = {};  // when this was driven last, and the transport
    time_point due_ = never;               // when it has to be driven again
    time_point asks_ = {};                 // when to look next whether a peer is occupied
    nanoseconds absent_{0};                // in total; an operation's since_ does not count it
    time_point granted_ =
        time_point::min();  // no wait is late before, since a peer was occupied; does not count it either
    operation const* favoured_ = nullptr;  // the oldest wait when time was given last
    detail::waiter_queue ready_;
    detail::waiter_queue yielded_;
    bool polled_ = false;         // since a yielded coroutine was resumed last
    operation* first_ = nullptr;  // the waiting, oldest first
    operation* last_ = nullptr;
    event* events_ = nullptr;
    mailbox_client* clients_ = nullptr;
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/scheduler_base.ipp>
#endif
