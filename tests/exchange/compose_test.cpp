// Exchanges that send less together with everything else a training has, against plain loops.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/core/random.hpp>
#include <ddp/nn/activation.hpp>
#include <ddp/nn/batch_norm.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/sequential.hpp>

#include "exchange/plain_loops.hpp"
#include "support/catch.hpp"
#include "support/sanitizers.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

struct variation {
    std::string name;
    training with;  // but for the exchange
    std::vector<int> ranks = {3};
};
std::vector<variation> variations() {
    training const plain{.exchange = bfloat16_exchange{}, .buckets = two_buckets};
    auto const changed = [&](auto const& change) {
        training one = plain;
        change(one);
        return one;
    };
    auto const by = [&](grouped const& optimizer) {
        return changed([&](training& t) {
            t.optimizer = optimizer;
            t.by_library = true;
        });
    };
    std::vector<variation> all = {
        {"adamw", by({adamw{.lr = 0.01, .weight_decay = 0.1}, {}}), {1, 2, 3, 4, 7}},
        {"adam", by({adam{.lr = 0.01}, {}})},
        {"rmsprop", by({rmsprop{.lr = 0.01, .momentum = 0.5}, {}})},
        {"adagrad", by({adagrad{.lr = 0.05}, {}})},
        {"lion", by({lion{.lr = 0.003}, {}})},
        {"lamb", by({lamb{.lr = 0.01, .weight_decay = 0.1}, {}})},
        {"lars", by({lars{.lr = 0.1, .momentum = 0.9}, {}})},
        {"groups", by({adamw{.lr = 0.01}, {{"b*", sgd{.lr = 0.1, .momentum = 0.5}}}})},
        {"clipped by norm", changed([](training& t) { t.clipped = true; }), {1, 2, 3, 4, 7}},
        {"clipped by value", changed([](training& t) { t.clip = clip_by_value{.limit = 0.05}; }), {1, 2, 3, 4, 7}},
        {"frozen from the start", changed([](training& t) { t.frozen = {"b1"}; })},
        {"left out", changed([](training& t) { t.leaves_out = true; })},
        {"an observer", changed([](training& t) { t.watched = true; })},
        {"four dimensions", changed([](training& t) { t.four_dimensions = true; })},
        {"all at once", changed([](training& t) {
             t.optimizer = {lamb{.lr = 0.01}, {{"w2", adamw{.lr = 0.02}}}};
             t.by_library = t.leaves_out = t.watched = t.clipped = true;
             t.frozen = {"b1"};
         })}};
    for (auto const& [name, buckets] : bucket_policies())
        all.push_back({name, changed([&, &chosen = buckets](training& t) { t.buckets = chosen; })});
    return all;
}

}  // namespace

TEST_CASE("every exchange with every optimizer, bucket plan, clipping, frozen and unused parameters and an observer",
          "[exchange]") {
    for (named const& one : all_exchanges())
        for (variation const& how : variations())
            for (int const ranks : how.ranks) {
                if (ranks != 3 && sanitizers_leave_out("exchanges and variations", ranks)) continue;
                CAPTURE(one.name, how.name, ranks);
                training with = how.with;
                with.exchange = one.exchange;
                std::vector<ending> got[2];
                for (bool const sharded : {false, true}) {
                    with.sharded = sharded;
                    got[sharded] = train_on(ranks, with);
                }
                // Both updates have the same slices, where there are norms too: int8 has its groups there.
                for (std::size_t b = 0; b < got[0][0].plan.buckets.size(); ++b)
                    REQUIRE(got[1][0].plan.buckets[b].cuts == got[0][0].plan.buckets[b].cuts);
                auto const expected = simulate(got[0][0].plan, one.simulation(got[0][0].plan), with).values;
                for (std::size_t r = 0; r < got[0].size(); ++r)
                    for (bool const sharded : {false, true}) {
                        CAPTURE(sharded, r);
                        REQUIRE(got[sharded][r].wrong == "");
                        REQUIRE(got[sharded][r].digests == got[0][0].digests);
                        for (std::size_t i = 0; i < expected.size(); ++i)
                            for (std::size_t k = 0; k < expected[i].size(); ++k)
                                REQUIRE(std::abs(got[sharded][r].values[i][k] - expected[i][k]) <= 1e-10);
                    }
            }
}

