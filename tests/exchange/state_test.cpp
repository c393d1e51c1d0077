// What exchanges keep from step to step: in checkpoints, compared between ranks, and a rank that fails while a bucket is
// under way.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/checkpoint/checkpoints.hpp>

#include "checkpoint/training.hpp"
#include "data/files.hpp"
#include "exchange/plain_loops.hpp"
#include "support/catch.hpp"
#include "support/thrown_by.hpp"

using namespace ddp;
using namespace ddp::test;
using Catch::Matchers::Contains;

namespace {

using bytes_by_name = std::map<std::string, std::vector<std::byte>>;

/// Puts together what ranks hold of state that is not each rank's own.
bytes_by_name put_together(std::vector<ending> const& ranks, bytes_by_name const& own) {
    bytes_by_name all;
    for (ending const& one : ranks)
        for (auto const& [key, bytes] : one.state) {
            std::size_t const slash = key.rfind('/');
            std::string const name = key.substr(0, slash);
            if (own.contains(name)) continue;
            std::size_t const begin = std::stoul(key.substr(slash + 1)) * sizeof(double);
            auto& into = all[name];
            into.resize(std::max(into.size(), begin + bytes.size()));
            std::copy(bytes.begin(), bytes.end(), into.begin() + static_cast<std::ptrdiff_t>(begin));
        }
    return all;
}
/// One exchange of each kind that keeps something.
std::vector<named> keeping_exchanges() {
    std::vector<named> some;
    for (named const& one : all_exchanges())
        if (one.name == "int8" || one.name == "top_k" || one.name == "random_k" || one.name == "power_sgd" ||
            one.name.ends_with("with feedback"))
            some.push_back(one);
    return some;
}

}  // namespace

TEST_CASE("what an exchange keeps goes through a checkpoint", "[exchange][checkpoint]") {
    for (named const& one : keeping_exchanges())
        for (bool const sharded : {false, true}) {
            training with{one.exchange, two_buckets, sharded};
            if (one.name == "top_k")  // groups that keep different things
                with.optimizer = {sgd{.lr = lr, .momentum = momentum}, {{"b*", adamw{.lr = 0.01}}}};
            ::test::scratch_directory const scratch;
            std::string const place = (scratch.path() / "kept").string();
            constexpr std::size_t kept_at = 5;
            auto const whole = train_on(3, with);
            auto const before = run_ranks(
                3,
                [&](auto& comm) {
                    told_mlp model;
                    auto trainer = trainer_of(model, comm, with);
                    ending end;
                    go(trainer, model, with, 0, kept_at, end);
                    checkpoints(place).save(trainer);
                    return end;
                },
                patient());
            auto const resume_on = [&](int ranks, std::size_t to, bool by_shards) {
                training by = with;
                by.sharded = by_shards;
                return run_ranks(
                    ranks,
                    [&, by](auto& comm) {
                        told_mlp model(99);
                        auto trainer = trainer_of(model, comm, by);
                        ending past, end;
                        go(trainer, model, by, 0, 3, past);  // a trainer that has kept something else
                        auto const from = checkpoints(place).resume(trainer);
                        if (!from || trainer.completed_steps() != kept_at) throw std::logic_error("nothing was found");
                        go(trainer, model, by, kept_at, to, end);
                        return end;
                    },
                    patient());
            };
            // The same ranks: the bits of the training that was not interrupted, by the other update too.
            auto const rest = resume_on(3, steps, sharded), other = resume_on(3, steps, !sharded);
            for (std::size_t r = 0; r < 3; ++r) {
                CAPTURE(one.name, sharded, r);
                REQUIRE(other[r].wrong == "");
                REQUIRE(other[r].digests.back() == whole[r].digests.back());
                REQUIRE(rest[r].wrong == "");
                REQUIRE(rest[r].digests.back() == whole[r].digests.back());
                REQUIRE(rest[r].state == whole[r].state);
                REQUIRE(rest[r].state_digest == whole[r].state_digest);
            }
            // Another number of ranks: what all share is found as it was; each rank's own residual begins at zero.
            bytes_by_name own;
            for (auto const& [key, bytes] : before[0].state)
                if (key.find("/residual/") != key.npos) own[key.substr(0, key.rfind('/'))];
            bytes_by_name const shared = put_together(before, own);
            REQUIRE(shared.contains("w1/momentum"));
            REQUIRE(shared.contains("w1/residual_of_mean") ==
                    (one.name == "int8" || one.name.ends_with("with feedback")));
            REQUIRE(shared.contains("w1/power_sgd_q") == (one.name == "power_sgd"));
            for (int const ranks : {1, 2, 4}) {
                CAPTURE(one.name, sharded, ranks);
                captured_stderr said(scratch);
                auto const found = resume_on(ranks, kept_at, sharded);
                REQUIRE(put_together(found, own) == shared);
                for (ending const& rank : found) {
                    REQUIRE(rank.values == before[0].values);
                    for (auto const& [key, bytes] : rank.state)
                        if (own.contains(key.substr(0, key.rfind('/'))))
                            REQUIRE(std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0}; }));
                }
                auto const on = resume_on(ranks, steps, sharded), again = resume_on(ranks, steps, sharded);
                REQUIRE_THAT(said.text(), Contains("was written by 3 ranks: state that each rank has for itself begins "
                                                   "at zero"));
                for (std::size_t r = 0; r < on.size(); ++r) {
                    REQUIRE(on[r].wrong == "");
                    REQUIRE(on[r].digests == again[0].digests);
                }
            }
        }
}

