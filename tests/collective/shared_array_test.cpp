// allreduce where all ranks see the numbers: the canonical tree, for every operation, number and group.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/naive_allreduce.hpp>
#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/reference.hpp>
#include <ddp/collective/shared_array.hpp>
#include <ddp/sim/cluster.hpp>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/ranks.hpp"
#include "support/virtual_lanes.hpp"

using namespace ddp;
using namespace ddp::test;
using namespace std::chrono_literals;

namespace {

/// Element i of what rank r brings: sums of them round.
template <Number E>
E number(int rank, std::size_t i) {
    std::size_t const k = (i * 7919 + static_cast<std::size_t>(rank) * 104729) % 1000;
    if constexpr (std::is_floating_point_v<E>)
        return static_cast<E>(1) / static_cast<E>(k + 1);
    else
        return static_cast<E>(k % 7 + 1);
}

template <Number E, class Op>
std::string check(communicator<>& comm, std::size_t count, Op op, bool start = false) {
    shared_array<E> const mine(comm, count);
    std::vector<E> plain(count);
    for (int repeat = 0; repeat < 2; ++repeat) {
        for (std::size_t i = 0; i < count; ++i) plain[i] = mine[i] = number<E>(comm.rank() + repeat, i);
        allreduce(comm, plain, op, naive_allreduce{});
        if (start) {
            request one = start_allreduce(comm, mine, op);
            one.wait();
        } else {
            allreduce(comm, mine, op);
        }
        for (std::size_t i = 0; i < count; ++i)
            if (plain[i] != mine[i]) return "element " + std::to_string(i) + " of " + std::to_string(count);
    }
    bool const in_place = comm.size() > 1 && count > 0;
    return in_memory(comm, mine) == in_place ? "" : "the other way was taken";
}

constexpr std::size_t flags_at(std::size_t bytes) {
    constexpr std::size_t line = detail::flag_barrier::line;
    return (bytes + line - 1) / line * line;
}
/// On a line's boundary, as pages are.
std::shared_ptr<std::byte> zeroed(std::size_t bytes) {
    struct alignas(detail::flag_barrier::line) line_of {
        std::byte held[detail::flag_barrier::line];
    };
    auto const lines = std::make_shared<std::vector<line_of>>((bytes + sizeof(line_of) - 1) / sizeof(line_of));
    return {lines, lines->front().held};
}

using on_type = virtual_cluster::scheduler_type;

constexpr std::size_t handed_over = 1024;

/// Three times in virtual time, over memory of all ranks; `table` has a page, then the numbers and the flags of each.
template <Number E, class Op>
task<> in_virtual_time(on_type* on, std::vector<std::shared_ptr<std::byte>> const* table, std::size_t count,
                       failures* wrong) {
    group& world = on->world();
    std::size_t const ranks = table->size();
    auto const memory =
        std::make_shared<shared_memory>(nullptr, *table, std::vector<std::size_t>(ranks), std::as_const(world), 1);
    auto const flags = std::make_shared<detail::flag_barrier>(memory, ranks, static_cast<std::size_t>(world.rank()),
                                                              flags_at(count * sizeof(E)), handed_over);
    for (std::uint64_t repeat = 1; repeat <= 3; ++repeat) {
        auto const terms = addends<E>(values::mixed, repeat, world.size(), count);
        std::span<E> const mine(reinterpret_cast<E*>(memory->mine().get()), count);
        std::ranges::copy(terms[static_cast<std::size_t>(world.rank())], mine.begin());
        virtual_lane const over = next(*on, world);
        co_await memory_allreduce::combine<Op, virtual_transport, E>(over, flags, mine, 0ns);
        note(*wrong, Op::name, compare(std::span<E const>(mine), std::span<E const>(reference_reduce<Op>(terms))));
    }
}
template <Number E, class Op>
void check_in_virtual_time() {
    for (std::uint64_t const seed : {1u, 2u, 3u})
        for (std::size_t const ranks : {2u, 3u, 6u, 9u, 50u})
            for (std::size_t const count : {std::size_t{1}, std::size_t{1003}, std::size_t{600'001}}) {
                if (count > 10'000 && (ranks > 2 || seed > 1)) continue;  // long enough that a rank yields
                if (ranks > 48 && seed > 1) continue;                     // more than one flag holds marks for
                CAPTURE(seed, ranks, count, Op::name);
                std::vector<std::shared_ptr<std::byte>> table;
                for (std::size_t r = 0; r < ranks; ++r)
                    table.push_back(zeroed(memory_sharing::header_bytes + flags_at(count * sizeof(E)) +
                                           detail::flag_barrier::bytes(ranks, handed_over)));
                virtual_cluster cluster(static_cast<int>(ranks), {.latency = 20us, .extra_delay = 200us, .seed = seed});
                std::vector<failures> wrong(ranks);
                auto const outcome = cluster.run([&](int rank, on_type& on) {
                    return in_virtual_time<E, Op>(&on, &table, count, &wrong[static_cast<std::size_t>(rank)]);
                });
                for (auto const& r : outcome.ranks) CHECK(r.finished);
                for (failures const& each : wrong) CHECK(each == failures{});
            }
}

}  // namespace

TEST_CASE("in virtual time an array in shared memory is combined in the canonical order",
          "[collective][same_threads]") {
    check_in_virtual_time<float, sum>();
    check_in_virtual_time<double, sum>();
    check_in_virtual_time<float, product>();
    check_in_virtual_time<double, maximum>();
    check_in_virtual_time<std::int32_t, minimum>();
    check_in_virtual_time<std::uint32_t, sum>();
    check_in_virtual_time<std::int64_t, product>();
    check_in_virtual_time<std::uint64_t, maximum>();
}

TEST_CASE("an array in shared memory is combined in the canonical order", "[collective]") {
    int const ranks = GENERATE(1, 2, 3, 5, 9);
    auto const wrong = run_ranks(ranks, [](communicator<>& comm) {
        for (std::size_t const count : {0u, 1u, 1024u, 1025u, 4096u, 5000u, 16387u, 300'001u})
            if (std::string text = check<float>(comm, count, sum{}); !text.empty()) return "float: " + text;
        for (bool const start : {false, true}) {
            if (std::string text = check<double>(comm, 70'001, sum{}, start); !text.empty()) return "double: " + text;
            if (std::string text = check<std::int64_t>(comm, 9001, product{}, start); !text.empty()) return text;
            if (std::string text = check<float>(comm, 9001, minimum{}, start); !text.empty()) return text;
        }
        communicator<> half = comm.split(comm.rank() % 2, -comm.rank());
        return check<double>(half, 20'000, maximum{});
    });
    for (std::string const& one : wrong) CHECK(one == "");
}

TEST_CASE("ranks that are late, by chance and for long, and an array of every size give the sums", "[collective]") {
    int const ranks = GENERATE(2, 3, 5, 50);
    auto const wrong = run_ranks(ranks, [](communicator<>& comm) -> std::string {
        int const all = comm.size(), rounds = all > 9 ? 40 : 400;
        shared_array<std::int64_t> const tiny(comm, 1), small(comm, 256), large(comm, 2000);
        std::uint64_t draws = static_cast<std::uint64_t>(comm.rank()) + 1;
        for (int round = 0; round < rounds; ++round) {
            draws = draws * 6364136223846793005u + 1442695040888963407u;
            // Within the time for which the others look, about at its end, long after it; and all at once.
            if (draws >> 62 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draws >> 32 & 127));
            if (draws >> 59 == 8) std::this_thread::sleep_for(1ms);
            shared_array<std::int64_t> const& array = round % 3 == 0 ? tiny : round % 3 == 1 ? small : large;
            for (std::size_t i = 0; i < array.size(); ++i)
                array[i] = comm.rank() * round + static_cast<std::int64_t>(i);
            if ((round + comm.rank()) % 7 == 0)  // others call it
                start_allreduce(comm, array).wait();
            else
                allreduce(comm, array);
            for (std::size_t i = 0; i < array.size(); ++i)
                if (array[i] != all * (all - 1) / 2 * round + all * static_cast<std::int64_t>(i))
                    return "round " + std::to_string(round) + ", element " + std::to_string(i);
        }
        return "";
    });
    for (std::string const& one : wrong) CHECK(one == "");
}

TEST_CASE("ranks that do different things to an array in memory get a mismatch at once", "[collective]") {
    std::size_t const count = GENERATE(10u, 5000u);  // handed over, in place
    int const other = GENERATE(0, 1, 2);
    CAPTURE(count, other);
    auto const began = std::chrono::steady_clock::now();
    timing times = timing::for_tests();
    times.heartbeat = 700ms;  // whose marks would say so after twice that time
    times.dead = 6s;
    times.collective = 20s;
    auto const body = [&](communicator<>& comm) {
        shared_array<float> const a(comm, count);
        for (int i = 0; i < 3; ++i) allreduce(comm, a);
        if (comm.rank() != 1) return allreduce(comm, a);
        if (other == 0) return allreduce(comm, a, minimum{});
        if (other == 1) return barrier(comm);
        allreduce(comm, a.span());
    };
    auto const errors = errors_of_ranks(3, body, times);
    CHECK(std::chrono::steady_clock::now() - began < 1300ms);
    for (std::string const& one : errors) {
        CAPTURE(one);
        CHECK(one.find("DDP-E205") == 0);
        CHECK(one.find("allreduce #5 of " + std::to_string(count)) != std::string::npos);
    }
}

TEST_CASE("what the page about collectives does with a shared array", "[collective]") {
    run_ranks(2, [](communicator<>& comm) {
        ddp::shared_array<float> gradient(comm, 100'000);
        std::fill(gradient.span().begin(), gradient.span().end(), 1.0f);
        ddp::allreduce(comm, gradient);
        if (gradient[99'999] != 2) throw std::logic_error("a wrong sum");
    });
}

TEST_CASE("an array is combined over other ranks than those that made it by messages", "[collective]") {
    auto const wrong = run_ranks(4, [](communicator<>& comm) -> std::string {
        shared_array<double> const all(comm, 9000);
        communicator<> const half = comm.split(comm.rank() / 2, 0), backwards = comm.split(0, -comm.rank());
        shared_array<double> const mine(half, 9000);
        auto const expect = [&](communicator<> const& over, shared_array<double> const& array, double sum) {
            std::fill(array.span().begin(), array.span().end(), 1.0 + comm.rank());
            barrier(comm);
            allreduce(over, array);
            return array[0] == sum && array[8999] == sum && !in_memory(over, array);
        };
        if (!expect(half, all, comm.rank() < 2 ? 3 : 7)) return "fewer ranks";
        barrier(comm);
        if (!expect(backwards, all, 10)) return "other numbers";
        if (!expect(comm, mine, 10)) return "more ranks";
        return "";
    });
    for (std::string const& one : wrong) CHECK(one == "");
}

TEST_CASE("ranks that bring different arrays to one allreduce get a mismatch", "[collective]") {
    auto const errors = errors_of_ranks(2, [](communicator<>& comm) {
        shared_array<float> const a(comm, 9000), b(comm, 9000);
        allreduce(comm, comm.rank() == 0 ? a : b);
    });
    for (std::string const& one : errors) {
        CAPTURE(one);
        CHECK(one.find("DDP-E205") == 0);
    }
}

TEST_CASE("an array may go before its request has ended elsewhere, and its communicator before it", "[collective]") {
    run_ranks(3, [](communicator<>& comm) {
        auto group = std::make_unique<communicator<>>(comm.split(0, comm.rank()));
        auto mine = std::make_unique<shared_array<double>>(*group, 10'000);
        std::iota(mine->span().begin(), mine->span().end(), 0.0);
        for (int i = 0; i < 20; ++i) allreduce(*group, *mine);
        mine.reset();  // others may still be in the last barrier
        for (int i = 0; i < 50; ++i) {
            auto small = std::make_unique<shared_array<double>>(*group, 100);
            std::fill(small->span().begin(), small->span().end(), 1.0);
            if (i % 2 == 0)
                start_allreduce(*group, *small).wait();
            else
                allreduce(*group, *small);
            if ((*small)[99] != 3) throw std::logic_error("another sum");
            small.reset();  // others may still read what it has handed over
        }
        shared_array<double> const last(*group, 10'000);
        group.reset();
        if (last[9999] != 0) throw std::logic_error("not zero");
    });
}

TEST_CASE("flags hold for more rounds than a flag can count, and two arrays at once", "[collective]") {
    auto const wrong = run_ranks(2, [](communicator<>& comm) {
        shared_array<std::int64_t> const a(comm, 1), b(comm, 1);
        int others = 0;
        for (std::int64_t round = 0; round < 70'000; ++round) {
            a[0] = round + comm.rank();
            if (round % 1000 != 0) {
                allreduce(comm, a);
            } else {
                b[0] = -round;
                request first = start_allreduce(comm, a), second = start_allreduce(comm, b);
                second.wait();
                first.wait();
                others += b[0] != -2 * round;
            }
            others += a[0] != 2 * round + 1;
        }
        return others;
    });
    for (int const one : wrong) CHECK(one == 0);
}