TEST_CASE("what is clipped, watched or left out trains to other values than what is not", "[exchange]") {
    // So that the case above compares more than plain trainings.
    training const plain{.exchange = int8_exchange{}, .buckets = two_buckets};
    auto const usual = train_on(3, plain)[0].digests.back();
    for (variation const& how : variations()) {
        CAPTURE(how.name);
        training with = how.with;
        with.exchange = plain.exchange;
        bool const same = how.name == "four dimensions" || how.name == "capped";
        if (!same) REQUIRE(train_on(3, with)[0].digests.back() != usual);
    }
    // A matrix of four dimensions is the one of two that its rows make.
    training flat{.exchange = power_sgd_exchange{.rank = 2, .min_compression_rate = 1.1}}, four = flat;
    four.four_dimensions = true;
    REQUIRE(train_on(3, four)[0].digests == train_on(3, flat)[0].digests);
}

TEST_CASE("one element that is not finite stops or skips a step under every exchange, which takes back all it has kept",
          "[exchange]") {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
    int const ranks = GENERATE(1, 3);
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true})
            for (nonfinite const decision : {nonfinite::stop, nonfinite::skip}) {
                CAPTURE(one.name, ranks, sharded, static_cast<int>(decision));
                training const with{
                    .exchange = one.exchange, .buckets = two_buckets, .sharded = sharded, .nonfinite = decision};
                auto const wrong = run_ranks(
                    ranks,
                    [&](auto& comm) {
                        told_mlp disturbed, whole;
                        auto trainer = trainer_of(disturbed, comm, with), other = trainer_of(whole, comm, with);
                        ending end, undisturbed;
                        for (std::size_t step = 0; step < 8; ++step) {
                            go(trainer, disturbed, with, step, step + 1, end);
                            go(other, whole, with, step, step + 1, undisturbed);
                            if (end.wrong != "") return end.wrong;
                            if (end.digests != undisturbed.digests || end.state != undisturbed.state)
                                return "after a step that was left out, step " + std::to_string(step);
                            std::size_t const in =
                                std::array{told_mlp::w1, told_mlp::b1, told_mlp::w2, told_mlp::b2}[step % 4];
                            std::size_t const at = 7 * (step + 1) % trainer.parameters()[in].value.size();
                            if (comm.rank() + 1 == comm.size())
                                disturbed.reported = [&](std::size_t i) {
                                    if (i == in) disturbed.gradient(i)[at] = step % 3 == 0 ? infinity : nan;
                                };
                            bool skipped = false;
                            std::string const said =
                                thrown_by([&] { skipped = trainer.step(all_data().batch(step, step + 2)).skipped; });
                            disturbed.reported = nullptr;
                            if (skipped != (decision == nonfinite::skip) ||
                                (said.find("DDP-E105 not finite") == 0) != (decision == nonfinite::stop))
                                return "step " + std::to_string(step) + " was made: " + said;
                            end.state.clear();
                            trainer.for_each_state(
                                [&](state_slice const& s) { end.state[key_of(s)] = {s.bytes.begin(), s.bytes.end()}; });
                            if (end.state != undisturbed.state || trainer.digest_of_values() != end.digests.back())
                                return "step " + std::to_string(step) + " has changed something";
                        }
                        return std::string();
                    },
                    patient());
                for (std::string const& text : wrong) REQUIRE(text == "");
            }
}

TEST_CASE("random-k shows what is not finite wherever it draws, also among elements that nobody steps", "[exchange]") {
    for (std::uint64_t seed = 0; seed < 16; ++seed)
        for (bool const sharded : {false, true}) {
            CAPTURE(seed, sharded);
            training const with{.exchange = random_k_exchange{.ratio = 1e-6, .seed = seed},  // one element a bucket
                                .buckets = single_bucket{},
                                .sharded = sharded,
                                .nonfinite = nonfinite::stop};
            auto const said = run_ranks(
                2,
                [&](auto& comm) {
                    told_mlp model;
                    auto trainer = trainer_of(model, comm, with);
                    trainer.freeze("w*");  // b1 and b2 share their bucket
                    if (comm.rank() == 1)
                        model.reported = [&](std::size_t i) {
                            if (i == told_mlp::b1) model.gradient(i)[0] = std::numeric_limits<double>::quiet_NaN();
                        };
                    return thrown_by([&] { trainer.step(all_data().batch(0, 2)); });
                },
                patient());
            for (std::string const& text : said) REQUIRE(text.find("DDP-E105 not finite") == 0);
        }
}

