/// \file
/// The scenarios of the conformance suite: what every transport promises, each as one rank's coroutine.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <ddp/testing/stage.hpp>

namespace ddp::testing::detail {

template <Transport T>
task<> order(stage<T>* s) {
    constexpr std::size_t count = 60;
    auto const bytes = [](std::size_t k) { return k * 37 % 3000; };
    std::vector<probe*> receives;
    std::vector<mutable_bytes> in;
    for (std::size_t k = 0; k < count; ++k) in.push_back(s->memory(bytes(k)));
    for (std::size_t k = 0; k < count / 3; ++k) receives.push_back(&s->receive(s->before(), s->what(1), in[k]));
    for (std::size_t k = 0; k < count; ++k)
        s->send(s->after(), s->what(1), s->pattern(bytes(k), k + 100 * static_cast<std::size_t>(s->rank())));
    co_await stage<T>::pause(s, std::chrono::milliseconds(5));  // some come early
    for (std::size_t k = count / 3; k < count; ++k) receives.push_back(&s->receive(s->before(), s->what(1), in[k]));
    bool const go1 = co_await stage<T>::all(s);
    if (!go1) co_return;
    for (std::size_t k = 0; k < count; ++k) {
        s->expect(receives[k]->status == op_status::ok, "messages of one identity came out of order: a length differs");
        s->expect(stage<T>::has_pattern(in[k], k + 100 * static_cast<std::size_t>(s->before())),
                  "messages of one identity came out of order");
    }
}

template <Transport T>
task<> independence(stage<T>* s) {
    constexpr std::uint64_t count = 24;
    for (std::uint64_t k = 0; k < count; ++k)  // identities that differ in one field only, of every field
        s->send(s->after(), k % 2 == 0 ? s->what(k << 33) : s->what(0, static_cast<std::uint32_t>(k) << 26),
                s->pattern(2000, k));
    for (std::uint64_t k = count; k-- > 0;) {  // the last first, one at a time
        mutable_bytes const in = s->memory(2000);
        probe const& got = s->receive(s->before(), k % 2 == 0 ? s->what(k << 33) : s->what(0, static_cast<std::uint32_t>(k) << 26), in);
        bool const came = co_await stage<T>::until(
            s, [&got] { return got.runs > 0; }, "a message waits behind others that have no receive yet");
        if (!came) co_return;
        s->expect(got.status == op_status::ok && stage<T>::has_pattern(in, k), "a receive got another identity's message");
    }
    co_await stage<T>::all(s);
}

template <Transport T>
task<> sizes(stage<T>* s) {
    std::vector<std::size_t> const bytes = {0,    1,    2,     63,    64,    65,     255,    256,    257,    471,       472,      473,
                                            4095, 4096, 65535, 65536, 65537, 262143, 262144, 262145, 300000, (1u << 20) + 1, 0};
    for (bool const receive_first : {true, false}) {
        std::vector<mutable_bytes> in;
        std::vector<probe*> got;
        for (std::size_t k = 0; k < bytes.size(); ++k) in.push_back(s->memory(bytes[k]));
        std::uint64_t const base = receive_first ? 0 : 1000;
        auto const receive = [&] {
            for (std::size_t k = 0; k < bytes.size(); ++k) got.push_back(&s->receive(s->before(), s->what(base + k), in[k]));
        };
        if (receive_first) receive();
        for (std::size_t k = 0; k < bytes.size(); ++k) s->send(s->after(), s->what(base + k), s->pattern(bytes[k], k));
        if (!receive_first) receive();
        bool const go2 = co_await stage<T>::all(s);
        if (!go2) co_return;
        for (std::size_t k = 0; k < bytes.size(); ++k) {
            std::string const size = std::to_string(bytes[k]) + " bytes";
            s->expect(got[k]->status == op_status::ok, "a message did not arrive: " + size);
            s->expect(got[k]->length == bytes[k], "completion.length is not the sender's length: " + size);
            s->expect(stage<T>::has_pattern(in[k], k), "a message arrived changed: " + size);
        }
        bool const go3 = co_await stage<T>::together(s);
        if (!go3) co_return;
    }
}

template <Transport T>
task<> empty(stage<T>* s) {
    for (std::uint64_t k = 0; k < 50; ++k) {
        s->send(s->after(), s->what(k % 5), {});
        s->receive(s->before(), s->what(k % 5), {});
    }
    co_await stage<T>::all(s, "empty messages did not all arrive");
}

template <Transport T>
task<> large(stage<T>* s) {
    std::vector<mutable_bytes> in;
    std::vector<int> peers;
    for (int d = 1; d < s->size(); ++d) {
        in.push_back(s->memory(s->options.large_bytes));
        peers.push_back(s->before(d));
        s->receive(s->before(d), s->what(1), in.back());
        s->send(s->after(d), s->what(1), s->pattern(s->options.large_bytes, static_cast<std::size_t>(s->rank() + 10 * s->after(d))));
    }
    bool const go4 = co_await stage<T>::all(s);
    if (!go4) co_return;
    for (std::size_t k = 0; k < in.size(); ++k)
        s->expect(stage<T>::has_pattern(in[k], static_cast<std::size_t>(peers[k] + 10 * s->rank())), "a large message arrived changed");
}

template <Transport T>
task<> many_in_flight(stage<T>* s) {
    std::size_t const count = s->options.many;
    auto const bytes = [](std::size_t k) { return (k * 7) % 900; };
    std::vector<mutable_bytes> in;
    for (std::size_t k = 0; k < count; ++k) in.push_back(s->memory(bytes(k)));
    for (std::size_t k = 0; k < count; ++k) {
        s->receive(s->before(), s->what(k), in[k]);
        s->send(s->after(), s->what(count - 1 - k), s->pattern(bytes(count - 1 - k), count - 1 - k));
    }
    bool const go5 = co_await stage<T>::all(s);
    if (!go5) co_return;
    for (std::size_t k = 0; k < count; ++k)
        s->expect(stage<T>::has_pattern(in[k], k), "of many messages in flight one arrived changed");
}

/// Far beyond any credit, and with receives in the opposite order: what nobody has asked for may delay, but never block.
template <Transport T>
task<> early(stage<T>* s) {
    std::size_t const bytes = 48 << 10;
    std::size_t const count = s->options.early_bytes / bytes;
    for (std::size_t k = 0; k < count; ++k) s->send(s->after(), s->what(k), s->pattern(bytes, k));
    s->send(s->after(), s->what(0, 1), s->pattern(8, 5));
    mutable_bytes const word = s->memory(8);
    probe const& got = s->receive(s->before(), s->what(0, 1), word);
    bool const came = co_await stage<T>::until(
        s, [&got] { return got.runs > 0; }, "a message with a receive waits for good behind messages without one");
    if (!came) co_return;
    s->expect(stage<T>::has_pattern(word, 5), "the message behind the early ones arrived changed");
    std::vector<mutable_bytes> in(count);
    for (std::size_t k = count; k-- > 0;) {
        in[k] = s->memory(bytes);
        s->receive(s->before(), s->what(k), in[k]);
    }
    bool const go6 = co_await stage<T>::all(s, "early messages were not all received");
    if (!go6) co_return;
    for (std::size_t k = 0; k < count; ++k) s->expect(stage<T>::has_pattern(in[k], k), "an early message arrived changed");
}

template <Transport T>
task<> length_mismatch(stage<T>* s) {
    struct lengths {
        std::size_t sent, expected;
    };
    std::vector<lengths> const cases = {{8, 16}, {16, 8}, {4, 0}, {0, 4}, {5000, 10}, {100, 5000}, {300000, 299999}, {299999, 300000}};
    for (bool const receive_first : {true, false}) {
        std::vector<mutable_bytes> in, second;
        std::vector<probe*> wrong, right;
        std::uint64_t const base = receive_first ? 0 : 1000;
        auto const receive = [&] {
            for (std::size_t k = 0; k < cases.size(); ++k) {
                in.push_back(s->memory(cases[k].expected));
                second.push_back(s->memory(700));
                wrong.push_back(&s->receive(s->before(), s->what(base + k), in[k]));
                right.push_back(&s->receive(s->before(), s->what(base + k), second[k]));
            }
        };
        if (receive_first) receive();
        for (std::size_t k = 0; k < cases.size(); ++k) {
            s->send(s->after(), s->what(base + k), s->pattern(cases[k].sent, k));
            s->send(s->after(), s->what(base + k), s->pattern(700, k + 50));
        }
        if (!receive_first) co_await stage<T>::pause(s, std::chrono::milliseconds(2));
        if (!receive_first) receive();
        bool const go7 = co_await stage<T>::all(s);
        if (!go7) co_return;
        for (std::size_t k = 0; k < cases.size(); ++k) {
            std::string const which = std::to_string(cases[k].sent) + " bytes sent, " + std::to_string(cases[k].expected) + " expected";
            s->expect(wrong[k]->status == op_status::length, "a wrong length was not refused: " + which);
            s->expect(wrong[k]->length == cases[k].sent, "a wrong length does not say the sender's: " + which);
            s->expect(right[k]->status == op_status::ok && stage<T>::has_pattern(second[k], k + 50),
                      "the message behind one of the wrong length did not arrive: " + which);
        }
        bool const go8 = co_await stage<T>::together(s);
        if (!go8) co_return;
    }
}

template <Transport T>
task<> fingerprint(stage<T>* s) {
    std::vector<probe*> got;
    auto const print = [](std::uint64_t k, int rank) { return k * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(rank); };
    for (std::uint64_t k = 0; k < 20; ++k) {
        std::size_t const bytes = k % 2 == 0 ? 8 : 100000;
        got.push_back(&s->receive(s->before(), s->what(k, 0, 1), s->memory(bytes)));
        s->send(s->after(), s->what(k, 0, print(k, s->rank())), s->pattern(bytes, k));
    }
    bool const go9 = co_await stage<T>::all(s);
    if (!go9) co_return;
    for (std::uint64_t k = 0; k < 20; ++k) {
        s->expect(got[k]->status == op_status::ok, "a message with another fingerprint was refused: that is decided above");
        s->expect(got[k]->fingerprint == print(k, s->before()), "a receive does not carry the sender's fingerprint");
    }
}

/// The counterpart is there before the post: the completion must wait for progress() all the same.
template <Transport T>
task<> nothing_inside_post(stage<T>* s) {
    for (std::uint64_t k = 0; k < 4; ++k) {
        bool const first = (s->rank() + static_cast<int>(k)) % 2 == 0;
        std::size_t const bytes = k < 2 ? 16 : 200000;
        if (first) s->send(s->after(), s->what(k), s->pattern(bytes, k));
        if (first) s->receive(s->before(), s->what(k), s->memory(bytes));
        co_await stage<T>::pause(s, std::chrono::milliseconds(10));
        if (!first) s->receive(s->before(), s->what(k), s->memory(bytes));
        if (!first) s->send(s->after(), s->what(k), s->pattern(bytes, k));
        bool const go10 = co_await stage<T>::all(s);
        if (!go10) co_return;
    }
}

template <Transport T>
task<> all_to_all(stage<T>* s) {
    for (std::size_t const bytes : {std::size_t{8}, std::size_t{100000}, std::size_t{70}}) {
        std::vector<mutable_bytes> in;
        for (int peer = 0; peer < s->size(); ++peer) {
            in.push_back(s->memory(bytes + static_cast<std::size_t>(peer)));
            if (peer == s->rank()) continue;
            auto const pair = static_cast<std::size_t>(s->rank() * 100 + peer);
            s->receive(peer, s->what(bytes), in.back());
            s->send(peer, s->what(bytes), s->pattern(bytes + static_cast<std::size_t>(s->rank()), pair));
        }
        bool const go11 = co_await stage<T>::all(s);
        if (!go11) co_return;
        for (int peer = 0; peer < s->size(); ++peer)
            if (peer != s->rank())
                s->expect(stage<T>::has_pattern(in[static_cast<std::size_t>(peer)], static_cast<std::size_t>(peer * 100 + s->rank())),
                          "with all ranks talking at once, a message arrived changed");
    }
}

template <Transport T>
task<> wake(stage<T>* s) {
    time_point const limit = s->transport().now() + s->options.patience;
    s->transport().wake();
    co_await s->progress(limit);
    s->expect(s->transport().now() < limit, "wake() before progress() was forgotten: it is sticky");
    co_await stage<T>::pause(s, std::chrono::milliseconds(5));
    if (!s->options.threads) co_return;
    std::thread other([s] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        s->transport().wake();
    });
    co_await s->progress(limit);
    s->expect(s->transport().now() < limit, "wake() from another thread did not end progress()");
    other.join();
    std::thread storm([s] {
        for (int k = 0; k < 2000; ++k) s->transport().wake();
    });
    for (std::uint64_t k = 0; k < 50; ++k) {
        s->send(s->after(), s->what(k), {});
        s->receive(s->before(), s->what(k), {});
    }
    bool const good = co_await stage<T>::all(s, "messages did not arrive while another thread was calling wake()");
    storm.join();
    if (good) co_await stage<T>::together(s);
}

