/// \file
/// Ranks that do not call the same thing: an error on every rank that names both things.
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"

namespace {

using ddp::any_allreduce, ddp::automatic_allreduce, ddp::network_cost;
using communicator = ddp::communicator<>;
using call = std::function<void(communicator&)>;

/// What the ranks throw when rank 1 does `odd` and the others `usual`, at the latest in the barrier that follows.
std::vector<std::string> errors(int ranks, call const& usual, call const& odd) {
    ddp::timing times = ddp::timing::for_tests();
    times.collective = std::chrono::milliseconds(1000);
    return ddp::test::errors_of_ranks(
        ranks,
        [&](communicator& comm) {
            comm.rank() == 1 ? odd(comm) : usual(comm);
            ddp::barrier(comm);
        },
        times);
}
void check_all_name(std::vector<std::string> const& errors, std::vector<std::string> const& parts) {
    for (std::string const& text : errors) {
        CAPTURE(text);
        CHECK(text.find("DDP-E205 mismatch") == 0);
        for (std::string const& part : parts) CHECK(text.find(part) != std::string::npos);
    }
}

call allreduce(std::size_t count, char const* algorithm) {
    return [=](communicator& comm) {
        std::vector<float> data(count);
        ddp::allreduce(comm, std::span<float>(data), ddp::any_allreduce::parse(algorithm));
    };
}
call broadcast(std::size_t count, int root) {
    return [=](communicator& comm) {
        std::vector<double> data(count);
        ddp::broadcast(comm, std::span<double>(data), root);
    };
}

}  // namespace

TEST_CASE("other counts on one rank are refused by every algorithm, on every rank", "[collective][mismatch]") {
    int const ranks = GENERATE(2, 3);
    for (char const* name : {"auto", "direct", "recursive_doubling", "halving_doubling", "ring", "naive"})
        for (std::size_t const count : {0u, 999u}) {
            CAPTURE(ranks, name, count);
            auto const all = errors(ranks, allreduce(1000, name), allreduce(count, name));
            check_all_name(all, {"allreduce #1 of 1000 float", "allreduce #1 of " + std::to_string(count) + " float"});
        }
}

TEST_CASE("ranks with different algorithms are refused, though the bits would be the same", "[collective][mismatch]") {
    check_all_name(errors(3, allreduce(64, "direct"), allreduce(64, "naive")), {"(direct)", "(naive)"});
}

TEST_CASE("ranks whose constants of the network lead to different choices are refused, with both choices",
          "[collective][mismatch]") {
    // For 4 kB among 3 ranks. Without a `cost` it is that of memory here.
    automatic_allreduce const usual, odd{.cost = network_cost{.message = 30, .post = 1}};
    network_cost near = network_cost::in_memory();
    REQUIRE(automatic_allreduce{.cost = near}.choice(4000, 3) == std::string("recursive_doubling"));
    REQUIRE(odd.choice(4000, 3) == std::string("direct"));
    auto const by = [](auto const& algorithm, int what) -> call {
        return [=](communicator& comm) {
            std::vector<float> data(1000);
            if (what == 0) ddp::allreduce(comm, data, algorithm);
            if (what == 1) ddp::allreduce(comm, data, ddp::minimum{}, any_allreduce(algorithm));
            if (what == 2) ddp::reduce_scatter(comm, data, algorithm);
            if (what == 3) ddp::start_allreduce(comm, data, algorithm).wait();
        };
    };
    char const* const names[] = {"allreduce", "minimum allreduce", "reduce_scatter", "allreduce"};
    for (int const what : {0, 1, 2, 3}) {
        CAPTURE(what);
        std::string const begin = names[what] + std::string(" #1 of 1000 float (auto: ");
        check_all_name(errors(3, by(usual, what), by(odd, what)), {begin + "recursive_doubling)", begin + "direct)"});
        // Other constants with the same choice do no harm.
        near.message = 1.01;
        automatic_allreduce const alike{.cost = near};
        REQUIRE(errors(3, by(usual, what), by(alike, what)) == std::vector<std::string>(3));
    }
}

