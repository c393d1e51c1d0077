// Trainings that are kept and resumed: the bits of those that nothing has disturbed.
#include <ddp/checkpoint/checkpoints.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/collective/barrier.hpp>
#include <ddp/exchange/narrow.hpp>
#include <ddp/optim/parameter_groups.hpp>
#include <ddp/strategy/averaging.hpp>
#include <ddp/strategy/local_parallel.hpp>
#include <ddp/strategy/outer_step.hpp>
#include <ddp/train/early_stopping.hpp>
#include <ddp/train/reduce_on_plateau.hpp>

#include "checkpoint/training.hpp"
#include "support/catch.hpp"
#include "support/no_room_for_stacks.hpp"
#include "support/on_ranks.hpp"
#include "support/sanitizers.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;
using ::test::scratch_directory;

namespace {

std::string in(scratch_directory const& scratch) {
    return (scratch.path() / "kept").string();
}

std::vector<std::pair<std::string, any_optimizer>> every_optimizer() {
    auto all = optimizers();
    all.emplace_back("lamb", lamb{.lr = 0.01, .weight_decay = 1e-2});
    all.emplace_back("lars", lars{.lr = 0.5, .momentum = 0.9, .weight_decay = 1e-2});
    return all;
}

/// One job trains and keeps step 5, which is in the middle of the second epoch; another, which began elsewhere, goes on to
/// step 11.
template <class Run>
std::vector<std::uint64_t> kept_and_resumed(Run const& run, kept_recipe const& by, checkpoint_options how = {}) {
    scratch_directory const scratch;
    run([&](auto& comm) {
        kept_training one(comm, by);
        checkpoints kept(in(scratch), how);
        if (kept.resume(one.trainer, one.batches)) return std::uint64_t{1};
        one.go_to(5);
        kept.save(one.trainer, one.batches, {{"loss", comm.rank() == 0 ? "0.5" : "0.25"}});  // rank 0's are kept
        one.go_to(7);  // saving has changed nothing, and what comes after it is forgotten
        kept.wait();
        return one.digest();
    });
    return run([&](auto& comm) {
        kept_recipe other = by;
        other.seed = 99;
        kept_training one(comm, other);
        one.go_to(2);  // a trainer that has a past
        checkpoints kept(in(scratch), how);
        auto const from = kept.resume(one.trainer, one.batches);
        if (!from || from->step != 5 || from->entries.at("loss") != "0.5" ||
            from->path != in(scratch) + "/step-000000000005" || one.trainer.completed_steps() != 5 ||
            one.batches.epoch() != 1 || one.batches.position() != 1)
            return std::uint64_t{2};
        return one.go_to(11).digest();
    });
}

}  // namespace

TEST_CASE("a training that is kept and resumed ends with the bits of one that was not disturbed",
          "[checkpoint][same_threads]") {
    int const ranks = GENERATE(1, 2, 3, 4);
    std::size_t number = 0;
    for (auto const& [name, optimizer] : every_optimizer())
        for (std::string const clipping : {"not", "by norm", "by value"}) {
            ++number;
            for (bool const sharded : {false, true}) {
                bool const both = name == "adam" || name == "lamb";
                if (!both && sharded == ((number + static_cast<std::size_t>(ranks)) % 2 == 0)) continue;
                // Each combination in memory and by messages, on one number of ranks or another; what is undisturbed in memory.
                bool const shared = (number / 2 + static_cast<std::size_t>(ranks) / 2) % 2 == 0;
                CAPTURE(ranks, name, sharded, clipping, shared);
                kept_recipe by{.optimizer = optimizer, .options = options_of(sharded, clipping == "by norm")};
                if (clipping == "by value") by.options.clip = clip_by_value{.limit = 0.01};
                auto const expected = undisturbed(ranks, by, 11);
                by.options.share_memory = shared;
                by.slice = number % 2 == 0 ? 0 : 7;  // gradients in ranges: what is undisturbed has them whole
                auto const got =
                    kept_and_resumed([&](auto const& body) { return run_ranks(ranks, body, patient()); }, by);
                REQUIRE(got == std::vector<std::uint64_t>(got.size(), expected));
            }
        }
}

TEST_CASE("the same over TCP, by messages and in shared memory, and written in the background", "[checkpoint]") {
    auto const every = every_optimizer();
    std::size_t number = 0;
    for (int const ranks : {1, 2, 3, 4})
        for (bool const memory : {false, true})
            for (bool const background : {false, true}) {
                auto const& [name, optimizer] = every[number++ % every.size()];
                CAPTURE(ranks, name, memory, background);
                kept_recipe by{.optimizer = optimizer, .options = options_of(number % 4 != 0, number % 2 != 0)};
                by.options.share_memory = memory;
                auto const expected = undisturbed(ranks, by, 11);
                by.slice = 5;
                auto const got = kept_and_resumed([&](auto const& body) { return on_ranks(ranks, body); }, by,
                                                  {.background = background});
                REQUIRE(got == std::vector<std::uint64_t>(got.size(), expected));
            }
}

TEST_CASE("values that still travel when a training is saved or resumed are those of the step", "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    for (bool const background : {false, true}) {
        CAPTURE(ranks, tcp, background);
        kept_recipe by{.optimizer = adam{.lr = 0.01}, .options = options_of(true, background)};
        auto const expected = undisturbed(ranks, by, 11);
        by.options.share_memory = false;
        by.options.overlap_gather = by.late = true;
        by.slice = 5;
        auto const got =
            kept_and_resumed([ranks, over = tcp](auto const& body) { return ranks_over(over, ranks, body, patient()); },
                             by, {.background = background});
        REQUIRE(got == std::vector<std::uint64_t>(got.size(), expected));
    }
}

namespace {

/// What a program may change between steps, here and there in a training.
template <class Training>
void go_to_with_changes(Training& one, std::uint64_t steps) {
    while (one.trainer.completed_steps() < steps) {
        std::uint64_t const step = one.trainer.completed_steps();
        if (step == 2) one.trainer.set_rate_factor(0.3);
        if (step == 3) one.trainer.freeze("w1");
        if (step == 4) one.trainer.unfreeze("b*");  // frozen from the start
        if (step == 8) one.trainer.unfreeze("w1");
        one.go_to(step + 1);
    }
}

}  // namespace

