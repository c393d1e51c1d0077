// Ranks whose values or optimizer states have drifted apart: found within agreement_steps steps, and named.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <ddp/optim/adam.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

enum class harm { none, value, bit, state, momentum };

struct outcome {
    std::string text;
    std::uint64_t steps = 0;  // that were made
    int culprit = -2;
};

/// What becomes of 12 steps if some ranks do harm to one of their elements after the third.
std::vector<outcome> train(int ranks, harm what, std::vector<int> const& culprits, training_options const& options,
                           bool tcp = false) {
    auto const body = [&](communicator<>& comm) {
        scripted_model<> net({{"first", {900}}, {"second", {5}}, {"third", {95}}}, 1.0);
        data_parallel trainer{net, adam{.lr = 0.1}, comm, options};
        bool const guilty = std::find(culprits.begin(), culprits.end(), comm.rank()) != culprits.end();
        outcome result;
        try {
            for (int step = 0; step < 12; ++step) {
                if (step == 3 && guilty && what == harm::value) net.value(2)[40] += comm.rank() + 1;
                if (step == 3 && guilty && what == harm::bit) net.value(0)[0] = std::nextafter(net.value(0)[0], 9.0);
                if (step == 3 && guilty && what >= harm::state)
                    trainer.for_each_state([&](state_slice const& s) {
                        std::span<double> const all = s.as<double>();
                        if (what == harm::state && s.of == "second" && s.name == "exp_avg_sq") all[1] *= 2;
                        if (what == harm::momentum && s.of == "third" && s.name == "exp_avg")
                            all.back() = std::nextafter(all.back(), 9.0);
                    });
                trainer.step(numbers{{1}});
                ++result.steps;
            }
        } catch (comm_error const& e) {
            result.text = e.what();
            result.culprit = e.culprit();
        }
        return result;
    };
    return ranks_over(tcp, ranks, body, patient());
}

}  // namespace

TEST_CASE("ranks that hold other values or states are named before a step changes anything", "[train]") {
    auto const [shares, tcp] = GENERATE(table<bool, bool>({{false, false}, {true, false}, {false, true}}));
    CAPTURE(shares, tcp);
    training_options const options{.update = update::replicated, .share_memory = shares, .agreement_steps = 4};
    struct example {
        int ranks;
        std::vector<int> culprits;
        std::string who;
    };
    std::string const other = " other values (or another optimizer state) than the other ",
                      differ = " hold different values";
    for (harm const what : {harm::value, harm::bit, harm::state, harm::momentum})
        for (example const& one : std::vector<example>{{2, {0}, "ranks 0, 1" + differ},
                                                       {3, {0}, "rank 0 holds" + other + "2"},
                                                       {3, {2}, "rank 2 holds" + other + "2"},
                                                       {4, {3}, "rank 3 holds" + other + "3"},
                                                       {4, {1, 3}, "ranks 0, 1, 2, 3" + differ},
                                                       {5, {1, 4}, "ranks 1, 4 hold" + other + "3"}}) {
            auto const all = train(one.ranks, what, one.culprits, options, tcp);
            for (outcome const& rank : all) {
                CAPTURE(static_cast<int>(what), one.ranks, rank.text);
                CHECK(rank.text == all.front().text);
                CHECK(rank.text.find("DDP-E106 replicas differ: ") == 0);
                CHECK(rank.text.find(one.who) != std::string::npos);
                CHECK(rank.culprit == (one.who.find(other) != std::string::npos ? one.culprits.front() : -1));
                CHECK(rank.text.find(what == harm::bit ? " in \"first\"." : " in \"first\" to \"third\".") !=
                      std::string::npos);
                CHECK(rank.steps >= 3);
                CHECK(rank.steps <= 6);  // each element is looked at in one of four steps
            }
        }
}

TEST_CASE("what ranks hold apart on purpose is not compared, nor anything where nobody wants it", "[train]") {
    for (auto const& [what, options] : std::vector<std::pair<harm, training_options>>{
             {harm::none, {.update = update::replicated, .agreement_steps = 1}},
             {harm::none, {.update = update::sharded, .agreement_steps = 5000}},
             {harm::state, {.update = update::sharded, .agreement_steps = 4}},
             {harm::value, {.agreement_steps = 0}}})
        for (outcome const& rank : train(3, what, {0}, options)) {
            CHECK(rank.text == "");
            CHECK(rank.steps == 12);
        }
    // With a sharded update the value of the rank that owns the slice replaces the others.
    auto const after = run_ranks(
        3,
        [](communicator<>& comm) {
            scripted_model<> net({{"a", {900}}}, 1.0);
            data_parallel trainer{net, sgd{.lr = 0}, comm, {.update = update::sharded, .agreement_steps = 0}};
            for (std::size_t k = 0; k < 900; k += 100) net.value(0)[k] = 2.0 + comm.rank();
            bool const before = trainer.replicas_identical();
            trainer.step(numbers{{1}});
            bool const then = trainer.replicas_identical();
            std::vector<double> seen;
            for (std::size_t k = 0; k < 900; k += 100) seen.push_back(net.value(0)[k]);
            return std::tuple(before, then, seen);
        },
        patient());
    for (auto const& rank : after)
        CHECK(rank == std::tuple(false, true, std::vector<double>{2, 2, 2, 3, 3, 3, 4, 4, 4}));
    for (outcome const& rank : train(1, harm::value, {0}, {.agreement_steps = 1})) CHECK(rank.text == "");
}