TEST_CASE("ranks whose choices differ for slices only are refused with these", "[collective][mismatch]") {
    constexpr int ranks = 4;
    automatic_allreduce const usual{.cost = network_cost{}};
    automatic_allreduce odd;
    std::size_t bytes = 0;
    std::string mine, other;
    for (std::size_t most = 4096; most <= std::size_t{1} << 20 && bytes == 0; most *= 2)
        for (double message = 1; message < 1000 && bytes == 0; message *= 1.5) {
            odd.cost = network_cost{.message = message};
            mine = usual.choice_for_slices(most, ranks);
            other = odd.choice_for_slices(most, ranks);
            if (usual.choice(most, ranks) == std::string(odd.choice(most, ranks)) && mine != other) bytes = most;
        }
    REQUIRE(bytes != 0);
    auto const by = [bytes](auto const& algorithm) -> call {
        return [=](communicator& comm) {
            std::vector<float> data(bytes / sizeof(float));
            ddp::reduce_scatter(comm, data, algorithm);
        };
    };
    std::string const begin = "reduce_scatter #1 of " + std::to_string(bytes / sizeof(float)) + " float (auto: ";
    check_all_name(errors(ranks, by(usual), by(odd)), {begin + mine + ")", begin + other + ")"});
    check_all_name(errors(ranks, by(any_allreduce(usual)), by(any_allreduce(odd))),
                   {begin + mine + ")", begin + other + ")"});
}

TEST_CASE("ranks with different roots are refused", "[collective][mismatch]") {
    int const ranks = GENERATE(2, 3, 4);
    CAPTURE(ranks);
    check_all_name(errors(ranks, broadcast(10, 0), broadcast(10, 1)),
                   {"broadcast #1 of 10 double with root 0", "broadcast #1 of 10 double with root 1"});
}

TEST_CASE("ranks that wait in different operations are told long before the deadline", "[collective][mismatch]") {
    ddp::timing times = ddp::timing::for_tests();
    times.collective = times.straggler = std::chrono::minutes(5);  // looking for late ranks would find it too
    auto const begun = std::chrono::steady_clock::now();
    std::string const how = GENERATE("another root", "left out");
    auto const all = ddp::test::errors_of_ranks(
        3,
        [&](communicator& comm) {
            bool const odd = comm.rank() == 1;
            if (how == "another root") broadcast(10, odd ? 1 : 0)(comm);
            if (how == "left out" && !odd) allreduce(8, "auto")(comm);
            ddp::barrier(comm);
        },
        times);
    if (how == "another root")
        check_all_name(all, {"broadcast #1 of 10 double with root 0", "broadcast #1 of 10 double with root 1"});
    else
        check_all_name(all, {"allreduce #1 of 8 float", "barrier #1"});
    CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(30));
}

TEST_CASE("ranks in different operations are refused", "[collective][mismatch]") {
    call const all_gather = [](communicator& comm) {
        std::vector<float> all(static_cast<std::size_t>(comm.size()) * 8);
        ddp::all_gather(comm, std::vector<float>(8), std::span<float>(all));
    };
    call const barrier = [](communicator& comm) { ddp::barrier(comm); };
    check_all_name(errors(3, all_gather, barrier), {"all_gather #1 of 8 float", "barrier #1"});
    check_all_name(errors(3, allreduce(8, "auto"), all_gather),
                   {"allreduce #1 of 8 float", "all_gather #1 of 8 float"});
    check_all_name(errors(3, broadcast(8, 0), allreduce(8, "ring")),
                   {"broadcast #1 of 8 double", "allreduce #1 of 8 float"});
}

TEST_CASE("ranks with different slices are refused", "[collective][mismatch]") {
    auto const reduce_scatter = [](std::vector<std::size_t> const& cuts) {
        return [=](communicator& comm) {
            std::vector<float> data(30);
            ddp::reduce_scatter(comm, std::span<float>(data), std::span<std::size_t const>(cuts));
        };
    };
    auto const all = errors(3, reduce_scatter({0, 10, 20, 30}), reduce_scatter({0, 0, 20, 30}));
    for (std::string const& text : all) {
        CAPTURE(text);
        CHECK(text.find("DDP-E205 mismatch") == 0);
        CHECK(text.find("reduce_scatter #1 of 30 float") != std::string::npos);
    }
}

