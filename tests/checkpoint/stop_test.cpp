// A wish to stop, from any rank and by any way, is known on all ranks after the same step.
#include <ddp/checkpoint/stop_signals.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/training.hpp"
#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

TEST_CASE("one rank's request stops all ranks after the same step, and changes no bit", "[checkpoint]") {
    for (int const ranks : {1, 2, 3, 4})
        for (auto const& [shared, tcp] :
             {std::pair(false, false), std::pair(false, true), std::pair(true, false), std::pair(true, true)}) {
            kept_recipe by{.optimizer = adam{.lr = 0.01}};
            by.options.share_memory = shared;
            CAPTURE(ranks, shared, tcp);
            struct end {
                std::uint64_t steps, digest;
                bool again;
            };
            auto const ends = ranks_over(
                tcp, ranks,
                [&](auto& comm) {
                    kept_training one(comm, by);
                    auto const rows = one.data.batch(0, 4);
                    for (;;) {
                        if (comm.rank() == comm.size() - 1 && one.trainer.completed_steps() == 3)
                            std::thread([&] { one.trainer.request_stop(); }).join();
                        step_result const result = one.trainer.step(rows);
                        if (result.stop != one.trainer.stop_agreed()) throw std::logic_error("two opinions");
                        if (result.stop) break;
                    }
                    std::uint64_t const steps = one.trainer.completed_steps(), digest = one.digest();
                    return end{steps, digest, one.trainer.step(rows).stop};
                },
                patient());
            auto const expected = run_ranks(
                ranks,
                [&](auto& comm) {
                    kept_training one(comm, by);
                    for (int i = 0; i < 4; ++i) one.trainer.step(one.data.batch(0, 4));
                    return one.digest();
                },
                patient());
            for (end const& e : ends) {
                REQUIRE(e.steps == 4);
                REQUIRE(e.digest == expected.front());
                REQUIRE(e.again);
            }
        }
}

TEST_CASE("ranks that are out of data hear of a request, or make one, and so do steps that are skipped",
          "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    int const joins = ranks > 1 ? ranks - 1 : -1;
    for (int const asks : {1 % ranks, ranks - 1}) {
        CAPTURE(ranks, tcp, asks);
        ::test::scratch_directory const scratch;
        captured_stderr said(scratch);  // of each step that it was skipped
        auto const steps = ranks_over(
            tcp, ranks,
            [&, asks = asks](auto& comm) {
                scripted_model<> net({{"a", {3}}});
                data_parallel trainer{net, sgd{.lr = 0.1}, comm, training_options{.nonfinite = nonfinite::skip}};
                std::vector<bool> told;
                while (told.size() < 5 && (told.empty() || !told.back())) {
                    if (comm.rank() == asks && told.size() == 1) trainer.request_stop();
                    if (comm.rank() == joins) {
                        if (!trainer.join()) throw std::logic_error("all are said to be out of data");
                        told.push_back(trainer.stop_agreed());
                        continue;
                    }
                    double const bad = std::numeric_limits<double>::infinity();  // each step is skipped
                    trainer.forward(numbers{{bad}});
                    trainer.backward();
                    auto const result = trainer.finish();
                    if (!result.skipped) throw std::logic_error("an infinite gradient is not seen");
                    told.push_back(result.stop);
                }
                return told;
            },
            patient());
        std::string const text = said.text();
        REQUIRE(std::count(text.begin(), text.end(), '\n') == 2);
        for (auto const& told : steps) REQUIRE(told == std::vector<bool>{false, true});
    }
}

namespace {
std::sig_atomic_t volatile interrupts = 0;
}

TEST_CASE("SIGTERM, SIGUSR1 and SIGINT set a flag while a guard lives, and are what they were afterwards",
          "[checkpoint]") {
    auto const handler_of = [](int signo) {
        struct ::sigaction now{};
        ::sigaction(signo, nullptr, &now);
        return now.sa_handler;
    };
    for (int const signo : {SIGTERM, SIGUSR1, SIGINT}) {
        using handler = void (*)(int);
        std::signal(signo, signo == SIGINT ? handler([](int) { interrupts = interrupts + 1; }) : SIG_DFL);
        auto const before = handler_of(signo);
        {
            stop_signals const one;
            REQUIRE_FALSE(one.received());
            std::raise(signo);
            REQUIRE(one.received());
            {
                stop_signals const two;  // another rank of this process
                REQUIRE(two.received());
            }
            REQUIRE(handler_of(signo) != before);
            std::raise(signo);
            REQUIRE(interrupts == 0);  // a launcher and a shell may send one Ctrl-C twice
            if (signo == SIGINT) std::this_thread::sleep_for(std::chrono::milliseconds(600));
            std::raise(signo);
        }
        REQUIRE(handler_of(signo) == before);
        stop_signals const later;
        REQUIRE_FALSE(later.received());
        std::signal(signo, SIG_IGN);  // the program's own
    }
    REQUIRE(interrupts == 1);  // the last one: the first set the flag
    REQUIRE(handler_of(SIGTERM) == SIG_IGN);
    {
        stop_signals const one;  // SIGINT is ignored, as under nohup: it stays so
        std::raise(SIGINT);
        REQUIRE_FALSE(one.received());
    }
    for (int const signo : {SIGTERM, SIGUSR1, SIGINT}) std::signal(signo, SIG_DFL);
    STATIC_REQUIRE(exit_to_be_resumed == 75);
}
