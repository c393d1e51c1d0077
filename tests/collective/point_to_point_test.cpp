/// \file
/// Messages between two ranks: order, tags, collectives beside them, and what goes wrong.
#include <ddp/collective/point_to_point.hpp>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/ranks.hpp"

using namespace std::chrono_literals;

namespace {

void check_all_name(std::vector<std::string> const& errors, std::string const& code,
                    std::vector<std::string> const& parts) {
    for (std::string const& text : errors) {
        CAPTURE(text);
        CHECK(text.find(code) == 0);
        for (std::string const& part : parts) CHECK(text.find(part) != std::string::npos);
    }
}
ddp::timing quick() {
    ddp::timing times = ddp::timing::for_tests();
    times.collective = 500ms;
    return times;
}

}  // namespace

TEST_CASE("messages arrive in order, tags are independent, collectives may be between", "[collective][message]") {
    int const ranks = GENERATE(2, 3, 5);
    CAPTURE(ranks);
    auto const wrong = ddp::test::run_ranks(ranks, [](auto& comm) {
        int const last = comm.size() - 1;
        int bad = 0;
        if (comm.rank() == 0) {
            std::vector<ddp::request> out;
            std::vector<int> numbers(20);
            for (int i = 0; i < 20; ++i) {
                numbers[static_cast<std::size_t>(i)] = i;
                out.push_back(ddp::start_send(comm, numbers[static_cast<std::size_t>(i)], last,
                                              static_cast<std::uint32_t>(i % 2)));
            }
            ddp::barrier(comm);
            ddp::wait_all(out);
        } else {
            ddp::barrier(comm);
        }
        if (comm.rank() == last)
            for (int const tag : {1, 0})
                for (int i = tag; i < 20; i += 2) {
                    int got = -1;
                    ddp::receive(comm, got, 0, static_cast<std::uint32_t>(tag));
                    bad += got != i;
                }
        int const sum = ddp::allreduce(comm, bad);
        return sum;
    });
    CHECK(wrong == std::vector<int>(static_cast<std::size_t>(ranks), 0));
}

TEST_CASE("two ranks that both send large messages first are helped by send_receive", "[collective][message]") {
    auto const sizes = ddp::test::run_ranks(2, [](auto& comm) {
        std::vector<double> out(200'000, comm.rank()), in(200'000, -1);
        ddp::send_receive(comm, out, 1 - comm.rank(), in, 1 - comm.rank());
        return in.front() + in.back();
    });
    CHECK(sizes == std::vector<double>{2, 0});
}

TEST_CASE("messages in two groups of the same ranks do not meet", "[collective][message]") {
    auto const got = ddp::test::run_ranks(2, [](auto& all) {
        auto const other = all.split(0);
        int const peer = 1 - all.rank();
        int first = 1, second = 2, a = 0, b = 0;
        std::vector<ddp::request> under_way;
        under_way.push_back(ddp::start_send(other, first, peer));
        under_way.push_back(ddp::start_send(all, second, peer));
        under_way.push_back(ddp::start_receive(all, a, peer));
        under_way.push_back(ddp::start_receive(other, b, peer));
        ddp::wait_all(under_way);
        return 10 * a + b;
    });
    CHECK(got == std::vector<int>{21, 21});
}

TEST_CASE("a peer is a rank of the group", "[collective][message]") {
    auto const got = ddp::test::run_ranks(4, [](auto& all) {
        auto const pair = all.split(all.rank() % 2, -all.rank());  // {2, 0} and {3, 1}
        int in = -1;
        ddp::send_receive(pair, all.rank(), 1 - pair.rank(), in, 1 - pair.rank());
        return in;
    });
    CHECK(got == std::vector<int>{2, 3, 0, 1});
}

TEST_CASE("a message of another length or type is an error that says both", "[collective][message]") {
    auto const lengths = ddp::test::errors_of_ranks(3, [](auto& comm) {
        std::vector<float> five(5), ten(10);
        if (comm.rank() == 0) ddp::send(comm, ten, 2, 7);
        if (comm.rank() == 2) ddp::receive(comm, five, 0, 7);
        ddp::barrier(comm);
    });
    check_all_name(lengths, "DDP-E205 mismatch",
                   {"rank 2 is in receive of 20 bytes from rank 0 with tag 7, which sent 40 bytes"});
    auto const types = ddp::test::errors_of_ranks(3, [](auto& comm) {
        if (comm.rank() == 0) ddp::send(comm, 1.0f, 2, 7);
        int in = 0;
        if (comm.rank() == 2) ddp::receive(comm, in, 0, 7);
        ddp::barrier(comm);
    });
    check_all_name(types, "DDP-E205 mismatch",
                   {"rank 2 is in receive of 4 bytes from rank 0 with tag 7, which sent values of another type"});
}

TEST_CASE("a message that nobody sends is an error at the deadline that names the receive", "[collective][message]") {
    auto const errors = ddp::test::errors_of_ranks(
        3,
        [](auto& comm) {
            double in = 0;
            ddp::barrier(comm);
            if (comm.rank() == 0) ddp::receive(comm, in, 2, 3);
            if (comm.rank() != 0) std::this_thread::sleep_for(1200ms);
            ddp::barrier(comm);
        },
        quick());
    check_all_name(errors, "DDP-E204 deadline",
                   {"rank 2 did not take part in receive of 8 bytes from rank 2 with tag 3 in time: rank 0 waited",
                    "the last operation it entered is barrier #1"});
}

TEST_CASE("a peer that leaves is an error that names the receive", "[collective][message]") {
    auto const errors = ddp::test::errors_of_ranks(2, [](auto& comm) {
        double in = 0;
        if (comm.rank() == 0) ddp::receive(comm, in, 1, 3);
    });
    CHECK(errors[0].find("DDP-E202") == 0);
    CHECK(errors[0].find("rank 1 exited cleanly while rank 0 was in receive of 8 bytes from rank 1") !=
          std::string::npos);
}

TEST_CASE("a send in a group names the group's ranks", "[collective][message]") {
    auto const errors = ddp::test::errors_of_ranks(4, [](auto& all) {
        auto const half = all.split(all.rank() / 2);
        std::vector<float> two(2), three(3);
        if (all.rank() == 2) ddp::send(half, two, 1);
        if (all.rank() == 3) ddp::receive(half, three, 0);
        ddp::barrier(all);
    });
    check_all_name(errors, "DDP-E205 mismatch",
                   {"rank 3 is in receive of 12 bytes from rank 2 with tag 0 in group {2, 3}, which sent 8 bytes"});
}