namespace {
/// Digests after each step of a model that holds its memory in this way, and reports its gradients so many elements at a time.
template <memory Kind>
std::vector<std::uint64_t> digests_of(any_exchange const& exchange, bool sharded, std::size_t slice) {
    auto const all = run_ranks(
        3,
        [&](auto& comm) {
            tanh_mlp<double, Kind> model(inputs, hidden, outputs, 1);
            model.slice = slice;
            data_parallel trainer{model,    grouped{sgd{.lr = lr, .momentum = momentum}, {}},
                                  comm,     options_of(sharded, false),
                                  exchange, any_buckets(two_buckets)};
            std::vector<std::uint64_t> digests;
            for (std::size_t step = 0; step < 6; ++step) {
                auto const [first, last] = share(rows, step, comm.rank(), comm.size());
                trainer.step(all_data().batch(step + first, step + last));
                digests.push_back(trainer.digest_of_values());
            }
            return digests;
        },
        patient());
    return all[0] == all[1] && all[0] == all[2] ? all[0] : std::vector<std::uint64_t>{};
}
}  // namespace

TEST_CASE("under every exchange, where a model's memory lies and how it reports gradients does not change bits",
          "[exchange]") {
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true}) {
            CAPTURE(one.name, sharded);
            auto const expected = train_on(3, {one.exchange, two_buckets, sharded})[0].digests;
            auto const begins = [&](std::vector<std::uint64_t> const& got) {
                return got.size() == 6 && std::equal(got.begin(), got.end(), expected.begin());
            };
            REQUIRE(begins(digests_of<memory::bound>(one.exchange, sharded, 10)));
            REQUIRE(begins(digests_of<memory::copied>(one.exchange, sharded, 0)));
            REQUIRE(begins(digests_of<memory::copied>(one.exchange, sharded, 10)));
            // Without gaps buckets lie otherwise, so that other elements are chosen.
            auto const packed = digests_of<memory::packed>(one.exchange, sharded, 0);
            REQUIRE(packed.size() == 6);
            REQUIRE(packed == digests_of<memory::packed>(one.exchange, sharded, 10));
            REQUIRE(packed == digests_of<memory::packed>(one.exchange, false, 0));
        }
}

namespace {
/// Holds up what comes after a rank's own step: the others get its slices so much later.
struct slow_to_send {
    bool slow = false;
    void on(step_finished const&) const {
        if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
};
/// Asks for each value before it reads it, so that the values of the last step may be under way until then.
struct asking_mlp : told_mlp {
    using told_mlp::forward;
    template <class Needed>
    double forward(regression<double> const& batch, Needed const& needed) {
        for (std::size_t i = 0; i < parameters().size(); ++i) needed(i);
        return forward(batch);
    }
};
}  // namespace

TEST_CASE("values that are gathered late are the same under every exchange", "[exchange]") {
    bool const tcp = GENERATE(false, true);
    int const ranks = tcp ? 2 : 3;
    for (named const& one : all_exchanges())
        for (bool const clipped : {false, true}) {
            CAPTURE(one.name, tcp, clipped);
            auto const trained = [&](bool late) {
                return ranks_over(
                    tcp, ranks,
                    [&](auto& comm) {
                        training_options options = options_of(true, clipped);
                        options.overlap_gather = late;
                        asking_mlp model;
                        data_parallel trainer{model,
                                              adamw{.lr = 0.01},
                                              comm,
                                              options,
                                              one.exchange,
                                              any_buckets(two_buckets),
                                              slow_to_send{comm.rank() + 1 == comm.size()}};
                        std::vector<std::uint64_t> seen;
                        // No look at values: they arrive when they are needed.
                        for (std::size_t step = 0; step < 6; ++step) {
                            auto const [first, last] = share(rows, step, comm.rank(), comm.size());
                            auto const result = trainer.step(all_data().batch(step + first, step + last));
                            seen.push_back(
                                digest{}.add(bytes_of(result.loss)).add(bytes_of(result.gradient_norm)).value());
                        }
                        trainer.freeze("b1");
                        trainer.step(all_data().batch(0, 3));
                        seen.push_back(trainer.digest_of_values());
                        seen.push_back(digest_of_state(trainer));
                        return seen;
                    },
                    patient());
            };
            auto const expected = trained(false), got = trained(true);
            for (std::size_t r = 0; r < got.size(); ++r) REQUIRE(got[r] == expected[r]);
        }
}

TEST_CASE("an exchange in a group of some ranks is that of so many ranks", "[exchange]") {
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true}) {
            CAPTURE(one.name, sharded);
            training const with{one.exchange, two_buckets, sharded};
            auto const expected = train_on(3, with);
            auto const got = run_ranks(
                4,
                [&](auto& comm) {
                    auto group = comm.subgroup({2, 0, 1});
                    return group ? train_part(*group, with, 0, steps, nullptr) : ending{};
                },
                patient());
            for (std::size_t r = 0; r < 3; ++r) {
                REQUIRE(got[r].wrong == "");
                REQUIRE(got[r].digests == expected[0].digests);
            }
            REQUIRE(got[3].digests.empty());
        }
}

