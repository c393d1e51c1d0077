// What a step means: accumulation, empty batches, the end of the data, what a model and an observer get to see.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;
using namespace std::chrono_literals;

namespace {

using bound_model = scripted_model<true>;
using copied_model = scripted_model<false>;

std::vector<bound_model::part> const two_parts = {{"a", {3}}, {"b", {2}}};
template <class M>
std::vector<typename M::part> parts() {
    return {{"a", {3}}, {"b", {2}}};
}
/// First elements of both parameters.
template <class M>
std::array<double, 2> values(M& model) {
    return {model.value(0)[0], model.value(1)[0]};
}
bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEMPLATE_TEST_CASE("micro-batches accumulate to the gradient of one large batch", "[train]", bound_model,
                   copied_model) {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            double const r = comm.rank();
            TestType small(parts<TestType>()), large(parts<TestType>());
            auto micro = make_trainer(small, comm, options_of(sharded, false));
            auto whole = make_trainer(large, comm, options_of(sharded, false));
            std::vector<std::uint64_t> digests;
            for (int step = 0; step < 3; ++step) {
                for (numbers const& batch : {numbers{}, numbers{{1 + r, 2}}, numbers{{}}, numbers{{3}}}) {
                    micro.forward(batch);
                    micro.accumulate();
                }
                micro.forward(numbers{{4, 5, r}});
                micro.backward();
                finish_result const done = micro.finish();
                if (done.weight != 6 * static_cast<std::uint64_t>(comm.size())) digests.push_back(0);
                whole.step(numbers{{1 + r, 2, 3, 4, 5, r}});
                digests.push_back(micro.digest_of_values());
                digests.push_back(whole.digest_of_values());
            }
            double sum = 0;
            for (int k = 0; k < comm.size(); ++k) sum += 15 + 2 * k;
            bool const right = values(small)[0] == Approx(-3 * sum / (6 * comm.size())) &&
                               values(small)[1] == Approx(-6 * sum / (6 * comm.size()));
            return std::pair(digests, right);
        },
        patient());
    for (auto const& [digests, right] : got) {
        REQUIRE(right);
        REQUIRE(digests.size() == 6);
        for (std::size_t i = 0; i < digests.size(); i += 2) REQUIRE(digests[i] == digests[i + 1]);
    }
}

TEST_CASE("under a guard of no_sync backward adds up, as for one large batch", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            double const r = comm.rank();
            bound_model small(two_parts), large(two_parts);
            auto micro = make_trainer(small, comm), whole = make_trainer(large, comm);
            std::vector<std::string> wrong;
            auto const pass = [&](numbers const& batch) { micro.forward(batch), micro.backward(); };
            for (int step = 0; step < 2; ++step) {
                try {
                    auto const outer = micro.no_sync();
                    pass({{1 + r, 2}});
                    {
                        auto const inner = micro.no_sync();
                        pass({{}});
                        pass({{3}});
                    }
                    pass({{r}});  // the outer guard still lives
                    wrong.push_back(thrown_by([&] { micro.step(numbers{{1}}); }));
                    wrong.push_back(thrown_by([&] { micro.join(); }));
                    wrong.push_back(thrown_by([&] { micro.finish(); }));
                    throw std::runtime_error("out of the scope");
                } catch (std::runtime_error const&) {
                }
                micro.forward(numbers{{6, 7 + r}});  // what counts is when backward begins
                {
                    auto const guard = micro.no_sync();
                    micro.backward();
                    micro.forward(numbers{{4, 5}});
                }
                micro.backward();
                auto const late = micro.no_sync();  // the step has begun
                if (micro.finish().weight != 8 * static_cast<std::uint64_t>(comm.size()))
                    wrong.push_back("another weight");
                whole.step(numbers{{1 + r, 2, 3, r, 6, 7 + r, 4, 5}});
                if (micro.digest_of_values() != whole.digest_of_values()) wrong.push_back("other values");
            }
            return wrong;
        },
        patient());
    for (auto const& wrong : got) {
        REQUIRE(wrong.size() == 6);
        for (std::size_t i = 0; i < 6; ++i)
            CHECK(contains(
                wrong[i], std::array{"step()", "join()", "finish()"}[i % 3] + std::string(" under a no_sync() guard")));
    }
}

TEMPLATE_TEST_CASE("an empty micro-batch may come first or last, and a rank may have none but empty ones", "[train]",
                   bound_model, copied_model) {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true);
    if (ranks != 3 && sanitizers_leave_out("empty micro-batches", ranks)) return;
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            TestType model(parts<TestType>());
            auto trainer = make_trainer(model, comm, options_of(sharded, false));
            for (int step = 0; step < 4; ++step) {
                bool const idle = comm.size() > 1 && comm.rank() == (step % 2 == 0 ? 0 : comm.size() - 1);
                numbers const first = idle ? numbers{} : numbers{{6}};
                trainer.forward(step < 2 ? first : numbers{});
                trainer.accumulate();
                trainer.forward(step < 2 ? numbers{} : first);
                trainer.backward();
                if (trainer.finish().weight != static_cast<std::uint64_t>(std::max(1, comm.size() - 1)))
                    throw std::runtime_error("another weight");
            }
            return std::pair(values(model), trainer.replicas_identical());
        },
        patient());
    CAPTURE(ranks, tcp, sharded);
    for (auto const& [one, alike] : got) {
        REQUIRE(alike);
        REQUIRE(std::abs(one[0] + 24) < 1e-12);  // the factor 1 / 6 is rounded
        REQUIRE(std::abs(one[1] + 48) < 1e-12);
    }
}