TEST_CASE("the learning rate's factor and what is frozen come back with a checkpoint, in another program's place",
          "[checkpoint]") {
    for (int const ranks : {1, 2, 3, 4})
        for (auto const& [sharded, tcp] :
             {std::pair(false, false), std::pair(false, true), std::pair(true, false), std::pair(true, true)}) {
            CAPTURE(ranks, sharded, tcp);
            kept_recipe by{.optimizer = sgd{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01},
                           .options = options_of(sharded, true)};
            by.options.frozen = {"b*"};
            auto const run = [ranks, over = tcp](auto const& body) { return ranks_over(over, ranks, body, patient()); };
            scratch_directory const scratch;
            auto const expected = run([&](auto& comm) {
                kept_training one(comm, by);
                go_to_with_changes(one, 5);
                checkpoints(in(scratch)).save(one.trainer, one.batches);
                go_to_with_changes(one, 11);
                return one.digest();
            });
            auto const resumed = [&](auto& comm) {
                kept_recipe other = by;
                other.seed = 99;
                other.options.frozen = {"b1", "w2"};
                kept_training one(comm, other);
                one.go_to(1);
                one.trainer.set_rate_factor(0.7);
                (void)checkpoints(in(scratch)).resume(one.trainer, one.batches);
                std::vector<std::string> frozen;
                for (std::size_t i = 0; i < one.trainer.frozen().size(); ++i)
                    if (one.trainer.frozen()[i] != 0) frozen.push_back(one.trainer.parameters()[i].name);
                return std::tuple(one.trainer.rate_factor(), frozen, [&] {
                    go_to_with_changes(one, 11);
                    return one.digest();
                }());
            };
            for (auto const& [factor, frozen, digest] : run(resumed)) {
                REQUIRE(factor == 0.3);
                REQUIRE(frozen == std::vector<std::string>{"w1"});
                REQUIRE(digest == expected.front());
            }

            // A trainer without such settings, or with other parameters, says so.
            ddp::detail::checkpoint_reader const reader(ddp::detail::checkpoint_directory(in(scratch)),
                                                        "step-000000000005", 0, 1);
            std::vector<std::string_view> const others{"w2", "b1"};
            REQUIRE(thrown_by([&] {
                        reader.expect_settings_for(false, true);
                    }).find("which this trainer cannot have") != std::string::npos);
            REQUIRE(thrown_by([&] {
                        (void)reader.frozen_among(others);
                    }).find("lists frozen parameter 'w1', which the model does not have") != std::string::npos);

            // What was written before there was anything about it leaves both as the program has them.
            auto const path = scratch.path() / "kept" / "step-000000000005" / "manifest.json";
            write_as_version(path, 1);
            REQUIRE(content_of(path).find("rate_factor") == std::string::npos);
            for (auto const& [factor, frozen, digest] : run(resumed)) {
                REQUIRE(factor == 0.7);
                REQUIRE(frozen == std::vector<std::string>{"b1", "w2"});
                REQUIRE(digest != 0);
            }
        }
}

TEST_CASE("a rate that falls by a metric falls after the same step, in the middle of its patience", "[checkpoint]") {
    auto const on = [](double loss) { return loss > 0 ? 1 / loss : 0; };  // never what was written in decimals
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    kept_recipe const by{.optimizer = adam{.lr = 0.01}};
    scratch_directory const scratch;
    auto const steps_to = [&](auto& one, reduce_on_plateau& plateau, early_stopping& stopping, std::uint64_t end) {
        std::vector<std::uint64_t> falls;
        while (one.trainer.completed_steps() < end) {
            std::uint64_t const step = one.trainer.completed_steps() + 1;
            one.go_to(step);
            // better until step 3, and worse from then on; rank 0's counts
            double const metric = on(one.comm.rank() == 0 ? (step < 4 ? 3.1 + static_cast<double>(step) : 0.7) : 0.1);
            plateau.update(one.comm, metric);
            stopping.update(one.comm, metric);
            if (plateau.reduced() || stopping.stopped()) falls.push_back(step * 2 + (stopping.stopped() ? 1 : 0));
            one.trainer.set_rate_factor(plateau.factor());
        }
        return falls;
    };
    reduce_on_plateau_options const how{.factor = 0.3, .patience = 2, .cooldown = 1};
    early_stopping_options const until{.patience = 5};
    auto const whole = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            kept_training one(comm, by);
            reduce_on_plateau plateau(how);
            early_stopping stopping(until);
            steps_to(one, plateau, stopping, 5);
            checkpoints(in(scratch))
                .save(one.trainer, one.batches, {{"plateau", plateau.text()}, {"stopping", stopping.text()}});
            auto const falls = steps_to(one, plateau, stopping, 12);
            return std::tuple(falls, one.digest(), plateau.text(), stopping.text());
        },
        patient());
    auto const resumed = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            kept_recipe other = by;
            other.seed = 99;
            kept_training one(comm, other);
            reduce_on_plateau plateau(how);
            early_stopping stopping(until);
            if (auto const from = checkpoints(in(scratch)).resume(one.trainer, one.batches)) {
                plateau.restore(from->entries.at("plateau"));
                stopping.restore(from->entries.at("stopping"));
            }
            auto const falls = steps_to(one, plateau, stopping, 12);
            return std::tuple(falls, one.digest(), plateau.text(), stopping.text());
        },
        patient());
    REQUIRE(resumed == whole);
    REQUIRE(resumed == std::vector(resumed.size(), resumed.front()));
    // down in step 6, the third that is no better, and again after one that is not counted; stop from step 8 on
    REQUIRE(std::get<0>(whole.front()) == std::vector<std::uint64_t>{12, 17, 19, 21, 23, 25});
}

