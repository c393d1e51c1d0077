/// \file
/// scheduler_base: who waits, for how long, and what this rank says when something fails; for any transport.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/group.hpp>
#include <ddp/comm/operation.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/task.hpp>

namespace ddp {

/// The part of a scheduler that does not depend on the transport's type.
class scheduler_base {
public:
    explicit scheduler_base(timing const& times) : times_(times) { times_.validate(); }
    scheduler_base(scheduler_base const&) = delete;
    scheduler_base& operator=(scheduler_base const&) = delete;

    [[nodiscard]] timing const& times() const noexcept { return times_; }
    [[nodiscard]] bool failed() const noexcept { return failed_.load(); }
    [[nodiscard]] frame_pool& frames() noexcept { return frames_; }

    /// Somebody waits for a peer: there is something to drive.
    [[nodiscard]] bool busy() const noexcept { return first_ != nullptr || !ready_.empty() || !yielded_.empty(); }

    /// The group of all ranks.
    [[nodiscard]] group& world() noexcept { return *world_; }

    /// Context ids that are free on this rank: the ranks that make a group take the largest of them.
    [[nodiscard]] std::uint32_t next_context() const noexcept { return next_context_; }
    void take_contexts_below(std::uint32_t next) noexcept { next_context_ = std::max(next_context_, next); }

    /// Fails this rank, once: publishes its record, ends every posted operation and every wait. The first reason stays.
    void fail(failure record) noexcept {
        if (failed_) return;
        failed_ = true;
        failed_at_ = now();
        record.rank = own_rank();
        if (record.entered.number == 0) record.entered = last_entered_->mark();
        publish(record);
        for (event* e = events_; e != nullptr; e = e->after_) ready_.splice(e->waiters_);
        ready_.splice(yielded_);
    }
    void fail(failure_kind kind, errc code, int peer, std::string_view text, group const* about = nullptr) noexcept {
        failure record;
        if (about != nullptr) record.entered = about->mark();
        record.kind = kind;
        record.code = code;
        record.peer = peer;
        record.text = text;
        fail(record);
    }
    /// Reports what user code threw, in its own words.
    void fail(std::exception_ptr const& thrown) noexcept {
        if (failed_) return;
        try {
            std::rethrow_exception(thrown);
        } catch (error const& e) {
            std::string_view const text = e.what();
            if (e.code() == errc::no_samples)  // every rank finds out by itself; one that left first says the same
                fail(failure_kind::mismatch, e.code(), -1, text.substr(text.find(": ") + 2));
            else
                fail(failure_kind::threw, errc::remote_exception, -1, text);
        } catch (std::exception const& e) {
            fail(failure_kind::threw, errc::remote_exception, -1, e.what());
        } catch (...) {
            fail(failure_kind::threw, errc::remote_exception, -1, "an exception that is no std::exception");
        }
    }

    void add(mailbox_client& client) noexcept { client.next_ = std::exchange(clients_, &client); }
    void remove(mailbox_client& client) noexcept {
        for (mailbox_client** at = &clients_; *at != nullptr; at = &(*at)->next_)
            if (*at == &client) {
                *at = client.next_;
                return;
            }
    }

    /// Awaitable: the driver goes through the transport once before the coroutine goes on. For long arithmetic, between
    /// whose pieces messages and heartbeats have to move.
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
    [[nodiscard]] yielder yield() noexcept { return {*this}; }

    /// Whether a client is within something that the members of `ranks` do together.
    [[nodiscard]] bool under_way(group const& ranks) const noexcept {
        for (mailbox_client const* c = clients_; c != nullptr; c = c->next_)
            if (c->under_way(ranks)) return true;
        return false;
    }

    /// Whether some client has mail that nobody has collected. Asked by the thread that adds and removes clients.
    [[nodiscard]] bool has_mail() const noexcept {
        for (mailbox_client const* c = clients_; c != nullptr; c = c->next_)
            if (c->has_mail()) return true;
        return false;
    }

