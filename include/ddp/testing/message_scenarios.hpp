/// \file
/// The conformance suite's scenarios about messages and sleep; each is one rank's coroutine.
#pragma once

#include <algorithm>
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
    bool const completed = co_await stage<T>::all(s);
    if (!completed) co_return;
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
        probe const& got = s->receive(
            s->before(), k % 2 == 0 ? s->what(k << 33) : s->what(0, static_cast<std::uint32_t>(k) << 26), in);
        bool const came = co_await stage<T>::until(
            s, [&got] { return got.runs > 0; }, "a message waits behind others that have no receive yet");
        if (!came) co_return;
        s->expect(got.status == op_status::ok && stage<T>::has_pattern(in, k),
                  "a receive got another identity's message");
    }
    co_await stage<T>::all(s);
}

template <Transport T>
task<> sizes(stage<T>* s) {
    std::vector<std::size_t> const bytes = {
        0,   1,    2,    63,    64,    65,    255,    256,    257,    471,    472,
        473, 4095, 4096, 65535, 65536, 65537, 262143, 262144, 262145, 300000, (1u << 20) + 1,
        0};
    for (bool const receive_first : {true, false}) {
        std::vector<mutable_bytes> in;
        std::vector<probe*> got;
        for (std::size_t k = 0; k < bytes.size(); ++k) in.push_back(s->memory(bytes[k]));
        std::uint64_t const base = receive_first ? 0 : 1000;
        auto const receive = [&] {
            for (std::size_t k = 0; k < bytes.size(); ++k)
                got.push_back(&s->receive(s->before(), s->what(base + k), in[k]));
        };
        if (receive_first) receive();
        for (std::size_t k = 0; k < bytes.size(); ++k) s->send(s->after(), s->what(base + k), s->pattern(bytes[k], k));
        if (!receive_first) receive();
        bool const completed = co_await stage<T>::all(s);
        if (!completed) co_return;
        for (std::size_t k = 0; k < bytes.size(); ++k) {
            std::string const size = std::to_string(bytes[k]) + " bytes";
            s->expect(got[k]->status == op_status::ok, "a message did not arrive: " + size);
            s->expect(got[k]->length == bytes[k], "completion.length is not the sender's length: " + size);
            s->expect(stage<T>::has_pattern(in[k], k), "a message arrived changed: " + size);
        }
        bool const met = co_await stage<T>::together(s);
        if (!met) co_return;
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
        int const pair = s->rank() + 10 * s->after(d);
        s->send(s->after(d), s->what(1), s->pattern(s->options.large_bytes, static_cast<std::size_t>(pair)));
    }
    bool const completed = co_await stage<T>::all(s);
    if (!completed) co_return;
    for (std::size_t k = 0; k < in.size(); ++k) {
        int const pair = peers[k] + 10 * s->rank();
        s->expect(stage<T>::has_pattern(in[k], static_cast<std::size_t>(pair)), "a large message arrived changed");
    }
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
    bool const completed = co_await stage<T>::all(s);
    if (!completed) co_return;
    for (std::size_t k = 0; k < count; ++k)
        s->expect(stage<T>::has_pattern(in[k], k), "of many messages in flight one arrived changed");
}

/// Far beyond any credit, and with receives in the opposite order: messages that no receive waits for may cause
/// delays, but never a deadlock.
template <Transport T>
task<> early(stage<T>* s) {
    std::size_t const bytes = 48 << 10;
    std::size_t const count = s->options.early_bytes / bytes;
    std::vector<probe*> sends;
    for (std::size_t k = 0; k < count; ++k) sends.push_back(&s->send(s->after(), s->what(k), s->pattern(bytes, k)));
    s->send(s->after(), s->what(0, 1), s->pattern(8, 5));
    mutable_bytes const word = s->memory(8);
    probe const& got = s->receive(s->before(), s->what(0, 1), word);
    bool const came = co_await stage<T>::until(
        s, [&got] { return got.runs > 0; }, "a message with a receive is never delivered behind messages without one");
    if (!came) co_return;
    s->expect(stage<T>::has_pattern(word, 5), "the message behind the early ones arrived changed");
    co_await stage<T>::pause(s, std::chrono::milliseconds(20));
    bool const all_taken = std::all_of(sends.begin(), sends.end(), [](probe const* p) { return p->runs > 0; });
    s->expect(!all_taken || !s->options.early_is_bounded,
              "all sends of early_bytes completed before anybody asked for them: the memory for early messages has no "
              "bound, or options.early_bytes is not above it");
    bool const met = co_await stage<T>::together(s);  // nobody has posted a receive before
    if (!met) co_return;
    std::vector<mutable_bytes> in(count);
    for (std::size_t k = count; k-- > 0;) {
        in[k] = s->memory(bytes);
        s->receive(s->before(), s->what(k), in[k]);
    }
    bool const completed = co_await stage<T>::all(s, "early messages were not all received");
    if (!completed) co_return;
    for (std::size_t k = 0; k < count; ++k)
        s->expect(stage<T>::has_pattern(in[k], k), "an early message arrived changed");
}

