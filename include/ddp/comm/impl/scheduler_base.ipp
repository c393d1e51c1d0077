/// \file
/// What comm/scheduler_base.hpp declares, and what operations, events and groups do with their scheduler.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/scheduler_base.hpp>
#include <ddp/core/text.hpp>

namespace ddp {
[[gnu::cold]] DDP_DECL void scheduler_base::fail(failure record) noexcept {
    if (failed_) return;
    failed_ = true;
    failed_at_ = now();
    record.rank = own_rank();
    if (record.entered.name.view().empty()) record.entered = last_entered_->mark();
    record.inside = calls_under_way_ > 0 || first_ != nullptr;
    for (mailbox_client const* c = clients_; c != nullptr && !record.inside; c = c->next_)
        record.inside = c->under_way(*last_entered_);
    if (recorder_ != nullptr) recorder_->fail(record);
    publish(record);
    for (event* e = events_; e != nullptr; e = e->after_) ready_.splice(e->waiters_);
    ready_.splice(yielded_);
}
[[gnu::cold]] DDP_DECL void scheduler_base::fail(failure_kind kind, errc code, int peer, std::string_view text,
                                                 group const* about) noexcept {
    failure record{.kind = kind, .code = code, .peer = peer, .text = text};
    if (about != nullptr) record.entered = about->mark();
    fail(record);
}
[[gnu::cold]] DDP_DECL void scheduler_base::fail(std::exception_ptr const& thrown, failure_kind kind) noexcept {
    if (failed_) return;
    bool const own = kind == failure_kind::threw;
    errc const code = own ? errc::remote_exception : errc::transport;
    try {
        std::rethrow_exception(thrown);
    } catch (error const& e) {
        std::string_view const text = e.what(), bare = text.substr(text.find(": ") + 2);
        if (own && detail::all_detect(e.code()))
            fail(failure_kind::mismatch, e.code(), -1, bare);
        else
            fail(kind, code, -1, own ? text : bare);
    } catch (std::exception const& e) {
        fail(kind, code, -1, e.what());
    } catch (...) {
        fail(kind, code, -1, "an exception that is not a std::exception");
    }
}
[[gnu::cold]] DDP_DECL void scheduler_base::fail_and_keep(std::exception_ptr const& thrown) noexcept {
    if (failed_) return;
    fail(thrown);
    try {
        std::rethrow_exception(thrown);
    } catch (error const& e) {
        if (!detail::all_detect(e.code())) kept_ = thrown;
    } catch (...) {
        kept_ = thrown;
    }
}
DDP_DECL void scheduler_base::remove(mailbox_client& client) noexcept {
    for (mailbox_client** at = &clients_; *at != nullptr; at = &(*at)->next_)
        if (*at == &client) {
            *at = client.next_;
            return;
        }
}
DDP_DECL void scheduler_base::make_world(int rank, int size) {
    std::vector<int> everybody;
    everybody.reserve(static_cast<std::size_t>(size));
    for (int each = 0; each < size; ++each) everybody.push_back(each);
    world_ = std::make_unique<group>(*this, 0, std::move(everybody), rank);
    last_entered_ = world_.get();
}
DDP_DECL mark scheduler_base::mark_in(group const& last) const noexcept {
    mark mine = last.brief_mark();
    if (occupied_.second != never) mine.occupied = 1, mine.name = std::string_view(occupied_.first);
    return mine;
}
DDP_DECL scheduler_base::occupation scheduler_base::occupy(occupation with) noexcept {
    occupation const before = std::exchange(occupied_, with);
    note_mark(mark_in(*last_entered_));
    return before;
}
DDP_DECL void scheduler_base::say_phase() noexcept {
    says_ = driven_ + times_.heartbeat;
    mark mine = mark_in(*last_entered_);
    add_phase(mine);
    note_mark(mine);
}
DDP_DECL void scheduler_base::turn() {
    try {
        for (mailbox_client* c = clients_; c != nullptr && !failed_; c = c->next_) c->collect();
    } catch (...) {
        fail(std::current_exception());
    }
    if (driven_ >= occupied_.second) occupy({"", never});
    if (!failed_ && first_ != nullptr && (driven_ >= asks_ || driven_ >= first_deadline())) {
        asks_ = driven_ + times_.collective / 8;  // at each look
        if (peer_is_occupied()) granted_ = driven_ - absent_ + times_.collective;
        if (driven_ >= first_deadline()) fail(waiting_record(*first_, true));
    }
    while (!ready_.empty()) resume_ready();
    if (detail::waiter* const next = std::exchange(polled_, false) ? yielded_.pop_front() : nullptr) {
        next->handle.resume();
        while (!ready_.empty()) resume_ready();
    }
}
DDP_DECL void scheduler_base::resume_ready() {
    detail::waiter_queue going;
    going.splice(ready_);
    while (detail::waiter* const w = going.pop_front()) w->handle.resume();
}
DDP_DECL void scheduler_base::came_back(time_point expected) noexcept {
    time_point const at = now();
    expected = std::max(expected, driven_);
    driven_ = at;
    if (at <= expected) return;
    absent_ += at - expected;
    if (at - expected <= times_.verdict || first_ == favoured_) return;
    absent_ += times_.collective / 4;
    favoured_ = first_;  // once for each wait: a stall every minute must not keep a deadline from ever passing
}
[[gnu::cold]] DDP_DECL failure scheduler_base::bystander(mark const& heard) const noexcept {
    group const* const same = heard.name.view().empty() ? nullptr : find(heard);  // {}: nothing was heard
    operation const* waits = first_;
    for (operation const* op = first_; op != nullptr && same != nullptr; op = op->after_)
        if (op->of_ == same) {
            waits = op;
            break;
        }
    failure record;
    if (waits != nullptr) {
        record = waiting_record(*waits, false);
    } else {
        record.kind = failure_kind::idle;
        record.entered = (same != nullptr ? same : last_entered_)->mark();
        add_phase(record.entered);
    }
    if (same != nullptr && same->remembers(heard.number))
        if (mark const then = same->mark_of(heard.number); then.contradicts(heard)) record.entered = then;
    return record;
}
DDP_DECL group const* scheduler_base::find(mark const& theirs) const noexcept {
    for (group const* g = groups_; g != nullptr; g = g->after_)
        if (g->id() == theirs.group && g->leader() == theirs.leader) return g;
    return nullptr;
}
[[gnu::cold]] DDP_DECL std::string scheduler_base::words_of(operation const& op) {
    if (op.tag.id.channel != channel::p2p) return op.of_->words_of(op.of_->number_of(op.tag.id));
    return detail::concat({op.sends ? "send of " : "receive of ", op.size,
                           op.sends ? " bytes to rank " : " bytes from rank ", op.peer, " with tag ", op.tag.id.index,
                           op.of_->words()});
}
[[gnu::cold]] DDP_DECL mark scheduler_base::mark_of(operation const& op) noexcept {
    if (op.tag.id.channel != channel::p2p) return op.of_->mark_of(op.of_->number_of(op.tag.id));
    mark m = op.of_->brief_mark();
    m.number = m.fingerprint = 0;  // not among what all members enter alike
    m.name = std::string_view(op.sends ? "send" : "receive");
    try {
        m.name = std::string_view(words_of(op));
    } catch (...) {  // no memory: only the name is given
    }
    return m;
}
[[gnu::cold]] DDP_DECL failure scheduler_base::waiting_record(operation const& of, bool expired) const noexcept {
    failure record;
    record.kind = failure_kind::waiting;
    record.code = errc::deadline;
    record.peer = of.peer;
    record.operation = of.tag.id;
    record.entered = mark_of(of);
    record.waited_ns = static_cast<std::uint64_t>(std::max(nanoseconds{0}, now() - absent_ - of.since_).count());
    record.expired = expired;
    return record;
}

DDP_DECL operation::~operation() {
    // Only an exception between post and await leads here. Ending everything is the only way to free the posted memory.
    if (!done_) on_->fail(failure_kind::threw, errc::remote_exception, -1, "a collective was left by an exception");
}
DDP_DECL void operation::ended(completion& node) noexcept {
    operation& self = static_cast<operation&>(node);
    self.done_ = true;
    if (!self.waiting_) return;
    self.on_->unwait(self);
    self.on_->ready_.push_back(self.waiter_);
}
DDP_DECL void operation::suspend(std::coroutine_handle<> self) noexcept {
    waiter_.handle = self;
    on_->wait(*this);
}
DDP_DECL void operation::resume() {
    if (on_ == nullptr)
        throw usage_error("an operation was awaited that was never posted: pass it to lane.send or lane.receive first");
    if (status == op_status::ok && (sends || fingerprint == tag.fingerprint)) return;
    refuse();
}
[[gnu::cold, gnu::noinline]] DDP_DECL void operation::refuse() {
    if (!on_->failed()) {
        failure record{.peer = peer, .operation = tag.id, .entered = scheduler_base::mark_of(*this)};
        std::string text;
        if (status == op_status::closed) {
            record.kind = failure_kind::closed;
            record.code = errc::peer_closed;
        } else {
            record.kind = failure_kind::mismatch;
            record.code = errc::mismatch;
            bool const p2p = tag.id.channel == channel::p2p;
            std::string const sent = status == op_status::length ? detail::concat({length, " bytes"})
                                     : p2p                       ? std::string("values of another type")
                                                                 : std::string("a message of another operation");
            std::string const expects =
                p2p ? std::string() : detail::concat({" and expects ", size, " bytes from rank ", peer});
            text = detail::concat({"rank ", on_->own_rank(), " is in ", scheduler_base::words_of(*this), expects,
                                   ", which sent ", sent,
                                   p2p ? ". Both must pass equally many values of the same type."
                                       : ". All ranks must call the same collectives in the same order with the same "
                                         "counts."});
        }
        record.text = std::string_view(text);
        on_->fail(record);
    }
    throw collective_aborted();
}

DDP_DECL group::group(scheduler_base& on, std::uint32_t id, std::vector<int> members, int rank)
    : on_(&on), id_(id), rank_(rank), members_(std::move(members)) {
    DDP_EXPECTS(rank >= 0 && rank < size(),
                detail::concat({"a group is made by one of its members: there is no member ", rank, " of ", size()}));
    leader_ = *std::min_element(members_.begin(), members_.end());
    after_ = std::exchange(on.groups_, this);
    if (after_ != nullptr) after_->before_ = this;
}
DDP_DECL group::~group() {
    (before_ != nullptr ? before_->after_ : on_->groups_) = after_;
    if (after_ != nullptr) after_->before_ = before_;
    if (on_->last_entered_ == this) on_->last_entered_ = on_->world_.get();
}
[[gnu::cold]] DDP_DECL std::string group::words() const {
    if (id_ == 0) return {};
    constexpr std::size_t shown = 4;
    std::string text = " in group {";
    for (std::size_t r = 0; r < std::min(shown, members_.size()); ++r)
        text += detail::concat({r == 0 ? "" : ", ", members_[r]});
    if (members_.size() > shown) text += detail::concat({" and ", members_.size() - shown, " more"});
    bool alone = true;
    for (group const* g = on_->groups_; g != nullptr; g = g->after_)
        if (g != this && g->id_ != 0 && g->members_ == members_) alone = false;
    return text + (alone ? "}" : detail::concat({"} #", id_}));
}
DDP_DECL std::uint64_t group::enter(operation_info const& what) noexcept {
    history_ = quick_digest().add(history_).add(what.fingerprint).value() | 1;  // 0 means "nothing entered"
    on_->last_entered_ = this;
    ++on_->entered_;
    ++number_;
    recent_[number_ % remembered] = {what, history_};
    on_->note_mark(on_->mark_in(*this));
    on_->note_driven(flight::entered, what.id.index, id_, what.count, what.name);
    return number_;
}

DDP_DECL event::event(scheduler_base& on) noexcept : on_(on), after_(on.events_) {
    if (after_ != nullptr) after_->before_ = this;
    on.events_ = this;
}
DDP_DECL event::~event() {
    (before_ != nullptr ? before_->after_ : on_.events_) = after_;
    if (after_ != nullptr) after_->before_ = before_;
}
DDP_DECL void event::set() noexcept {
    set_ = true;
    on_.ready_.splice(waiters_);
}
DDP_DECL bool event::awaiter::await_ready() const noexcept {
    return of.set_ || of.on_.failed();
}
DDP_DECL void event::awaiter::await_resume() const {
    if (of.on_.failed()) throw collective_aborted();
}

}  // namespace ddp
