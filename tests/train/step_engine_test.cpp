// Hundreds of engines in one thread, on virtual time: the same bits on every rank, as on one, and as over threads.
#include <ddp/train/step_engine.hpp>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/collective/algorithms/halving_doubling_allreduce.hpp>
#include <ddp/collective/algorithms/recursive_doubling_allreduce.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/split.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/exchange/choice.hpp>
#include <ddp/exchange/narrow.hpp>
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/exchange/sparse.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/sim/cluster.hpp>
#include <ddp/transport/inproc.hpp>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t steps = 2;

struct setup {
    ddp::update update = ddp::update::replicated;
    bool clip = false;
    bool random_floats = false;  // else small integers, whose sum is exact in any order
    bool late = false;           // new values travel after the step
};

/// A model of some thousand floats, as an engine sees it.
struct subject {
    explicit subject(setup const& how) : how_(how), where({1000, 37, 4096 + 70, 3, 0, 900}, {}, sizeof(float)) {
        options.update = how.update;
        if (how.clip) options.clip = clip_by_global_norm{.max_norm = 0.25};
        options.buckets_in_flight = 2;
        gradients.resize(where.size());
        values.assign(where.size(), 1.0f);
        for (std::size_t i = 0; i < where.parameters(); ++i)
            parameters.push_back({"p" + std::to_string(i), {where.count(i)}, {}, {}});
        parameters[0].shape = {40, 25};
    }
    template <class T, class X>
    auto make(scheduler<T>& on, X exchange) {
        return make_as<step_engine<T, float>>(on, exchange);
    }
    template <class Engine, class T, class X>
    std::unique_ptr<Engine> make_as(scheduler<T>& on, X exchange, group* among = nullptr) {
        std::size_t const grain = step_engine<T, float>::slice_grain(how_.clip);
        std::vector<std::size_t> counts;
        for (std::size_t i = 0; i < where.parameters(); ++i) counts.push_back(where.count(i));
        bucket_plan const plan =
            size_capped_buckets{.cap_bytes = 6000, .first_bytes = 1500}.plan({counts, sizeof(float), grain});
        detail::bucket_map const buckets(plan, where, grain);
        bucket_count = buckets.count();
        return std::make_unique<Engine>(
            on, among == nullptr ? on.world() : *among,
            step_subject<float>{where, buckets, parameters, options, false, gradients, values, how_.late},
            step_parts<T, float>{detail::make_optimizer_model<float>(sgd{.lr = 0.5, .momentum = 0.5}),
                                 detail::make_exchange_model<T, float>(exchange)});
    }
    /// What rank `rank` adds to element k of parameter i.
    [[nodiscard]] float addend(std::size_t rank, std::size_t step, std::size_t i, std::size_t k) const {
        std::size_t const mix = rank * 7919 + step * 131 + i * 31 + k;
        if (how_.random_floats) return std::sin(static_cast<float>(mix)) * std::exp2(static_cast<float>(mix % 13));
        return static_cast<float>(mix % 9) - 4.0f;
    }
    void write(std::size_t i, std::size_t step, std::size_t first_rank, std::size_t last_rank) {
        for (std::size_t k = 0; k < where.count(i); ++k) {
            float sum = 0;
            for (std::size_t r = first_rank; r < last_rank; ++r) sum += addend(r, step, i, k);
            gradients[where.begin(i) + k] = sum;
        }
    }

    setup how_;
    layout where;
    training_options options;
    std::vector<float> gradients, values;
    std::vector<parameter<float>> parameters;
    std::size_t bucket_count = 0;
    std::vector<double> norms;
    std::vector<nanoseconds> current;  // with how.late: of each parameter, how long after finished() in the last step
    nanoseconds forward{0};            // a parameter's part of the next forward
};

using virtual_engine = step_engine<virtual_transport, float>;

/// Leaves out the gate: values are stepped as soon as their mean is there, whether backward is done or not.
class ungated_engine final : public virtual_engine {
public:
    using virtual_engine::virtual_engine;

protected:
    task<> bucket(std::size_t b) override {
        co_await exchange_gradients(b);
        if (weight() == 0) co_return;
        co_await step_values(b);
        if (sharded()) co_await gather(b);
    }
};