    [[nodiscard]] virtual time_point now() const noexcept = 0;

protected:
    ~scheduler_base() = default;
    void make_world(int rank, int size) {
        std::vector<int> everybody(static_cast<std::size_t>(size));
        std::iota(everybody.begin(), everybody.end(), 0);
        world_ = std::make_unique<group>(*this, 0, std::move(everybody), rank);
        last_entered_ = world_.get();
    }
    virtual void publish(failure const& record) noexcept = 0;
    virtual void note_entered(group const& /*in*/) noexcept {}
    [[nodiscard]] virtual int own_rank() const noexcept = 0;

    /// Deadlines that have passed, mail, then everybody who can go on. Collects first, then resumes: a resumed coroutine
    /// may end others.
    void turn() {
        try {
            for (mailbox_client* c = clients_; c != nullptr && !failed_; c = c->next_) c->collect();
        } catch (...) {
            fail(std::current_exception());
        }
        if (!failed_ && now() >= first_deadline()) {
            failure late = waiting_record(*first_);
            fail(late);
        }
        while (!ready_.empty()) {
            resume_ready();
        }
        if (detail::waiter* const next = std::exchange(polled_, false) ? yielded_.pop_front() : nullptr) {
            next->handle.resume();
            while (!ready_.empty()) resume_ready();
        }
    }
    void resume_ready() {
        detail::waiter_queue going;
        going.splice(ready_);
        while (detail::waiter* const w = going.pop_front()) w->handle.resume();
    }
    [[nodiscard]] time_point first_deadline() const noexcept {
        return first_ == nullptr ? never : first_->since_ + times_.collective + absent_;
    }
    /// Time in which nobody drove us, although we asked for it, counts for no deadline: own code that ran long where no
    /// thread of ours drives, a stopped process, a sleeping machine. After a long absence peers get time to be heard.
    void came_back() noexcept {
        time_point const at = now();
        time_point const expected = std::max(due_, driven_);
        driven_ = at;
        if (at <= expected) return;
        absent_ += at - expected;
        if (at - expected <= times_.verdict || first_ == favoured_) return;
        absent_ += times_.collective / 4;
        favoured_ = first_;  // once for each wait: a stall every minute must not keep a deadline from ever passing
    }
    void goes_away(time_point due) noexcept {
        driven_ = now();
        due_ = due;
        polled_ = true;
    }
    [[nodiscard]] bool yielding() const noexcept { return !yielded_.empty(); }
    /// This rank's record of what it is doing, when the failure is somebody else's: in the group that `heard` is about,
    /// where this rank is a member and waits there; else what it waits for anywhere, so that chains of waiting ranks can
    /// be followed from group to group.
    [[nodiscard]] failure bystander(mark const& heard) const noexcept {
        group const* const same = find(heard);
        for (operation const* op = first_; op != nullptr; op = op->after_)
            if (op->of_ == same) return waiting_record(*op);
        if (first_ != nullptr) return waiting_record(*first_);
        failure record;
        record.kind = failure_kind::idle;
        record.entered = (same != nullptr ? same : last_entered_)->mark();
        return record;
    }
    /// The group that a peer's mark is about; null where this rank is no member.
    [[nodiscard]] group const* find(mark const& theirs) const noexcept {
        for (group const* g = groups_; g != nullptr; g = g->after_)
            if (g->id() == theirs.group && g->leader() == theirs.leader) return g;
        return nullptr;
    }

    std::atomic<bool> failed_{false};  // written by the driver; anybody may look
    time_point failed_at_ = {};

private:
    friend class operation;
    friend class event;
    friend class group;