TEST_CASE("steps go on counting where they were, and tell the loss of the step before the checkpoint", "[checkpoint]") {
    // Noise by the number of the step, steps that are skipped, a rate that falls by previous_loss, and at the end a rank whose
    // value is another: what follows from all of it is that of a training which nothing has disturbed.
    struct outcome {
        std::uint64_t begun = 0, digest = 0;
        std::vector<std::uint64_t> told, losses, falls;
        std::string different;
        [[nodiscard]] std::uint64_t finished_first() const {
            return *std::ranges::find_if(told, [](std::uint64_t step) { return step > 1000; });
        }
        bool operator==(outcome const&) const = default;
    };
    auto const bits = [](double loss) { return std::isnan(loss) ? 1 : std::bit_cast<std::uint64_t>(loss); };
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = ranks % 2 == 0;
    CAPTURE(ranks, tcp, sharded);
    kept_recipe by{.optimizer = adam{.lr = 0.01}, .options = options_of(sharded, false), .noise = true, .poison = true};
    by.options.nonfinite = nonfinite::skip;
    by.options.agreement_steps = 4;
    by.options.share_memory = tcp || ranks == 3;
    scratch_directory const scratch;
    auto const go_on = [&](auto& one, reduce_on_plateau& plateau, std::uint64_t end) {
        outcome all;
        one.noise.steps.clear();
        while (one.trainer.completed_steps() < end) {
            one.go_to(one.trainer.completed_steps() + 1);
            all.losses.push_back(bits(one.last.previous_loss));
            plateau.update(one.comm, one.last.previous_loss);
            if (plateau.reduced()) all.falls.push_back(one.trainer.completed_steps());
            one.trainer.set_rate_factor(plateau.factor());
        }
        all.begun = one.trainer.progress().begun_steps;
        all.digest = one.digest();
        all.told = one.noise.steps;
        return all;
    };
    auto const differs = [&](auto& one, outcome& all) {
        if (one.comm.size() == 1) return;
        if (one.comm.rank() == 1) one.model.value(0)[5] += 1;
        all.different = thrown_by([&] { one.go_to(one.trainer.completed_steps() + 8); });
    };
    reduce_on_plateau_options const how{.factor = 0.5, .patience = 0, .threshold = 0.02};
    auto const run = [&](auto const& body) { return ranks_over(tcp, ranks, body, patient()); };
    captured_stderr said(scratch);
    auto const whole = run([&](auto& comm) {
        kept_training one(comm, by);
        reduce_on_plateau plateau(how);
        (void)go_on(one, plateau, 4);
        std::string const falling = plateau.text();
        std::uint64_t const before = bits(one.trainer.previous_loss());
        checkpoints(in(scratch)).save(one.trainer, one.batches, {{"plateau", falling}});
        auto all = go_on(one, plateau, 14);
        differs(one, all);
        return std::pair(all, before);
    });
    auto const resumed = run([&](auto& comm) {
        kept_recipe other = by;
        other.seed = 99;
        kept_training one(comm, other);
        reduce_on_plateau plateau(how), unused(how);
        (void)go_on(one, unused,
                    2 + static_cast<std::uint64_t>(ranks) % 3 * 3);  // a trainer that has a past, or 8 steps of it
        if (auto const from = checkpoints(in(scratch)).resume(one.trainer, one.batches))
            plateau.restore(from->entries.at("plateau"));
        std::uint64_t const before = bits(one.trainer.previous_loss());
        auto all = go_on(one, plateau, 14);
        differs(one, all);
        return std::pair(all, before);
    });
    REQUIRE(resumed == whole);
    outcome const& all = whole.front().first;
    REQUIRE(all.digest != 0);
    REQUIRE(all.begun == 14 + 4);  // in each epoch of four steps one was skipped
    REQUIRE(all.told.back() == 1000 + all.begun);
    REQUIRE_FALSE(all.falls.empty());
    REQUIRE(all.losses.front() != bits(std::nan("")));
    if (ranks > 1 && !sharded) REQUIRE(all.different.find("DDP-E106") == 0);

    // The same on another number of ranks; before version 3 it was not known.
    auto const first = run_ranks(
        2,
        [&](auto& comm) {
            kept_training one(comm, by);
            (void)checkpoints(in(scratch)).resume(one.trainer, one.batches);
            double const loss = one.go_to(5).last.previous_loss;
            return std::pair(loss, one.noise.steps.back());
        },
        patient());
    for (auto const& [loss, step] : first) {
        REQUIRE(bits(loss) == all.losses.front());
        REQUIRE(step == all.finished_first());
    }
    write_as_version(scratch.path() / "kept" / "step-000000000004" / "manifest.json", 2);
    auto const older = run_ranks(
        1,
        [&](auto& comm) {
            kept_training one(comm, by);
            one.go_to(3);
            (void)checkpoints(in(scratch)).resume(one.trainer, one.batches);
            training_progress const at = one.trainer.progress();
            return at.begun_steps == 4 && at.completed_steps == 4 && std::isnan(one.go_to(5).last.previous_loss);
        },
        patient());
    REQUIRE(older == std::vector<bool>{true});
}

TEST_CASE("counters are restored from what they have written, and from nothing else", "[checkpoint]") {
    reduce_on_plateau plateau;
    early_stopping stopping;
    std::string const before = plateau.text();
    CHECK(before == "reduce_on_plateau best=inf factor=1p+0 bad=0 cooling=0 updates=0 reduced=0");
    for (std::string const& wrong : {std::string(), stopping.text(), before + " ", before.substr(0, before.size() - 1),
                                     std::string("reduce_on_plateau best=inf factor=0.1 bad=-1")})
        CHECK(thrown_by([&] { plateau.restore(wrong); }).find("reduce_on_plateau: cannot restore from ") !=
              std::string::npos);
    for (std::string const wrong : {"best=nan factor=1p+0", "best=inf factor=1.8p+0", "best=inf factor=-1p+0"})
        CHECK(thrown_by([&] {
                  plateau.restore("reduce_on_plateau " + wrong + " bad=0 cooling=0 updates=0 reduced=0");
              }).find("a factor lies in [0, 1], and a best metric is a number") != std::string::npos);
    CHECK(thrown_by([&] {
              stopping.restore("early_stopping best=1p+0 best_update=3 updates=2");
          }).find("best_update is at most updates") != std::string::npos);
    CHECK(plateau.text() == before);
}

TEST_CASE("what an exchange keeps on each rank is kept for that rank; another number of ranks begins without",
          "[checkpoint]") {
    for (int const ranks : {1, 2, 3, 4})
        for (bool const sharded : {false, true}) {
            kept_recipe const by{.options = options_of(sharded, false), .rounded = true};
            auto const expected = undisturbed(ranks, by, 11);
            for (bool const tcp : {false, true}) {
                CAPTURE(ranks, sharded, tcp);
                auto const got =
                    kept_and_resumed([&](auto const& body) { return ranks_over(tcp, ranks, body, patient()); }, by);
                REQUIRE(got == std::vector<std::uint64_t>(got.size(), expected));
            }
        }
    scratch_directory const scratch;
    captured_stderr said(scratch);
    kept_recipe const by{.rounded = true};
    auto const sum_of_residuals = [](auto& one) {
        double sum = 0;
        one.trainer.for_each_state([&](state_slice const& s) {
            if (s.per_rank)
                for (float const x : s.as<float>()) sum += std::abs(static_cast<double>(x));
        });
        return sum;
    };
    auto const kept_sum = run_ranks(
        3,
        [&](auto& comm) {
            kept_training one(comm, by);
            checkpoints(in(scratch)).save(one.go_to(3).trainer, one.batches);
            return sum_of_residuals(one);
        },
        patient());
    for (double const sum : kept_sum) REQUIRE(sum > 0);
    auto const sums = run_ranks(
        2,
        [&](auto& comm) {
            kept_training one(comm, by);
            one.go_to(2);
            (void)checkpoints(in(scratch)).resume(one.trainer, one.batches);
            double const sum = sum_of_residuals(one);
            return one.go_to(5).digest() == 0 ? -1 : sum;
        },
        patient());
    REQUIRE(sums == std::vector<double>{0, 0});
    REQUIRE(said.text() == "ddp: " + in(scratch) +
                               "/step-000000000003: was written by 3 ranks: state that each rank has for itself begins "
                               "at zero\n");
}

namespace {
/// Two buckets, cut behind w1, or within.
struct recut_buckets {
    bool within = false;
    [[nodiscard]] bucket_plan plan(bucket_request const&) const {
        return {.cuts = {within ? bucket_cut{0, 80} : bucket_cut{1, 0}}};
    }
};
}  // namespace

