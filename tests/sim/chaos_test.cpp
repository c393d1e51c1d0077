// Thousands of small jobs on virtual time, each with delays and faults drawn from its seed: no hang, one verdict that names
// somebody who is at fault, the same values on every rank that got through. DDP_TEST_SEED=N runs one seed and tells its story,
// DDP_TEST_SEEDS=N the first N.
#include <ddp/sim/cluster.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/any_allreduce.hpp>
#include <ddp/comm/split.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/exchange/choice.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/train/step_engine.hpp>

#include "support/catch.hpp"
#include "train/patience.hpp"

using namespace std::chrono_literals;
using ddp::nanoseconds;
using ddp::virtual_cluster;

namespace {

// Not optimised, a seed takes ten times as long.
#if defined(__OPTIMIZE__)
constexpr std::uint64_t usual_seeds = ddp::test::fewer > 1 ? 1000 : 20000;
#else
constexpr std::uint64_t usual_seeds = ddp::test::fewer > 1 ? 1000 : 3000;
#endif

using on_type = virtual_cluster::scheduler_type;
using lane = ddp::lane<ddp::virtual_transport>;

enum class fault { kill, kill_at_message, freeze, hole, cut, slow, throws, late, stall, nap };
constexpr std::uint64_t fault_kinds = 10;
constexpr char const* fault_names[fault_kinds] = {"killed",      "killed at a message",
                                                  "stopped",     "hole from the first to the second",
                                                  "cut between", "slow from the first to the second",
                                                  "throws",      "late",
                                                  "stalls",      "stops shortly"};
/// A stall and a nap end before anybody may complain, a nap sooner than timing.verdict; what a slow link carries arrives by then.
bool harmless(fault kind) {
    return kind == fault::stall || kind == fault::nap || kind == fault::slow;
}

struct strike {
    fault kind;
    int victim, other;
    nanoseconds when;
    std::uint64_t step;
};

/// In which groups ranks sum before they do so in the whole job, which they then do in every second step only.
enum class grouping { none, halves, neighbours };  // neighbours: in two groups each, so that groups form a row

/// What a seed stands for.
struct script {
    std::uint64_t seed = 0;
    int ranks = 2;
    std::size_t count = 1;
    std::uint64_t steps = 4;
    grouping groups = grouping::none;
    bool trains = false;  // the whole job makes steps of a training instead of sums, by an engine with these options:
    ddp::training_options options;
    bool late_gather = false;
    ddp::any_allreduce algorithm;
    ddp::network_model network;
    std::vector<strike> strikes;