TEST_CASE("through memory and among ranks of several hosts every exchange has the bits that it has in one process",
          "[exchange]") {
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true}) {
            CAPTURE(one.name, sharded);
            training const with{
                .exchange = one.exchange, .buckets = two_buckets, .sharded = sharded, .clipped = sharded};
            auto const train = [&](auto& comm) { return train_part(comm, with, 0, steps, nullptr); };
            auto const expected = train_on(5, with);
            for (auto const& got : {on_ranks(5, train, true), on_hosts({7, 9, 7, 7, 9}, train, patient())})
                for (std::size_t r = 0; r < expected.size(); ++r) {
                    REQUIRE(got[r].wrong == "");
                    REQUIRE(got[r].digests == expected[r].digests);
                    REQUIRE(got[r].state == expected[r].state);
                }
        }
}

TEST_CASE("two groups train at the same time under every exchange, each to the bits of so many ranks alone",
          "[exchange]") {
    bool const tcp = GENERATE(false, true);
    for (named const& one : all_exchanges()) {
        CAPTURE(one.name, tcp);
        auto const with = [&](int color) { return training{one.exchange, two_buckets, color == 0}; };
        auto const got = ranks_over(
            tcp, 5,
            [&](auto& world) {
                int const color = world.rank() % 2;
                auto half = world.split(color);
                return train_part(half, with(color), 0, steps, nullptr);
            },
            patient());
        for (int const color : {0, 1}) {
            auto const alone = train_on(color == 0 ? 3 : 2, with(color));
            for (std::size_t r = 0; r < alone.size(); ++r) {
                ending const& mine = got[2 * r + static_cast<std::size_t>(color)];
                REQUIRE(mine.wrong == "");
                REQUIRE(mine.digests == alone[r].digests);
                REQUIRE(mine.state == alone[r].state);
            }
        }
    }
}

TEST_CASE("every exchange trains a model with running statistics, whose passes may add over all ranks", "[exchange]") {
    auto const rows_of = [&](std::size_t begin, std::size_t end) {
        regression<double> const some = all_data().batch(begin, end);
        return regression_batch<double>{.inputs = some.x, .targets = some.y, .rows = some.rows, .features = inputs};
    };
    for (nn::batch_statistics const over : {nn::batch_statistics::local, nn::batch_statistics::synchronised})
        for (named const& one : all_exchanges()) {
            CAPTURE(one.name, static_cast<int>(over));
            auto const trained = [&](bool sharded) {
                return run_ranks(
                    3,
                    [&](auto& comm) {
                        nn::sequential net{nn::linear<double>(inputs, hidden),
                                           nn::batch_norm<double>(hidden, {.statistics = over}), nn::relu<double>(),
                                           nn::linear<double>(hidden, outputs), nn::mean_squared_error<double>()};
                        net.initialize(5);
                        data_parallel trainer{net,          any_optimizer(sgd{.lr = lr, .momentum = momentum}),
                                              comm,         options_of(sharded, false),
                                              one.exchange, two_buckets};
                        // Uneven; where statistics are over all ranks, one has no samples now and then.
                        bool const none = over == nn::batch_statistics::synchronised;
                        std::vector<std::uint64_t> seen;
                        double first_loss = 0, loss = 0;
                        for (std::size_t step = 0; step < 12; ++step) {
                            std::array<std::size_t, 4> const cuts{0, none && step % 3 == 1 ? 0u : 3u, 8, rows};
                            auto const r = static_cast<std::size_t>(comm.rank());
                            loss = trainer.step(rows_of(cuts[r], cuts[r + 1])).loss;
                            if (step == 0) first_loss = loss;
                            seen.push_back(trainer.digest_of_values());
                            seen.push_back(trainer.replicas_identical() ? 1 : 0);
                        }
                        for (model_buffer const& b : net.buffers()) seen.push_back(digest{}.add(b.bytes).value());
                        seen.push_back(loss < first_loss ? 1 : 0);
                        return seen;
                    },
                    patient());
            };
            auto const replicated = trained(false), sharded = trained(true);
            for (std::size_t r = 0; r < 3; ++r) {
                REQUIRE(replicated[r] == replicated[0]);
                REQUIRE(sharded[r] == replicated[0]);
            }
            for (std::size_t k = 1; k < 24; k += 2) REQUIRE(replicated[0][k] == 1);
            REQUIRE(replicated[0].back() == 1);
        }
}

