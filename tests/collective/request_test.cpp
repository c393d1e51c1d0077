/// \file
/// Requests: what moves while nobody waits, what their destructors do, and what becomes of them when the job fails.
#include <ddp/collective/request.hpp>

#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/counting_transport.hpp"
#include "support/ranks.hpp"
#include "support/sanitizers.hpp"

using namespace std::chrono_literals;

namespace {

using ddp::request;

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}
ddp::timing quick() {
    ddp::timing times = ddp::timing::for_tests();
    times.collective = 500ms;
    return times;
}

/// Whether it says true within a second.
bool ends(request& r) {
    for (int i = 0; i < 1000; ++i) {
        if (r.test()) return true;
        std::this_thread::sleep_for(1ms);
    }
    return false;
}

}  // namespace

TEST_CASE("a request goes on while its program computes", "[collective][request]") {
    auto const ended = ddp::test::run_ranks(4, [](auto& comm) {
        std::vector<double> data(100'000, 1.0);
        request sum = ddp::start_allreduce(comm, data);
        bool const done = ends(sum);
        return done && data.back() == 4.0;
    });
    CHECK(ended == std::vector<bool>(4, true));
}

TEST_CASE("a request is not done before the last rank has started it", "[collective][request]") {
    std::atomic<bool> late{false};
    auto const right = ddp::test::run_ranks(3, [&](auto& comm) {
        if (comm.rank() == 2) {
            std::this_thread::sleep_for(50ms);
            late.store(true);
        }
        request all = ddp::start_barrier(comm);
        while (!all.test()) std::this_thread::yield();
        return late.load();
    });
    CHECK(right == std::vector<bool>(3, true));
}

TEST_CASE("hundreds under way, waited for in another order on every rank", "[collective][request]") {
    auto const wrong = ddp::test::run_ranks(3, [](auto& comm) {
        constexpr std::size_t count = 300;
        std::vector<std::vector<float>> data;
        for (std::size_t i = 0; i < count; ++i)
            data.emplace_back(i % 7 * 50, static_cast<float>(comm.rank()) + static_cast<float>(i));
        std::vector<request> all;
        for (auto& d : data) all.push_back(ddp::start_allreduce(comm, d));
        std::size_t const step = std::vector<std::size_t>{1, 7, 299}[static_cast<std::size_t>(comm.rank())];
        std::size_t bad = 0;
        for (std::size_t i = 0, at = 0; i < count; ++i, at = (at + step) % count) {
            all[at].wait();
            for (float const x : data[at]) bad += x != 3 + 3 * static_cast<float>(at) ? 1u : 0u;
        }
        return bad;
    });
    CHECK(wrong == std::vector<std::size_t>(3, 0));
}

TEST_CASE("a request that nobody waits for is waited for by its destructor", "[collective][request]") {
    auto const sums = ddp::test::run_ranks(3, [](auto& comm) {
        std::vector<int> data(1000, comm.rank());
        if (comm.rank() == 1) std::this_thread::sleep_for(20ms);
        {
            request const dropped = ddp::start_allreduce(comm, data);
        }
        request other = ddp::start_barrier(comm);
        other = ddp::start_allreduce(comm, data);  // what it held before is waited for
        other.wait();
        return data[999];
    });
    CHECK(sums == std::vector<int>(3, 9));
}

TEST_CASE("a request may outlive its communicator", "[collective][request]") {
    auto const sums = ddp::test::run_ranks(3, [](auto& all) {
        std::vector<int> data(1000, 1);
        request under_way;
        {
            auto const half = all.split(all.rank() % 2);
            under_way = ddp::start_allreduce(half, data);
        }
        ddp::barrier(all);
        under_way.wait();
        return data[5];
    });
    CHECK(sums == std::vector<int>{2, 1, 2});
}

TEST_CASE("every request of a job that fails throws the verdict of all ranks", "[collective][request]") {
    for (bool const dies : {false, true}) {
        CAPTURE(dies);
        auto const errors = ddp::test::errors_of_ranks(
            3,
            [&](auto& comm) {
                if (comm.rank() == 1) {
                    if (dies) return;
                    throw std::runtime_error("out of disk");
                }
                double a = 1, b = 2;
                request first = ddp::start_allreduce(comm, a), second = ddp::start_allreduce(comm, b);
                std::string text;
                try {
                    first.wait();
                } catch (ddp::comm_error const& e) {
                    text = e.what();
                }
                first.wait();  // has thrown, and holds nothing any more
                try {
                    second.wait();
                    text += "nothing";
                } catch (ddp::comm_error const& e) {
                    if (text != e.what()) text += e.what();
                }
                throw ddp::usage_error(text);
            },
            quick());
        for (int const r : {0, 2}) {
            std::string const& text = errors[static_cast<std::size_t>(r)];
            CAPTURE(text);
            CHECK(contains(text, dies ? "rank 1 exited cleanly" : "rank 1 failed in its own code"));
            CHECK(!contains(text, "nothing"));
        }
        CHECK(errors[1] == (dies ? "" : "out of disk"));
    }
}

TEST_CASE("a request that ended before the job failed has its result", "[collective][request]") {
    auto const errors = ddp::test::errors_of_ranks(
        2,
        [](auto& comm) {
            double a = 1;
            request first = ddp::start_allreduce(comm, a);
            if (!ends(first) || a != 2) throw std::logic_error("never ended");
            if (comm.rank() == 0) comm.fail("the end");
            try {
                ddp::barrier(comm);
            } catch (ddp::comm_error const&) {
            }
            if (!first.test()) throw std::logic_error("not done any more");
        },
        quick());
    CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("a destructor drops the error, and the next call throws it", "[collective][request]") {
    auto const errors = ddp::test::errors_of_ranks(
        2,
        [](auto& comm) {
            if (comm.rank() == 1) throw std::runtime_error("out of disk");
            double a = 1;
            {
                request const dropped = ddp::start_allreduce(comm, a);
            }
            ddp::barrier(comm);
        },
        quick());
    CHECK(contains(errors[0], "rank 1 failed in its own code"));
}

TEST_CASE("an exception that leaves a request under way ends the job soon, not at the deadline",
          "[collective][request]") {
    ddp::timing times = ddp::timing::for_tests();
    times.collective = 60s;
    times.shutdown = 100ms;
    auto const begin = std::chrono::steady_clock::now();
    auto const errors = ddp::test::errors_of_ranks(
        2,
        [](auto& comm) {
            double a = 1;
            if (comm.rank() == 0) {
                request const received = ddp::start_receive(comm, a, 1);
                throw std::runtime_error("out of disk");
            }
            ddp::barrier(comm);
        },
        times);
    CHECK(std::chrono::steady_clock::now() - begin < 30s);
    CHECK(errors[0] == "out of disk");
    CHECK(contains(errors[1], "rank 0 failed in its own code"));
    CHECK(contains(errors[1], "left a request under way by an exception"));
}

TEST_CASE("a hook that drops a request under way ends the job", "[collective][request]") {
    // What the request waits with stays behind: LeakSanitizer would report it.
    if (ddp::test::sanitizers_leave_out("a hook that drops a request")) return;
    struct of_a_hook {
        static ddp::task<> drop(std::optional<ddp::request>* what) {
            what->reset();
            co_return;
        }
    };
    auto const errors = ddp::test::errors_of_ranks(
        2,
        [](auto& comm) {
            double a = 1;
            if (comm.rank() == 0) {
                std::optional<ddp::request> received(ddp::start_receive(comm, a, 1));
                comm.run([&] { return of_a_hook::drop(&received); });
            }
            ddp::barrier(comm);
        },
        quick());
    for (std::string const& text : errors)
        CHECK(contains(text, "rank 0 failed in its own code: a hook has dropped a request under way"));
}

TEST_CASE("a deadline of a request names the operation and the rank that did not start it", "[collective][request]") {
    auto const errors = ddp::test::errors_of_ranks(
        2,
        [](auto& comm) {
            std::vector<float> a(10), b(20);
            if (comm.rank() == 0) {
                request first = ddp::start_allreduce(comm, a), second = ddp::start_allreduce(comm, b);
                first.wait();
            } else {
                std::this_thread::sleep_for(1500ms);
                ddp::barrier(comm);
            }
        },
        quick());
    for (std::string const& text : errors) {
        CAPTURE(text);
        CHECK(contains(text, "DDP-E204"));
        CHECK(contains(text, "rank 1 did not take part in allreduce #1 of 10 float (auto: recursive_doubling)"));
    }
}
