/// \file
/// scheduler: runs any number of collectives, written as coroutines, over one transport on one thread.
///
/// It has no threads and no locks. Whatever drives it repeats: pump(), then transport().progress(next_deadline()). A
/// driver does so for a program, a simulation for a thousand ranks at once.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/comm/scheduler_base.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/comm/verdict.hpp>
#include <ddp/core/task.hpp>

namespace ddp {

/// Runs any number of collectives, written as coroutines, over one transport on one thread. A driver makes and
/// drives it; lane::on gives a collective access to it. Not thread-safe: see communicator for the threads that may drive it.
template <Transport T>
class scheduler final : public scheduler_base {
public:
    scheduler(T& transport, timing const& times) : scheduler_base(times), transport_(transport) {
        make_world(transport.rank(), transport.size());
    }

    [[nodiscard]] T& transport() noexcept { return transport_; }
    [[nodiscard]] int rank() const noexcept { return transport_.rank(); }
    [[nodiscard]] int size() const noexcept { return transport_.size(); }
    [[nodiscard]] time_point now() const noexcept override { return transport_.now(); }

    /// Advances everything that can make progress without waiting. Called only from the top of a driver's loop, never
    /// from a coroutine.
    void pump() {
        frame_pool_scope const pool(frames());
        came_back();
        if (!failed_) listen();
        turn();
    }
    /// Sleeps in the transport until something may make progress, at the latest until `until` or the next deadline. An
    /// error of the transport itself fails the scheduler (DDP-E208), so that everything in flight ends. Returns whether the
    /// transport still works; one that does not may return at once every time.
    bool progress(time_point until) noexcept {
        try {
            if constexpr (WatchfulTransport<T>) watch();
            time_point const limit = std::min(until, next_deadline());
            goes_away(limit);
            news_ |= transport_.progress(limit);
            return true;
        } catch (...) {
            fail(std::current_exception(), failure_kind::broke);
        }
        return false;
    }
    /// Calls f(), which posts an operation. What the transport throws is its own failure, as in progress(), except
    /// usage_error.
    template <class F>
    void post(F&& f) {
        try {
            f();
        } catch (usage_error const&) {
            throw;
        } catch (...) {
            count_calls(1);  // within what was entered last
            fail(std::current_exception(), failure_kind::broke);
            count_calls(-1);
            throw collective_aborted();
        }
    }

    /// The scheduler is intentionally not driven before `due`: that time counts towards deadlines.
    void rests_until(time_point due) noexcept { goes_away(due); }

    /// The time at which pump() has something to do even if no message arrives.
    [[nodiscard]] time_point next_deadline() const noexcept {
        time_point next = std::min(next_look(), occupied_.second);
        if (failed_)
            next = settled_ ? never : std::max(failed_at_ + times().verdict, now() + std::chrono::milliseconds(5));
        if constexpr (TimedTransport<T>) next = std::min(next, transport_.next_timer());
        if constexpr (WatchfulTransport<T>)
            for (time_point const due : {marks_due(), straggler_due()})
                if (due > driven()) next = std::min(next, due);
        if (yielding()) next = time_point::min();
        return next;
    }