TEST_CASE("a model hears the number of each step once, before the step's first forward", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const shared = GENERATE(true, false);
    CAPTURE(ranks, tcp, shared);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            bound_model model(two_parts);
            auto trainer = make_trainer(model, comm, {.share_memory = shared});
            std::vector<std::pair<int, std::uint64_t>> heard;
            model.in_forward = [&] { heard.emplace_back(model.steps_begun, model.step_number); };
            trainer.step(numbers{{1}});
            trainer.forward(numbers{{1}});
            trainer.accumulate();
            trainer.forward(numbers{{2}});
            trainer.backward();
            trainer.finish();
            // a rank without samples runs no forward
            trainer.step(comm.rank() == 0 && comm.size() > 1 ? numbers{} : numbers{{1}});
            trainer.step(numbers{{1}});
            return heard;
        },
        patient());
    using list = std::vector<std::pair<int, std::uint64_t>>;
    if (ranks > 1) REQUIRE(got[0] == list{{1, 0}, {2, 1}, {2, 1}, {3, 3}});
    for (std::size_t rank = ranks > 1 ? 1 : 0; rank < got.size(); ++rank)
        REQUIRE(got[rank] == list{{1, 0}, {2, 1}, {2, 1}, {3, 2}, {4, 3}});
}

TEST_CASE("what was accumulated goes into a step without a batch, which is then not the last", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            bound_model model(two_parts);
            auto trainer = make_trainer(model, comm, options_of(sharded, false));
            if (comm.rank() == comm.size() - 1) {
                trainer.forward(numbers{{8}});
                trainer.accumulate();
            }
            bool const goes_on = trainer.join();
            bool const then = trainer.join();
            return goes_on && !then && trainer.completed_steps() == 1 && values(model) == std::array{-8.0, -16.0} &&
                   trainer.replicas_identical();
        },
        patient());
    CAPTURE(ranks, tcp, sharded);
    for (bool const right : got) REQUIRE(right);
}

TEST_CASE("ranks with different numbers of batches stop in the same call", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            bound_model model(two_parts);
            auto trainer = make_trainer(model, comm, options_of(comm.size() == 4, false));
            int calls = 0;
            for (bool going = true; going; ++calls) {
                if (calls <= 2 * comm.rank())
                    trainer.step(numbers{{1, 3}});
                else
                    going = trainer.join();
            }
            return std::tuple(calls, trainer.completed_steps(), values(model), trainer.replicas_identical());
        },
        patient());
    double const most = 2 * (ranks - 1) + 1;
    for (auto const& one : got)
        REQUIRE(one == std::tuple(static_cast<int>(most) + 1, static_cast<std::uint64_t>(most),
                                  std::array{-2 * most, -4 * most}, true));
}

TEST_CASE("the loss over all ranks' samples comes with the next step", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            double const r = comm.rank();
            bound_model model(two_parts);
            auto trainer = make_trainer(model, comm, options_of(comm.size() == 4, false));
            std::vector<double> seen;
            step_result const one = trainer.step(numbers{{r, r + 1, 5}});
            if (one.loss != (2 * r + 6) / 3) throw std::logic_error("not the mean over this rank's samples");
            seen.push_back(one.previous_loss);
            seen.push_back(trainer.step(comm.rank() == 0 ? numbers{{7}} : numbers{{}}).previous_loss);
            trainer.forward(numbers{{r}});
            trainer.accumulate();
            trainer.forward(numbers{{r + 1, 2}});
            trainer.backward();
            seen.push_back(trainer.finish().previous_loss);
            (void)trainer.forward(numbers{{100}});  // without its backward: for a look at the loss
            trainer.step(numbers{{r + 4}});
            seen.push_back(trainer.previous_loss());
            (void)trainer.forward(numbers{{100}});
            trainer.join();
            seen.push_back(trainer.previous_loss());
            trainer.step(numbers{{1}});
            seen.push_back(trainer.previous_loss());
            return seen;
        },
        patient());
    double first = 0, third = 0, fourth = 0;  // the mean over all samples, by hand
    for (double r = 0; r < ranks; ++r) {
        fourth += (r + 4) / ranks;
        first += (r + (r + 1) + 5) / (3 * ranks);
        third += (r + (r + 1) + 2) / (3 * ranks);
    }
    for (auto const& one : got) {
        REQUIRE(std::isnan(one[0]));
        REQUIRE(std::abs(one[1] - first) < 1e-13);
        REQUIRE(one[2] == 7);
        REQUIRE(std::abs(one[3] - third) < 1e-13);
        REQUIRE(std::abs(one[4] - fourth) < 1e-13);
        REQUIRE(std::isnan(one[5]));  // of a step without samples
        for (std::size_t i = 1; i < 5; ++i) REQUIRE(one[i] == got[0][i]);
    }
}