TEST_CASE("exchanges with batches added up, steps without samples, and parameters frozen on the way", "[exchange]") {
    constexpr std::size_t nobody = 4, last_alone = 5, frozen_at = 6, thawed_at = 8, all_steps = 10;
    bool const tcp = GENERATE(false, true);
    int const ranks = tcp ? 2 : 3;
    for (named const& one : all_exchanges()) {
        CAPTURE(one.name, ranks, tcp);
        std::vector<ending> got[2][2];
        for (bool const sharded : {false, true})
            for (bool const added_up : {false, true})
                got[sharded][added_up] = ranks_over(
                    tcp, ranks,
                    [&](auto& comm) {
                        training const with{one.exchange, two_buckets, sharded};
                        told_mlp model;
                        ending end;
                        auto trainer = trainer_of(model, comm, with);
                        auto const kept = [&] {
                            std::vector<numbers_of> all;
                            for (auto const& p : trainer.parameters()) all.emplace_back(p.value.begin(), p.value.end());
                            std::map<std::string, std::vector<std::byte>> state;
                            trainer.for_each_state(
                                [&](state_slice const& s) { state[key_of(s)] = {s.bytes.begin(), s.bytes.end()}; });
                            return std::pair(all, state);
                        };
                        std::string const thrown = thrown_by([&] {
                            for (std::size_t step = 0; step < all_steps; ++step) {
                                auto [first, last] = share(rows, step, comm.rank(), comm.size());
                                if (step == nobody || (step == last_alone && comm.rank() + 1 < comm.size()))
                                    last = first;
                                if (step == frozen_at) trainer.freeze("w2");
                                if (step == thawed_at) trainer.unfreeze("w2");
                                auto const before = kept();
                                std::size_t const middle = added_up ? (first + last) / 2 : first;
                                if (added_up) {
                                    trainer.forward(all_data().batch(step + first, step + middle));
                                    trainer.accumulate();
                                }
                                trainer.forward(all_data().batch(step + middle, step + last));
                                trainer.backward();
                                std::string const refused = thrown_by([&] { trainer.finish(); });
                                bool const said = refused.find("DDP-E104 no samples") != refused.npos;
                                if (said != (step == nobody) || said == refused.empty())
                                    throw std::logic_error("finish: " + refused);
                                end.digests.push_back(trainer.digest_of_values());
                                auto const after = kept();
                                bool const frozen = step >= frozen_at && step < thawed_at;
                                if (!trainer.replicas_identical()) end.wrong = "ranks hold different bits";
                                if ((before == after) != (step == nobody))
                                    end.wrong = "what a step without samples does";
                                if (frozen && before.first[told_mlp::w2] != after.first[told_mlp::w2])
                                    end.wrong = "what is frozen has moved";
                                if (!frozen && step != nobody &&
                                    before.first[told_mlp::w2] == after.first[told_mlp::w2])
                                    end.wrong = "what is not frozen stands still";
                            }
                        });
                        if (thrown != "") end.wrong = thrown;
                        end.values = kept().first;
                        return end;
                    },
                    patient());
        for (std::size_t r = 0; r < got[0][0].size(); ++r)
            for (bool const added_up : {false, true}) {
                CAPTURE(r, added_up);
                for (bool const sharded : {false, true}) REQUIRE(got[sharded][added_up][r].wrong == "");
                REQUIRE(got[0][added_up][r].digests == got[0][added_up][0].digests);
                REQUIRE(got[1][added_up][r].digests == got[0][added_up][0].digests);
                for (std::size_t i = 0; i < got[0][0][0].values.size(); ++i)
                    for (std::size_t k = 0; k < got[0][0][0].values[i].size(); ++k)
                        REQUIRE(std::abs(got[0][added_up][r].values[i][k] - got[0][0][0].values[i][k]) <= 1e-10);
            }
    }
}

