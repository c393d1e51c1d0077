// When a rank's own code fails, it gets its own error back, all others are told of it, and nobody hangs.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/checkpoint/lines_of_ranks.hpp>
#include <ddp/collective/all_gather.hpp>
#include <ddp/collective/all_to_all.hpp>
#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/gather.hpp>
#include <ddp/collective/measure_network.hpp>
#include <ddp/collective/reduce.hpp>
#include <ddp/collective/scatter.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/optim/lamb.hpp>
#include <ddp/strategy/averaging.hpp>
#include <ddp/strategy/local_parallel.hpp>
#include <ddp/strategy/loose.hpp>
#include <ddp/strategy/stale_synchronous.hpp>
#include <ddp/train/buffers.hpp>
#include <ddp/train/evaluate.hpp>
#include <ddp/train/weights.hpp>

#include "support/catch.hpp"
#include "support/lingering_transport.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

using model = scripted_model<>;
constexpr int ranks = 3, culprit = 1;
/// The culprit among so many ranks: the last of fewer than two.
int culprit_of(int all) {
    return std::min(culprit, all - 1);
}

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

/// What ranks throw that have trained for two steps when `spoil(model)` happens to one of them, the last of fewer than
/// two: in memory that they share, and by messages. Every later call must throw again.
std::vector<std::string> errors_after(std::function<void(model&)> const& spoil, training_options options = {},
                                      bool tcp = false, int all = ranks) {
    options.share_memory = GENERATE(true, false);
    CAPTURE(options.share_memory);
    return errors_over(
        tcp, all,
        [&](auto& comm) {
            model net({{"a", {30}}, {"b", {20}}, {"c", {0}}, {"d", {10}}});
            auto trainer = make_trainer(net, comm, options);
            if (trainer.shares_memory() != (options.share_memory && comm.size() > 1))
                throw std::logic_error("gradients take another path");
            trainer.step(numbers{{1}});
            trainer.step(numbers{{1, 2}});
            bool const guilty = comm.rank() == culprit_of(comm.size());
            if (guilty) spoil(net);
            std::string first = thrown_by([&] { trainer.step(numbers{{1}}); });
            // Where the culprit reported every gradient before it failed, the others may have completed that step.
            bool const ahead = first.empty() && !guilty;
            if (ahead) first = thrown_by([&] { trainer.step(numbers{{1}}); });
            if (first.empty()) throw std::logic_error("the step did not fail");
            if (thrown_by([&] { trainer.step(numbers{{1}}); }).empty())
                throw std::logic_error("the next step went well");
            if (thrown_by([&] { (void)trainer.replicas_identical(); }).empty())
                throw std::logic_error("so did a check");
            std::uint64_t const complete = trainer.completed_steps();
            if (complete != 2 && (complete != 3 || guilty)) throw std::logic_error("another number of complete steps");
            throw std::runtime_error(first);
        },
        patient());
}

void expect_on_every_rank(std::vector<std::string> const& errors, std::vector<std::string> const& words) {
    for (std::string const& one : errors) {
        CAPTURE(one);
        REQUIRE(one == errors.front());
        for (std::string const& word : words) REQUIRE(contains(one, word));
    }
}
void expect_own_and_told(std::vector<std::string> const& errors, std::string const& own) {
    int const all = static_cast<int>(errors.size()), guilty = culprit_of(all);
    for (int rank = 0; rank < all; ++rank) {
        std::string const& one = errors[static_cast<std::size_t>(rank)];
        CAPTURE(rank, one);
        if (rank == guilty) {
            REQUIRE(one == own);
        } else {
            REQUIRE(one.find("DDP-E206") == 0);
            REQUIRE(contains(one, "rank " + std::to_string(guilty)));
            REQUIRE(contains(one, own));
        }
    }
}

}  // namespace

TEST_CASE("a gradient that is not reported is an error on every rank that names rank and parameter", "[train]") {
    auto const [all, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true), clipped = GENERATE(false, true);
    CAPTURE(all, tcp, sharded, clipped);
    std::string const who = "rank " + std::to_string(culprit_of(all)) + ": backward never reported ";
    for (auto const& [left_out, what] :  // an empty parameter counts
         {std::pair(std::size_t{1}, "parameter #1 'b'"), std::pair(std::size_t{2}, "parameter #2 'c'")})
        expect_on_every_rank(
            errors_after([missing = left_out](model& m) { m.leaves_out = [=](std::size_t i) { return i == missing; }; },
                         options_of(sharded, clipped), tcp, all),
            {"DDP-E103", who + what, "unused::allowed"});
}