/// `own_rank`: in the engine's group. The engine is not this coroutine's own: after a failure its coroutines end beside it.
task<> train(virtual_cluster* cluster, scheduler<virtual_transport>* on, subject* mine, virtual_engine* work,
             int own_rank) {
    auto const rank = static_cast<std::size_t>(own_rank);
    for (std::size_t step = 0; step < steps; ++step) {
        work->begin({.weight = 1 + rank % 3, .done = 0});
        work->collect();
        for (std::size_t i = mine->where.parameters(); i-- > 0;) {
            nanoseconds const own(2'000 + static_cast<std::int64_t>((rank * 37 + i * 11) % 50) * 1'000);
            co_await cluster->compute(on->rank(), own);
            mine->write(i, step, rank, rank + 1);
            work->ready(i, 0, mine->where.count(i));
        }
        work->backward_done();
        work->collect();
        co_await work->finished();
        mine->norms.push_back(work->gradient_norm());
        time_point const since = on->now();
        mine->current.clear();
        for (std::size_t i = 0; i < mine->where.parameters(); ++i) {
            if (work->late() != nullptr && !work->late()->current(i)) co_await work->late()->made_current(i);
            mine->current.push_back(on->now() - since);
            if (mine->forward.count() > 0) co_await cluster->compute(on->rank(), mine->forward);
        }
        co_await work->settled();
    }
}

/// `groups`: of each rank, in which its engine trains; none: the whole cluster.
template <class Engine = virtual_engine, class A>
cluster_outcome run_on(virtual_cluster& cluster, std::vector<std::unique_ptr<subject>> const& all, A algorithm,
                       std::vector<std::unique_ptr<group>> const& groups = {}) {
    std::vector<std::unique_ptr<virtual_engine>> work;
    for (std::size_t r = 0; r < all.size(); ++r)
        work.push_back(all[r]->template make_as<Engine>(cluster.scheduler_of(static_cast<int>(r)), algorithm,
                                                        groups.empty() ? nullptr : groups[r].get()));
    return cluster.run([&](int rank, auto& on) {
        auto const r = static_cast<std::size_t>(rank);
        return train(&cluster, &on, all[r].get(), work[r].get(), groups.empty() ? rank : groups[r]->rank());
    });
}

/// Late messages; links of 100 kB/s, where a step takes seconds, to 1 GB/s, where only the delays count; with early messages
/// and without.
network_model network_of(std::uint64_t seed, nanoseconds extra_delay) {
    constexpr double rates[] = {1e9, 1e7, 1e5, 1e8, 1e6};
    return {.bytes_per_second = rates[seed % std::size(rates)],
            .extra_delay = extra_delay,
            .early_bytes = seed % 3 == 1 ? 0u : 1u << 20,
            .seed = seed};
}

std::uint64_t total_weight(std::size_t ranks) {
    std::uint64_t total = 0;
    for (std::size_t r = 0; r < ranks; ++r) total += 1 + r % 3;
    return total;
}

template <class A>
std::vector<std::unique_ptr<subject>> on_virtual_time(int ranks, setup const& how, A algorithm,
                                                      network_model const& network = {}) {
    std::vector<std::unique_ptr<subject>> all;
    for (int r = 0; r < ranks; ++r) all.push_back(std::make_unique<subject>(how));
    virtual_cluster cluster(ranks, network);
    auto const outcome = run_on(cluster, all, algorithm);
    for (auto const& r : outcome.ranks) REQUIRE((r.finished && !r.verdict));
    return all;
}

template <class A>
std::vector<std::unique_ptr<subject>> over_threads(int ranks, setup const& how, A algorithm) {
    return ddp::test::run_ranks(
        ranks,
        [&](communicator<>& comm) {
            auto mine = std::make_unique<subject>(how);
            auto const rank = static_cast<std::size_t>(comm.rank());
            decltype(mine->make(comm.tasks(), algorithm)) work;
            comm.exclusively([&] { work = mine->make(comm.tasks(), algorithm); });
            for (std::size_t step = 0; step < steps; ++step) {
                work->begin({.weight = 1 + rank % 3, .done = 0});
                comm.poke();
                for (std::size_t i = mine->where.parameters(); i-- > 0;) {
                    mine->write(i, step, rank, rank + 1);
                    if (work->ready(i, 0, mine->where.count(i))) comm.poke();
                }
                work->backward_done();
                comm.run([&] {
                    work->collect();
                    return work->finished();
                });
                mine->norms.push_back(work->gradient_norm());
            }
            comm.exclusively([&] { work.reset(); });
            return mine;
        },
        ddp::test::patient());
}