TEST_CASE("batches that are empty on every rank are an error on every rank, and training goes on", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            bound_model model(two_parts, 1);
            auto trainer = make_trainer(model, comm);
            errc code = errc::usage;
            std::string text;
            try {
                // Empty and absent batches together are the same mistake.
                if (comm.rank() == 1)
                    trainer.join();
                else
                    trainer.step(numbers{});
            } catch (error const& e) {
                code = e.code();
                text = e.what();
            }
            bool const unchanged = values(model) == std::array{1.0, 1.0} && trainer.completed_steps() == 0;
            trainer.step(numbers{{2}});
            bool const right = values(model) == std::array{-1.0, -3.0};
            // Nor do moments or the number of updates change.
            bound_model disturbed(two_parts), whole(two_parts);
            auto one = make_trainer(disturbed, comm, {}, adam{.lr = 0.1}),
                 other = make_trainer(whole, comm, {}, adam{.lr = 0.1});
            for (int step = 0; step < 3; ++step) {
                if (!contains(thrown_by([&] { one.step(numbers{}); }), "DDP-E104") || one.join()) return false;
                one.step(numbers{{1.0 + step}});
                other.step(numbers{{1.0 + step}});
                if (one.digest_of_values() != other.digest_of_values()) return false;
            }
            return unchanged && code == errc::no_samples && contains(text, "DDP-E104") && right;
        },
        patient());
    for (bool const right : got) REQUIRE(right);
}

TEMPLATE_TEST_CASE("where unused parameters are allowed, their gradient is zero or what was accumulated", "[train]",
                   bound_model, copied_model) {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true);
    if (ranks != 3 && sanitizers_leave_out("unused parameters", ranks)) return;
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            TestType model(parts<TestType>());
            training_options options = options_of(sharded, false);
            options.unused = unused::allowed;
            auto trainer = make_trainer(model, comm, options);
            std::vector<std::array<double, 2>> seen;
            model.leaves_out = [&](std::size_t i) { return i == 1 && comm.rank() > 0; };
            trainer.step(numbers{{4}});  // b only from rank 0
            seen.push_back(values(model));
            model.leaves_out = [](std::size_t i) { return i == 1; };
            trainer.step(numbers{{4}});  // b from nobody: a zero, and nothing left over from the step before
            seen.push_back(values(model));
            model.leaves_out = [](std::size_t) { return false; };
            trainer.forward(numbers{{4}});
            trainer.accumulate();
            model.leaves_out = [](std::size_t i) { return i == 1; };
            trainer.forward(numbers{{4}});
            trainer.backward();
            trainer.finish();  // b keeps what the first pass gave
            seen.push_back(values(model));
            model.leaves_out = [&](std::size_t i) { return i == 1 && comm.rank() + 1 < comm.size(); };
            trainer.forward(numbers{{4}});
            trainer.accumulate();
            model.leaves_out = [](std::size_t i) { return i == 1; };
            trainer.forward(numbers{{4}});
            trainer.backward();
            trainer.finish();  // b has what the last rank's first pass gave
            seen.push_back(values(model));
            if (!trainer.replicas_identical()) seen.clear();
            return seen;
        },
        patient());
    CAPTURE(ranks, tcp, sharded);
    for (auto const& seen : got) {
        REQUIRE(seen.size() == 4);
        double const p = ranks;
        std::array<double, 2> const expected[] = {{-4, -8 / p}, {-8, -8 / p}, {-12, -8 / p - 4}, {-16, -12 / p - 4}};
        for (std::size_t k = 0; k < 4; ++k)
            for (std::size_t i = 0; i < 2; ++i) REQUIRE(std::abs(seen[k][i] - expected[k][i]) < 1e-12);
    }
}