TEST_CASE("a digest of the state covers values, the optimizer's state, and what each exchange keeps", "[exchange]") {
    for (named const& one : keeping_exchanges())
        for (bool const sharded : {false, true}) {
            CAPTURE(one.name, sharded);
            training const with{one.exchange, two_buckets, sharded};
            auto const blind = run_ranks(3, [&](auto& comm) {
                told_mlp model;
                auto trainer = trainer_of(model, comm, with);
                ending end;
                go(trainer, model, with, 0, 3, end);
                std::string not_seen;
                trainer.for_each_state([&](state_slice const& s) {
                    if (s.bytes.empty()) return;
                    std::string const key = key_of(s);
                    std::byte& last = s.bytes.back();
                    last ^= std::byte{1};
                    if (digest_of_state(trainer) == end.state_digest) not_seen += key + " ";
                    last ^= std::byte{1};
                });
                double& value = const_cast<double&>(trainer.parameters()[1].value[0]);
                double const before = std::exchange(value, value + 1);
                if (digest_of_state(trainer) == end.state_digest) not_seen += "values ";
                value = before;
                if (digest_of_state(trainer) != end.state_digest) not_seen += "(not restored) ";
                trainer.set_completed_steps(7);
                if (digest_of_state(trainer) == end.state_digest) not_seen += "steps ";
                return not_seen;
            });
            REQUIRE(blind == std::vector<std::string>(3));
            auto const first = train_on(3, with), again = train_on(3, with);
            for (std::size_t r = 0; r < 3; ++r) REQUIRE(first[r].state_digest == again[r].state_digest);
            // What ranks have left out differs, which the digest of values does not show.
            bool const own = std::ranges::any_of(
                first[0].state, [](auto const& entry) { return entry.first.find("/residual/") != entry.first.npos; });
            REQUIRE(own);
            REQUIRE(first[0].state_digest != first[1].state_digest);
            REQUIRE(first[0].digests == first[1].digests);
        }
}