    /// After a failure: whether the verdict is known and posted memory belongs to the caller again (or times().verdict
    /// has passed since). Once every rank has published a record or is gone, or times().verdict has passed, the lowest
    /// rank that has published one publishes the verdict, and the others adopt it.
    bool settle() { return knows_verdict() && memory_is_ours(); }
    [[nodiscard]] failure const& verdict() const noexcept { return verdict_; }

private:
    bool knows_verdict() {
        if (!failed_) return false;
        if (settled_) return true;
        std::span<report const> const all = transport_.reports();
        bool complete = true;
        int speaker = -1;
        for (std::size_t r = 0; r < all.size(); ++r) {
            if (all[r].is == report::state::silent || !all[r].confirmed) complete = false;
            if (all[r].is != report::state::spoke) continue;
            if (speaker < 0) speaker = static_cast<int>(r);
            if (all[r].record.is_verdict) return adopt(all[r].record);
        }
        time_point const patience = failed_at_ + times().verdict;
        if (!complete && now() < patience) return false;
        if (speaker >= 0 && speaker != rank() && now() < patience + times().verdict) return false;
        failure mine = decide(all, times().collective);
        if (mine.peer >= 0) detail::name_process(mine, process_of(transport_, mine.peer));
        mine.rank = mine.rank < 0 ? rank() : mine.rank;
        transport_.abort(mine);
        return adopt(mine);
    }
    [[nodiscard]] bool memory_is_ours() const {
        if constexpr (requires { transport_.still_writes(); })
            return !transport_.still_writes() || now() >= settled_at_ + times().verdict;
        return true;
    }
    bool adopt(failure const& v) {
        verdict_ = v;
        settled_at_ = now();
        settled_ = true;
        if (recorder() != nullptr) recorder()->adopt(v);
        return true;
    }
    void publish(failure const& record) noexcept override { transport_.abort(record); }

    /// Sets what this rank's heartbeats report as entered.
    void note_mark(mark const& mine) noexcept override {
        if constexpr (WatchfulTransport<T>) transport_.entered(mine);
    }
    [[nodiscard]] bool peer_is_occupied() const noexcept override {
        if constexpr (WatchfulTransport<T>)  // who has left, or sends no heartbeats, can no longer withdraw its mark
            for (int r = 0; r < size(); ++r)
                if (r != rank() && transport_.reports()[static_cast<std::size_t>(r)].is == report::state::silent &&
                    transport_.last_heard(r) != time_point{} && transport_.mark_of(r).occupied != 0)
                    return true;
        return false;
    }
    /// The time at which the marks of peers are compared with the operation that this rank waits in: by then their
    /// heartbeats have had time to arrive.
    [[nodiscard]] time_point marks_due() const noexcept {
        return first_began() == never ? never : first_began() + 2 * times().heartbeat;
    }
    /// Fails at once, without waiting for the deadline, if a peer's mark names another operation under the same number
    /// of the same group.
    void compare_marks() {
        if constexpr (WatchfulTransport<T>) {
            if (driven() < marks_due()) return;
            for (int peer = 0; peer < size() && !failed_; ++peer) {
                if (peer == rank()) continue;
                mark const& theirs = transport_.mark_of(peer);
                group const* const same = theirs.fingerprint == 0 ? nullptr : find(theirs);
                if (same == nullptr || !same->contradicts(theirs)) continue;
                failure record{.kind = failure_kind::mismatch, .code = errc::mismatch, .peer = peer};
                record.entered = same->mark_of(theirs.number);
                record.text = std::string_view(detail::concat(
                    {"rank ", rank(), theirs.number == same->number() ? " is in " : " was in ",
                     same->words_of(theirs.number), ", rank ", peer, " in ",
                     theirs.occupied != 0 ? "another operation" : theirs.name.view(),
                     " of the same number. All ranks must call the same collectives in the same order with the same "
                     "counts."}));
                fail(record);
            }
        }
    }
    /// The time at which the oldest wait is reported on stderr. Each further report requires a wait twice as long; that of
    /// another wait no longer than half of timing.collective: so every wait that is going to fail is reported.
    [[nodiscard]] time_point straggler_due() const noexcept {
        return watched_ == never || patience_ >= times().collective ? never
                                                                    : std::max(watched_from_ + patience_, looks_again_);
    }
    /// Notices when the oldest wait is another one.
    void watch() noexcept {
        if (time_point const oldest = oldest_wait(); oldest != watched_)
            watched_ = oldest, watched_from_ = driven(), looks_again_ = {};
    }
    /// Prints the ranks that have not entered the operation that this rank waits in, or, if all have, the rank that it
    /// waits for. Only the lowest rank among those that have entered it prints.
    void name_stragglers() {
        if constexpr (WatchfulTransport<T>) {
            watch();
            if (driven() < straggler_due()) return;
            looks_again_ = driven() + times().heartbeat;
            failure mine = bystander({});
            mine.waited_ns = static_cast<std::uint64_t>((driven() - watched_from_).count());
            std::vector<int> absent;
            bool lowest = true;  // of those that have entered it
            auto const beats = [this](int r) { return transport_.last_heard(r) != time_point{}; };
            group const* const in =
                mine.entered.number == 0 ? nullptr : find(mine.entered);  // null: a message between two
            for (int const r : in != nullptr ? in->members() : std::span<int const>()) {
                if (r == rank() || !beats(r)) continue;
                mark const theirs = transport_.mark_of(r);
                bool const same = theirs.same_group(mine.entered), here = same && theirs.number >= mine.entered.number;
                lowest = lowest && !(here && r < rank() && r != mine.peer);
                // A mark describes what was entered last, in any group.
                if (!here && (same || r == mine.peer || theirs.name.view().empty())) absent.push_back(r);
            }
            if (!lowest) return;
            looks_again_ = driven() + (driven() - watched_from_);  // the same wait when it has lasted twice as long
            int const named = absent.empty() ? mine.peer : absent.front();
            patience_ =
                std::max<nanoseconds>(times().straggler, std::min<nanoseconds>(2 * patience_, times().collective / 2));
            detail::print_if_ready(
                "ddp: " +
                detail::straggler_text(rank(), mine, absent, named, beats(named) ? transport_.mark_of(named) : mark{},
                                       times().collective, recorder() != nullptr && recorder()->answers_signal.load(),
                                       peer_is_occupied(), process_of(transport_, named)) +
                "\n");
        }
    }
    [[nodiscard]] int own_rank() const noexcept override { return transport_.rank(); }