/// One rank that has the sum of everybody's gradients, and everybody's weight.
subject alone(std::size_t ranks, setup const& how) {
    subject mine(how);
    virtual_cluster cluster(1);
    auto const work = mine.make(cluster.scheduler_of(0), direct_allreduce{});
    for (std::size_t step = 0; step < steps; ++step) {
        work->begin({.weight = total_weight(ranks), .done = 0});
        for (std::size_t i = 0; i < mine.where.parameters(); ++i) {
            mine.write(i, step, 0, ranks);
            work->ready(i, 0, mine.where.count(i));
        }
        work->backward_done();
        auto const outcome = cluster.run([&](int, auto&) {
            work->collect();
            return work->finished();
        });
        REQUIRE(outcome.ranks[0].finished);
        mine.norms.push_back(work->gradient_norm());
    }
    return mine;
}

}  // namespace

TEST_CASE("four buckets in flight end sooner than one, where the network is what takes time", "[train]") {
    auto const update = GENERATE(ddp::update::replicated, ddp::update::sharded);
    auto const time_of = [&](std::size_t in_flight) {
        std::vector<std::unique_ptr<subject>> all;
        for (int r = 0; r < 4; ++r) {
            all.push_back(std::make_unique<subject>(setup{.update = update}));
            all.back()->options.buckets_in_flight = in_flight;
        }
        virtual_cluster cluster(4, {.latency = 5ms});
        auto const outcome = run_on(cluster, all, direct_allreduce{});
        for (auto const& r : outcome.ranks) REQUIRE((r.finished && !r.verdict));
        REQUIRE(all[0]->bucket_count > 4);
        return outcome.elapsed;
    };
    nanoseconds const one = time_of(1), four = time_of(4);
    CAPTURE(one.count(), four.count());
    CHECK(4 * four < 3 * one);
}

TEST_CASE("values that are gathered late come in the order of a forward, which hides them", "[train]") {
    int const ranks = GENERATE(2, 4);
    auto const trained = [&](bool late) {
        std::vector<std::unique_ptr<subject>> all;
        for (int r = 0; r < ranks; ++r) {
            all.push_back(std::make_unique<subject>(setup{.update = ddp::update::sharded, .late = late}));
            all.back()->forward = 1ms;
        }
        virtual_cluster cluster(ranks, {.latency = 10us, .bytes_per_second = 4e6});
        auto const outcome = run_on(cluster, all, direct_allreduce{});
        for (auto const& r : outcome.ranks) REQUIRE((r.finished && !r.verdict));
        return std::pair(outcome.elapsed, std::move(all));
    };
    auto const [at_once, before] = trained(false);
    auto const [hidden, after] = trained(true);
    CAPTURE(at_once.count(), hidden.count());
    CHECK(hidden + 4ms < at_once);  // of two forwards of 6 ms
    for (auto const& mine : after) {
        CHECK(mine->values == before.front()->values);
        std::vector<nanoseconds> waits;  // for the values of each parameter, once those before are worked through
        for (std::size_t i = 0; i < mine->current.size(); ++i)
            waits.push_back(mine->current[i] - (i == 0 ? 0ns : mine->current[i - 1] + mine->forward));
        CAPTURE(waits.front().count());
        CHECK(waits.front() > 0ns);  // it had not come with the step
        CHECK(waits.front() < 3ms);  // of 6 ms for all
    }
}

TEST_CASE("hundreds of engines train alike on virtual time, and as one rank with all gradients", "[train][sim]") {
    auto const update = GENERATE(ddp::update::replicated, ddp::update::sharded);
    bool const clip = GENERATE(false, true);
    setup const how{.update = update, .clip = clip};
    constexpr int ranks = 200;
    subject const one = alone(ranks, how);
    CHECK(one.bucket_count >= (clip ? 2 : 4));
    CHECK((one.norms[0] > 0.25) == clip);
    CHECK(one.values != std::vector<float>(one.values.size(), 1.0f));
    auto const all = on_virtual_time(ranks, how, recursive_doubling_allreduce{});
    std::size_t different = 0;
    for (auto const& r : all) different += r->values != one.values || r->norms != one.norms;
    CHECK(different == 0);
}

TEST_CASE("engines over the direct algorithm agree at awkward rank counts, whatever the delays", "[train][sim]") {
    auto const update = GENERATE(ddp::update::replicated, ddp::update::sharded);
    bool const clip = GENERATE(false, true), late = GENERATE(false, true);
    int const ranks = GENERATE(2, 7, 33);
    if (late && update != ddp::update::sharded) return;
    setup const how{.update = update, .clip = clip, .late = late};
    CAPTURE(ranks, clip, late);
    subject const one = alone(static_cast<std::size_t>(ranks), how);
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
        network_model const network = network_of(seed + static_cast<std::uint64_t>(ranks), 400us);
        CAPTURE(network.bytes_per_second, network.early_bytes);
        auto const all = on_virtual_time(ranks, how, direct_allreduce{.chunk_bytes = 512}, network);
        std::size_t different = 0;
        for (auto const& r : all) different += r->values != one.values || r->norms != one.norms;
        CHECK(different == 0);
    }
}