TEST_CASE("parameters that are not reported are all named, as far as the text has room", "[train]") {
    bool const tcp = GENERATE(false, true);
    struct example {
        std::size_t parts;
        std::string stem, said;
    };
    for (auto const& [parts, stem, said] : std::vector<example>{
             {3, "bias", "parameters: #0 'bias.0', #1 'bias.1': call"},
             {11, "b",
              "10 parameters: #0 'b.0', #1 'b.1', #2 'b.2', #3 'b.3', #4 'b.4', #5 'b.5', #6 'b.6', #7 'b.7', "
              "#8 'b.8', #9 'b.9': call"},
             {31, "b",
              "30 parameters: #0 'b.0', #1 'b.1', #2 'b.2', #3 'b.3', #4 'b.4', #5 'b.5', #6 'b.6', #7 'b.7', "
              "#8 'b.8', #9 'b.9' and 20 more: call"},
             {31, "decoder.layers.attention.output.projection",
              "30 parameters: #0 'decoder.layers.attention.output.projection.0', "
              "#1 'decoder.layers.attention.output.projection.1', "
              "#2 'decoder.layers.attention.output.projection.2', "
              "#3 'decoder.layers.attention.output.projection.3', "
              "#4 'decoder.layers.attention.output.projection.4', "
              "#5 'decoder.layers.attention.output.projection.5' and 24 more: call"},
         }) {
        auto const errors = errors_over(
            tcp, ranks,
            [&](auto& comm) {
                std::vector<model::part> all;
                for (std::size_t i = 0; i < parts; ++i) all.push_back({stem + "." + std::to_string(i), {2}});
                model net(all);
                auto trainer = make_trainer(net, comm);
                if (comm.rank() == culprit) net.leaves_out = [&](std::size_t i) { return i + 1 < all.size(); };
                trainer.step(numbers{{1}});
            },
            patient());
        expect_on_every_rank(errors, {"DDP-E103 gradient: rank 1: backward never reported ", said,
                                      " ready(i) for each, or set training_options.unused = ddp::unused::allowed"});
        for (std::string const& one : errors) CHECK(one.ends_with("ddp::unused::allowed"));
    }
}

TEST_CASE("in a group, ranks are named by their numbers in the job", "[train]") {
    std::string const how =
        GENERATE("left out", "left out locally", "not finite", "factor", "patterns", "model", "replicas");
    auto const errors = run_ranks(
        3,
        [&](auto& comm) {
            std::optional<std::decay_t<decltype(comm)>> pair;  // rank 1 of the job is its rank 1, rank 2 its rank 0
            // A slow rank 0 is still in this call when the others have failed.
            std::string const early = thrown_by([&] { pair = comm.subgroup({2, 1}); });
            if (!early.empty()) return early;
            bool const odd = comm.rank() == 2;
            model net({{"a", {how == "model" && odd ? 31u : 30u}}, {"b", {20}}});
            if (how.starts_with("left out") && odd) net.leaves_out = [](std::size_t i) { return i == 1; };
            std::string text = "rank 2";
            if (how == "left out locally" && pair) {
                text = thrown_by([&] {
                    local_parallel trainer{net, sgd{.lr = 0.1}, *pair, local_sgd{.period = 1}};
                    trainer.step(numbers{{1}});
                });
            } else if (pair) {
                text = thrown_by([&] {
                    data_parallel trainer{
                        net, sgd{.lr = 0.1}, *pair,
                        training_options{.update = how == "replicas" ? update::replicated : update::automatic,
                                         .nonfinite = nonfinite::stop,
                                         .agreement_steps = 1}};
                    if (how == "replicas" && odd) trainer.parameters()[0].value[7] += 1;
                    if (how == "factor") trainer.set_rate_factor(odd ? -1 : 1);
                    if (how == "patterns") trainer.freeze(odd ? "a" : "b");
                    trainer.step(numbers{{odd && how == "not finite" ? NAN : 1}});
                });
            }
            std::string const verdict = thrown_by([&] { barrier(comm); });  // where it is everybody's
            return verdict.empty() ? text : verdict;
        },
        patient());
    for (std::size_t rank = 0; rank < 3; ++rank)
        if (how != "patterns" || rank != 1)
            CHECK_THAT(errors[rank],
                       Catch::Contains(how == "replicas" ? "ranks 2, 1 hold different values" : "rank 2"));
    if (how.starts_with("left out"))
        for (auto const& text : errors) CHECK_THAT(text, Catch::Contains("DDP-E103"));
    if (how == "left out") CHECK(errors[1] == errors[0]);
}