TEST_CASE("what no rank has used keeps its value and its optimizer's state; what one has used is stepped everywhere",
          "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const shares = GENERATE(true, false);
    constexpr std::size_t count = 70, each = 40;  // more parameters than bits in a word
    std::vector<bound_model::part> parts;
    for (std::size_t i = 0; i < count; ++i) parts.push_back({"p" + std::to_string(i), {each}});
    // In step s parameter i is used by the ranks r with (i + s + r) divisible by 5: of 4 ranks, one step in five by none.
    auto const uses = [](std::size_t i, std::size_t step, int rank) {
        return (i + step + static_cast<std::size_t>(rank)) % 5 == 0;
    };
    std::vector<double> value(count, 1.0), momentum(count), moved(count);
    for (std::size_t step = 0; step < 6; ++step)
        for (std::size_t i = 0; i < count; ++i) {
            double sum = 0;
            bool used = false;
            for (int r = 0; r < ranks; ++r)
                if (uses(i, step, r)) {
                    sum += static_cast<double>(i + 1) * (r + 1);
                    used = true;
                }
            if (!used) continue;
            double const gradient = sum / ranks + 0.125 * value[i];
            momentum[i] = moved[i] == 0 ? gradient : 0.5 * momentum[i] + gradient;
            moved[i] = 1;
            value[i] -= 0.0625 * momentum[i];
        }
    for (bool const sharded : {false, true})
        for (bool const clipped : {false, true}) {
            CAPTURE(ranks, tcp, shares, sharded, clipped);
            auto const got = ranks_over(
                tcp, ranks,
                [&](auto& comm) {
                    bound_model model(parts, 1.0);
                    training_options options = options_of(sharded, false);
                    if (clipped) options.clip = clip_by_global_norm{.max_norm = 1e9};  // a gate, and nothing else
                    options.share_memory = shares;
                    options.unused = unused::allowed;
                    auto trainer =
                        make_trainer(model, comm, options, sgd{.lr = 0.0625, .momentum = 0.5, .weight_decay = 0.125},
                                     any_allreduce{}, size_capped_buckets{.cap_bytes = 4096, .first_bytes = 1000});
                    for (std::size_t step = 0; step < 6; ++step) {
                        model.leaves_out = [&](std::size_t i) { return !uses(i, step, comm.rank()); };
                        trainer.step(numbers{{1.0 + comm.rank()}});
                    }
                    std::vector<double> all, state;
                    for (std::size_t i = 0; i < count; ++i) all.push_back(model.value(i)[each / 2]);
                    bool same = trainer.replicas_identical();
                    trainer.for_each_state([&](state_slice const& s) {
                        std::size_t const i = static_cast<std::size_t>(std::stoi(std::string(s.of.substr(1))));
                        for (double const m : s.as<double>()) same = same && std::abs(m - momentum[i]) < 1e-10;
                    });
                    return std::pair(all, same);
                },
                patient());
            for (auto const& [all, same] : got) {
                REQUIRE(same);
                for (std::size_t i = 0; i < count; ++i) REQUIRE(std::abs(all[i] - value[i]) < 1e-11);
            }
        }
}

TEMPLATE_TEST_CASE("rank 0's values go everywhere at the start, and values may be edited between steps", "[train]",
                   bound_model, copied_model) {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true);
    CAPTURE(ranks, tcp, sharded);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            TestType model(parts<TestType>(), 10 + comm.rank());
            auto trainer = make_trainer(model, comm, options_of(sharded, false));
            auto const start = values(model);
            trainer.step(numbers{{1}});
            model.value(0)[0] = 100;
            trainer.parameters()[1].value[0] = 200;  // the same memory, by another way
            trainer.step(numbers{{1}});
            return std::array{start, values(model), std::array{trainer.parameters()[0].value[0], model.value(0)[1]}};
        },
        patient());
    for (auto const& one : got)
        REQUIRE(one == std::array{std::array{10.0, 10.0}, std::array{99.0, 198.0}, std::array{99.0, 8.0}});
}

TEST_CASE("a bound model outlives its trainer, and another trainer goes on with it", "[train]") {
    auto const got = run_ranks(
        2,
        [](auto& comm) {
            bound_model model(two_parts);
            for (int i = 0; i < 3; ++i) {
                auto trainer = make_trainer(model, comm);
                trainer.step(numbers{{1}});
            }
            return values(model);
        },
        patient());
    for (auto const& one : got) REQUIRE(one == std::array{-3.0, -6.0});
}

TEST_CASE("a model may be gone before its trainer", "[train]") {
    run_ranks(
        2,
        [](auto& comm) {
            auto model = std::make_unique<bound_model>(two_parts);
            auto trainer = make_trainer(*model, comm);
            trainer.step(numbers{{1}});
            model.reset();
            (void)trainer.completed_steps();
        },
        patient());
}

TEST_CASE("two trainers take turns on one communicator", "[train]") {
    auto const got = run_ranks(
        3,
        [](auto& comm) {
            bound_model one(two_parts), two({{"c", {5}}, {"d", {7}}, {"e", {1}}});
            auto first = make_trainer(one, comm);
            auto second = make_trainer(two, comm, options_of(true, false));
            for (int i = 0; i < 20; ++i) {
                first.step(numbers{{1}});
                second.step(numbers{{2}});
                second.step(numbers{{2}});
            }
            return std::pair(values(one), values(two));
        },
        patient());
    for (auto const& one : got) REQUIRE(one == std::pair(std::array{-20.0, -40.0}, std::array{-80.0, -160.0}));
}

namespace {
/// Keeps the thread that drives for a while, in its first step on one rank, and says when it has it.
struct sluggish_sgd : sgd {
    std::atomic<bool>* begun;
    bool slow;
    template <class E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> state) const {
        begun->store(true);
        if (slow) std::this_thread::sleep_for(100ms);
        sgd::step(at, gradient, value, state);
    }
};
}  // namespace