TEST_CASE("what all ranks keep alike is compared with the values; what each keeps for itself is not", "[exchange]") {
    constexpr std::size_t harmed_after = 3, small_model_steps = 2000;
    struct harm {
        std::string exchange, state;
        std::size_t found;  // after so many steps from the harm at most; 0: never
        std::size_t agreement_steps;
    };
    for (harm const& what : std::vector<harm>{{"power_sgd", "power_sgd_q", 1, 1},
                                              // Fewer values than steps: in the step after the harm none is compared.
                                              {"power_sgd", "power_sgd_q", 1, small_model_steps},
                                              {"power_sgd", "", 0, 1},
                                              {"random_k", "", 0, 3}})
        for (bool const sharded : {false, true}) {
            CAPTURE(what.exchange, what.state, sharded);
            struct outcome {
                std::string text;
                std::size_t steps = 0;
            };
            auto const got = run_ranks(
                3,
                [&](auto& comm) {
                    for (named const& one : all_exchanges()) {
                        if (one.name != what.exchange) continue;
                        told_mlp model;
                        training_options options = options_of(sharded, false);
                        options.agreement_steps = what.agreement_steps;
                        trainer_type trainer(model, grouped{sgd{.lr = lr}, {}}, comm, options, one.exchange,
                                             two_buckets);
                        outcome mine;
                        mine.text = thrown_by([&] {
                            for (; mine.steps < 12; ++mine.steps) {
                                if (mine.steps == harmed_after && comm.rank() == 1)
                                    trainer.for_each_state([&](state_slice const& s) {
                                        // The lowest bit: nobody sees it in the values of this step.
                                        if (s.name == what.state) s.bytes[0] ^= std::byte{1};
                                    });
                                auto const [first, last] = share(rows, mine.steps, comm.rank(), comm.size());
                                trainer.step(all_data().batch(mine.steps + first, mine.steps + last));
                            }
                        });
                        return mine;
                    }
                    throw std::logic_error("no such exchange");
                },
                patient());
            for (outcome const& rank : got) {
                if (what.found == 0) {
                    REQUIRE(rank.text == "");
                    continue;
                }
                REQUIRE_THAT(rank.text,
                             Contains("DDP-E106 replicas differ: rank 1 holds other values (or another state of "
                                      "optimizer or exchange) than the other 2, seen before step ") &&
                                 Contains(what.agreement_steps == small_model_steps
                                              ? "before step 4 in what the exchange keeps."  // no value was looked at
                                              : " or in what the exchange keeps."));
                REQUIRE(rank.steps < harmed_after + what.found);
                REQUIRE(rank.steps >= harmed_after);
            }
        }
}

namespace {

constexpr int victim = 1;

}  // namespace

TEST_CASE("a rank that is killed while buckets of any exchange are under way is named by all others",
          "[exchange][faults]") {
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true})
            // Before it reports this parameter: then none of its buckets is under way, or one, or all but the last.
            for (std::size_t const at : {told_mlp::b2, told_mlp::w2, told_mlp::b1, told_mlp::w1}) {
                CAPTURE(one.name, sharded, at);
                auto const world = inproc_world::create(3);
                auto const said = on_threads(3, [&](int rank) {
                    communicator<> comm = any_communicator(world->connect(rank), patient());
                    training const with{one.exchange, any_buckets(per_parameter_buckets{}), sharded};
                    told_mlp model;
                    auto trainer = trainer_of(model, comm, with);
                    std::size_t passes = 0;
                    if (rank == victim)
                        model.reported = [&](std::size_t i) {
                            if (i != at || ++passes != 3) return;
                            world->kill(victim);  // from now on nobody hears of it
                            throw std::runtime_error("killed");
                        };
                    ending end;
                    return thrown_by([&] { go(trainer, model, with, 0, 4, end); });
                });
                REQUIRE(said[victim] == "killed");
                REQUIRE_THAT(said[0], Contains("DDP-E202") && Contains("rank 1 is gone"));
                REQUIRE(said[2] == said[0]);
            }
}