TEST_CASE("a gradient that is reported twice is an error on every rank that names rank and parameter", "[train]") {
    std::size_t const which = GENERATE(0u, 2u, 3u);
    auto const [all, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true);
    CAPTURE(which, all, tcp, sharded);
    expect_on_every_rank(
        errors_after([&](model& m) { m.at_end = [&](auto const& ready) { ready(which), ready(which); }; },
                     options_of(sharded, which == 0), tcp, all),
        {"DDP-E103",
         "rank " + std::to_string(culprit_of(all)) + ": backward reported parameter #" + std::to_string(which),
         "twice"});
}

TEST_CASE("a report out of range is an error on every rank that names rank and number", "[train]") {
    std::size_t const index = GENERATE(std::size_t{4}, std::size_t{1000}, ~std::size_t{0});
    auto const [all, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true);
    CAPTURE(index, all, tcp, sharded);
    expect_on_every_rank(
        errors_after([&](model& m) { m.at_end = [&](auto const& ready) { ready(index); }; },
                     options_of(sharded, index == 4), tcp, all),
        {"DDP-E103",
         "rank " + std::to_string(culprit_of(all)) + ": backward reported parameter #" + std::to_string(index),
         "the model has 4"});
}

TEST_CASE("parameters that nobody may leave out are not excused by those that may", "[train]") {
    auto const [all, tcp] = GENERATE(ways_to_run());
    CAPTURE(all, tcp);
    expect_on_every_rank(errors_after([](model& m) { m.at_end = [](auto const& ready) { ready(3); }; },
                                      {.unused = unused::allowed}, tcp, all),
                         {"DDP-E103", "parameter #3 'd' twice"});
}

TEST_CASE("what a rank's forward throws comes back as itself, and the others are told", "[train]") {
    auto const [all, tcp] = GENERATE(ways_to_run());
    CAPTURE(all, tcp);
    expect_own_and_told(
        errors_after([](model& m) { m.in_forward = [] { throw std::runtime_error("the file is empty"); }; }, {}, tcp,
                     all),
        "the file is empty");
}

TEST_CASE("what a rank's backward throws comes back as itself, and the others are told", "[train]") {
    auto const [all, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true), clipped = GENERATE(false, true);
    CAPTURE(all, tcp, sharded, clipped);
    auto const after_all = [](model& m) {
        m.at_end = [](auto const&) { throw std::runtime_error("no memory for this"); };
    };
    auto const at_once = [](model& m) {
        m.leaves_out = [](std::size_t) -> bool { throw std::runtime_error("no memory for this"); };
    };
    expect_own_and_told(errors_after(at_once, options_of(sharded, clipped), tcp, all), "no memory for this");
    expect_own_and_told(errors_after(after_all, options_of(sharded, clipped), tcp, all), "no memory for this");
}

TEST_CASE("a rank whose model has lost its memory is told so, and the others are told of it", "[train]") {
    auto const [all, tcp] = GENERATE(ways_to_run());
    auto const errors = errors_over(
        tcp, all,
        [](auto& comm) {
            model net({{"a", {3}}, {"b", {3}}});
            auto trainer = make_trainer(net, comm);
            trainer.step(numbers{{1}});
            if (comm.rank() == culprit_of(comm.size())) net.whole = false;
            for (int step = 0; step < 3; ++step) trainer.step(numbers{{1}});
        },
        patient());
    for (int rank = 0; rank < all; ++rank) {
        bool const guilty = rank == culprit_of(all);
        std::string const& one = errors[static_cast<std::size_t>(rank)];
        CAPTURE(all, tcp, rank, one);
        CHECK(one.find(guilty ? "DDP-E100" : "DDP-E206") == 0);
        CHECK(contains(one, guilty ? "no longer the library's"
                                   : "rank 1 failed in its own code after step #1: its program left the "
                                     "communicator by an exception"));
    }
}