    /// Handles records of other ranks, and ranks that have become silent.
    void listen() {
        std::span<report const> const all = transport_.reports();
        std::size_t const count = std::exchange(news_, false) ? all.size() : 0;
        auto const accuse = [&](std::size_t peer, flight seen, failure_kind kind, errc code) {
            note(seen, 0, static_cast<int>(peer));
            failure record = bystander({});
            record.kind = kind;
            record.code = code;
            record.peer = static_cast<int>(peer);
            record.text = all[peer].record.text;
            if constexpr (WatchfulTransport<T>)
                if (kind == failure_kind::silent)
                    record.waited_ns =
                        static_cast<std::uint64_t>((transport_.now() - transport_.last_heard(record.peer)).count());
            fail(record);
        };
        for (std::size_t r = 0; r < count && !failed_; ++r) {
            if (static_cast<int>(r) == rank()) continue;
            if (all[r].is == report::state::spoke) {
                note(flight::record, all[r].record.entered.number, static_cast<int>(r),
                     static_cast<std::uint64_t>(all[r].record.code), detail::kind_name(all[r].record.kind));
                fail(bystander(all[r].record.entered));
            }
            if (all[r].is == report::state::closed)
                accuse(r, flight::closed, failure_kind::closed,
                       all[r].record.code == errc::frame ? errc::frame : errc::peer_closed);
        }
        if constexpr (TimedTransport<T>)  // who is not driven that often would say what is long past
            if (driven() >= says_ && transport_.next_timer() != never) say_phase();
        if constexpr (WatchfulTransport<T>) {
            if (failed_) return;
            if (std::optional<int> const peer = transport_.overdue_peer())
                accuse(static_cast<std::size_t>(*peer), flight::silent, failure_kind::silent, errc::peer_silent);
        }
        if (!failed_) compare_marks();
        if (!failed_) name_stragglers();
    }

    T& transport_;
    bool news_ = false;
    bool settled_ = false;
    time_point settled_at_ = {};
    failure verdict_;
    nanoseconds patience_ = times().straggler;
    // The oldest wait: which, and since when it is that.
    time_point watched_ = never, watched_from_ = {}, looks_again_ = {};
};

}  // namespace ddp