TEST_CASE("gathers of different counts are refused", "[collective][mismatch]") {
    auto const all_gather = [](std::vector<std::size_t> const& counts) {
        return [=](communicator& comm) {
            std::vector<float> all(counts[0] + counts[1] + counts[2]);
            std::vector<float> const mine(counts[static_cast<std::size_t>(comm.rank())]);
            ddp::all_gather(comm, mine, counts, std::span<float>(all));
        };
    };
    check_all_name(errors(3, all_gather({1, 2, 3}), all_gather({1, 2, 4})),
                   {"all_gather #1 of 6 float", "all_gather #1 of 7 float"});
}

TEST_CASE("a gather that does not fit is refused, though a rank that has sent may be in its next call already",
          "[collective][mismatch]") {
    auto const gather = [](std::size_t m) {
        return [=](communicator& comm) {
            std::vector<std::int32_t> all(static_cast<std::size_t>(comm.size()) * m);
            ddp::gather(comm, std::vector<std::int32_t>(m), std::span<std::int32_t>(all));
        };
    };
    check_all_name(errors(3, gather(4), gather(5)), {"rank 1"});
    check_all_name(errors(2, [](communicator& comm) { ddp::barrier(comm); }, gather(5)), {"rank 1"});
}

namespace {

template <class Op = ddp::sum, class E = float>
call reduce(std::size_t count, int root) {
    return [=](communicator& comm) {
        std::vector<E> data(count);
        ddp::reduce(comm, data, root, Op{});
    };
}

}  // namespace

TEST_CASE("ranks with different operations, types and roots are refused, and both are named",
          "[collective][mismatch]") {
    int const ranks = GENERATE(2, 3);
    CAPTURE(ranks);
    call const least = [](communicator& comm) {
        std::vector<float> data(1000);
        ddp::allreduce(comm, data, ddp::minimum{}, ddp::any_allreduce::parse("direct"));
    };
    call const integers = [](communicator& comm) {
        std::vector<std::int32_t> data(1000);
        ddp::allreduce(comm, data, ddp::any_allreduce::parse("direct"));
    };
    check_all_name(errors(ranks, allreduce(1000, "direct"), least),
                   {"in allreduce #1 of 1000 float (direct)", "minimum allreduce #1 of 1000 float (direct)"});
    check_all_name(errors(ranks, allreduce(1000, "direct"), integers),
                   {"allreduce #1 of 1000 float", "allreduce #1 of 1000 int32"});
}

TEST_CASE("reductions to other roots, by other operations, of other types and counts are refused",
          "[collective][mismatch]") {
    check_all_name(errors(2, reduce(10, 0), reduce(10, 1)),
                   {"reduce #1 of 10 float with root 0", "reduce #1 of 10 float with root 1"});
    check_all_name(errors(2, reduce(10, 0), reduce<ddp::maximum>(10, 0)),
                   {"in reduce #1 of 10 float", "maximum reduce #1 of 10 float with root 0"});
    check_all_name(errors(2, reduce<ddp::product>(10, 0), reduce<ddp::product, double>(10, 0)),
                   {"product reduce #1 of 10 float", "product reduce #1 of 10 double"});
    check_all_name(errors(2, reduce(100'000, 0), reduce(99'999, 0)),
                   {"reduce #1 of 100000 float", "reduce #1 of 99999 float"});
    // Ranks that have sent may be in their next call already, and disagree there: the odd one is named all the same.
    check_all_name(errors(3, reduce(10, 0), reduce(10, 1)), {"rank 1"});
    check_all_name(errors(3, reduce(10, 0), reduce<ddp::maximum>(10, 0)), {"rank 1"});
    check_all_name(errors(3, reduce(100'000, 0), reduce(99'999, 0)), {"rank 1"});
}

TEST_CASE("scatters and exchanges that do not fit are refused", "[collective][mismatch]") {
    auto const scatter = [](std::size_t m, int root) {
        return [=](communicator& comm) {
            std::vector<double> const all(m * static_cast<std::size_t>(comm.size()));
            std::vector<double> mine(m);
            ddp::scatter(comm, all, mine, root);
        };
    };
    check_all_name(errors(3, scatter(4, 0), scatter(5, 0)),
                   {"scatter #1 of 4 double with root 0", "scatter #1 of 5 double with root 0"});
    check_all_name(errors(3, scatter(4, 0), scatter(4, 1)), {"with root 0", "with root 1"});
    auto const exchange = [](std::size_t m) {
        return [=](communicator& comm) {
            std::vector<float> const out(m * static_cast<std::size_t>(comm.size()));
            (void)ddp::all_to_all(comm, out);
        };
    };
    check_all_name(errors(3, exchange(4), exchange(0)), {"all_to_all #1 of 4 float", "all_to_all #1 of 0 float"});
}