TEST_CASE("a rank that catches such an error repeats the call in time, or is named to all at the deadline", "[train]") {
    bool const tcp = GENERATE(false, true), superseded = GENERATE(false, true), repeats = GENERATE(false, true);
    CAPTURE(tcp, superseded, repeats);
    timing times = patient();
    times.collective = std::chrono::milliseconds(repeats ? 20000 : 300);
    auto const world = inproc_world::create(ranks);
    auto const join = loopback_job(ranks, false, times.collective);
    std::atomic<int> told = 0;
    auto const said = on_threads(ranks, [&](int rank) {
        communicator<> comm = tcp ? join(rank) : any_communicator(world->connect(rank), times);
        model net({{"a", {3}}, {"b", {3}}}), other({{"a", {3}}, {"b", {3}}});
        auto first = make_trainer(net, comm);
        auto second = make_trainer(superseded ? net : other, comm);
        auto& trainer = superseded ? second : first;
        trainer.step(numbers{{1}});
        std::vector<std::string> texts;
        if (rank == culprit) {
            net.whole = superseded;
            texts.push_back(thrown_by([&] { first.step(numbers{{1}}); }));
            while (!repeats && told < ranks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            net.whole = true;
        } else if (!repeats) {
            texts.push_back(thrown_by([&] { trainer.step(numbers{{1}}); }));
            ++told;
        }
        texts.push_back(thrown_by([&] { trainer.step(numbers{{1}}); }));
        texts.push_back(thrown_by([&] { barrier(comm); }));
        if (repeats && (!trainer.replicas_identical() || trainer.completed_steps() != 2)) texts.emplace_back("wrong");
        return texts;
    });
    CHECK(said[culprit][0].find("DDP-E100 usage: ") == 0);
    CHECK(
        contains(said[culprit][0], superseded ? "another trainer was made for this model" : "no longer the library's"));
    std::string const verdict = said[0][0];
    CAPTURE(verdict);
    CHECK(verdict.find(repeats ? "" : "DDP-E204 deadline: rank 1 did not take part in step #2 in time: rank ") == 0);
    for (int rank = 0; rank < ranks; ++rank) {
        auto const& texts = said[static_cast<std::size_t>(rank)];
        CAPTURE(rank, texts);
        CHECK(texts.size() == (repeats && rank != culprit ? 2 : 3));
        for (std::size_t k = rank == culprit ? 1 : 0; k < texts.size(); ++k) CHECK(texts[k] == verdict);
    }
    CHECK(verdict.empty() == repeats);
}

TEST_CASE("what a rank's weight throws comes back as itself, and the others are told", "[train]") {
    auto const [all, tcp] = GENERATE(ways_to_run());
    CAPTURE(all, tcp);
    expect_own_and_told(
        errors_after([](model& m) { m.in_weight = [] { throw std::runtime_error("no such batch"); }; }, {}, tcp, all),
        "no such batch");
}

TEST_CASE("an error in a pass without communication reaches the others too", "[train]") {
    auto const [all, tcp] = GENERATE(ways_to_run());
    CAPTURE(all, tcp);
    auto const errors = errors_over(
        tcp, all,
        [](auto& comm) {
            model net({{"a", {3}}, {"b", {3}}});
            auto trainer = make_trainer(net, comm);
            if (comm.rank() == culprit_of(comm.size())) net.leaves_out = [](std::size_t i) { return i == 0; };
            trainer.forward(numbers{{1}});
            trainer.accumulate();
            trainer.forward(numbers{{1}});
            trainer.backward();
            trainer.finish();
        },
        patient());
    expect_on_every_rank(errors, {"DDP-E103", "rank " + std::to_string(culprit_of(all)), "'a'"});
}

TEST_CASE("a trainer that an exception destroys within a step tells the others", "[train]") {
    auto const [all, tcp] = GENERATE(ways_to_run());
    auto const errors = errors_over(
        tcp, all,
        [](auto& comm) {
            model net({{"a", {3}}, {"b", {3}}});
            auto trainer = make_trainer(net, comm);
            trainer.step(numbers{{1}});
            trainer.forward(numbers{{1}});
            trainer.backward();
            if (comm.rank() == culprit_of(comm.size())) throw std::runtime_error("between backward and finish");
            trainer.finish();
            trainer.step(numbers{{1}});
        },
        patient());
    for (int rank = 0; rank < all; ++rank) {
        std::string const& one = errors[static_cast<std::size_t>(rank)];
        CAPTURE(all, tcp, rank, one);
        if (rank == culprit_of(all))
            REQUIRE(one == "between backward and finish");
        else
            REQUIRE((one.find("DDP-E206") == 0 && contains(one, "rank 1") && contains(one, "step")));
    }
}

TEST_CASE("a trainer destroyed between backward and finish is told of, though no message is missing", "[train]") {
    auto const [all, tcp] = GENERATE(ways_to_run());
    auto const errors = errors_over(
        tcp, all,
        [](auto& comm) {
            model net({{"a", {3}}, {"b", {3}}});
            {
                auto trainer = make_trainer(net, comm);
                trainer.forward(numbers{{1}});
                trainer.backward();
            }
            comm.check();
        },
        patient());
    for (std::string const& one : errors) {
        CAPTURE(all, tcp, one);
        REQUIRE((one.find("DDP-E206") == 0 && contains(one, "left a training step before the step had ended")));
    }
}

TEST_CASE("a rank that ends early is named to those who train on", "[train]") {
    auto const [all, tcp] = GENERATE(ways_to_run());
    auto const errors = errors_over(
        tcp, all,
        [](auto& comm) {
            model net({{"a", {3}}, {"b", {3}}});
            auto trainer = make_trainer(net, comm);
            for (int step = 0; step < (comm.rank() == culprit_of(comm.size()) ? 2 : 5); ++step)
                trainer.step(numbers{{1}});
        },
        patient());
    for (int rank = 0; rank < all; ++rank) {
        std::string const& one = errors[static_cast<std::size_t>(rank)];
        CAPTURE(all, tcp, rank, one);
        if (rank == culprit_of(all))
            REQUIRE(one == "");
        else
            REQUIRE((one.find("DDP-E202") == 0 && contains(one, "rank 1 exited cleanly")));
    }
}

namespace {
struct sees_last_bucket {
    std::atomic<int>* reduced;
    void on(bucket_reduced const& event) const {
        if (event.bucket == 1) ++*reduced;
    }
};

/// Whether values are torn on each rank when all throw after they have reduced one bucket of two.
template <bool Releases>
std::vector<std::string> torn_after_half_a_step(training_options const& options, bool tcp, int all) {
    std::atomic<int> reduced = 0;  // of all ranks, in both steps; a rank alone reduces nothing
    return errors_over(
        tcp, all,
        [&](auto& comm) {
            scripted_model<true, Releases> net({{"a", {30}}, {"b", {20}}});
            data_parallel trainer{
                net, sgd{}, comm, options, automatic_allreduce{}, per_parameter_buckets{}, sees_last_bucket{&reduced}};
            bool const before = trainer.torn();
            trainer.step(numbers{{1}});
            bool const after = trainer.torn();
            net.leaves_out = [&](std::size_t i) -> bool {
                if (i != 0) return false;
                for (auto const until = monotonic_clock::now() + std::chrono::seconds(20);
                     all > 1 && reduced < 2 * all && monotonic_clock::now() < until;)
                    std::this_thread::sleep_for(std::chrono::microseconds(50));
                throw std::runtime_error("half-way");
            };
            (void)thrown_by([&] { trainer.step(numbers{{1}}); });
            std::string const text =
                std::string(before || after ? "too early; " : "") + (trainer.torn() ? "torn" : "whole");
            throw std::runtime_error(text + " after " + std::to_string(trainer.completed_steps()));
        },
        patient());
}
}  // namespace

namespace {

struct full_log {
    bool here;
    void on(step_finished const& event) const {
        if (here && event.step == 2) throw std::runtime_error("the log is full");
    }
};

}  // namespace

TEST_CASE("what an observer throws at the end of a step on one rank is heard by the others at once", "[train]") {
    bool const tcp = GENERATE(false, true), sharded = GENERATE(false, true), shared = GENERATE(true, false);
    CAPTURE(tcp, sharded, shared);
    auto const since = monotonic_clock::now();
    auto const errors = errors_over(
        tcp, ranks,
        [&](auto& comm) {
            training_options options = options_of(sharded, false);
            options.share_memory = shared;
            model net({{"a", {30}}, {"b", {3}}});
            data_parallel trainer{net, sgd{.lr = 0.1}, comm, options, full_log{comm.rank() == culprit}};
            for (int step = 0; step < 4; ++step) trainer.step(numbers{{1}});
        },
        patient());
    CHECK(monotonic_clock::now() - since < std::chrono::seconds(20));  // a deadline is 60
    expect_own_and_told(errors, "the log is full");
    CAPTURE(errors.front());
    CHECK(contains(errors.front(), "rank 1 failed in its own code during step #2: the log is full"));
}

TEST_CASE("what a rank's own code threw where nobody could catch it is thrown once, by the next call", "[train]") {
    auto const errors = run_ranks(
        2,
        [](auto& comm) {
            auto const own = std::make_exception_ptr(std::runtime_error("the log is full"));
            if (comm.rank() == 1) comm.driver()->fail([&] { comm.tasks().fail_and_keep(own); });
            std::string all = thrown_by([&] { barrier(comm); }) + "|";
            if (comm.rank() == 1) comm.driver()->put_back(own);  // as a call that has to be quiet does
            for (int call = 0; call < 2; ++call) all += thrown_by([&] { barrier(comm); }) + "|";
            return all;
        },
        patient());
    CHECK(errors[1].find("the log is full|the log is full|DDP-E206") == 0);
    CHECK(errors[0].find("DDP-E206") == 0);
    CHECK_FALSE(contains(errors[0], "|the log"));
}

TEST_CASE("what is thrown after a step is said to be after it", "[train]") {
    auto const errors = errors_of_ranks(
        2,
        [](auto& comm) {
            model net({{"a", {30}}});
            data_parallel trainer{net, sgd{.lr = 0.1}, comm};
            trainer.step(numbers{{1}});
            trainer.step(numbers{{1}});
            if (comm.rank() == 1) {
                comm.fail("out of paper");
                throw std::runtime_error("out of paper");
            }
            trainer.step(numbers{{1}});
        },
        patient());
    CHECK_THAT(errors[0], Catch::Contains("rank 1 failed in its own code after step #2: out of paper"));
}

TEST_CASE("values of which only some took part in the step that failed are called torn", "[train]") {
    training_options options = options_of(GENERATE(false, true), false);
    options.share_memory = GENERATE(true, false);
    auto const [all, tcp] = GENERATE(ways_to_run());
    CAPTURE(options.update, options.share_memory, all, tcp);
    std::vector<std::string> const torn(static_cast<std::size_t>(all), "torn after 1");
    std::vector<std::string> const whole(static_cast<std::size_t>(all), "whole after 1");
    REQUIRE(torn_after_half_a_step<true>(options, tcp, all) == torn);
    REQUIRE(torn_after_half_a_step<false>(options, tcp, all) == whole);
}

namespace {

/// What ranks throw that run `body` over transports that may still write after a failure, and do.
template <class F>
std::vector<std::string> errors_over_lingering(F const& body) {
    auto const world = inproc_world::create(ranks);
    std::vector<std::thread> all;
    std::vector<std::string> errors(ranks);
    for (int rank = 0; rank < ranks; ++rank)
        all.emplace_back([&, rank] {
            try {
                communicator<> comm =
                    any_communicator(std::make_unique<lingering_transport>(world->connect(rank)), patient());
                body(comm);
            } catch (std::exception const& e) {
                errors[static_cast<std::size_t>(rank)] = e.what();
            }
        });
    for (std::thread& one : all) one.join();
    return errors;
}

/// Fails on one rank when two of three buckets are reduced: the others wait for its sums of squares then.
struct breaks_off {
    bool here;

    void on(bucket_reduced const& event) const {
        if (here && event.step == 3 && event.bucket == 1) throw std::runtime_error("no more");
    }
};

/// A strategy that fails on one rank, while the others wait: at the start, or in the third meeting.
template <class S>
struct spoilt : S {
    int guilty_at_start = -1;
    void validate() const { S::validate(); }
    template <Transport T>
    void validate(communicator<T> const& comm) const {
        if (comm.rank() == guilty_at_start) throw std::runtime_error("no more");
    }
    template <class State, Transport T, Element E>
        requires requires(S const& s, State& kept, meeting<T, E> const& with) { s.meet(kept, with); }
    void meet(State& kept, meeting<T, E> const& with) const {
        fail_in(with);
        S::meet(kept, with);
    }
    template <class State, Transport T, Element E>
        requires requires(S const& s, State& kept, passing<T, E> const& with) { s.pass(kept, with); }
    passed pass(State& kept, passing<T, E> const& with) const {
        fail_in(with);
        return S::pass(kept, with);
    }

private:
    static void fail_in(auto const& with) {
        if (with.comm.rank() == culprit && with.number == 3) throw std::runtime_error("no more");
    }
};

/// Metrics of several numbers.
struct tally {
    std::array<double, 7> of = {};
    tally& operator+=(tally const& more) {
        for (std::size_t i = 0; i < of.size(); ++i) of[i] += more.of[i];
        return *this;
    }
};
struct counting_model {
    tally evaluate(int what) const { return {{static_cast<double>(what)}}; }
};

}  // namespace

TEST_CASE("what a failed step has posted outlives the transport, which may still write there", "[train]") {
    bool const sharded = GENERATE(false, true), clipped = GENERATE(false, true);
    auto const errors = errors_over_lingering([&](communicator<>& comm) {
        model net({{"a", {300}}, {"b", {3}}, {"c", {70}}});
        data_parallel trainer{net, sgd{.lr = 0.1}, comm, options_of(sharded, clipped), per_parameter_buckets{}};
        for (int step = 0; step < 5; ++step) {
            if (comm.rank() == culprit && step == 3) net.in_forward = [] { throw std::runtime_error("no more"); };
            trainer.step(numbers{{1}});
        }
    });
    expect_own_and_told(errors, "no more");
}

TEST_CASE("so do the squares of a norm that it waits for", "[train]") {
    auto const expect_kept = [](auto const& optimizer, training_options const& options) {
        auto const errors = errors_over_lingering([&](communicator<>& comm) {
            model net({{"a", {300}}, {"b", {3}}, {"c", {70}}});
            data_parallel trainer{
                net, optimizer, comm, options, per_parameter_buckets{}, breaks_off{comm.rank() == culprit}};
            for (int step = 0; step < 5; ++step) trainer.step(numbers{{1}});
        });
        expect_own_and_told(errors, "no more");
    };
    for (int again = 0; again < 12; ++again) {  // what is in flight when it fails is chance
        expect_kept(sgd{.lr = 0.1}, options_of(true, true));
        expect_kept(lamb{.lr = 0.1}, options_of(true, false));
        expect_kept(lamb{.lr = 0.1}, options_of(true, true));
    }
}

TEST_CASE("so does what a failed meeting has posted", "[train]") {
    auto const expect_kept = [](char const* name, auto const& strategy) {
        DYNAMIC_SECTION(name) {
            auto const train = [](communicator<>& comm, auto const& with) {
                model net({{"a", {3000}}, {"b", {3}}, {"c", {700}}});
                local_parallel trainer{net, sgd{.lr = 0.1}, comm, with};
                for (int step = 0; step < 5; ++step) trainer.step(numbers{{1}});
            };
            using spoilt_one = spoilt<std::remove_cvref_t<decltype(strategy)>>;
            expect_own_and_told(errors_over_lingering([&](auto& comm) { train(comm, spoilt_one{strategy}); }),
                                "no more");
            auto const at_start = errors_over_lingering([&](auto& comm) { train(comm, spoilt_one{strategy, 0}); });
            REQUIRE(at_start[0] == "no more");
            for (std::size_t const r : {1u, 2u}) REQUIRE(contains(at_start[r], "its program left"));
        }
    };
    expect_kept("local_sgd", local_sgd{.period = 1});
    expect_kept("elastic_averaging", elastic_averaging{.period = 1});
    expect_kept("ring", gossip{.graph = gossip_graph::ring});
    expect_kept("exponential", gossip{.graph = gossip_graph::exponential});
    expect_kept("stale_synchronous", stale_synchronous{.staleness = 2});
}

TEST_CASE("so does what a failed call has posted in memory of its own", "[train]") {
    // One rank makes the calls that come before, and fails once the others wait in what comes next.
    auto const expect_kept = [](
                                 char const* name, auto const& call, int guilty = culprit,
                                 std::function<void(communicator<>&)> const& before = [](communicator<>&) {}) {
        DYNAMIC_SECTION(name) {
            auto const errors = errors_over_lingering([&](communicator<>& comm) {
                if (comm.rank() == guilty) {
                    before(comm);
                    std::this_thread::sleep_for(std::chrono::milliseconds(30));
                    throw std::runtime_error("no more");
                }
                call(comm);
                barrier(comm);  // where a rank only sends
            });
            REQUIRE(errors[static_cast<std::size_t>(guilty)] == "no more");
            for (int rank = 0; rank < ranks; ++rank)
                if (rank != guilty) REQUIRE(contains(errors[static_cast<std::size_t>(rank)], "its program left"));
        }
    };
    std::vector<double> const many(9000, 1.0);  // more than goes through scratch memory
    std::string const text(300, 'x');
    ddp::detail::file_outcome const failed{1, text.size(), 7};
    // A buffer of a model, in memory that no message may go to.
    auto const with_buffer = [](auto const& f) {
        return [&f](communicator<>& comm) {
            std::vector<double> own(700, 1.0);
            model_buffer one;
            one.name = "mean";
            one.type = element_type::f64;
            one.shape = {own.size()};
            one.bytes = as_mutable_bytes(std::span<double>(own));
            f(comm, std::span<model_buffer const>(&one, 1));
        };
    };
    expect_kept("evaluate", [](auto& comm) {
        counting_model counts;
        std::optional<int> next = 3;
        (void)evaluate(comm, counts, [&] { return std::exchange(next, std::nullopt); }, [](int one) { return one; });
    });
    expect_kept("all_gather", [&](auto& comm) { (void)all_gather(comm, many); });
    expect_kept("all_gather of bool", [&](auto& comm) {
        std::array<bool, 40'000> const flags = {};
        (void)all_gather(comm, flags);
    });
    expect_kept("gather", [&](auto& comm) { (void)gather(comm, many); });
    expect_kept("all_to_all", [&](auto& comm) { (void)all_to_all(comm, many); });
    expect_kept("scatter", [&](auto& comm) { (void)scatter(comm, many, culprit); });
    expect_kept("allreduce", [&](auto& comm) { (void)allreduce(comm, 1.0); });
    expect_kept("reduce", [&](auto& comm) { (void)reduce(comm, 1.0); });
    expect_kept("measure_network", [](auto& comm) { (void)measure_network(comm); });
    expect_kept("size of a text", [&](auto& comm) { (void)ddp::detail::text_of_rank_0(comm, ""); }, 0);
    expect_kept(
        "text", [&](auto& comm) { (void)ddp::detail::text_of_rank_0(comm, ""); }, 0,
        [&](auto& comm) {
            std::uint64_t size = text.size();
            broadcast(comm, size);
        });
    expect_kept(
        "lines", [&](auto& comm) { (void)ddp::detail::lines_of_all(comm, {text}); }, culprit,
        [&](auto& comm) {
            (void)ddp::detail::text_of_rank_0(comm, "");
            (void)all_gather(comm, text.size());
        });
    expect_kept(
        "outcome", [&](auto& comm) { ddp::detail::agree_on_outcome(comm, failed, text, "save_weights"); }, 0,
        [&](auto& comm) {
            std::vector<ddp::detail::file_outcome> all(ranks, failed);
            ddp::detail::call(comm, ddp::detail::about<ddp::detail::file_outcome>("save_weights", 1),
                              [&](auto over) { return all_gather_small(over, std::span(all)); });
        });
    auto const rank_0s = [](auto& comm, auto all) { ddp::detail::broadcast_buffers(comm, all); };
    auto const averaged = [](auto& comm, auto all) { ddp::detail::average_buffers(comm, all, {.count = comm.size()}); };
    auto const sums = [](auto& comm, auto all) {
        ddp::detail::trainer_sums(comm).add({reinterpret_cast<double*>(all[0].bytes.data()), 700});
    };
    expect_kept("buffers", with_buffer(rank_0s), 0);
    expect_kept("averaged buffers", with_buffer(averaged));
    expect_kept("sums of a model", with_buffer(sums));
}

TEST_CASE("a call throws only when the transport writes into its memory no more", "[train]") {
    auto const world = inproc_world::create(2);
    std::vector<std::thread> both;
    std::vector<std::string> wrong(2);
    for (int rank = 0; rank < 2; ++rank)
        both.emplace_back([&, rank] {
            communicator comm(std::make_unique<lingering_transport>(world->connect(rank)), patient());
            std::vector<float> data(1000);
            try {
                if (rank == 0) comm.fail("it gives up");
                allreduce(comm, data);
                wrong[static_cast<std::size_t>(rank)] = "nothing was thrown";
            } catch (comm_error const&) {
                if (comm.transport().still_writes()) wrong[static_cast<std::size_t>(rank)] = "thrown too early";
            }
        });
    for (std::thread& one : both) one.join();
    CHECK(wrong == std::vector<std::string>(2));
}