    [[nodiscard]] bool any(fault kind) const {
        return std::any_of(strikes.begin(), strikes.end(), [&](strike const& s) { return s.kind == kind; });
    }
    [[nodiscard]] std::set<int> culprits() const {
        std::set<int> all;
        for (strike const& s : strikes)
            if (!harmless(s.kind)) {
                all.insert(s.victim);
                if (s.kind == fault::hole || s.kind == fault::cut) all.insert(s.other);
            }
        return all;
    }
};

script of(std::uint64_t seed) {
    ddp::random_stream const random(seed, ddp::random_use::user, 2);
    std::uint64_t draws = 0;
    auto const draw = [&](std::uint64_t bound) { return random.at(draws++).below(bound); };
    script s;
    s.seed = seed;
    s.ranks = 2 + static_cast<int>(draw(7));
    s.count = 1 + draw(300);
    s.steps = 2 + draw(6);
    ddp::any_allreduce const algorithms[] = {ddp::direct_allreduce{.chunk_bytes = std::size_t{64} << draw(4)},
                                             ddp::recursive_doubling_allreduce{}, ddp::naive_allreduce{},
                                             ddp::halving_doubling_allreduce{.chunk_bytes = std::size_t{64} << draw(4)},
                                             ddp::ring_allreduce{.segment_bytes = std::size_t{64} << draw(4)}};
    s.algorithm = algorithms[draw(5)];
    s.network = {.latency = nanoseconds(1000 + static_cast<int>(draw(300'000))),
                 .bytes_per_second = draw(3) == 0 ? 1e6 : 1e9,
                 .extra_delay = nanoseconds(static_cast<std::int64_t>(draw(5'000'000))),
                 .early_bytes = draw(2) == 0 ? 0u : 65536u,
                 .seed = seed};
    auto const some_rank = [&] { return static_cast<int>(draw(static_cast<std::uint64_t>(s.ranks))); };
    for (std::uint64_t k = draw(4); k > 0; --k) {
        strike one{static_cast<fault>(draw(fault_kinds)), some_rank(), 0,
                   nanoseconds(static_cast<std::int64_t>(draw(60'000'000))), draw(s.steps)};
        one.other = (one.victim + 1 + static_cast<int>(draw(static_cast<std::uint64_t>(s.ranks - 1)))) % s.ranks;
        s.strikes.push_back(one);
    }
    s.groups = static_cast<grouping>(draw(3));
    s.trains = draw(2) == 0;
    s.options.update = draw(2) == 0 ? ddp::update::sharded : ddp::update::replicated;
    if (draw(3) == 0) s.options.clip = ddp::clip_by_global_norm{.max_norm = 0.25};
    if (draw(2) == 0) s.options.nonfinite = ddp::nonfinite::unchecked;
    s.options.buckets_in_flight = 1 + draw(4);
    s.late_gather = s.options.update == ddp::update::sharded && draw(2) == 0;
    return s;
}

using groups_type = std::vector<std::unique_ptr<ddp::group>>;

/// Enters a collective of this group.
lane next(on_type* on, ddp::group* of, char const* name, std::size_t count) {
    ddp::operation_info what;
    what.name = name;
    what.count = count;
    what.element = "float";
    what.id = {.group = of->id(), .channel = ddp::channel::user, .index = of->next_call()};
    what.fingerprint = 17 + 1000 * count;
    of->enter(what);
    return {*on, *of, what.id, of->history()};
}

using engine = ddp::step_engine<ddp::virtual_transport, float>;

/// What a rank of a training has. It outlives the rank's program: after a failure the engine's coroutines end beside that.
struct learner {
    ddp::layout where;
    ddp::training_options options;
    std::vector<ddp::parameter<float>> parameters;
    std::vector<float> gradients, values;
    std::vector<std::uint64_t> after;  // by step that it has completed: a digest of its values
    std::unique_ptr<engine> work;

    learner(script const& with, on_type& on) : options(with.options) {
        std::vector<std::size_t> const counts = {with.count, 1, 0, 2 * with.count + 5};
        for (std::size_t const count : counts)
            parameters.push_back({"p" + std::to_string(parameters.size()), {count}, {}, {}});
        std::size_t const grain = engine::slice_grain(options.needs_norm());
        ddp::bucket_plan const plan =
            ddp::size_capped_buckets{.cap_bytes = 1024, .first_bytes = 128}.plan({counts, sizeof(float), grain});
        where = ddp::layout(counts, plan.order, sizeof(float));
        gradients.resize(where.size());
        values.assign(where.size(), 1.0f);
        work = std::make_unique<engine>(
            on, on.world(),
            ddp::step_subject<float>{where, ddp::detail::bucket_map(plan, where, grain), parameters, options, false,
                                     gradients, values, with.late_gather},
            ddp::step_parts<ddp::virtual_transport, float>{
                ddp::detail::make_optimizer_model<float>(ddp::sgd{.lr = 0.5, .momentum = 0.5}),
                ddp::detail::make_exchange_model<ddp::virtual_transport, float>(with.algorithm)});
    }
};

ddp::task<> learn(virtual_cluster* cluster, learner* mine, int rank, std::uint64_t step, bool throws) {
    engine& work = *mine->work;
    work.begin({.weight = static_cast<std::uint64_t>(rank % 3), .done = 0});  // two ranks have samples
    work.collect();
    for (std::size_t i = mine->parameters.size(); i-- > 0;) {
        co_await cluster->compute(
            rank, nanoseconds(static_cast<std::int64_t>((static_cast<std::size_t>(rank) * 37 + i * 11) % 50) * 10'000));
        if (throws && i == 1) throw std::runtime_error("the disk of rank " + std::to_string(rank) + " is full");
        for (std::size_t k = 0; k < mine->where.count(i); ++k)
            mine->gradients[mine->where.begin(i) + k] =
                rank % 3 == 0
                    ? 0
                    : static_cast<float>((static_cast<std::size_t>(rank) * 7919 + step * 131 + i * 31 + k) % 101) / 7 -
                          7;
        work.ready(i, 0, mine->where.count(i));
    }
    work.backward_done();
    work.collect();
    co_await work.finished();
    co_await work.settled();
    mine->after.push_back(ddp::digest().add(std::span<float const>(mine->values)).value());
}

ddp::task<> train(virtual_cluster* cluster, script const* of, int rank, on_type* on, std::vector<float>* data,
                  groups_type* groups, learner* model) {
    std::vector<int> colors;
    if (of->groups == grouping::halves) colors = {rank % 2};
    if (of->groups == grouping::neighbours) colors = {rank / 2, (rank + 1) / 2};
    for (int const color : colors) {
        std::unique_ptr<ddp::group> made;
        lane const over = next(on, &on->world(), "split", 0);
        co_await ddp::detail::split(over, static_cast<std::uint64_t>(color), 0, &made);
        groups->push_back(std::move(made));
    }
    for (std::uint64_t step = 0; step < of->steps; ++step) {
        nanoseconds compute(static_cast<std::int64_t>(
            (of->seed * 7919 + step * 104729 + static_cast<std::uint64_t>(rank) * 31) % 10'000'000));
        bool const whole = groups->empty() || step % 2 == 0;
        bool throws = false;
        for (strike const& s : of->strikes) {
            if (s.victim != rank || s.step != step) continue;
            throws |= s.kind == fault::throws;
            if (s.kind == fault::throws && (model == nullptr || !whole))
                throw std::runtime_error("the disk of rank " + std::to_string(rank) + " is full");
            if (s.kind == fault::late) compute += 30s;
            if (s.kind == fault::stall) compute += 300ms;
        }
        co_await cluster->compute(rank, compute);
        std::vector<ddp::group*> sums;
        for (auto const& each : *groups) sums.push_back(each.get());
        if (whole && model == nullptr) sums.push_back(&on->world());
        for (ddp::group* const each : sums) {
            lane const over = next(on, each, "allreduce", data->size());
            co_await ddp::any_allreduce::sum(of->algorithm, over, std::span<float>(*data));
            for (float& v : *data) v *= 0.5f / static_cast<float>(each->size());
        }
        if (whole && model != nullptr) co_await learn(cluster, model, rank, step, throws);
    }
}

struct result {
    ddp::cluster_outcome outcome;
    std::vector<std::uint64_t> digests;  // of each rank's values
    std::map<std::size_t, std::set<std::uint64_t>>
        replicas;  // by step: digests of what was trained, of all ranks that got there
    std::uint64_t trace = 0;
};

result run(script const& with, bool faults) {
    virtual_cluster cluster(with.ranks, with.network, ddp::timing::for_tests());
    for (strike const& s : with.strikes) {
        if (!faults) break;
        ddp::virtual_world& world = cluster.world();
        if (s.kind == fault::kill) world.kill(s.victim, s.when);
        if (s.kind == fault::kill_at_message) world.kill_at_message(s.victim, 1 + s.step * 5);
        if (s.kind == fault::freeze) world.freeze(s.victim, s.when, s.when + 20s);
        if (s.kind == fault::nap) world.freeze(s.victim, s.when, s.when + 200ms);
        if (s.kind == fault::hole || s.kind == fault::cut) world.blackhole(s.victim, s.other, s.when);
        if (s.kind == fault::cut) world.blackhole(s.other, s.victim, s.when);
        if (s.kind == fault::slow)
            world.slow_down(s.victim, s.other, s.when / 4, nanoseconds(s.when.count() % 20'000'000), 1e5);
    }
    script calm = with;
    if (!faults) calm.strikes.clear();
    std::vector<std::vector<float>> data(static_cast<std::size_t>(with.ranks));
    std::vector<groups_type> groups(data.size());  // they outlive the programs, as those of a communicator's user do
    for (std::size_t r = 0; r < data.size(); ++r)
        for (std::size_t i = 0; i < with.count; ++i)
            data[r].push_back(static_cast<float>((r * 31 + i * 7 + with.seed) % 1009) / 7);
    std::vector<std::unique_ptr<learner>> models(data.size());
    for (std::size_t r = 0; r < data.size(); ++r)
        if (with.trains) models[r] = std::make_unique<learner>(with, cluster.scheduler_of(static_cast<int>(r)));
    result all;
    all.outcome = cluster.run([&](int rank, on_type& on) {
        std::size_t const r = static_cast<std::size_t>(rank);
        return train(&cluster, &calm, rank, &on, &data[r], &groups[r], models[r].get());
    });
    for (std::size_t r = 0; r < data.size(); ++r) {
        ddp::digest digest;
        if (with.trains) digest.add(std::span<float const>(models[r]->values));
        for (std::size_t step = 0; with.trains && step < models[r]->after.size(); ++step)
            all.replicas[step].insert(models[r]->after[step]);
        all.digests.push_back(digest.add(std::span<float const>(data[r])).value());
    }
    all.trace = cluster.world().trace();
    return all;
}

/// What is wrong with the outcome; empty: nothing.
std::string complaint(script const& with, result const& got, result const& expected) {
    std::set<int> const culprits = with.culprits();
    auto const told = [](ddp::rank_outcome const& r) { return std::string(r.verdict->text.view()); };
    std::optional<std::string> first;
    bool const holes = with.any(fault::hole) || with.any(fault::cut);
    for (auto const& [step, digests] : got.replicas)
        if (digests != expected.replicas.at(step)) return "replicas differ after step " + std::to_string(step);
    for (auto const& [step, digests] : expected.replicas)
        if (digests.size() != 1) return "replicas differ without faults after step " + std::to_string(step);
    bool const agree = !holes || (with.ranks > 2 && with.strikes.size() == 1);  // else the network may be in parts
    for (std::size_t r = 0; r < got.outcome.ranks.size(); ++r) {
        ddp::rank_outcome const& one = got.outcome.ranks[r];
        std::string const me = "rank " + std::to_string(r) + ": ";
        if (one.dead) continue;
        if (one.finished && got.digests[r] != expected.digests[r]) return me + "other values than without faults";
        if (!one.finished && !one.verdict) return me + "neither finished nor told why";
        if (one.error && !with.any(fault::throws)) return me + "an exception that nobody threw";
        if (!one.verdict) continue;
        if (culprits.empty()) return me + "a false alarm: " + told(one);
        // A message was lost, or two ranks were stopped while each waited for the other: nobody can say whose fault it is.
        bool const lost = one.verdict->peer == -1 && (holes || (with.any(fault::freeze) && culprits.size() > 1));
        if (!lost && culprits.count(one.verdict->peer) == 0) return me + "names somebody innocent: " + told(one);
        if (agree && told(one) != first.value_or(told(one)))
            return me + "another verdict: " + told(one) + " / " + *first;
        if (!first) first = told(one);
    }
    if (got.outcome.elapsed > 100s) return "it took too long";
    return "";
}

}  // namespace

TEST_CASE("whatever delays and faults a seed stands for, a job ends as it must", "[sim][faults][seeds]") {
    char const* const only = std::getenv("DDP_TEST_SEED");
    char const* const many = std::getenv("DDP_TEST_SEEDS");
    std::uint64_t const begin = only != nullptr ? std::strtoull(only, nullptr, 10) : 0;
    std::uint64_t const end = only != nullptr   ? begin + 1
                              : many != nullptr ? std::strtoull(many, nullptr, 10)
                                                : usual_seeds;
    std::size_t failed = 0, fine = 0, trainings = 0, sums = 0;
    std::map<std::tuple<fault, grouping, bool>, std::size_t> struck;
    for (std::uint64_t seed = begin; seed < end; ++seed) {
        script const with = of(seed);
        CAPTURE(seed, with.ranks, with.strikes.size());
        for (strike const& s : with.strikes)
            if (only != nullptr)
                std::printf("%s: rank %d, rank %d, at %.3f ms, step %llu\n",
                            fault_names[static_cast<std::size_t>(s.kind)], s.victim, s.other,
                            std::chrono::duration<double, std::milli>(s.when).count(),
                            static_cast<unsigned long long>(s.step));
        result const calm = run(with, false), got = run(with, true);
        if (only != nullptr) {
            for (std::size_t r = 0; r < got.outcome.ranks.size(); ++r)
                std::printf("rank %zu: %s\n", r,
                            got.outcome.ranks[r].dead ? "killed"
                            : got.outcome.ranks[r].verdict
                                ? std::string(got.outcome.ranks[r].verdict->text.view()).c_str()
                                : "finished");
        }
        std::string const wrong = complaint(with, got, calm);
        REQUIRE(wrong == "");
        bool const any = std::any_of(got.outcome.ranks.begin(), got.outcome.ranks.end(),
                                     [](ddp::rank_outcome const& r) { return r.verdict.has_value(); });
        (any ? failed : fine) += 1;
        (with.trains ? trainings : sums) += 1;
        if (any)
            for (strike const& s : with.strikes) ++struck[{s.kind, with.groups, with.trains}];
        if (seed % 100 == 0) REQUIRE(run(with, true).trace == got.trace);  // a seed replays exactly
    }
    if (only != nullptr) return;
    std::printf("%llu seeds, %zu sums and %zu trainings: %zu jobs failed as they must, %zu ended well\n",
                static_cast<unsigned long long>(end - begin), sums, trainings, failed, fine);
    CHECK(failed > (end - begin) / 4);
    CHECK(fine > (end - begin) / 4);
    CHECK(struck.size() == 2 * 3 * fault_kinds);  // each in each grouping, in sums and in trainings
}

TEST_CASE("ranks that die while the others settle who died first change nothing about one verdict", "[sim][faults]") {
    std::uint64_t const seeds = ddp::test::fewer > 1 ? 300 : 3000;
    std::size_t second = 0;
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
        script with = of(seed);
        ddp::random_stream const random(seed, ddp::random_use::user, 3);
        with.ranks = 3 + static_cast<int>(random.at(0).below(6));
        with.network.extra_delay = nanoseconds(static_cast<std::int64_t>(random.at(1).below(40'000'000)));
        with.strikes.clear();
        nanoseconds when(static_cast<std::int64_t>(random.at(2).below(20'000'000)));
        int const first = static_cast<int>(random.at(3).below(static_cast<std::uint64_t>(with.ranks)));
        for (int k = 0; k < 2; ++k) {
            with.strikes.push_back(
                {fault::kill, (first + k * (1 + static_cast<int>(seed % 2))) % with.ranks, 0, when, 0});
            when += nanoseconds(static_cast<std::int64_t>(random.at(4).below(k == 0 ? 60'000'000 : 1)));
        }
        CAPTURE(seed, with.ranks);
        result const calm = run(with, false), got = run(with, true);
        REQUIRE(complaint(with, got, calm) == "");
        for (ddp::rank_outcome const& one : got.outcome.ranks)
            second += one.verdict && one.verdict->peer != first ? 1 : 0;
    }
    CHECK(second > 0);
}