TEST_CASE("steps of several trainers begin in the order of the calls, however late mail is collected", "[train]") {
    auto const got = run_ranks(
        2,
        [](auto& comm) {
            scripted_model<true, true> background({{"a", {3}}});
            bound_model one(two_parts), two({{"c", {5}}});
            std::atomic<bool> begun = false;
            data_parallel busy{background,
                               sluggish_sgd{{.lr = 1}, &begun, comm.rank() == 1},
                               comm,
                               {.update = update::replicated}};  // both ranks step
            auto first = make_trainer(one, comm);
            auto second = make_trainer(two, comm);
            for (int step = 0; step < 3; ++step) {
                begun = false;
                busy.forward(numbers{{1}});
                busy.backward();
                while (!begun) std::this_thread::sleep_for(1ms);
                // On rank 1 the thread that collects is in the optimizer from here on.
                first.forward(numbers{{2}});
                first.backward();
                if (comm.rank() == 0) std::this_thread::sleep_for(20ms);  // here it collects at once
                second.forward(numbers{{3}});
                second.backward();
                second.finish();
                first.finish();
                busy.finish();
            }
            return std::array{background.value(0)[0], one.value(0)[0], two.value(0)[0]};
        },
        patient());
    for (auto const& one : got) REQUIRE(one == std::array{-3.0, -6.0, -9.0});
}

TEST_CASE("the schedule goes by updates, not by calls", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    std::vector<schedule> const every = {
        constant_rate{},
        step_decay{.every = 1, .factor = 0.5},
        cosine_decay{.steps = 5, .floor = 0.1},
        polynomial_decay{.steps = 4, .power = 2, .floor = 0.125},
        exponential_decay{.factor = 0.75},
        one_cycle{.steps = 5, .rise = 0.4},
        schedule{linear_warmup{.steps = 2, .from = 0.5}, polynomial_decay{.steps = 3}}};
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            std::vector<std::vector<double>> all;
            for (schedule const& one : every) {
                bound_model model(two_parts);
                auto trainer = make_trainer(model, comm, {.schedule = one});
                for (int i = 0; i < 5; ++i) {
                    (void)thrown_by([&] { trainer.step(numbers{}); });  // nobody has samples: no update
                    trainer.step(numbers{std::vector<double>(static_cast<std::size_t>(comm.rank() + 1), 8)});
                    all.emplace_back(model.value(0).begin(), model.value(0).end());
                }
            }
            return all;
        },
        patient());
    std::vector<std::vector<double>> expected;  // one process: every sample's gradient is 8
    for (schedule const& one : every) {
        double value = 0;
        for (std::uint64_t k = 0; k < 5; ++k) expected.emplace_back(3, value -= 8 * one.factor(k));
    }
    for (auto const& one : got) {
        REQUIRE(one.size() == expected.size());
        for (std::size_t i = 0; i < one.size(); ++i)
            for (std::size_t j = 0; j < 3; ++j) CHECK(std::abs(one[i][j] - expected[i][j]) < 1e-12);
    }
    CHECK(expected[4] == std::vector(3, -40.0));
    CHECK(expected[9] == std::vector(3, -15.5));
}

TEST_CASE("clipping shortens the mean gradient of all parameters together, and says how long it was", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            bound_model model({{"a", {1}}, {"b", {3}}, {"empty", {0}}});
            training_options options = options_of(sharded, false);
            options.clip = clip_by_global_norm{.max_norm = 1};
            auto trainer = make_trainer(model, comm, options);
            // One rank alone has what makes the mean that long.
            double const norm = trainer.step(numbers{{comm.rank() == 0 ? 2.0 * comm.size() : 0}}).gradient_norm;
            return std::array{norm, model.value(0)[0], model.value(1)[2]};
        },
        patient());
    double const norm = std::sqrt(4 + 3 * 16.0);
    CAPTURE(ranks, tcp, sharded);
    for (auto const& one : got) {
        REQUIRE(one == got.front());
        REQUIRE(one[0] == Approx(norm));
        REQUIRE(one[1] == Approx(-2 / norm));
        REQUIRE(one[2] == Approx(-4 / norm));
    }
}

TEST_CASE("calls out of order are refused with advice, and the step under way is not harmed", "[train]") {
    auto const got = run_ranks(
        2,
        [](auto& comm) {
            bound_model model(two_parts);
            auto trainer = make_trainer(model, comm);
            std::vector<std::string> said;
            said.push_back(thrown_by([&] { trainer.finish(); }));
            trainer.forward(numbers{{1}});
            trainer.backward();
            said.push_back(thrown_by([&] { trainer.backward(); }));
            said.push_back(thrown_by([&] { trainer.accumulate(); }));
            said.push_back(thrown_by([&] { trainer.step(numbers{{1}}); }));
            std::string const figures = thrown_by([&] { (void)trainer.statistics(); });
            trainer.finish();
            said.push_back(values(model) == std::array{-1.0, -2.0} ? "right" : "wrong");
            model.whole = false;
            said.push_back(thrown_by([&] { trainer.forward(numbers{{1}}); }));
            said.push_back(thrown_by([&] { trainer.step(numbers{{1}}); }));
            said.push_back(figures);
            return said;
        },
        patient());
    for (auto const& said : got) {
        REQUIRE(contains(said[0], "finish(): no step is under way; call forward() and backward() first"));
        REQUIRE(contains(said[1], "a step is under way"));
        REQUIRE(contains(said[2], "before the synchronising backward()"));
        REQUIRE(contains(said[3], "a step is under way"));
        REQUIRE(said[4] == "right");
        REQUIRE(contains(said[5], "no longer the library's"));
        REQUIRE(contains(said[6], "no longer the library's"));
        REQUIRE(contains(said[7], "a step is under way: finish() it before its exchange's figures are looked at"));
    }
}