TEST_CASE("differing counts that two ranks do not agree about are refused, and the two are named",
          "[collective][mismatch]") {
    auto const all = ddp::test::errors_of_ranks(3, [](communicator& comm) {
        using counts = std::vector<std::size_t>;
        counts const out_counts = comm.rank() == 1 ? counts{1, 0, 2} : counts{1, 1, 1};
        counts const in_counts = comm.rank() == 1 ? counts{1, 0, 1} : counts{1, comm.rank() == 0 ? 1u : 0u, 1};
        std::vector<float> const out(3);
        std::vector<float> in(in_counts[0] + in_counts[1] + in_counts[2]);
        ddp::all_to_all(comm, out, out_counts, in, in_counts);
        ddp::barrier(comm);
    });
    check_all_name(all,
                   {"rank 2 is in all_to_all #1 (differing counts) and expects 0 bytes from rank 1, which sent 8"});
}

TEST_CASE("a mismatch among many under way names the operation in which it was found", "[collective][mismatch]") {
    auto const four = [](bool odd) {
        return [=](communicator& comm) {
            std::vector<float> a(10), b(20), c(30), d(40);
            std::vector<ddp::request> all;
            all.push_back(ddp::start_allreduce(comm, a));
            all.push_back(ddp::start_allreduce(comm, b));
            all.push_back(odd ? ddp::start_all_gather(comm, a, c) : ddp::start_allreduce(comm, c));
            for (ddp::request& r : all) r.wait();  // before the next one: what differs is the last under way
            all.push_back(ddp::start_allreduce(comm, d));
        };
    };
    check_all_name(errors(3, four(false), four(true)),
                   {"allreduce #3 of 30 float (auto: recursive_doubling)", "all_gather #3 of 10 float"});
    // Where others are under way behind it, the first of them that meets another says so, and that it may not be the first.
    auto const three = [](bool odd) {
        return [=](communicator& comm) {
            std::vector<float> a(10), b(20), c(30);
            std::vector<ddp::request> all;
            all.push_back(ddp::start_allreduce(comm, a));
            all.push_back(odd ? ddp::start_broadcast(comm, b) : ddp::start_allreduce(comm, b));
            all.push_back(ddp::start_allreduce(comm, c));
            ddp::wait_all(all);
        };
    };
    int const ranks = GENERATE(2, 3);
    CAPTURE(ranks);
    for (std::string const& text : errors(ranks, three(false), three(true))) {
        CAPTURE(text);
        CHECK(text.find("DDP-E205 mismatch") == 0);
        bool const at_once = text.find("allreduce #2 of 20 float") != std::string::npos &&
                             text.find("broadcast #2 of 20 float with root 0") != std::string::npos;
        bool const later = text.find("both in allreduce #3 of 30 float") != std::string::npos &&
                           text.find("or an earlier operation differed") != std::string::npos;
        // The other rank's record may still tell of its first operation; then only the message itself can be described.
        bool const by_message =
            text.find("rank 1 is in broadcast #2 of 20 float with root 0") != std::string::npos ||
            text.find("is in allreduce #2 of 20 float (auto: recursive_doubling)") != std::string::npos;
        CHECK((at_once || later || by_message));
    }
}

TEST_CASE("a rank that is in a later call by now says what it entered where the others differ",
          "[collective][mismatch]") {
    auto const late = [](communicator& comm) {
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        std::vector<float> data(10);
        ddp::allreduce(comm, data);
    };
    auto const ahead = [](communicator& comm) {
        std::vector<float> data(10);
        ddp::broadcast(comm, data, comm.rank());  // ends here as soon as it has sent
        ddp::barrier(comm);
    };
    ddp::timing times = ddp::timing::for_tests();
    times.collective = std::chrono::milliseconds(1000);
    auto const said = ddp::test::errors_over(  // over TCP, where a small message is sent before the peer asks for it
        true, 2, [&](communicator& comm) { comm.rank() == 1 ? ahead(comm) : late(comm); }, times);
    check_all_name(said, {"rank 0 is in allreduce #1 of 10 float", "rank 1 in broadcast #1 of 10 float with root 1"});
}