TEST_CASE("with a sharded update a value is found before it is replaced, and a frozen one when its turn comes",
          "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const shares = GENERATE(true, false), frozen = GENERATE(false, true);
    CAPTURE(ranks, tcp, shares, frozen);
    training_options options{.update = update::sharded, .share_memory = shares, .agreement_steps = 1};
    if (frozen) options.frozen = {"third"}, options.agreement_steps = 4;
    std::string const last = std::to_string(ranks - 1),
                      who = ranks == 2 ? "ranks 0, 1 hold different values"
                                       : "rank " + last +
                                             " holds other values (or another optimizer state) than the other " + last;
    for (outcome const& rank : train(ranks, harm::value, {ranks - 1}, options, tcp)) {
        CAPTURE(rank.text);
        CHECK((rank.text.find("DDP-E106 replicas differ: ") == 0) == (ranks > 1));
        CHECK((rank.text.find(who) != std::string::npos) == (ranks > 1));
        CHECK(rank.steps >= (ranks == 1 ? 12 : 3));
        CHECK(rank.steps <= (ranks == 1 ? 12 : frozen ? 6 : 3));
    }
}

TEST_CASE("with a check for NaN, a mean gradient that one rank alone has is found before it is used", "[train]") {
    struct changes {
        int rank;
        std::vector<int> culprits;
        double factor;
        void on(mean_gradient<double> const& event) const {
            if (event.step != 3 || event.parameter != 1) return;
            if (std::find(culprits.begin(), culprits.end(), rank) != culprits.end())
                event.gradient[event.gradient.size() / 2] *= factor;
        }
    };
    bool const tcp = GENERATE(false, true), shares = GENERATE(false, true);
    nonfinite const decision = GENERATE(nonfinite::stop, nonfinite::skip, nonfinite::warn);
    double const factor = GENERATE(std::numeric_limits<double>::infinity(), -2.0, 1.5);
    if (tcp && shares) return;
    CAPTURE(tcp, shares, static_cast<int>(decision), factor);
    struct example {
        int ranks;
        std::vector<int> culprits;
        std::string who;
    };
    // Where nothing is compared, ranks still agree on whether it is finite.
    bool const compares = GENERATE(true, false), found = compares || std::isinf(factor);
    std::string const other = " another mean gradient than the other ",
                      differ = " hold different mean gradients, without a majority";
    for (example const& one : std::vector<example>{{1, {0}, ""},
                                                   {2, {1}, "ranks 0, 1" + differ},
                                                   {3, {1}, "rank 1 holds" + other + "2"},
                                                   {4, {0, 2}, "ranks 0, 1, 2, 3" + differ},
                                                   {5, {2, 3}, "ranks 2, 3 hold" + other + "3"}}) {
        training_options const options{.update = update::replicated,
                                       .nonfinite = decision,
                                       .share_memory = shares,
                                       .agreement_steps = compares ? 5000u : 0u};
        auto const all = ranks_over(
            tcp, one.ranks,
            [&](communicator<>& comm) {
                scripted_model<> net({{"first", {900}}, {"second", {5}}, {"third", {95}}}, 1.0);
                data_parallel trainer{net, adam{.lr = 0.1}, comm, options, changes{comm.rank(), one.culprits, factor}};
                outcome result;
                std::vector<double> before;
                auto const values = [&] {
                    std::vector<double> now;
                    for (std::size_t i = 0; i < 3; ++i) now.insert(now.end(), net.value(i).begin(), net.value(i).end());
                    return now;
                };
                try {
                    for (int step = 0; step < 5; ++step) {
                        before = values();
                        trainer.step(numbers{{1}});
                        ++result.steps;
                    }
                } catch (error const& e) {
                    result.text = e.what();
                    if (auto const* const verdict = dynamic_cast<comm_error const*>(&e))
                        result.culprit = verdict->culprit();
                    if (before != values()) result.text += "; values have changed";
                }
                return result;
            },
            patient());
        for (outcome const& rank : all) {
            CAPTURE(one.ranks, rank.text);
            if (one.ranks == 1 || !found) {
                CHECK(rank.steps == (decision == nonfinite::stop && std::isinf(factor) ? 2u : 5u));
                CHECK(rank.culprit == -2);
                continue;
            }
            CHECK(rank.text == all.front().text);
            CHECK(rank.text.find("DDP-E106 replicas differ: " + one.who +
                                 ", seen by the norm in step 3. No value was changed. ") == 0);
            CHECK(rank.text.find("values have changed") == std::string::npos);
            CHECK(rank.culprit == (one.who.find("than the other") != std::string::npos ? one.culprits.front() : -1));
            CHECK(rank.steps == 2);
        }
    }
}