TEMPLATE_TEST_CASE("a trainer whose model has got another trainer is refused, and that one trains on", "[train]",
                   bound_model, copied_model) {
    auto const got = run_ranks(
        2,
        [](auto& comm) {
            TestType model(parts<TestType>()), other(parts<TestType>());
            auto first = make_trainer(model, comm), elsewhere = make_trainer(other, comm);
            first.step(numbers{{1}});
            std::vector<std::string> said;
            {
                auto second = make_trainer(model, comm);
                said.push_back(thrown_by([&] { first.forward(numbers{{1}}); }));
                said.push_back(thrown_by([&] { first.step(numbers{{1}}); }));
                second.step(numbers{{1}});
                elsewhere.step(numbers{{1}});
                said.push_back(values(model) == std::array{-2.0, -4.0} ? "right" : "wrong");
            }
            said.push_back(thrown_by([&] { first.step(numbers{{1}}); }));
            auto third = make_trainer(model, comm);
            third.step(numbers{{1}});
            said.push_back(values(model) == std::array{-3.0, -6.0} ? "right" : "wrong");
            return said;
        },
        patient());
    for (auto const& said : got) {
        for (std::size_t const i : {0u, 1u, 3u}) REQUIRE(contains(said[i], "DDP-E100"));
        for (std::size_t const i : {0u, 1u, 3u}) REQUIRE(contains(said[i], "another trainer was made for this model"));
        REQUIRE(said[2] == "right");
        REQUIRE(said[4] == "right");
    }
}

TEST_CASE("no buckets in flight are refused", "[train]") {
    auto const refusal_of = [](training_options const& options) {
        return thrown_by([&] { options.validate<double>(); });
    };
    REQUIRE(contains(refusal_of({.buckets_in_flight = 0}), "training_options.buckets_in_flight is 0"));
    REQUIRE(refusal_of({.buckets_in_flight = 1, .step_piece_bytes = 0}).empty());
}

TEST_CASE("parameters may all be empty, and buckets may be", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true), clipped = GENERATE(false, true), shared = GENERATE(true, false);
    CAPTURE(ranks, tcp, sharded, clipped, shared);
    training_options options = options_of(sharded, clipped);
    options.share_memory = shared;
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            bound_model nothing({{"a", {0}}, {"b", {2, 0}}}), something({{"a", {0}}, {"b", {1}}, {"c", {0}}});
            auto first = make_trainer(nothing, comm, options);
            auto second = make_trainer(something, comm, options);
            for (int i = 0; i < 3; ++i) {
                first.step(numbers{{1}});
                second.step(numbers{{0.1}});
            }
            bool const alike = first.replicas_identical() && second.replicas_identical();
            return std::tuple(first.completed_steps(), something.value(1)[0], alike);
        },
        patient());
    for (auto const& [steps, value, alike] : got) {
        REQUIRE(steps == 3);
        REQUIRE(value == Approx(-0.6));
        REQUIRE(alike);
    }
}

TEST_CASE("the model hears of every value that has changed", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const got = ranks_over(
        tcp, ranks,
        [](auto& comm) {
            bound_model model(two_parts);
            auto trainer = make_trainer(model, comm);
            auto const after_start = model.steps_seen;
            trainer.step(numbers{{1}});
            (void)thrown_by([&] { trainer.step(numbers{}); });  // changes nothing
            return std::pair(after_start, model.steps_seen);
        },
        patient());
    for (auto const& one : got) REQUIRE(one == std::pair(std::vector{1, 1}, std::vector{2, 2}));
}

TEST_CASE("times count the calls of step, and waiting is a part of them", "[train]") {
    auto const got = run_ranks(
        2,
        [](auto& comm) {
            bound_model model(two_parts);
            auto trainer = make_trainer(model, comm);
            for (int i = 0; i < 5; ++i) trainer.step(numbers{{1}});
            step_times const five = trainer.times();
            trainer.reset_times();
            step_times const none = trainer.times();
            return five.steps == 5 && five.waited.count() > 0 && five.total >= five.waited + five.stepped &&
                   none.steps == 0 && none.total.count() == 0 && none.waited.count() == 0 && none.stepped.count() == 0;
        },
        patient());
    for (bool const right : got) REQUIRE(right);
}