TEST_CASE("a rank whose backward throws or stops with buckets of any exchange under way is named by all",
          "[exchange][faults]") {
    auto const all = all_exchanges();
    for (bool const stops : {false, true}) {
        timing times = patient();
        if (stops) times.collective = std::chrono::milliseconds(1500);
        // Side by side: those that stop do nothing else for a while.
        auto const said = on_threads(static_cast<int>(all.size()), [&](int which) {
            named const& one = all[static_cast<std::size_t>(which)];
            return errors_of_ranks(
                3,
                [&](auto& comm) {
                    training const with{one.exchange, any_buckets(per_parameter_buckets{}), which % 2 == 0};
                    told_mlp model;
                    auto trainer = trainer_of(model, comm, with);
                    ending end;
                    go(trainer, model, with, 0, 2, end);
                    if (comm.rank() == victim)
                        model.reported = [&](std::size_t i) {
                            if (i != told_mlp::b1) return;  // b2 and w2 are under way
                            if (!stops) throw std::runtime_error("no memory for this");
                            std::this_thread::sleep_for(std::chrono::milliseconds(4500));
                        };
                    go(trainer, model, with, 2, 3, end);
                },
                times);
        });
        for (std::size_t which = 0; which < all.size(); ++which)
            for (std::size_t rank = 0; rank < 3; ++rank) {
                std::string const& text = said[which][rank];
                CAPTURE(all[which].name, stops, rank);
                if (stops)
                    REQUIRE_THAT(text, Contains("DDP-E204") && Contains("rank 1"));
                else if (rank == victim)
                    REQUIRE(text == "no memory for this");
                else
                    REQUIRE_THAT(text, Contains("DDP-E206") && Contains("rank 1") && Contains("no memory for this"));
            }
    }
}

namespace {

enum class moment : std::uint8_t { at_once, with_its_gradients, with_the_mean };

/// Any exchange that throws on one rank in its third step.
struct throwing_exchange : any_exchange {
    moment when = moment::at_once;
    int rank = 0;
    std::shared_ptr<int> calls = std::make_shared<int>(0);

    throwing_exchange(any_exchange const& inner, moment at, int of) : any_exchange(inner), when(at), rank(of) {}
    static task<> exchange(throwing_exchange const& self, lane<any_transport> over, state& kept,
                           bucket_exchange<double> what) {
        bool const throws = self.rank == victim && what.bucket == 1 && ++*self.calls == 3;
        auto const say = [&](moment now) {
            if (throws && now == self.when) throw std::runtime_error("no memory for this");
        };
        say(moment::at_once);
        if (throws && self.when == moment::with_its_gradients) {
            co_await *what.go;
            say(moment::with_its_gradients);
        }
        co_await kept.inner->exchange(over, what);
        say(moment::with_the_mean);
    }
};

}  // namespace

TEST_CASE("an exchange that throws on one rank while it runs is named by all", "[exchange][faults]") {
    for (named const& one : all_exchanges())
        for (moment const when : {moment::at_once, moment::with_its_gradients, moment::with_the_mean})
            for (bool const sharded : {false, true}) {
                auto const said = errors_of_ranks(
                    3,
                    [&](auto& comm) {
                        training const with{one.exchange, any_buckets(per_parameter_buckets{}), sharded};
                        told_mlp model;
                        trainer_type trainer(model, with.optimizer, comm, with.options(),
                                             throwing_exchange(one.exchange, when, comm.rank()), with.buckets);
                        ending end;
                        go(trainer, model, with, 0, 5, end);
                    },
                    patient());
                CAPTURE(one.name, static_cast<int>(when), sharded);
                for (std::size_t rank = 0; rank < 3; ++rank) {
                    CAPTURE(rank);
                    if (rank == victim)
                        REQUIRE_THAT(said[rank], Contains("no memory for this"));
                    else
                        REQUIRE_THAT(said[rank],
                                     Contains("DDP-E206") && Contains("rank 1") && Contains("no memory for this"));
                }
            }
}