TEST_CASE("exchanges that draw go on to the same bits, and with another bucket plan they continue, too",
          "[checkpoint]") {
    for (std::string const exchange : {"random_k", "power_sgd"})
        for (int const ranks : {1, 2, 3, 4}) {
            CAPTURE(exchange, ranks);
            kept_recipe const by{.options = options_of(ranks == 3, false),
                                 .buckets = size_capped_buckets{.cap_bytes = 2048, .first_bytes = 128},
                                 .sends_less = exchange};
            auto const expected = undisturbed(ranks, by, 11);
            for (bool const tcp : {false, true}) {
                auto const got =
                    kept_and_resumed([&](auto const& body) { return ranks_over(tcp, ranks, body, patient()); }, by);
                REQUIRE(got == std::vector<std::uint64_t>(got.size(), expected));
            }
            if (ranks % 2 == 0) continue;
            scratch_directory const scratch;
            run_ranks(
                ranks,
                [&](auto& comm) {
                    kept_training one(comm, by);
                    checkpoints(in(scratch)).save(one.go_to(3).trainer, one.batches);
                    return 0;
                },
                patient());
            struct cut {
                any_buckets buckets;
                std::string missing;  // of the state
            };
            for (cut const& other_cut :
                 std::vector<cut>{{per_parameter_buckets{}, ""},
                                  {recut_buckets{}, ""},
                                  {recut_buckets{.within = true}, "w1/power_sgd_q_from_row_12"}}) {
                captured_stderr said(scratch);
                // What a trainer resumes with is what the checkpoint has of each element; a Q that it does not have is zero.
                auto const recut = run_ranks(
                    ranks,
                    [&](auto& comm) {
                        kept_recipe whole = by;
                        whole.options = options_of(false, false);  // all state is on this rank
                        kept_recipe other = whole;
                        other.buckets = other_cut.buckets;
                        kept_training one(comm, other), two(comm, other), saved(comm, whole);
                        one.go_to(4);  // a Q that is not zero
                        for (auto* const training : {&one, &saved})
                            if (!checkpoints(in(scratch)).resume(training->trainer, training->batches))
                                throw std::logic_error("nothing was found");
                        std::map<std::string, std::vector<std::byte>> state;
                        saved.trainer.for_each_state([&](state_slice const& s) {
                            auto& all = state[std::string(s.of) + "/" + std::string(s.name)];
                            all.resize(std::max(all.size(), s.begin * bits_of(s.type) / 8 + s.bytes.size()));
                            std::ranges::copy(s.bytes,
                                              all.begin() + static_cast<std::ptrdiff_t>(s.begin * bits_of(s.type) / 8));
                        });
                        for (std::size_t i = 0; i < two.trainer.parameters().size(); ++i)
                            std::ranges::copy(saved.trainer.parameters()[i].value,
                                              two.trainer.parameters()[i].value.begin());
                        std::string missing;
                        two.trainer.for_each_state([&](state_slice const& s) {
                            std::string const key = std::string(s.of) + "/" + std::string(s.name);
                            if (!state.contains(key)) {
                                missing += key;
                                if (!s.optional) missing += ", which is not optional";
                                return;
                            }
                            std::copy_n(state[key].begin() + static_cast<std::ptrdiff_t>(s.begin * bits_of(s.type) / 8),
                                        s.bytes.size(), s.bytes.begin());
                        });
                        two.trainer.set_completed_steps(3);
                        two.batches.seek(one.batches.epoch(), one.batches.position());
                        return std::tuple(one.go_to(8).digest(), two.go_to(8).digest(), missing);
                    },
                    patient());
                std::string const missing = exchange == "power_sgd" ? other_cut.missing : "";
                for (auto const& [resumed, by_hand, found_missing] : recut) {
                    REQUIRE(resumed != 0);
                    REQUIRE(resumed == std::get<0>(recut.front()));
                    REQUIRE(resumed == by_hand);
                    REQUIRE(found_missing == missing);
                }
                REQUIRE(said.text() ==
                        (missing.empty() ? std::string()
                                         : "ddp: " + in(scratch) +
                                               "/step-000000000003: was written with another bucket plan: state of the "
                                               "exchange that it does not have for this one begins at zero\n"));
            }
        }
}

namespace {

/// Elements of all state, by (parameter, slot), put together from what ranks hold; with it the values.
using whole_state = std::map<std::pair<std::string, std::string>, std::vector<double>>;

template <class Training>
whole_state state_of(Training& one) {
    whole_state all;
    for (auto const& p : one.trainer.parameters()) all[{p.name, ""}].assign(p.value.begin(), p.value.end());
    one.trainer.for_each_state([&](state_slice const& s) {
        auto& into = all[{std::string(s.of), std::string(s.name)}];
        std::size_t count = 1;
        for (std::size_t const extent : s.shape) count *= extent;
        into.resize(count);
        auto const values = s.as<double>();
        std::copy(values.begin(), values.end(), into.begin() + static_cast<std::ptrdiff_t>(s.begin));
    });
    return all;
}
/// Where ranks hold parts, the others are zero.
whole_state put_together(std::vector<whole_state> const& ranks) {
    whole_state all = ranks.front();
    for (whole_state const& rank : ranks)
        for (auto const& [key, values] : rank) {
            auto& into = all[key];
            into.resize(values.size());
            for (std::size_t i = 0; i < values.size(); ++i)
                if (values[i] != 0) into[i] = values[i];
        }
    return all;
}
/// The largest difference between two of the same things.
double distance(whole_state const& a, whole_state const& b) {
    double most = 0;
    for (auto const& [key, values] : a)
        for (std::size_t i = 0; i < values.size(); ++i) most = std::max(most, std::abs(values[i] - b.at(key).at(i)));
    return most;
}

}  // namespace