namespace {
constexpr auto a_step = 50ms;
struct slow_sgd : sgd {
    std::atomic<int>* calls;
    template <class E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> state) const {
        std::this_thread::sleep_for(a_step);
        sgd::step(at, gradient, value, state);
        calls->fetch_add(1);
    }
};
}  // namespace

TEST_CASE("the optimizer's time is not waiting, and counts only after backward has ended", "[train]") {
    for (int const ranks : {1, 2}) {
        auto const got = run_ranks(
            ranks,
            [](auto& comm) {
                bound_model model(two_parts);
                std::atomic<int> calls = 0;
                data_parallel trainer{model, slow_sgd{{}, &calls}, comm, {}, automatic_allreduce{}, single_bucket{}};
                std::vector<step_times> times;
                for (bool const elsewhere : {false, true, true}) {
                    trainer.reset_times();
                    trainer.forward(numbers{{1}});
                    int const before = calls;
                    trainer.backward();
                    auto const until = monotonic_clock::now() + 5s;
                    if (elsewhere && comm.size() > 1)  // the communication thread does it meanwhile
                        while (calls == before && monotonic_clock::now() < until) std::this_thread::sleep_for(1ms);
                    trainer.finish();
                    times.push_back(trainer.times());
                }
                return times;
            },
            patient());
        for (std::vector<step_times> const& times : got) {
            REQUIRE(times[0].stepped + times[0].waited >= a_step / 2);
            if (ranks == 1) REQUIRE(times[0].stepped >= a_step);
            for (std::size_t k : {1u, 2u}) {
                REQUIRE(times[k].waited >= 0ns);
                REQUIRE((times[k].stepped >= a_step) == (ranks == 1));
            }
        }
    }
}

namespace {
struct record {
    std::vector<std::array<std::size_t, 3>> reduced;  // step, bucket, bytes
    std::vector<step_finished> finished;
    bool times_make_sense = true;
};
struct recorder {
    record* into;
    void on(bucket_reduced const& event) const {
        into->reduced.push_back({static_cast<std::size_t>(event.step), event.bucket, event.bytes});
        into->times_make_sense = into->times_make_sense && event.elapsed.count() >= 0;
    }
    void on(step_finished const& event) const { into->finished.push_back(event); }
};
}  // namespace

TEST_CASE("the observer hears of every bucket and every step", "[train]") {
    int const ranks = GENERATE(1, 2);
    auto const got = run_ranks(
        ranks,
        [](auto& comm) {
            record seen;
            bound_model model({{"a", {8}}, {"b", {16}}});
            training_options options;
            options.clip = clip_by_global_norm{};
            double norm = 0;
            {
                data_parallel trainer{
                    model, sgd{.lr = 0.1}, comm, options, naive_allreduce{}, per_parameter_buckets{}, recorder{&seen}};
                norm = trainer.step(numbers{{1, 2}}).gradient_norm;
                (void)thrown_by([&] { trainer.step(numbers{}); });
                trainer.step(numbers{{1}});
            }
            return std::pair(seen, norm);
        },
        patient());
    for (auto const& [seen, norm] : got) {
        std::size_t const p = static_cast<std::size_t>(ranks);
        REQUIRE(seen.times_make_sense);
        REQUIRE(seen.reduced.size() == 4);  // none of the step that changed nothing
        std::array<std::size_t, 2> bytes{};
        for (auto const& [step, bucket, size] : seen.reduced) {
            REQUIRE((step == 1 || step == 3));
            bytes[bucket] += size;
        }
        REQUIRE(bytes == std::array<std::size_t, 2>{2 * 64, 2 * 128});
        REQUIRE(seen.finished.size() == 2);
        REQUIRE(seen.finished[0].step == 1);
        REQUIRE(seen.finished[0].weight == 2 * p);
        REQUIRE(seen.finished[0].gradient_norm == norm);
        REQUIRE(seen.finished[1].step == 3);
        REQUIRE(seen.finished[1].weight == p);
    }
}

namespace {
/// A bucket a parameter, of which the first comes first or last.
struct in_order {
    bool last;
    [[nodiscard]] bucket_plan plan(bucket_request const&) const {
        return {.cuts = {{1, 0}, {2, 0}},
                .launch = last ? std::vector<std::size_t>{2, 1, 0} : std::vector<std::size_t>{0, 2, 1}};
    }
};
/// Sums as naive_allreduce, and writes down how many elements each bucket has, as its exchange begins.
struct order_of_buckets {
    static constexpr char const* name = "order_of_buckets";
    static constexpr bool canonical = true;
    std::vector<std::size_t>* seen;
    template <Transport T, Number E>
    static task<> sum(order_of_buckets self, lane<T> over, std::span<E> data) {
        self.seen->push_back(data.size());
        return naive_allreduce::sum({}, over, data);
    }
};
}  // namespace