TEST_CASE("the norm is that of what is stepped, whatever an exchange still keeps of frozen parameters", "[exchange]") {
    int const ranks = GENERATE(1, 2, 3);
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true}) {
            CAPTURE(one.name, ranks, sharded);
            auto const wrong = run_ranks(
                ranks,
                [&](auto& comm) -> std::string {
                    told_mlp model;
                    training_options const options{.update = sharded ? update::sharded : update::replicated,
                                                   .clip = clip_by_global_norm{.max_norm = 1e9}};
                    data_parallel trainer{model,        any_optimizer(sgd{.lr = 1}), comm, options,
                                          one.exchange, any_buckets(single_bucket{})};
                    auto const values = [&] {
                        std::vector<double> all;
                        for (auto const& p : trainer.parameters())
                            all.insert(all.end(), p.value.begin(), p.value.end());
                        return all;
                    };
                    for (std::size_t step = 0; step < 6; ++step) {
                        auto const [first, last] = share(rows, step, comm.rank(), comm.size());
                        if (step == 2) trainer.freeze("w2");
                        if (step == 5) trainer.unfreeze("w2");
                        auto const before = values();
                        double const norm = trainer.step(all_data().batch(step + first, step + last)).gradient_norm;
                        auto const after = values();
                        double squares = 0;
                        for (std::size_t i = 0; i < after.size(); ++i) squares += std::pow(after[i] - before[i], 2);
                        if (std::abs(norm - std::sqrt(squares)) > 1e-9 * norm)
                            return "step " + std::to_string(step) + ": " + std::to_string(norm) + " for " +
                                   std::to_string(std::sqrt(squares));
                    }
                    return trainer.replicas_identical() ? "" : "ranks hold different bits";
                },
                patient());
            for (std::string const& text : wrong) REQUIRE(text == "");
        }
}

TEST_CASE("what backward reports of a frozen parameter does not reach the exchange of its bucket", "[exchange]") {
    for (named const& one : all_exchanges()) {
        CAPTURE(one.name);
        auto const digests = [&](bool reports) {
            return run_ranks(
                2,
                [&](auto& comm) {
                    told_mlp model;
                    data_parallel trainer{model,        any_optimizer(sgd{.lr = 0.1}), comm, training_options{},
                                          one.exchange, any_buckets(single_bucket{})};
                    for (std::size_t step = 0; step < 4; ++step) {
                        if (step == 1) {
                            trainer.freeze("b2");
                            model.leaves_out = !reports;
                        }
                        auto const [first, last] = share(rows, step, comm.rank(), comm.size());
                        trainer.step(all_data().batch(step + first, step + last));
                    }
                    return trainer.digest_of_values();
                },
                patient());
        };
        REQUIRE(digests(true) == digests(false));
    }
}