TEST_CASE(
    "another number of ranks, update policy, bucket plan, transport, group and hosts find exactly the same state, and "
    "go on alike",
    "[checkpoint][same_threads]") {
    struct side {
        int ranks;
        bool sharded;
        any_buckets buckets;
        bool tcp = false, memory = true;
        bool group = false;    // of a job with a rank more, which comes first
        placement hosts = {};  // where it is not one
    };
    std::vector<side> const sides = {
        {2, true, size_capped_buckets{.cap_bytes = 1024, .first_bytes = 256}, false, false},
        {3, true, size_capped_buckets{.cap_bytes = 512, .first_bytes = 128}, true},
        {3, false, single_bucket{}},
        {1, false, per_parameter_buckets{}},
        {3, false, size_capped_buckets{.cap_bytes = 700, .first_bytes = 64}, true, false},
        {4, true, scrambled_buckets{}, true},
        {3, true, size_capped_buckets{.cap_bytes = 512, .first_bytes = 128}, true, true, true},
        {3, false, single_bucket{}, false, true, true},
        {4, false, per_parameter_buckets{}, false, true, false, {7, 4, 7, 4}},
        {4, true, scrambled_buckets{}, false, true, false, {7, 4, 4, 7}},
        {3, true, size_capped_buckets{.cap_bytes = 700, .first_bytes = 64}, false, false, false, {7, 7, 4}}};
    using training = kept_training<communicator<>, double>;
    auto const every = every_optimizer();
    auto const recipe = [](side const& s, any_optimizer const& optimizer, bool clipped) {
        kept_recipe by{.optimizer = optimizer, .options = options_of(s.sharded, clipped), .buckets = s.buckets};
        by.options.share_memory = s.memory;
        return by;
    };
    using two_states = std::pair<whole_state, whole_state>;  // at step 5, at step 8
    auto const both = [](std::vector<two_states> const& ranks) {
        std::vector<whole_state> first, last;
        for (auto const& [a, b] : ranks)
            if (!a.empty()) first.push_back(a), last.push_back(b);
        return two_states(put_together(first), put_together(last));
    };
    auto const on = [](side const& s, auto const& body) {
        if (!s.hosts.empty()) return on_hosts(s.hosts, body, patient());
        if (!s.group) return ranks_over(s.tcp, s.ranks, body, patient());
        return ranks_over(
            s.tcp, s.ranks + 1,
            [&](communicator<>& comm) {
                communicator<> rest = comm.split(comm.rank() > 0 ? 1 : 0, comm.rank());
                return comm.rank() > 0 ? body(rest) : two_states();
            },
            patient());
    };
    for (std::size_t from = 0; from < sides.size(); ++from)
        for (std::size_t to = 0; to < sides.size(); ++to) {
            if ((from + to) % 3 != 0 && sanitizers_leave_out("two of three pairs of sides")) continue;
            auto const& [name, optimizer] = every[(from + to) % every.size()];
            bool const clipped = (from + 2 * to) % 4 < 2, changed = (2 * from + to) % 3 == 0;
            CAPTURE(from, to, name, clipped, changed);
            scratch_directory const scratch;
            auto const undisturbed = both(on(sides[from], [&, &by_this = optimizer](communicator<>& comm) {
                training one(comm, recipe(sides[from], by_this, clipped));
                one.go_to(3);
                if (changed) one.trainer.freeze("w1");
                if (changed) one.trainer.set_rate_factor(0.7);
                one.go_to(5);
                checkpoints(in(scratch)).save(one.trainer, one.batches);
                whole_state const kept = state_of(one);
                return two_states(kept, state_of(one.go_to(8)));
            }));
            auto const resumed = both(on(sides[to], [&, &by_this = optimizer](communicator<>& comm) {
                training one(comm, recipe(sides[to], by_this, clipped));
                one.go_to(1);
                if (!checkpoints(in(scratch)).resume(one.trainer, one.batches))
                    throw std::logic_error("nothing was found");
                whole_state const found = state_of(one);
                if (one.go_to(8).digest() == 0) throw std::logic_error("ranks differ");
                return two_states(found, state_of(one));
            }));
            REQUIRE(resumed.first == undisturbed.first);
            REQUIRE(distance(undisturbed.first, undisturbed.second) > 1e-3);
            if (sides[from].ranks == sides[to].ranks)
                REQUIRE(resumed.second == undisturbed.second);
            else
                REQUIRE(distance(resumed.second, undisturbed.second) < 1e-13);
        }
}

TEST_CASE("with a sharded update every rank writes its own part, with a replicated one rank 0 writes all",
          "[checkpoint]") {
    bool const sharded = GENERATE(false, true);
    scratch_directory const scratch;
    run_ranks(
        3,
        [&](auto& comm) {
            kept_training one(comm, {.options = options_of(sharded, false)});
            one.go_to(1);
            checkpoints(in(scratch)).save(one.trainer, one.batches);
            return 0;
        },
        patient());
    std::vector<std::string> expected{"manifest.json", "shard-00000-of-00003.safetensors"};
    if (sharded) {
        expected.emplace_back("shard-00001-of-00003.safetensors");
        expected.emplace_back("shard-00002-of-00003.safetensors");
    }
    REQUIRE(names_in(scratch.path() / "kept" / "step-000000000001") == expected);
    std::map<std::string, std::size_t> elements;
    for (std::size_t r = 0; r + 1 < expected.size(); ++r) {
        safetensors_file const file((scratch.path() / "kept" / "step-000000000001" / expected[r + 1]).string());
        for (tensor_info const& t : file.tensors()) {
            REQUIRE((r == 0 || !t.name.starts_with("model/")));
            elements[t.name.substr(0, t.name.find('['))] += (t.end - t.begin) / sizeof(float);
        }
    }
    REQUIRE(elements == std::map<std::string, std::size_t>{{"model/b1", 24},
                                                           {"model/b2", 3},
                                                           {"model/none", 0},
                                                           {"model/w1", 168},
                                                           {"model/w2", 72},
                                                           {"state/b1/momentum", 24},
                                                           {"state/b2/momentum", 3},
                                                           {"state/w1/momentum", 168},
                                                           {"state/w2/momentum", 72}});
}

TEST_CASE("so many of the newest checkpoints stay, and nothing else is touched", "[checkpoint]") {
    scratch_directory const scratch;
    std::filesystem::path const kept_in = scratch.path() / "kept";
    std::filesystem::create_directories(kept_in / "step-000000000002.tmp");  // of a job that was killed
    put_content(kept_in / "step-000000000002.tmp" / "shard-00000-of-00009.safetensors", "half");
    put_content(kept_in / "latest.77.0.tmp", "step");
    put_content(kept_in / "notes.txt", "mine");
    std::filesystem::create_directories(kept_in / "step-7");
    std::filesystem::create_directories(kept_in / "step-000000000900");  // of a future that was given up
    run_ranks(
        2,
        [&](auto& comm) {
            kept_training one(comm, {});
            checkpoints kept(in(scratch), {.keep = 2});
            for (std::uint64_t const step : {1u, 2u, 2u, 3u, 5u}) {
                one.go_to(step);
                kept.save(one.trainer, one.batches, {{"step", std::to_string(step)}});
                if (kept.resume(one.trainer, one.batches)->step != step) throw std::logic_error("another one");
            }
            return 0;
        },
        patient());
    REQUIRE(names_in(kept_in) == std::vector<std::string>{"latest", "notes.txt", "step-000000000003",
                                                          "step-000000000005", "step-000000000900", "step-7"});
    REQUIRE(content_of(kept_in / "latest") == "step-000000000005\n");

    std::filesystem::create_directories(kept_in / "step-000000000003" / "mine");
    captured_stderr said(scratch);
    run_ranks(
        1,
        [&](auto& comm) {
            kept_training one(comm, {});
            for (std::uint64_t const step : {6u, 7u})  // what cannot be removed does not stop the next one
                checkpoints(in(scratch), {.keep = 2}).save(one.go_to(step).trainer, one.batches);
            return 0;
        },
        patient());
    std::string const text = said.text();
    CAPTURE(text);
    REQUIRE(text.find("ddp: an older checkpoint cannot be removed: DDP-E301 file: " + in(scratch) +
                      "/step-000000000003.tmp/mine: cannot be removed") == 0);
    REQUIRE(content_of(kept_in / "latest") == "step-000000000007\n");
}