    [[nodiscard]] failure waiting_record(operation const& of) const noexcept {
        failure record;
        record.kind = failure_kind::waiting;
        record.code = errc::deadline;
        record.peer = of.peer;
        record.operation = of.tag.id;
        record.entered = of.of_->mark();
        record.waited_ns = static_cast<std::uint64_t>(std::max(nanoseconds{0}, now() - absent_ - of.since_).count());
        return record;
    }
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
    std::uint32_t next_context_ = 1;
    time_point driven_ = {};               // when we were driven last
    time_point due_ = never;               // when we asked to be driven again
    nanoseconds absent_{0};                // in sum; an operation's since_ counts without it
    operation const* favoured_ = nullptr;  // the oldest wait when time was given last
    detail::waiter_queue ready_;
    detail::waiter_queue yielded_;
    bool polled_ = false;         // since a coroutine was resumed that had yielded
    operation* first_ = nullptr;  // the waiting, oldest first
    operation* last_ = nullptr;
    event* events_ = nullptr;
    mailbox_client* clients_ = nullptr;
};

inline operation::~operation() {
    // Only an exception between post and await gets here: ending everything is what frees our memory.
    if (!done_) on_->fail(failure_kind::threw, errc::remote_exception, -1, "a collective was left by an exception");
}
inline void operation::ended(completion& node) noexcept {
    operation& self = static_cast<operation&>(node);
    self.done_ = true;
    if (!self.waiting_) return;
    self.on_->unwait(self);
    self.on_->ready_.push_back(self.waiter_);
}
inline void operation::suspend(std::coroutine_handle<> self) noexcept {
    waiter_.handle = self;
    on_->wait(*this);
}
inline void operation::resume() {
    if (on_ == nullptr)
        throw usage_error("an operation is awaited that was never posted: lane.send or receive it first");
    if (status == op_status::ok && (sends || fingerprint == tag.fingerprint)) return;
    if (!on_->failed()) {
        failure record;
        record.operation = tag.id;
        record.entered = of_->mark();
        record.peer = peer;
        std::string const who = "rank " + std::to_string(peer);
        std::string text;
        if (status == op_status::closed) {
            record.kind = failure_kind::closed;
            record.code = errc::peer_closed;
        } else {
            record.kind = failure_kind::mismatch;
            record.code = errc::mismatch;
            text =
                "rank " + std::to_string(on_->own_rank()) + " is in " + of_->current_words() + " and expects " +
                std::to_string(size) + " bytes from " + who + ", which sent " +
                (status == op_status::length ? std::to_string(length) + " bytes" : "a message of another operation") +
                ". All ranks must call the same collectives in the same order with the same counts.";
        }
        record.text = std::string_view(text);
        on_->fail(record);
    }
    throw collective_aborted();
}

inline group::group(scheduler_base& on, std::uint32_t id, std::vector<int> members, int rank)
    : on_(&on), id_(id), rank_(rank), members_(std::move(members)) {
    DDP_EXPECTS(rank >= 0 && rank < size(), "a group is made by one of its members");
    leader_ = *std::min_element(members_.begin(), members_.end());
    after_ = std::exchange(on.groups_, this);
    if (after_ != nullptr) after_->before_ = this;
}
inline group::~group() {
    (before_ != nullptr ? before_->after_ : on_->groups_) = after_;
    if (after_ != nullptr) after_->before_ = before_;
    if (on_->last_entered_ == this) on_->last_entered_ = on_->world_.get();
}
inline std::uint64_t group::enter(operation_info const& what) noexcept {
    current_ = what;
    history_ = digest().add(history_).add(what.fingerprint).value() | 1;  // 0 means "nothing entered"
    on_->last_entered_ = this;
    ++number_;
    on_->note_entered(*this);
    return number_;
}

inline event::event(scheduler_base& on) noexcept : on_(on), after_(on.events_) {
    if (after_ != nullptr) after_->before_ = this;
    on.events_ = this;
}
inline event::~event() {
    (before_ != nullptr ? before_->after_ : on_.events_) = after_;
    if (after_ != nullptr) after_->before_ = before_;
}
inline void event::set() noexcept {
    set_ = true;
    on_.ready_.splice(waiters_);
}
inline bool event::awaiter::await_ready() const noexcept {
    return of.set_ || of.on_.failed();
}
inline void event::awaiter::await_resume() const {
    if (of.on_.failed()) throw collective_aborted();
}

}  // namespace ddp