template <Transport T>
task<> progress_deadline(stage<T>* s) {
    auto const half = s->options.patience / 2;
    time_point const start = s->transport().now();
    for (int k = 0; k < 20; ++k) co_await s->progress(time_point{});
    s->expect(s->transport().now() - start < half, "progress() with a time in the past does not poll");
    s->receive(s->before(), s->what(1), s->memory(8));
    time_point const until = s->transport().now() + std::chrono::milliseconds(40);
    while (s->transport().now() < until) co_await s->progress(until);
    s->expect(s->transport().now() - until < half, "progress() sleeps past its deadline");
    s->send(s->after(), s->what(1), s->pattern(8, 1));
    co_await stage<T>::all(s);
}

inline failure conformance_record(int rank, std::string_view text, bool verdict) {
    failure record;
    record.kind = failure_kind::threw;
    record.code = errc::remote_exception;
    record.rank = rank;
    record.peer = rank;
    record.is_verdict = verdict;
    record.operation = {.group = 1, .channel = 2, .index = 3};
    record.waited_ns = 123456789;
    record.name = std::string_view("conformance");
    record.text = text;
    return record;
}

template <Transport T>
bool heard(stage<T>* s, int rank, std::string_view text, bool verdict) {
    std::span<report const> const all = s->transport().reports();
    report const& r = all[static_cast<std::size_t>(rank)];
    return r.is == report::state::spoke && r.record.text.view() == text && r.record.is_verdict == verdict &&
           r.record.rank == rank && r.record.waited_ns == 123456789 && r.record.operation.index == 3 &&
           r.record.name.view() == "conformance";
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
    bool const go12 = co_await stage<T>::together(s);
    if (!go12) co_return;
    s->expect(s->transport().reports().size() == static_cast<std::size_t>(s->size()), "reports() has not one entry a rank");
    for (report const& r : s->transport().reports()) s->expect(r.is == report::state::silent, "a rank has spoken before anything failed");
    post_unanswered(s);
    co_await s->progress(time_point{});
    std::string const text = "the end, says rank ";
    auto const words = [&](int rank) { return text + std::to_string(rank); };
    if (s->rank() != 0) {
        bool const told = co_await stage<T>::until(
            s, [&] { return heard(s, 0, words(0), false); }, "rank 0's record did not arrive, or not as it was written");
        if (!told) co_return;
    }
    s->transport().abort(conformance_record(s->rank(), words(s->rank()), false));
    s->expect(s->open() == 0, "abort() returned before every posted operation had completed");
    s->expect(heard(s, s->rank(), words(s->rank()), false), "reports() does not show this rank's own record");
    probe const& late_send = s->send(s->after(), s->what(1, 9), s->pattern(100, 1));
    probe const& late_receive = s->receive(s->before(), s->what(1, 9), s->memory(100));
    bool const go13 = co_await stage<T>::all(s, "what is posted after abort() does not complete");
    if (!go13) co_return;
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
    co_await stage<T>::until(s, [&] { return heard(s, 0, "the verdict", true); }, "a second abort() does not replace the record");
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
        bool const go14 = co_await stage<T>::until(s, [&got] { return got.runs > 0; }, "ranks that stayed cannot talk to each other");
        if (!go14) co_return;
        s->expect(got.status == op_status::ok && stage<T>::has_pattern(in, bytes), "between ranks that stayed a message failed");
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
    for (probe const* const p : lost) s->expect(p->status == op_status::closed, "a receive from a rank that has gone does not end as closed");
    bool const seen = co_await stage<T>::until(
        s, [&] { return s->transport().reports()[static_cast<std::size_t>(gone)].is == state; },
        "reports() does not say that a rank has gone");
    if (!seen) co_return;
    probe const& late_receive = s->receive(gone, s->what(7, 4), s->memory(10));
    probe const& late_send = s->send(gone, s->what(8, 4), s->pattern(10, 1));
    bool const late = co_await stage<T>::until(
        s, [&] { return late_receive.runs > 0 && late_send.runs > 0; }, "what is posted to a rank that has gone does not end");
    if (!late) co_return;
    s->expect(late_receive.status == op_status::closed && late_send.status == op_status::closed,
              "what is posted to a rank that has gone does not end as closed");
    co_await survivors_go_on(s, s->size() - 1, 2);
    for (int r = 0; r < s->size() - 1; ++r)
        s->expect(s->transport().reports()[static_cast<std::size_t>(r)].is == report::state::silent, "a departure was taken for a failure of others");
    if (s->size() > 2) co_await stage<T>::together(s, s->size() - 1);
}

