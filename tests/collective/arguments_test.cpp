/// \file
/// What may be passed: spans, vectors, arrays, single numbers; what is returned; what is refused.
#include <ddp/collective/arguments.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/ranks.hpp"

namespace {

struct config {
    int layers;
    double rate;
    friend bool operator==(config const&, config const&) = default;
};

/// Runs it on three ranks; each says what is wrong there.
template <class Body>
void on_three(Body body) {
    for (std::string const& wrong : ddp::test::run_ranks(3, body)) CHECK(wrong == "");
}
std::string unless(bool good, char const* what) {
    return good ? std::string() : std::string(what) + " is wrong";
}

// What Source says about strings.
static_assert(ddp::Source<std::string const&> && ddp::Target<std::string&> && ddp::Source<std::string_view>);
static_assert(!ddp::Target<std::string> && !ddp::Target<std::string const&> && !ddp::Target<std::string_view&>);
static_assert(std::is_same_v<ddp::value_in<std::string&>, char> && std::is_same_v<ddp::value_in<decltype("ab")>, char>);
static_assert(!ddp::Source<char const*> && !ddp::Source<std::vector<std::string>> && !ddp::Source<std::vector<bool>>);

}  // namespace

TEST_CASE("allreduce takes containers in place and returns single numbers", "[collective][arguments]") {
    on_three([](auto& comm) {
        int const me = comm.rank();
        std::vector<float> v(5, static_cast<float>(me));
        std::array<std::int64_t, 2> a{me, -me};
        double plain[3] = {1, 2, 3};
        ddp::allreduce(comm, v);
        ddp::allreduce(comm, a, ddp::minimum{});
        ddp::allreduce(comm, plain, ddp::product{}, ddp::naive_allreduce{});
        ddp::allreduce(comm, std::span(v).first(1), ddp::ring_allreduce{});
        double const mine = me + 0.5;
        double const all = ddp::allreduce(comm, mine);
        int const greatest = ddp::allreduce(comm, me, ddp::maximum{});
        return unless(v == std::vector<float>{9, 3, 3, 3, 3}, "the vector") +
               unless(a == std::array<std::int64_t, 2>{0, -2}, "the array") +
               unless(plain[0] == 1 && plain[1] == 8 && plain[2] == 27, "the plain array") +
               unless(all == 4.5 && mine == me + 0.5, "the number") + unless(greatest == 2, "the greatest");
    });
}

TEST_CASE("broadcast, gather, all_gather, scatter and all_to_all take values and return vectors",
          "[collective][arguments]") {
    on_three([](auto& comm) {
        int const me = comm.rank();
        config common{me, me / 2.0};
        ddp::broadcast(comm, common, 2);
        std::vector<int> const everybody = ddp::all_gather(comm, me);
        std::vector<int> const twice = ddp::all_gather(comm, std::array<int, 2>{me, -me});
        std::vector<config> const there = ddp::gather(comm, config{me, 0.25}, 1);
        std::vector<bool> const flags = ddp::all_gather(comm, me == 1);
        std::vector<double> const parts = me == 1 ? std::vector<double>{0.5, 1.5, 2.5} : std::vector<double>{};
        double const part = ddp::scatter(comm, parts, 1);
        std::vector<int> const swapped = ddp::all_to_all(comm, std::array<int, 3>{10 * me, 10 * me + 1, 10 * me + 2});
        std::optional<int> const total = ddp::reduce(comm, me + 1, 2);
        std::size_t const at_root = me == 1 ? 3 : 0;
        return unless(common == config{2, 1.0}, "the config") + unless(everybody == std::vector{0, 1, 2}, "everybody") +
               unless(twice == std::vector{0, 0, 1, -1, 2, -2}, "twice") +
               unless(there.size() == at_root && (at_root == 0 || there[2] == config{2, 0.25}), "gather") +
               unless(flags == std::vector<bool>{false, true, false}, "flags") + unless(part == me + 0.5, "part") +
               unless(swapped == std::vector{me, 10 + me, 20 + me}, "all_to_all") +
               unless(total == (me == 2 ? std::optional(6) : std::nullopt), "reduce");
    });
}

TEST_CASE("a string is an array of characters, and keeps its size", "[collective][arguments]") {
    on_three([](auto& comm) {
        std::string text = comm.rank() == 1 ? "three ranks" : "";
        std::size_t size = text.size();
        ddp::broadcast(comm, size, 1);
        text.resize(size);
        ddp::broadcast(comm, text, 1);
        std::vector<char> const first = ddp::gather(comm, std::string_view(text).substr(0, 2));
        return unless(text == "three ranks", "the string") +
               unless(comm.rank() != 0 || std::string(first.begin(), first.end()) == "ththth", "the gathered text");
    });
}