TEST_CASE("a checkpoint of the same step is replaced", "[checkpoint]") {
    scratch_directory const scratch;
    auto const got = run_ranks(
        2,
        [&](auto& comm) {
            kept_training one(comm, {});
            checkpoints kept(in(scratch), {.keep = 1});
            one.go_to(2);
            kept.save(one.trainer, {{"which", "first"}});
            kept.save(one.trainer, {{"which", "second"}});
            return kept.resume(one.trainer)->entries.at("which");
        },
        patient());
    REQUIRE(got == std::vector<std::string>{"second", "second"});
    REQUIRE(names_in(scratch.path() / "kept") == std::vector<std::string>{"latest", "step-000000000002"});

    // Settings may be others: those of the trainer that goes on hold.
    auto const goes_on = run_ranks(
        2,
        [&](auto& comm) {
            kept_recipe other{.optimizer = sgd{.lr = 0, .momentum = 0.5}, .options = options_of(true, true)};
            other.options.agreement_steps = 4;
            kept_training one(comm, other), plain(comm, {});
            if (!checkpoints(in(scratch)).resume(one.trainer) || !checkpoints(in(scratch)).resume(plain.trainer))
                throw std::logic_error("nothing was found");
            std::uint64_t const found = one.digest();
            return std::array{found == plain.digest(), one.go_to(3).digest() == found,
                              plain.go_to(3).digest() != found};
        },
        patient());
    for (auto const& one : goes_on) REQUIRE(one == std::array{true, true, true});
}

namespace {

/// A model whose buffers and names are not the simplest.
struct odd_model : scripted_model<> {
    using scripted_model<>::scripted_model;
    std::int64_t batches = 0;
    std::vector<model_buffer> buffers() { return {{"batches", element_type::i64, {}, bytes_of(batches)}}; }
};
std::vector<odd_model::part> const odd_parts = {
    {"a/b", {2, 3}, {1, 2}}, {"a", {4}},          {"50%[1:2]", {5}}, {"none", {0}},
    {"\u00e9 \" \\", {1}},   {"two\nlines", {2}}, {"t*", {1}}};

}  // namespace

TEST_CASE("buffers, memory that is not row-major and names with any characters are kept", "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    scratch_directory const scratch;
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            odd_model net(odd_parts, 1.0);
            data_parallel trainer{net, sgd{.lr = 0.1, .momentum = 0.9}, comm, {.update = update::sharded}};
            trainer.step(numbers{{1.0}});
            net.batches = 10 + comm.rank();
            trainer.set_frozen(
                std::vector<std::uint8_t>{1, 0, 0, 0, 1, 0, 1});  // patterns cannot say that: t* fits another
            std::vector<std::uint8_t> const odd(7, comm.rank() == 1 ? 1 : 0);
            std::string const refused = comm.size() > 1 ? thrown_by([&] { trainer.set_frozen(odd); }) : std::string();
            bool const said =
                refused.find("set_frozen: ranks pass different marks; nothing was changed") != refused.npos;
            if (said != (comm.size() > 1)) return false;
            for (std::size_t i = 0; i < 6; ++i) net.value(0)[i] = static_cast<double>(i);
            std::uint64_t const before = trainer.digest_of_values();
            checkpoints kept(in(scratch));
            kept.save(trainer, {{"", "\n\t\"\\\u00e9"}, {"empty", ""}});
            trainer.step(numbers{{3.0}});
            std::uint64_t const beyond = trainer.digest_of_values();
            net.batches = 0;
            trainer.unfreeze("*");
            auto const from = kept.resume(trainer);
            if (trainer.digest_of_values() != before || net.batches != 10) return false;
            if (!std::ranges::equal(trainer.frozen(), std::vector<int>{1, 0, 0, 0, 1, 0, 1})) return false;
            trainer.step(numbers{{3.0}});
            return trainer.digest_of_values() == beyond && from->entries.at("") == "\n\t\"\\\u00e9" &&
                   from->entries.at("empty").empty() && from->entries.size() == 2;
        },
        patient());
    for (bool const right : got) REQUIRE(right);
}

TEST_CASE("buffers that each rank has for itself are kept for that rank; another number of ranks begins with rank 0's",
          "[checkpoint]") {
    bool const local = GENERATE(false, true);
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(local, ranks, tcp);
    scratch_directory const scratch;
    // What each rank has after `steps` steps, and after it has resumed.
    auto const go = [&, over = tcp](int of, buffers policy, int steps) {
        return ranks_over(
            over, of,
            [&](auto& comm) {
                odd_model net(odd_parts, 1.0);
                auto const with = [&](auto trainer) {
                    for (int step = 0; step < steps; ++step) trainer->step(numbers{{1.0}});
                    net.batches = 10 + comm.rank();
                    if (steps == 2) checkpoints(in(scratch)).save(*trainer);
                    net.batches = -7;
                    return checkpoints(in(scratch)).resume(*trainer) ? net.batches : std::int64_t{0};
                };
                if (!local) {
                    training_options const options{.buffers = policy};
                    using made = decltype(data_parallel{net, sgd{.lr = 0.1}, comm, options});
                    return with(std::make_unique<made>(net, sgd{.lr = 0.1}, comm, options));
                }
                local_options const options{.buffers = policy};
                using made = decltype(local_parallel{net, sgd{.lr = 0.1}, comm, local_sgd{.period = 1}, options});
                return with(std::make_unique<made>(net, sgd{.lr = 0.1}, comm, local_sgd{.period = 1}, options));
            },
            patient());
    };
    using all = std::vector<std::int64_t>;
    all const rank_0s(static_cast<std::size_t>(ranks), 10);
    all own = rank_0s;
    for (std::size_t rank = 0; rank < own.size(); ++rank) own[rank] += static_cast<std::int64_t>(rank);
    int const others = ranks == 1 ? 2 : ranks - 1;
    captured_stderr said(scratch);
    CHECK(go(ranks, buffers::left_alone, 2) == own);
    CHECK(go(ranks, buffers::left_alone, 0) == own);
    CHECK(go(ranks, buffers::left_alone, 1) == own);
    CHECK(go(ranks, buffers::averaged, 1) == rank_0s);
    CHECK(go(others, buffers::left_alone, 1) == all(static_cast<std::size_t>(others), 10));
    // What was kept where ranks have the same is rank 0's everywhere.
    CHECK(go(ranks, buffers::from_rank_0, 2) == rank_0s);
    CHECK(go(ranks, buffers::left_alone, 1) == rank_0s);
    CHECK(go(ranks, buffers::from_rank_0_at_evaluation, 2) == (local ? rank_0s : own));
    std::string const by_others = "ddp: " + in(scratch) + "/step-000000000002: was written by " +
                                  std::to_string(ranks) + (ranks == 1 ? " rank: " : " ranks: ");
    auto const changed = [&](char const* then, char const* now) {
        return "ddp: " + in(scratch) +
               "/step-000000000002: the training continues with other settings:\n  buffers: " + then +
               " in the checkpoint, " + now + " in this one\n";
    };
    std::string expected = changed("left_alone", "averaged");
    if (local) expected += by_others + "state that each rank has for itself begins at zero\n";
    if (ranks > 1) expected += by_others + "buffers that each rank has for itself begin as rank 0's\n";
    expected += changed("from_rank_0", "left_alone");
    CHECK(said.text() == expected);  // a rank alone is rank 0
}

