/// \file
/// The conformance suite's scenarios about failing, leaving, dying and destruction; each is one rank's coroutine.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/testing/stage.hpp>

namespace ddp::testing::detail {

inline failure conformance_record(int rank, std::string_view text, bool verdict) {
    failure record;
    record.kind = failure_kind::threw;
    record.code = errc::remote_exception;
    record.rank = rank;
    record.peer = rank;
    record.is_verdict = verdict;
    record.operation = {.group = 1, .channel = 2, .index = 3};
    record.waited_ns = 123456789;
    record.entered.name = std::string_view("conformance");
    record.text = text;
    return record;
}

template <Transport T>
bool heard(stage<T>* s, int rank, std::string_view text, bool verdict) {
    std::span<report const> const all = s->transport().reports();
    report const& r = all[static_cast<std::size_t>(rank)];
    return r.is == report::state::spoke && r.record.text.view() == text && r.record.is_verdict == verdict &&
           r.record.rank == rank && r.record.waited_ns == 123456789 && r.record.operation.index == 3 &&
           r.record.entered.name.view() == "conformance";
}

/// Work that nobody will ever answer, and some that is half-way there.
template <Transport T>
void post_unanswered(stage<T>* s) {
    for (int d = 1; d < s->size(); ++d)
        for (std::uint64_t k = 0; k < 20; ++k) {
            s->receive(s->before(d), s->what(k, 5), s->memory(k % 2 == 0 ? 64 : 300000));
            s->send(s->after(d), s->what(k, k % 4 == 0 ? 5u : 6u), s->pattern(k % 2 == 0 ? 64 : 300000, k));
        }
}

/// Rank 0 aborts, the others when they hear of it; then rank 0 publishes a verdict in its record's place.
template <Transport T>
task<> abort(stage<T>* s) {
    bool const met = co_await stage<T>::together(s);
    if (!met) co_return;
    s->expect(s->transport().reports().size() == static_cast<std::size_t>(s->size()),
              "reports() does not have one entry per rank");
    // Only where rank 0 is: elsewhere its abort may have been heard already.
    for (report const& r : s->transport().reports())
        s->expect(s->rank() != 0 || r.is == report::state::silent, "reports() shows a record before anything failed");
    post_unanswered(s);
    co_await s->progress(time_point{});
    std::string const text = "the end, says rank ";
    auto const words = [&](int rank) { return text + std::to_string(rank); };
    if (s->rank() != 0) {
        bool const told = co_await stage<T>::until(
            s, [&] { return heard(s, 0, words(0), false); },
            "rank 0's record did not arrive, or not as it was written");
        if (!told) co_return;
    }
    s->transport().abort(conformance_record(s->rank(), words(s->rank()), false));
    s->expect(s->open() == 0, "abort() returned before every posted operation had completed");
    s->expect(heard(s, s->rank(), words(s->rank()), false), "reports() does not show this rank's own record");
    probe const& late_send = s->send(s->after(), s->what(1, 9), s->pattern(100, 1));
    probe const& late_receive = s->receive(s->before(), s->what(1, 9), s->memory(100));
    bool const completed = co_await stage<T>::all(s, "what is posted after abort() does not complete");
    if (!completed) co_return;
    s->expect(late_send.status == op_status::aborted && late_receive.status == op_status::aborted,
              "what is posted after abort() does not complete as aborted");
    bool const all_told = co_await stage<T>::until(
        s,
        [&] {
            for (int r = 0; r < s->size(); ++r)
                if (!heard(s, r, words(r), false) && !(r == 0 && heard(s, 0, "the verdict", true))) return false;
            return true;
        },
        "after abort() the other ranks' records do not arrive");
    if (!all_told) co_return;
    if (s->rank() == 0) {
        // Everybody's record is here; peers learn the verdict in this record's place.
        s->transport().abort(conformance_record(0, "the verdict", true));
    }
    co_await stage<T>::until(
        s, [&] { return heard(s, 0, "the verdict", true); }, "a second abort() does not replace the record");
    // Ranks that end at once might take their records along: everybody waits until all have theirs.
    co_await stage<T>::pause(s, std::chrono::milliseconds(50));
}

template <Transport T>
task<> survivors_go_on(stage<T>* s, int survivors, std::uint64_t index) {
    if (survivors < 2) co_return;
    int const to = (s->rank() + 1) % survivors, from = (s->rank() + survivors - 1) % survivors;
    for (std::size_t const bytes : {std::size_t{0}, std::size_t{100}, std::size_t{200000}}) {
        mutable_bytes const in = s->memory(bytes);
        probe const& got = s->receive(from, s->what(index, static_cast<std::uint32_t>(bytes)), in);
        s->send(to, s->what(index, static_cast<std::uint32_t>(bytes)), s->pattern(bytes, bytes));
        bool const came =
            co_await stage<T>::until(s, [&got] { return got.runs > 0; }, "ranks that stayed cannot talk to each other");
        if (!came) co_return;
        s->expect(got.status == op_status::ok && stage<T>::has_pattern(in, bytes),
                  "between ranks that stayed a message failed");
    }
}

/// The last rank goes; `state` is what the others must see of it.
template <Transport T>
task<> after_departure(stage<T>* s, report::state state) {
    int const gone = s->size() - 1;
    std::vector<probe*> lost;
    for (std::size_t const bytes : {std::size_t{0}, std::size_t{64}, std::size_t{400000}})
        lost.push_back(&s->receive(gone, s->what(bytes, 3), s->memory(bytes)));
    bool const ended = co_await stage<T>::until(
        s, [&] { return std::all_of(lost.begin(), lost.end(), [](probe* p) { return p->runs > 0; }); },
        "receives from a rank that has gone do not end");
    if (!ended) co_return;
    for (probe const* const p : lost)
        s->expect(p->status == op_status::closed, "a receive from a rank that has gone does not end as closed");
    bool const seen = co_await stage<T>::until(
        s, [&] { return s->transport().reports()[static_cast<std::size_t>(gone)].is == state; },
        "reports() does not say that a rank has gone");
    if (!seen) co_return;
    probe const& late_receive = s->receive(gone, s->what(7, 4), s->memory(10));
    probe const& late_send = s->send(gone, s->what(8, 4), s->pattern(10, 1));
    bool const late = co_await stage<T>::until(
        s, [&] { return late_receive.runs > 0 && late_send.runs > 0; },
        "what is posted to a rank that has gone does not end");
    if (!late) co_return;
    s->expect(late_receive.status == op_status::closed && late_send.status == op_status::closed,
              "what is posted to a rank that has gone does not end as closed");
    co_await survivors_go_on(s, s->size() - 1, 2);
    for (int r = 0; r < s->size() - 1; ++r)
        s->expect(s->transport().reports()[static_cast<std::size_t>(r)].is == report::state::silent,
                  "a departure was taken for a failure of others");
    if (s->size() > 2) co_await stage<T>::together(s, s->size() - 1);
}

/// Whether what is open are those of `early` that have not completed, and nothing else.
inline bool all_but_early(std::vector<probe*> const& early, std::size_t open) {
    auto const waiting = std::count_if(early.begin(), early.end(), [](probe const* p) { return p->runs == 0; });
    return open == static_cast<std::size_t>(waiting);
}

template <Transport T>
task<> leave(stage<T>* s) {
    bool const met = co_await stage<T>::together(s);
    if (!met) co_return;
    int const gone = s->size() - 1;
    // What it sent, and saw completed, is there even if it is asked for after it has gone. A transport may complete a send
    // only when it was received: then there is nothing that may be asked for later.
    mutable_bytes const in = s->memory(1000);
    if (s->rank() == gone) {
        std::vector<probe*> sends;
        for (int r = 0; r < gone; ++r) sends.push_back(&s->send(r, s->what(2, 2), s->pattern(100, 4)));
        co_await stage<T>::pause(s, std::chrono::milliseconds(20));
        for (int r = 0; r < gone; ++r)
            s->send(r, s->what(1, 2), s->pattern(1000, sends[static_cast<std::size_t>(r)]->runs > 0 ? 10 : 9));
        bool const completed = co_await stage<T>::until(
            s, [&] { return all_but_early(sends, s->open()); }, "operations did not complete in time");
        if (!completed) co_return;
        s->destroy_transport();
        co_return;
    }
    probe const& got = s->receive(gone, s->what(1, 2), in);
    bool const came =
        co_await stage<T>::until(s, [&got] { return got.runs > 0; }, "a leaver's last message did not come");
    if (!came) co_return;
    bool const early_completed = stage<T>::has_pattern(in, 10);
    s->expect(got.status == op_status::ok && (early_completed || stage<T>::has_pattern(in, 9)),
              "a leaver's last message did not come whole");
    if (early_completed) {
        bool const left = co_await stage<T>::until(
            s, [&] { return s->transport().reports()[static_cast<std::size_t>(gone)].is == report::state::left; },
            "reports() does not say that a rank has gone");
        if (!left) co_return;
        mutable_bytes const late = s->memory(100);
        probe const& kept = s->receive(gone, s->what(2, 2), late);
        bool const ended = co_await stage<T>::until(
            s, [&kept] { return kept.runs > 0; }, "a receive of what a leaver had sent does not end");
        if (!ended) co_return;
        s->expect(kept.status == op_status::ok && stage<T>::has_pattern(late, 4),
                  "a message whose send had completed was lost when its sender left");
    }
    co_await after_departure(s, report::state::left);
}

template <Transport T>
task<> death(stage<T>* s) {
    bool const met = co_await stage<T>::together(s);
    if (!met) co_return;
    if (s->rank() == s->size() - 1) {
        s->options.kill(s->rank());
        co_return;
    }
    co_await after_departure(s, report::state::closed);
}

/// Everybody, or at first only rank 0, destroys a transport that is at work; then the memory is used for something else.
template <Transport T>
task<> destruction(stage<T>* s) {
    bool const met = co_await stage<T>::together(s);
    if (!met) co_return;
    post_unanswered(s);
    if (s->rank() % 2 == 1) co_await stage<T>::pause(s, std::chrono::milliseconds(3));
    s->destroy_transport();
}

template <Transport T>
task<> destruction_by_one(stage<T>* s) {
    bool const met = co_await stage<T>::together(s);
    if (!met) co_return;
    post_unanswered(s);
    if (s->rank() == 0) {
        s->destroy_transport();
        co_return;
    }
    bool const gone = co_await stage<T>::until(
        s, [&] { return s->transport().reports()[0].is == report::state::left; },
        "a rank was destroyed at work, and reports() does not show it");
    if (!gone) co_return;
    co_await stage<T>::pause(s, std::chrono::milliseconds(5));
    s->destroy_transport();
}

}  // namespace ddp::testing::detail