TEST_CASE("virtual time and threads give the same bits for random floats", "[train][sim]") {
    int const ranks = GENERATE(3, 5, 6);
    bool const clip = GENERATE(false, true);
    setup const first{.update = ddp::update::replicated, .clip = clip, .random_floats = true};
    setup const second{.update = ddp::update::sharded, .clip = clip, .random_floats = true};
    CAPTURE(ranks, clip);
    auto const reference = over_threads(ranks, first, direct_allreduce{});
    auto const same = [&](std::vector<std::unique_ptr<subject>> const& all) {
        for (auto const& r : all)
            if (r->values != reference[0]->values || r->norms != reference[0]->norms) return false;
        return true;
    };
    CHECK(same(reference));
    CHECK(same(over_threads(ranks, second, recursive_doubling_allreduce{})));
    CHECK(same(on_virtual_time(ranks, first, direct_allreduce{})));
    CHECK(same(on_virtual_time(ranks, second, direct_allreduce{})));
    CHECK(same(on_virtual_time(ranks, first, recursive_doubling_allreduce{})));
    CHECK(same(on_virtual_time(ranks, second, recursive_doubling_allreduce{}, {.extra_delay = 1ms, .seed = 4})));
    CHECK(same(over_threads(ranks, second, halving_doubling_allreduce{.chunk_bytes = 512})));
    CHECK(same(on_virtual_time(ranks, first, halving_doubling_allreduce{.chunk_bytes = 512})));
    CHECK(same(on_virtual_time(ranks, second, halving_doubling_allreduce{}, {.extra_delay = 1ms, .seed = 5})));
}

TEST_CASE("exchanges that send less have the same bits on virtual time, whatever the delays, as over threads",
          "[train][sim]") {
    int const ranks = GENERATE(2, 3, 5);
    bool const clip = GENERATE(false, true);
    setup const first{.update = ddp::update::replicated, .clip = clip, .random_floats = true};
    setup second = first, third = first;
    second.update = third.update = ddp::update::sharded;
    third.late = true;
    auto const plain = over_threads(ranks, first, direct_allreduce{});
    auto const same_bits = [&](auto const& exchange) {
        auto const reference = over_threads(ranks, first, exchange);
        REQUIRE(reference[0]->values != plain[0]->values);
        std::size_t different = 0, compared = 0;
        for (std::uint64_t seed = 0; seed < 4; ++seed)
            for (setup const& how : {first, second, third})
                for (auto const& r : on_virtual_time(ranks, how, exchange, network_of(seed, 1ms)))
                    different += r->values != reference[0]->values || r->norms != reference[0]->norms, ++compared;
        CAPTURE(exchange.name, ranks, clip);
        CHECK(compared == 12 * static_cast<std::size_t>(ranks));
        CHECK(different == 0);
    };
    same_bits(bfloat16_exchange{.feedback = true});
    same_bits(int8_exchange{});
    same_bits(top_k_exchange{.ratio = 0.1});
    same_bits(random_k_exchange{.ratio = 0.1});
    same_bits(power_sgd_exchange{.rank = 2, .min_compression_rate = 1.1});
}

namespace {

task<> divide(scheduler<virtual_transport>* on, int color, std::int64_t key, std::unique_ptr<group>* mine) {
    lane<virtual_transport> const over(on, {.channel = channel::user, .index = 1}, 5);
    co_await detail::split(over, static_cast<std::uint64_t>(color), key, mine);
}

}  // namespace

TEST_CASE("engines in groups of a cluster train at once, each to the bits of its group alone", "[train][sim]") {
    auto const update = GENERATE(ddp::update::replicated, ddp::update::sharded);
    setup const how{.update = update, .clip = true, .random_floats = true};
    constexpr int ranks = 8;  // in groups {6, 3, 0}, {7, 4, 1} and {5, 2}
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
        std::vector<std::unique_ptr<subject>> all;
        for (int r = 0; r < ranks; ++r) all.push_back(std::make_unique<subject>(how));
        virtual_cluster cluster(ranks, network_of(seed, 400us));
        std::vector<std::unique_ptr<group>> groups(ranks);
        cluster.run(
            [&](int rank, auto& on) { return divide(&on, rank % 3, -rank, &groups[static_cast<std::size_t>(rank)]); });
        auto const outcome = run_on(cluster, all, direct_allreduce{.chunk_bytes = 512}, groups);
        for (std::size_t r = 0; r < ranks; ++r) {
            REQUIRE((outcome.ranks[r].finished && !outcome.ranks[r].verdict));
            int const size = r % 3 == 2 ? 2 : 3;
            REQUIRE(groups[r]->size() == size);
            auto const expected = on_virtual_time(size, how, recursive_doubling_allreduce{});
            CHECK(all[r]->values == expected[0]->values);
            CHECK(all[r]->norms == expected[0]->norms);
        }
    }
}