TEST_CASE("clipped, with slices cut inside a parameter, both updates give the same bits", "[exchange]") {
    struct outcome {
        std::string wrong;
        std::vector<std::uint64_t> digests;
        std::vector<std::size_t> cuts;
        bool operator==(outcome const&) const = default;
    };
    constexpr double most = 0.7;
    // Other gradients in each step, on each rank and of each element.
    std::vector<double> drawn(9201);
    random_stream const draws{1, random_use::user, 0};
    for (std::size_t k = 0; k < drawn.size(); ++k) drawn[k] = draws.at(k).symmetric<double>();
    for (int const ranks : {2, 4})
        for (named const& one : all_exchanges()) {
            std::vector<outcome> got[2];
            for (bool const sharded : {false, true})
                got[sharded] = run_ranks(
                    ranks,
                    [&](auto& comm) {
                        scripted_model<> net({{"matrix", {100, 50}}, {"vector", {4201}}});
                        exchange_plan<double> plan;
                        any_exchange told = one.exchange;
                        told.told = &plan;
                        training_options options = options_of(sharded, false);
                        options.clip = clip_by_global_norm{.max_norm = most};
                        data_parallel trainer{net,  any_optimizer(sgd{.lr = 1}), comm, options,
                                              told, any_buckets(single_bucket{})};
                        std::size_t step = 0;
                        net.leaves_out = [](std::size_t) { return true; };
                        net.at_end = [&](auto const& ready) {
                            std::size_t at = step * 977 + static_cast<std::size_t>(comm.rank()) * 2003;
                            for (std::size_t const i : {std::size_t{1}, std::size_t{0}}) {
                                for (double& g : trainer.parameters()[i].gradient) g = drawn[at++ % drawn.size()];
                                ready(i);
                            }
                        };
                        outcome mine{{}, {}, plan.buckets[0].cuts};
                        std::vector<double> before(drawn.size());
                        for (; step < 4; ++step) {
                            double const norm = trainer.step(numbers{{1.0}}).gradient_norm;
                            double squares = 0;
                            std::size_t at = 0;
                            for (auto const& p : trainer.parameters())
                                for (double const x : p.value) {
                                    squares += (x - before[at]) * (x - before[at]);
                                    before[at++] = x;
                                }
                            double const stepped = norm * std::min(1.0, most / (norm + 1e-6));
                            if (norm < most || std::abs(std::sqrt(squares) - stepped) > 1e-9)
                                mine.wrong = "a step of another length";
                            if (!trainer.replicas_identical()) mine.wrong = "ranks hold different bits";
                            mine.digests.push_back(trainer.digest_of_values());
                        }
                        return mine;
                    },
                    patient());
            CAPTURE(one.name, ranks);
            REQUIRE(got[0][0].wrong == "");
            REQUIRE(got[0][0].cuts[static_cast<std::size_t>(ranks) / 2] == 4096);  // in the matrix, where no row begins
            for (std::vector<outcome> const& all : got)
                for (outcome const& rank : all) REQUIRE((rank == got[0][0]));
        }
}

TEST_CASE("every exchange trains models of one element and of fewer elements than ranks; one of none is refused",
          "[exchange]") {
    int const ranks = GENERATE(1, 2, 3, 4, 7);
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true}) {
            CAPTURE(one.name, ranks, sharded);
            bool const power = one.name.starts_with("power_sgd");
            struct outcome {
                std::string nothing, refused, wrong;
                double single = 0;
            };
            auto const got = run_ranks(
                ranks,
                [&](auto& comm) {
                    outcome mine;
                    scripted_model<> none(std::vector<scripted_model<>::part>{}), single({{"one", {1}}}),
                        two({{"two", {2}}});
                    auto const train = [&](scripted_model<>& net) {
                        training_options const options{.update = sharded ? update::sharded : update::replicated};
                        data_parallel trainer{net,          any_optimizer(sgd{.lr = 1}), comm, options,
                                              one.exchange, any_buckets(single_bucket{})};
                        for (int step = 0; step < 3; ++step)
                            trainer.step(numbers{{static_cast<double>(comm.rank() + 1)}});
                        if (!trainer.replicas_identical()) mine.wrong = "ranks hold different bits";
                        return net.value(0)[0];
                    };
                    mine.nothing = thrown_by([&] { train(none); });
                    mine.refused = thrown_by([&] { mine.single = train(single); });
                    if (!power) (void)train(two);
                    return mine;
                },
                patient());
            for (outcome const& rank : got) {
                REQUIRE_THAT(rank.nothing, Catch::Contains("the model has no parameters to train"));
                REQUIRE(rank.wrong == "");
                if (power) {
                    REQUIRE_THAT(rank.refused, Catch::Contains("no parameter of this model becomes smaller"));
                    continue;
                }
                REQUIRE(rank.refused == "");
                double const expected = -3 * (ranks + 1) / 2.0;  // the mean of three steps; nothing is left out of it
                bool const narrow = one.name.starts_with("bfloat16") || one.name.starts_with("half");
                REQUIRE(std::abs(rank.single / expected - 1) < (narrow ? 1e-2 : 1e-6));
            }
        }
}