template <Transport T>
task<> leave(stage<T>* s) {
    bool const go15 = co_await stage<T>::together(s);
    if (!go15) co_return;
    int const gone = s->size() - 1;
    // What it sent, and saw completed, is there even if it is asked for later.
    mutable_bytes const in = s->memory(1000);
    if (s->rank() == gone) {
        for (int r = 0; r < gone; ++r) s->send(r, s->what(1, 2), s->pattern(1000, 9));
        bool const go16 = co_await stage<T>::all(s);
        if (!go16) co_return;
        s->destroy_transport();
        co_return;
    }
    probe const& got = s->receive(gone, s->what(1, 2), in);
    bool const go17 = co_await stage<T>::until(s, [&got] { return got.runs > 0; }, "a leaver's last message did not come");
    if (!go17) co_return;
    s->expect(got.status == op_status::ok && stage<T>::has_pattern(in, 9), "a leaver's last message did not come whole");
    co_await after_departure(s, report::state::left);
}

template <Transport T>
task<> death(stage<T>* s) {
    bool const go18 = co_await stage<T>::together(s);
    if (!go18) co_return;
    if (s->rank() == s->size() - 1) {
        s->options.kill(s->rank());
        co_return;
    }
    co_await after_departure(s, report::state::closed);
}

/// Everybody, or at first only rank 0, destroys a transport that is at work; then the memory is used for something else.
template <Transport T>
task<> destruction(stage<T>* s) {
    bool const go19 = co_await stage<T>::together(s);
    if (!go19) co_return;
    post_unanswered(s);
    if (s->rank() % 2 == 1) co_await stage<T>::pause(s, std::chrono::milliseconds(3));
    s->destroy_transport();
}

template <Transport T>
task<> destruction_by_one(stage<T>* s) {
    bool const go20 = co_await stage<T>::together(s);
    if (!go20) co_return;
    post_unanswered(s);
    if (s->rank() == 0) {
        s->destroy_transport();
        co_return;
    }
    bool const gone = co_await stage<T>::until(
        s, [&] { return s->transport().reports()[0].is == report::state::left; }, "a rank was destroyed at work, and reports() does not show it");
    if (!gone) co_return;
    co_await stage<T>::pause(s, std::chrono::milliseconds(5));
    s->destroy_transport();
}

}  // namespace ddp::testing::detail