TEST_CASE("messages and requests take values in place", "[collective][arguments]") {
    on_three([](auto& comm) {
        int const me = comm.rank(), right = (me + 1) % 3, left = (me + 2) % 3;
        config got{};
        ddp::send_receive(comm, config{me, 1.5}, right, got, left);
        double number = me;
        std::uint32_t least = static_cast<std::uint32_t>(me + 7);
        ddp::request sum = ddp::start_allreduce(comm, number);
        ddp::request minimum = ddp::start_reduce(comm, least, 0, ddp::minimum{});
        ddp::request nothing;
        nothing.wait();
        sum.wait();
        sum.wait();
        minimum.wait();
        return unless(got == config{left, 1.5}, "the message") + unless(number == 3, "the sum") +
               unless(least == static_cast<std::uint32_t>(7 + me), "the least") +
               unless(nothing.test() && sum.test(), "test");
    });
}

TEST_CASE("one rank keeps what it has", "[collective][arguments]") {
    ddp::test::run_ranks(1, [](auto& comm) {
        std::vector<float> v{1, 2};
        ddp::allreduce(comm, v, ddp::product{});
        ddp::reduce(comm, v);
        std::vector<float> in(2);
        ddp::send_receive(comm, v, 0, in, 0);
        ddp::all_to_all(comm, std::span<float const>(in), std::vector<std::size_t>{2}, v, std::vector<std::size_t>{2});
        if (v != std::vector<float>{1, 2} || ddp::all_gather(comm, 5) != std::vector{5} ||
            ddp::scatter(comm, std::vector{9}) != 9)
            throw ddp::usage_error("one rank is not enough");
    });
}

TEST_CASE("memory of the wrong size is refused with advice", "[collective][arguments]") {
    auto const error = [](auto call) { return ddp::test::errors_of_ranks(1, call)[0]; };
    auto const contains = [](std::string const& text, std::string const& part) {
        return text.find(part) != std::string::npos;
    };
    using counts = std::vector<std::size_t>;
    std::vector<int> two(2), three(3), room(3);
    CHECK(contains(error([&](auto& comm) { ddp::scatter(comm, two, room); }),
                   "scatter: on the root `all` needs size() times as many values as `mine`"));
    CHECK(contains(error([&](auto& comm) { ddp::gather(comm, two, room); }),
                   "gather: on the root `all` needs size() times as many values as `mine`"));
    CHECK(
        contains(error([&](auto& comm) { ddp::all_gather(comm, two, room); }),
                 "all_gather: `all` needs size() times as many values as `mine`; where ranks bring different numbers, "
                 "pass the counts"));
    CHECK(contains(error([&](auto& comm) { ddp::all_gather(comm, two, counts{2, 0}, room); }),
                   "all_gather: `counts` needs one number per rank"));
    CHECK(contains(error([&](auto& comm) { ddp::all_gather(comm, two, counts{3}, room); }),
                   "all_gather: `mine` needs as many values as `counts` says for this rank"));
    CHECK(contains(error([&](auto& comm) { ddp::all_gather(comm, two, counts{2}, std::span(room).first(1)); }),
                   "all_gather: `all` needs as many values as `counts` adds up to"));
    CHECK(contains(error([&](auto& comm) { ddp::scatter(comm, two, two, 1); }),
                   "scatter: root 1 is not a rank: they are numbered from 0 to 0"));
    CHECK(contains(error([&](auto& comm) { ddp::all_to_all(comm, two, room); }),
                   "all_to_all: `out` and `in` need equally many values, a multiple of size()"));
    CHECK(contains(error([&](auto& comm) { ddp::all_to_all(comm, two, two); }),
                   "all_to_all: `out` and `in` may not overlap"));
    CHECK(contains(error([&](auto& comm) { ddp::all_to_all(comm, two, counts{2}, two, counts{2}); }),
                   "all_to_all: `out` and `in` may not overlap"));
    for (auto const& [out, in] : {std::pair(counts{2, 0}, counts{3}), std::pair(counts{2}, counts{3, 0})})
        CHECK(contains(error([&, &to = out, &from = in](auto& comm) { ddp::all_to_all(comm, two, to, room, from); }),
                       "all_to_all: `out_counts` and `in_counts` need one number per rank"));
    CHECK(contains(error([&](auto& comm) { ddp::all_to_all(comm, two, counts{2}, room, counts{2}); }),
                   "their counts add up to"));
    CHECK(contains(error([&](auto& comm) { ddp::all_to_all(comm, two, counts{2}, room, counts{3}); }),
                   "from itself what it sends to itself"));
    CHECK(contains(error([&](auto& comm) { ddp::send(comm, two, 0); }),
                   "send, receive: the peer must be another rank of these 1, and rank 0 passes 0"));
    CHECK(contains(error([&](auto& comm) { ddp::receive(comm, two, 1); }), "the peer must be another rank"));
    CHECK(contains(error([&](auto& comm) { ddp::send_receive(comm, two, 0, room, 1); }),
                   "the peer must be another rank"));
    CHECK(contains(error([&](auto& comm) { ddp::send_receive(comm, two, 0, room, 0); }), "both need the same size"));
}