TEST_CASE("a checkpoint of another kind of trainer, exchange or strategy is refused with the cause, alike on all ranks",
          "[checkpoint]") {
    std::vector<std::string> const kinds = {"plain",    "bf16",         "bf16 without feedback", "top_k",
                                            "random_k", "power_sgd",    "power_sgd of rank 1",   "local",
                                            "diloco",   "slow_momentum"};
    // One after the other is made, saved and resumed by the next one.
    auto const with = [](std::string const& kind, auto& comm, auto const& use) {
        tanh_mlp<float> net(7, 24, 3, 5);
        sgd const by{.lr = 0.05, .momentum = 0.9};
        auto const exchanging = [&](auto const& exchange) {
            data_parallel trainer{net, by, comm, training_options{.update = update::sharded}, exchange};
            return use(trainer);
        };
        auto const meeting = [&](auto const& strategy) {
            local_parallel trainer{net, by, comm, strategy};
            return use(trainer);
        };
        if (kind == "bf16") return exchanging(bfloat16_exchange{.feedback = true});
        if (kind == "bf16 without feedback") return exchanging(bfloat16_exchange{.feedback = false});
        if (kind == "top_k") return exchanging(top_k_exchange{.ratio = 0.25});
        if (kind == "random_k") return exchanging(random_k_exchange{.ratio = 0.25});
        if (kind == "power_sgd") return exchanging(power_sgd_exchange{.rank = 2});
        if (kind == "power_sgd of rank 1") return exchanging(power_sgd_exchange{.rank = 1});
        if (kind == "local") return meeting(local_sgd{.period = 1});
        if (kind == "diloco") return meeting(diloco{.period = 1});
        if (kind == "slow_momentum") return meeting(slow_momentum{.period = 1});
        return exchanging(any_allreduce{});
    };
    bool const tcp = GENERATE(false, true);
    std::string const
        exchange = "\n  it was written with another exchange, or one with other options that its state depends on",
        strategy = "\n  it was written with another strategy",
        was_local = "\n  it was written by a local_parallel, and this trainer is not one",
        is_local = "\n  it was not written by a local_parallel, and this trainer is one";
    task_data<float> const data(7, 3, 8);
    scratch_directory const scratch;
    auto const said = ranks_over(
        tcp, 2,
        [&](auto& comm) {
            std::map<std::pair<std::string, std::string>, std::string> all;
            for (std::string const& from : kinds) {
                checkpoints kept(in(scratch) + std::to_string(tcp) + from);
                with(from, comm, [&](auto& trainer) {
                    trainer.step(data.batch(0, 8));
                    kept.save(trainer);
                    return 0;
                });
                for (std::string const& to : kinds)
                    with(to, comm, [&](auto& trainer) {
                        all[{from, to}] = thrown_by([&] { (void)kept.resume(trainer); });
                        return 0;
                    });
            }
            return all;
        },
        patient());
    REQUIRE(said[1] == said[0]);
    auto const local = [&](std::string const& kind) {
        return kind == "local" || kind == "diloco" || kind == "slow_momentum";
    };
    auto const stateless = [](std::string const& kind) { return kind == "plain" || kind == "bf16 without feedback"; };
    auto const only_residuals = [](std::string const& kind) { return kind == "top_k" || kind == "random_k"; };
    for (auto const& [kind, text] : said[0]) {
        auto const& [from, to] = kind;
        CAPTURE(from, to, text);
        if (from == to || (stateless(from) && stateless(to)) || (only_residuals(from) && only_residuals(to))) {
            REQUIRE(text == "");
            continue;
        }
        REQUIRE(text.find(": is a checkpoint of another training:\n  state '") != text.npos);
        REQUIRE(text.find("it was", text.find("\n  it was") + 6) == text.npos);
        REQUIRE(text.ends_with(local(from) && !local(to)   ? was_local
                               : !local(from) && local(to) ? is_local
                               : local(from)               ? strategy
                                                           : exchange));
    }
}

TEST_CASE("what is written in the background, or at once where no thread starts, is what was there when it was saved",
          "[checkpoint]") {
    scratch_directory const scratch;
    auto const got = run_ranks(
        2,
        [&](auto& comm) {
            scripted_model<> net({{"large", {2'000'000}}}, 1.0);  // written for longer than a step takes
            data_parallel trainer{net, sgd{.lr = 0.1, .momentum = 0.9}, comm};
            checkpoints kept(in(scratch), {.keep = 2, .background = true});
            for (int round = 0; round < 2; ++round) {
                trainer.step(numbers{{1.0}});
                std::uint64_t const before = trainer.digest_of_values();
                std::optional<no_room_for_stacks> no_thread;  // the second time, all of it is written by save()
                if (round == 1 && comm.rank() == 0) no_thread.emplace();
                barrier(comm);
                kept.save(trainer);
                barrier(comm);
                if (round == 1 && !kept.poll()) return false;
                no_thread.reset();
                trainer.step(numbers{{2.0}});
                std::uint64_t const beyond = trainer.digest_of_values();
                for (int i = 0; i < 5; ++i) trainer.step(numbers{{3.0}});
                while (!kept.poll()) trainer.step(numbers{{4.0}});
                if (!kept.poll() || !kept.resume(trainer) || trainer.digest_of_values() != before) return false;
                trainer.step(numbers{{2.0}});
                if (trainer.digest_of_values() != beyond) return false;
            }
            trainer.step(numbers{{1.0}});
            kept.save(trainer);
            return true;  // without wait(): what was written last is no checkpoint
        },
        patient());
    REQUIRE(got == std::vector<bool>{true, true});
    REQUIRE(names_in(scratch.path() / "kept") ==
            std::vector<std::string>{"latest", "step-000000000001", "step-000000000003", "step-000000000005.tmp"});
}