TEST_CASE("a strategy may leave a stage out", "[train][sim]") {
    auto const update = GENERATE(ddp::update::replicated, ddp::update::sharded);
    setup const how{.update = update, .random_floats = true};
    std::vector<std::unique_ptr<subject>> all;
    for (int r = 0; r < 4; ++r) all.push_back(std::make_unique<subject>(how));
    virtual_cluster cluster(4);
    auto const outcome = run_on<ungated_engine>(cluster, all, direct_allreduce{});
    auto const usual = on_virtual_time(4, how, direct_allreduce{});
    for (std::size_t r = 0; r < 4; ++r) {
        REQUIRE(outcome.ranks[r].finished);
        REQUIRE(all[r]->values == usual[0]->values);  // no gate is asked for: the same bits without it
    }
}

TEST_CASE("a rank killed anywhere in a step is named by the engines that are left, and none of them goes on",
          "[train][sim][faults]") {
    auto const update = GENERATE(ddp::update::replicated, ddp::update::sharded);
    setup const how{.update = update, .clip = true};
    std::size_t runs = 0;
    for (int const ranks : {2, 3, 5})
        for (std::uint64_t k = 1; k < 400; k += ranks == 2 ? 1 : 7) {
            int const victim = static_cast<int>(k) % ranks;
            std::vector<std::unique_ptr<subject>> all;
            for (int r = 0; r < ranks; ++r) all.push_back(std::make_unique<subject>(how));
            virtual_cluster cluster(ranks, network_of(k, 200us));
            cluster.world().kill_at_message(victim, k);
            auto const outcome = run_on(cluster, all, direct_allreduce{.chunk_bytes = 1024});
            if (!outcome.ranks[static_cast<std::size_t>(victim)].dead) break;
            CAPTURE(ranks, victim, k);
            std::optional<failure> first;
            for (auto const& r : outcome.ranks) {
                if (r.dead || !r.verdict) continue;
                if (!first) first = r.verdict;
                REQUIRE(r.verdict->text.view() == first->text.view());
                REQUIRE(r.verdict->peer == victim);
            }
            ++runs;
        }
    CHECK(runs > 30);
}

TEST_CASE("engines name a rank that stops for good in a step, or an end of a link that carries nothing",
          "[train][sim][faults]") {
    bool const hole = GENERATE(false, true);
    setup const how{.update = update::sharded, .clip = true};
    std::size_t failed = 0;
    for (int const ranks : {2, 3, 5})
        for (std::uint64_t k = 0; k < 30; ++k) {
            nanoseconds whole{0};  // of an undisturbed run
            std::vector<float> expected;
            for (bool const struck : {false, true}) {
                std::vector<std::unique_ptr<subject>> all;
                for (int r = 0; r < ranks; ++r) all.push_back(std::make_unique<subject>(how));
                virtual_cluster cluster(ranks, network_of(k, 200us), timing::for_tests());
                int const victim = static_cast<int>(k) % ranks, other = (victim + 1) % ranks;
                nanoseconds const at = whole * static_cast<std::int64_t>(k) / 30;
                if (struck && hole) cluster.world().blackhole(victim, other, at);
                if (struck && !hole) cluster.world().freeze(victim, at, at + 20s);
                auto const outcome = run_on(cluster, all, direct_allreduce{.chunk_bytes = 1024});
                CAPTURE(ranks, k, victim, struck, at.count());
                if (!struck) expected = all[0]->values;
                bool any = false;
                for (std::size_t r = 0; r < all.size(); ++r) {
                    rank_outcome const& one = outcome.ranks[r];
                    REQUIRE((one.finished || (struck && one.verdict)));
                    if (one.finished) REQUIRE(all[r]->values == expected);
                    if (!one.verdict) continue;
                    any = true;
                    int const named =
                        one.verdict->peer;  // -1: of a message that was lost nobody can say whose fault it is
                    REQUIRE((named == victim || (hole && (named == other || named == -1))));
                }
                whole = outcome.elapsed;
                failed += any ? 1 : 0;
            }
        }
    CHECK(failed > 30);
}