template <Transport T>
task<> length_mismatch(stage<T>* s) {
    struct lengths {
        std::size_t sent, expected;
    };
    std::vector<lengths> const cases = {{8, 16},    {16, 8},     {4, 0},           {0, 4},
                                        {5000, 10}, {100, 5000}, {300000, 299999}, {299999, 300000}};
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
        bool const completed = co_await stage<T>::all(s);
        if (!completed) co_return;
        for (std::size_t k = 0; k < cases.size(); ++k) {
            std::string const which =
                std::to_string(cases[k].sent) + " bytes sent, " + std::to_string(cases[k].expected) + " expected";
            s->expect(wrong[k]->status == op_status::length, "a wrong length was not refused: " + which);
            s->expect(wrong[k]->length == cases[k].sent, "a wrong length does not say the sender's: " + which);
            s->expect(right[k]->status == op_status::ok && stage<T>::has_pattern(second[k], k + 50),
                      "the message behind one of the wrong length did not arrive: " + which);
        }
        bool const met = co_await stage<T>::together(s);
        if (!met) co_return;
    }
}

template <Transport T>
task<> fingerprint(stage<T>* s) {
    std::vector<probe*> got;
    auto const print = [](std::uint64_t k, int rank) {
        return k * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(rank);
    };
    for (std::uint64_t k = 0; k < 20; ++k) {
        std::size_t const bytes = k % 2 == 0 ? 8 : 100000;
        got.push_back(&s->receive(s->before(), s->what(k, 0, 1), s->memory(bytes)));
        s->send(s->after(), s->what(k, 0, print(k, s->rank())), s->pattern(bytes, k));
    }
    bool const completed = co_await stage<T>::all(s);
    if (!completed) co_return;
    for (std::uint64_t k = 0; k < 20; ++k) {
        s->expect(got[k]->status == op_status::ok,
                  "a message with another fingerprint was refused: that is decided above");
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
        bool const completed = co_await stage<T>::all(s);
        if (!completed) co_return;
    }
}

template <Transport T>
task<> all_to_all(stage<T>* s) {
    for (std::size_t const bytes : {std::size_t{8}, std::size_t{100000}, std::size_t{70}}) {
        std::vector<mutable_bytes> in;
        for (int peer = 0; peer < s->size(); ++peer) {
            in.push_back(s->memory(bytes + static_cast<std::size_t>(peer)));
            if (peer == s->rank()) continue;
            int const pair = s->rank() * 100 + peer;
            s->receive(peer, s->what(bytes), in.back());
            s->send(peer, s->what(bytes),
                    s->pattern(bytes + static_cast<std::size_t>(s->rank()), static_cast<std::size_t>(pair)));
        }
        bool const completed = co_await stage<T>::all(s);
        if (!completed) co_return;
        for (int peer = 0; peer < s->size(); ++peer) {
            int const pair = peer * 100 + s->rank();
            if (peer != s->rank())
                s->expect(stage<T>::has_pattern(in[static_cast<std::size_t>(peer)], static_cast<std::size_t>(pair)),
                          "with all ranks talking at once, a message arrived changed");
        }
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
    std::jthread storm([s] {
        for (int k = 0; k < 2000; ++k) s->transport().wake();
    });
    for (std::uint64_t k = 0; k < 50; ++k) {
        s->send(s->after(), s->what(k), {});
        s->receive(s->before(), s->what(k), {});
    }
    bool const completed = co_await stage<T>::all(s, "messages did not arrive while another thread was calling wake()");
    storm.join();
    if (completed) co_await stage<T>::together(s);
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

}  // namespace ddp::testing::detail