TEST_CASE("a bucket policy says in which order buckets travel, whatever order they fill in", "[train]") {
    auto const got = run_ranks(
        3,
        [](auto& comm) {
            std::vector<std::size_t> seen;
            for (bool const last : {true, false}) {
                bound_model model({{"a", {8}}, {"b", {16}}, {"c", {24}}});
                data_parallel trainer{model,
                                      sgd{.lr = 0.1},
                                      comm,
                                      training_options{.share_memory = false, .buckets_in_flight = 1},
                                      order_of_buckets{&seen},
                                      in_order{last}};
                for (int step = 0; step < 2; ++step) trainer.step(numbers{{1}});  // c is reported first
            }
            return seen;
        },
        patient());
    for (auto const& seen : got) CHECK(seen == std::vector<std::size_t>{24, 16, 8, 24, 16, 8, 8, 24, 16, 8, 24, 16});
}

namespace {
struct counter {
    int buckets = 0, steps = 0;
    counter() = default;
    counter(counter&&) = default;
    void on(bucket_reduced const&) { ++buckets; }
    void on(step_finished const&) { ++steps; }
};
/// An algorithm that says how often it was used.
struct counting_sum {
    static constexpr char const* name = "counting";
    static constexpr bool canonical = true;
    int* sums;
    template <Transport T, Element E>
    static task<> sum(counting_sum self, lane<T> over, std::span<E> data) {
        ++*self.sums;
        return naive_allreduce::sum(naive_allreduce{}, over, data);
    }
};
}  // namespace

TEST_CASE("policies come in any order, and an observer is moved in or stays the caller's", "[train]") {
    auto const right = run_ranks(
        2,
        [](auto& comm) {
            auto const digest_of = [&](auto&&... policies) {
                bound_model model({{"a", {8}}, {"b", {16}}}, 0.5);
                data_parallel trainer{model, sgd{.lr = 0.1, .momentum = 0.5}, comm, std::move(policies)...};
                for (int step = 0; step < 3; ++step) trainer.step(numbers{{1.0 + step, 2}});
                return trainer.digest_of_values();
            };
            training_options const options{.clip = clip_by_value{.limit = 0.5}};
            counter mine;
            int sums = 0;
            counting_sum const counting{&sums};
            std::uint64_t const expected = digest_of(options, counting, per_parameter_buckets{}, counter{});
            bool same = digest_of(counter{}, per_parameter_buckets{}, counting, options) == expected && sums == 12;
            same = same && digest_of(per_parameter_buckets{}, counting, options) == expected && sums == 18;
            same = same && digest_of(per_parameter_buckets{}, options, std::ref(mine)) == expected && sums == 18;
            bound_model model({{"a", {8}}, {"b", {16}}}, 0.5);
            data_parallel braces{model, sgd{.lr = 0.1}, comm, {.update = update::sharded}, std::ref(mine)};
            braces.step(numbers{{1}});
            return same && mine.steps == 4 && mine.buckets == 7 && digest_of() != expected;
        },
        patient());
    for (bool const each : right) REQUIRE(each);
}

namespace {
/// The least that an algorithm can be: it only adds.
struct only_sum {
    static constexpr char const* name = "only sum";
    static constexpr bool canonical = true;
    template <Transport T, Element E>
    static task<> sum(only_sum, lane<T> over, std::span<E> data) {
        return naive_allreduce::sum(naive_allreduce{}, over, data);
    }
};
}  // namespace

TEST_CASE("an algorithm that can only sum trains to the same bits, sharded too", "[train]") {
    bool const sharded = GENERATE(false, true), clipped = GENERATE(false, true);
    auto const got = run_ranks(
        3,
        [&](auto& comm) {
            task_data<float> const data(7, 3, 64);
            tanh_mlp<float> plain(7, 24, 3, 1), other(7, 24, 3, 1);
            data_parallel least{plain,      any_optimizer(adam{}),
                                comm,       options_of(sharded, clipped),
                                only_sum{}, any_buckets(per_parameter_buckets{})};
            data_parallel usual{other,
                                any_optimizer(adam{}),
                                comm,
                                options_of(sharded, clipped),
                                any_allreduce{},
                                any_buckets(size_capped_buckets{})};
            std::size_t const r = static_cast<std::size_t>(comm.rank());
            for (std::size_t step = 1; step < 6; ++step) {
                least.step(data.batch(3 * r, 3 * r + step));
                usual.step(data.batch(3 * r, 3 * r + step));
            }
            return least.digest_of_values() == usual.digest_of_values();
        },
        patient());
    for (bool const same : got) REQUIRE(same);
}

TEST_CASE("gradients may be reported from a thread of the model's own", "[train]") {
    auto const got = run_ranks(
        2,
        [](auto& comm) {
            bound_model model(two_parts);
            model.leaves_out = [](std::size_t i) { return i == 0; };
            auto trainer = make_trainer(model, comm);
            model.at_end = [&](auto const& ready) {
                std::jthread([&] {
                    for (double& g : trainer.parameters()[0].gradient) g = 5;
                    ready(0);
                });
            };
            for (int i = 0; i < 10; ++i) trainer.step(numbers{{1}});
            return values(model);
        },
        patient());
    for (auto const& one : got) REQUIRE(one == std::array{-50.0, -20.0});
}