TEST_CASE("a save that its job did not live to finish does not end the next job", "[checkpoint]") {
    bool const polls = GENERATE(false, true);
    CAPTURE(polls);
    scratch_directory const scratch;
    std::vector<std::unique_ptr<checkpoints>> kept;
    for (int rank = 0; rank < 2; ++rank)
        kept.push_back(std::make_unique<checkpoints>(in(scratch), checkpoint_options{.background = true}));
    auto const first = errors_of_ranks(
        2,
        [&](auto& comm) {
            checkpoints& mine = *kept[static_cast<std::size_t>(comm.rank())];
            kept_training one(comm, {});
            mine.save(one.go_to(2).trainer, one.batches);
            mine.wait();
            mine.save(one.go_to(4).trainer, one.batches);
            barrier(comm);
            if (comm.rank() == 1) comm.fail("no more");  // it keeps what it was saving
            while (polls && comm.rank() == 0) (void)mine.poll();
            one.go_to(6);
        },
        patient());
    for (std::string const& error : first) REQUIRE(error.starts_with("DDP-E206"));
    auto const second = run_ranks(
        2,
        [&](auto& comm) {
            kept_training one(comm, {});
            auto const from = kept[static_cast<std::size_t>(comm.rank())]->resume(one.trainer, one.batches);
            return from ? one.go_to(6).digest() : 0;
        },
        patient());
    REQUIRE(second == std::vector<std::uint64_t>(2, undisturbed(2, {}, 6)));
}

TEST_CASE("what the model throws when it hears of restored values comes back as itself, and the others are told",
          "[checkpoint]") {
    scratch_directory const scratch;
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const texts = errors_over(
        tcp, ranks,
        [&](auto& comm) {
            scripted_model<> net({{"a", {2}}});
            data_parallel trainer{net, sgd{.lr = 0.1}, comm};
            trainer.step(numbers{{1}});
            checkpoints kept(in(scratch));
            kept.save(trainer);
            if (comm.rank() == 0) net.in_stepped = [] { throw std::runtime_error("the lamp fell over"); };
            kept.resume(trainer);
        },
        patient());
    REQUIRE(texts[0] == "the lamp fell over");
    for (std::string const& text : std::span(texts).subspan(1)) {
        CAPTURE(text);
        REQUIRE(text.starts_with("DDP-E206"));
        REQUIRE(text.find("rank 0") != std::string::npos);
        REQUIRE(text.find("the lamp fell over") != std::string::npos);
    }
}

TEST_CASE("a position of a sampler that is saved and not asked for is mentioned", "[checkpoint]") {
    scratch_directory const scratch;
    run_ranks(1, [&](auto& comm) {
        kept_training one(comm, {});
        checkpoints(in(scratch)).save(one.go_to(2).trainer, one.batches);
        captured_stderr said(scratch);
        checkpoints(in(scratch)).resume(one.trainer);
        REQUIRE(
            said.text() ==
            "ddp: " + in(scratch) +
                "/step-000000000002: holds a sampler's position, which is not used: pass the sampler to resume() to "
                "continue there\n");
    });
}

TEST_CASE("no two pieces of state are kept under one name", "[checkpoint]") {
    auto const key = [](std::string_view of, std::string_view name, bool per_rank = false) {
        return ddp::detail::state_key({.of = of, .name = name, .per_rank = per_rank});
    };
    REQUIRE(key("0.weight", "exp_avg") == "state/0.weight/exp_avg");
    REQUIRE(key("0.weight", "exp_avg", true) == "rank_state/0.weight/exp_avg");
    REQUIRE(key("a/b", "c") != key("a", "b/c"));
    REQUIRE(key("a/b", "c") == "state/a%2Fb/c");
    REQUIRE(key("a%2Fb", "c") == "state/a%252Fb/c");
    REQUIRE(key("a[0:3]", "\n\t") == "state/a%5B0:3%5D/%0A%09");
}

TEST_CASE("without a directory or a checkpoint there is nothing to resume, and nothing is made", "[checkpoint]") {
    scratch_directory const scratch;
    std::filesystem::create_directories(scratch.path() / "empty" / "step-000000000002.tmp");
    auto const got = run_ranks(
        2,
        [&](auto& comm) {
            kept_training one(comm, {});
            return !checkpoints((scratch.path() / "nowhere").string()).resume(one.trainer, one.batches) &&
                   !checkpoints((scratch.path() / "empty").string()).resume(one.trainer);
        },
        patient());
    REQUIRE(got == std::vector<bool>{true, true});
    REQUIRE(names_in(scratch.path()) == std::vector<std::string>{"empty"});
}

TEST_CASE("within a step, or with gradients accumulated, nothing is saved or resumed", "[checkpoint]") {
    scratch_directory const scratch;
    auto const said = run_ranks(1, [&](auto& comm) {
        scripted_model<> net({{"a", {3}}});
        data_parallel trainer{net, sgd{}, comm};
        checkpoints kept(in(scratch));
        trainer.forward(numbers{{1}});
        trainer.accumulate();
        std::string text = thrown_by([&] { kept.save(trainer); }) + thrown_by([&] { kept.resume(trainer); }) +
                           thrown_by([&] { trainer.set_completed_steps(3); }) +
                           thrown_by([&] { (void)trainer.progress(); }) + thrown_by([&] { trainer.set_progress({}); }) +
                           thrown_by([&] { trainer.set_frozen(trainer.frozen()); });
        trainer.forward(numbers{{1}});
        trainer.backward();
        text += thrown_by([&] { kept.save(trainer); });
        trainer.finish();
        kept.save(trainer);
        return text + thrown_by([&] { kept.save(trainer, {{"x", "\xff"}}); }) +
               thrown_by([&] { trainer.set_frozen({}); }) + thrown_by([&] { checkpoints(in(scratch), {.keep = 0}); }) +
               thrown_by([&] { checkpoints(""); });
    })[0];
    auto const count = [&](std::string const& words) {
        std::size_t found = 0;
        for (std::size_t at = 0; (at = said.find(words, at)) != said.npos; ++at) ++found;
        return found;
    };
    CAPTURE(said);
    REQUIRE(count("between steps: finish() the step") == 2);
    REQUIRE(count("a step is under way") == 1);
    for (char const* const what : {" set_completed_steps", " set_frozen", " progress", " set_progress"})
        REQUIRE(count(std::string(what) + ": gradients of accumulate() wait for their step; make it first, by") == 1);
    REQUIRE(count("set_frozen: 0 marks for 1 parameters") == 1);
    REQUIRE(count("checkpoints: the entries must be UTF-8: 'x' is not") == 1);
    REQUIRE(count("checkpoints: keep is zero; the newest checkpoint has to stay") == 1);
    REQUIRE(count("give the directory a name") == 1);
}
