// Training with meetings now and then, against simulations in plain loops, one rank after the other.
#include <ddp/strategy/averaging.hpp>
#include <ddp/strategy/local_parallel.hpp>
#include <ddp/strategy/loose.hpp>
#include <ddp/strategy/outer_step.hpp>
#include <ddp/strategy/stale_synchronous.hpp>

#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/checkpoint/checkpoints.hpp>
#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/optim/parameter_groups.hpp>
#include <ddp/train/data_parallel.hpp>
#include <ddp/train/state_digest.hpp>
#include <ddp/train/stepper.hpp>
#include <ddp/train/weights.hpp>
#include <ddp/transport/inproc.hpp>

#include "support/catch.hpp"
#include "support/counting_transport.hpp"
#include "support/on_ranks.hpp"
#include "support/on_threads.hpp"
#include "support/ranks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"
#include "train/tanh_mlp.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

using numbers_of = std::vector<double>;
using grouped = parameter_groups<any_optimizer>;
constexpr std::size_t in = 7, hidden = 11, out = 3;

/// A strategy chosen at run time: one trainer is compiled.
template <bool Agrees>
struct strategy_of {
    using model = ddp::detail::strategy_model<any_transport, double>;
    std::function<std::unique_ptr<model>()> make;
    std::shared_ptr<model> asked;
    char const* name;
    static constexpr bool agrees = Agrees;

    template <class S>
    strategy_of(S policy)
        : make([policy] { return std::make_unique<ddp::detail::strategy_model_of<any_transport, double, S>>(policy); }),
          asked(make()),
          name(S::name) {}
    [[nodiscard]] std::uint64_t hash() const { return asked->hash(); }
    void validate() const {}
    void validate(int ranks) const { asked->validate(ranks); }
    void validate(communicator<> const& comm) const { asked->validate(comm); }
    [[nodiscard]] bool due(std::uint64_t step) const { return asked->due(step); }
    [[nodiscard]] communicator<> const* group(std::uint64_t step) const { return asked->group(step); }
    struct state {
        std::unique_ptr<model> held;
        void for_each_state(state_visitor visit) { held->for_each_state(visit); }
    };
    [[nodiscard]] state prepare(strategy_plan<double> const& plan) const {
        state all{make()};
        all.held->prepare(plan);
        return all;
    }
    void meet(state& kept, meeting<any_transport, double> const& with) const { kept.held->meet(with); }
};

using any_strategy = strategy_of<true>;

/// Samples of `rank` in its local step number `step`, from 1: uneven, none now and then, and no more than its data.
std::size_t rows_of(int rank, std::size_t step) {
    std::size_t const r = static_cast<std::size_t>(rank);
    if (step > 20 - r % 3) return 0;  // out of data: join()
    return (step + r) % 7 == 3 && step <= 17 ? 0 : 2 + (r + step) % 3;
}
std::size_t offset_of(int rank, std::size_t step) {
    return (static_cast<std::size_t>(rank) * 13 + step * 5) % 50;
}

using clipping = decltype(local_options::clip);
clipping const by_norm = clip_by_global_norm{.max_norm = 2.0}, by_value = clip_by_value{.limit = 0.05};

/// Of a rank, whose thread must not use the test framework.
void expect(bool good, char const* what) {
    if (!good) throw std::logic_error(what);
}

struct ending {
    numbers_of values;
    std::vector<std::uint64_t> after_meetings;  // digests
    std::uint64_t state = 0;                    // digest of all that is kept, at the end
    std::size_t sent = 0, steps = 0;
    std::string wrong;
};
numbers_of flat(auto const& parameters) {
    numbers_of all;
    for (auto const& p : parameters) all.insert(all.end(), p.value.begin(), p.value.end());
    return all;
}

ddp::schedule down_to_a_fifth() {
    return ddp::schedule{cosine_decay{.steps = 40, .floor = 0.2}};
}

template <memory Kind = memory::releasing, Element E = double, class Strategy>
ending train_on(communicator<>& comm, Strategy const& strategy, grouped const& optimizer,
                ddp::schedule const& decay = down_to_a_fifth(), clipping const& clip = by_norm) {
    constexpr bool agrees = Strategy::agrees;
    task_data<double> const data(in, out, 64);
    std::uint64_t const seed = 1 + static_cast<std::uint64_t>(comm.rank());  // rank 0's values go everywhere
    tanh_mlp<E, Kind> model(in, hidden, out, seed);
    if constexpr (!std::same_as<E, double>) {  // other numbers are drawn for it
        tanh_mlp<double> start(in, hidden, out, seed);
        auto const from = start.parameters();
        auto const to = model.parameters();
        for (std::size_t i = 0; i < to.size(); ++i)
            std::ranges::transform(from[i].value, to[i].value.begin(), [](double x) { return static_cast<E>(x); });
    }
    local_parallel trainer{model, optimizer, comm, strategy, {.clip = clip, .schedule = decay}};
    ending end;
    std::uint64_t const before = comm.bytes_sent();
    for (std::size_t step = 1; rows_of(comm.rank(), step) != 0 || step <= 17; ++step) {
        std::size_t const from = offset_of(comm.rank(), step);
        auto const batch = data.batch(from, from + rows_of(comm.rank(), step));
        std::vector<E> const x(batch.x.begin(), batch.x.end()), y(batch.y.begin(), batch.y.end());
        local_result const done = trainer.step(regression<E>{x, y, batch.rows});
        if (done.weight != rows_of(comm.rank(), step)) end.wrong = "another weight";
        if (done.met && agrees) {
            end.after_meetings.push_back(trainer.digest_of_values());
            if (step <= 17 && !trainer.replicas_identical()) end.wrong = "ranks differ after a meeting";
        }
    }
    while (trainer.join()) end.after_meetings.push_back(trainer.digest_of_values());
    end.sent = static_cast<std::size_t>(comm.bytes_sent() - before);
    end.steps = static_cast<std::size_t>(trainer.completed_steps());
    if constexpr (std::same_as<Strategy, stale_synchronous>) {
        if (trainer.between_steps()) end.wrong = "sums are under way";
        trainer.synchronise();
        if (!trainer.replicas_identical()) end.wrong = "ranks differ after synchronise()";
        trainer.synchronise();  // nothing is under way
    }
    end.values = flat(trainer.parameters());
    end.state = digest_of_state(trainer);
    return end;
}

/// What a meeting does to all ranks' values, by hand.
using by_hand = std::function<void(std::vector<numbers_of>& values, numbers_of& since, std::size_t step, double rate)>;

/// The same, one rank after the other. due: whether ranks meet after a step. weigh: over which ranks shares add up to 1.
std::vector<numbers_of> simulate(int ranks, grouped const& optimizer, std::function<bool(std::size_t)> const& due,
                                 by_hand const& meet, std::size_t last, ddp::schedule const& decay = down_to_a_fifth(),
                                 bool clipped_by_value = false) {
    task_data<double> const data(in, out, 64);
    tanh_mlp<double> model(in, hidden, out, 1);
    auto const parameters = model.parameters();
    std::vector<std::size_t> counts;
    for (auto const& p : parameters) counts.push_back(p.value.size());
    layout const where(counts, {}, sizeof(double));
    std::vector<numbers_of> values(static_cast<std::size_t>(ranks), flat(parameters));
    std::vector<stepper<double>> steppers;
    for (int r = 0; r < ranks; ++r) steppers.emplace_back(optimizer, where, parameters);
    std::vector<std::uint64_t> updates(static_cast<std::size_t>(ranks));
    numbers_of since(static_cast<std::size_t>(ranks));
    for (std::size_t step = 1; step <= last; ++step) {
        for (std::size_t r = 0; r < values.size(); ++r) {
            std::size_t const rows = rows_of(static_cast<int>(r), step), from = offset_of(static_cast<int>(r), step);
            if (rows == 0) continue;
            std::size_t at = 0;
            for (auto const& p : parameters) {
                std::copy_n(values[r].begin() + static_cast<std::ptrdiff_t>(at), p.value.size(), p.value.begin());
                at += p.value.size();
            }
            (void)model.forward(data.batch(from, from + rows));
            model.backward({.scale = static_cast<double>(rows)}, [](std::size_t) {});
            numbers_of gradients(where.size()), now(where.size()), value_norms, gradient_norms;
            double squares = 0;
            for (std::size_t i = 0; i < parameters.size(); ++i)
                for (std::size_t k = 0; k < counts[i]; ++k) {
                    double const g = parameters[i].gradient[k] / static_cast<double>(rows);
                    gradients[where.begin(i) + k] = g;
                    now[where.begin(i) + k] = parameters[i].value[k];
                    squares += g * g;
                }
            double const clip = std::min(1.0, 2.0 / (std::sqrt(squares) + 1e-6));
            for (double& g : gradients) g = clipped_by_value ? std::min(std::max(g, -0.05), 0.05) : g * clip;
            update_info how{.update = ++updates[r], .rate_factor = decay.factor(step - 1)};
            auto const of_each = [&](auto const& body) {
                for (std::size_t i = 0; i < counts.size(); ++i)
                    if (counts[i] != 0) body(where.begin(i), where.end(i));
            };
            if (steppers[r].needs_norms()) {
                of_each([&](std::size_t a, std::size_t z) { steppers[r].prepare(how, gradients, now, a, z); });
                for (std::size_t i = 0; i < counts.size(); ++i) {
                    double of_value = 0, of_gradient = 0;
                    for (std::size_t k = where.begin(i); k < where.end(i); ++k) {
                        of_value += now[k] * now[k];
                        of_gradient += gradients[k] * gradients[k];
                    }
                    value_norms.push_back(std::sqrt(of_value));
                    gradient_norms.push_back(std::sqrt(of_gradient));
                }
                how.value_norms = value_norms;
                how.gradient_norms = gradient_norms;
            }
            of_each([&](std::size_t a, std::size_t z) { steppers[r].step(how, gradients, now, a, z); });
            at = 0;
            for (std::size_t i = 0; i < counts.size(); at += counts[i++])
                std::copy_n(now.begin() + static_cast<std::ptrdiff_t>(where.begin(i)), counts[i],
                            values[r].begin() + static_cast<std::ptrdiff_t>(at));
            since[r] += static_cast<double>(rows);
        }
        if (!due(step)) continue;
        meet(values, since, step, decay.factor(step - 1));
    }
    return values;
}
numbers_of mean_of(std::vector<numbers_of> const& values, std::vector<std::size_t> const& ranks,
                   numbers_of const& since) {
    double all = 0;
    for (std::size_t const r : ranks) all += since[r];
    numbers_of mean(values[0].size());
    for (std::size_t const r : ranks)
        for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += values[r][i] * (since[r] / all);
    return mean;
}
std::vector<std::size_t> everybody(std::size_t ranks) {
    std::vector<std::size_t> all(ranks);
    for (std::size_t r = 0; r < ranks; ++r) all[r] = r;
    return all;
}
double total(numbers_of const& all) {
    double sum = 0;
    for (double const x : all) sum += x;
    return sum;
}

void compare(std::vector<ending> const& got, std::vector<numbers_of> const& expected, double tolerance = 1e-10) {
    for (std::size_t r = 0; r < got.size(); ++r) {
        REQUIRE(got[r].wrong == "");
        REQUIRE(got[r].values.size() == expected[r].size());
        for (std::size_t i = 0; i < expected[r].size(); ++i)
            REQUIRE(std::abs(got[r].values[i] - expected[r][i]) < tolerance);
    }
}
/// In float, what plain loops in double give: its roundings, and no more.
template <class Strategy>
void compare_in_float(int ranks, bool tcp, Strategy const& strategy, grouped const& optimizer,
                      std::vector<numbers_of> const& expected) {
    if (ranks != 7 && (ranks != 3 || tcp)) return;
    auto const train = [&](auto& comm) { return train_on<memory::releasing, float>(comm, strategy, optimizer); };
    compare(ranks_over(tcp, ranks, train, patient()), expected, 2e-5);
}
/// Another transport gives the same bits, of all that is kept too; with seven ranks, messages through memory.
template <class Train>
void repeat_elsewhere(bool tcp, int ranks, Train const& train, std::vector<ending> const& got) {
    if (ranks == 1) return;
    auto const again = ranks == 7 ? on_ranks(ranks, train, true) : ranks_over(!tcp, ranks, train, patient());
    for (std::size_t r = 0; r < got.size(); ++r) {
        REQUIRE(again[r].values == got[r].values);
        REQUIRE(again[r].after_meetings == got[r].after_meetings);
        REQUIRE(again[r].state == got[r].state);
    }
}
any_optimizer const momentum_sgd = sgd{.lr = 0.05, .momentum = 0.9},
                    decayed_adamw = adamw{.lr = 0.01, .weight_decay = 0.1};
std::vector<std::pair<std::string, grouped>> every_optimizer() {
    return {{"sgd", {momentum_sgd, {}}},
            {"adamw", {decayed_adamw, {}}},
            {"adam", {adam{.lr = 0.01, .weight_decay = 0.01}, {}}},
            {"lion", {lion{.lr = 0.003, .weight_decay = 0.1}, {}}},
            {"lamb", {lamb{.lr = 0.01, .weight_decay = 0.1}, {}}},
            {"rmsprop", {rmsprop{.lr = 0.01, .momentum = 0.5}, {}}},
            {"lars", {lars{.lr = 0.1, .momentum = 0.9}, {}}},
            {"adagrad", {adagrad{.lr = 0.05}, {}}}};
}
/// Numbers ways_to_run() from 0.
std::size_t number_of(int ranks, bool tcp) {
    return 2 * static_cast<std::size_t>(std::min(ranks - 1, 4)) + (tcp ? 1 : 0);
}
/// Two of every_optimizer(), which are others in the next way to run, and groups of three.
std::vector<std::pair<std::string, grouped>> some_optimizers(int ranks, bool tcp) {
    auto const every = every_optimizer();
    std::size_t const first = 2 * number_of(ranks, tcp) % every.size();
    std::vector<std::pair<std::string, grouped>> some = {every[first], every[first + 1]};
    if (ranks == 3)
        some.emplace_back("groups", grouped{decayed_adamw, {{"b*", momentum_sgd}, {"w2", lamb{.lr = 0.02}}}});
    return some;
}

}  // namespace

TEST_CASE("local SGD, with warm-up and without, is what plain loops give", "[strategy]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    for (auto const& [name, optimizer] : some_optimizers(ranks, tcp))
        for (std::size_t const warm_up : {std::size_t{0}, std::size_t{3}}) {
            bool const one_by_one = warm_up != 0;  // values are clipped
            CAPTURE(ranks, tcp, name, warm_up);
            local_sgd const strategy{.period = 4, .warm_up_steps = warm_up};
            auto const train = [&, &by = optimizer](auto& comm) {
                return train_on(comm, any_strategy(strategy), by, down_to_a_fifth(), one_by_one ? by_value : by_norm);
            };
            auto const got = ranks_over(tcp, ranks, train, patient());
            for (ending const& one : got) REQUIRE(one.after_meetings == got[0].after_meetings);
            repeat_elsewhere(tcp, ranks, train, got);
            std::size_t meetings = 0;
            auto const expected = simulate(
                ranks, optimizer, [&](std::size_t s) { return s <= warm_up || (s - warm_up) % 4 == 0; },
                [&](auto& values, numbers_of& since, std::size_t, double) {
                    ++meetings;
                    if (total(since) == 0) return;
                    numbers_of const mean = mean_of(values, everybody(values.size()), since);
                    for (auto& one : values) one = mean;
                    std::fill(since.begin(), since.end(), 0.0);
                },
                got[0].steps, down_to_a_fifth(), one_by_one);
            compare(got, expected);
            if (!one_by_one) compare_in_float(ranks, tcp, strategy, optimizer, expected);
            REQUIRE(got[0].after_meetings.size() + 1 == meetings);
        }
}

TEST_CASE("DiLoCo and slow momentum are what the papers' pseudo-code gives", "[strategy]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    // The second one is 0 from step 18 on: the meeting after step 20 has steps before and behind that.
    bool const ends = GENERATE(false, true);
    ddp::schedule const decay = ends ? ddp::schedule{cosine_decay{.steps = 17}} : down_to_a_fifth();
    for (auto const& [name, optimizer] : some_optimizers(ranks, tcp))
        for (bool const nesterov : {true, false}) {
            CAPTURE(ranks, tcp, ends, name, nesterov);
            diloco const outer{.period = 5, .outer_lr = 0.6, .outer_momentum = 0.8};
            any_strategy const strategy =
                nesterov ? any_strategy(outer) : any_strategy(slow_momentum{.period = 5, .lr = 0.9, .momentum = 0.4});
            auto const train = [&, &by = optimizer](auto& comm) { return train_on(comm, strategy, by, decay); };
            auto const got = ranks_over(tcp, ranks, train, patient());
            repeat_elsewhere(tcp, ranks, train, got);
            std::size_t at_zero = 0;
            numbers_of anchor, momentum;
            double const base = 0.05;  // whatever it is: the momentum is divided by it, and then multiplied
            task_data<double> const data(in, out, 64);
            tanh_mlp<double> start(in, hidden, out, 1);
            anchor = flat(start.parameters());
            momentum.resize(anchor.size());
            auto const expected = simulate(
                ranks, optimizer, [](std::size_t s) { return s % 5 == 0; },
                [&](auto& values, numbers_of& since, std::size_t, double factor) {
                    if (total(since) == 0) return;
                    numbers_of const mean = mean_of(values, everybody(values.size()), since);
                    for (std::size_t i = 0; i < mean.size(); ++i) {
                        if (nesterov) {  // torch.optim.SGD(lr=0.6, momentum=0.8, nesterov=True) on anchor - mean
                            double const gradient = anchor[i] - mean[i];
                            momentum[i] = 0.8 * momentum[i] + gradient;
                            anchor[i] -= 0.6 * (gradient + 0.8 * momentum[i]);
                        } else if (factor == 0) {  // without a rate there is no step along the momentum
                            anchor[i] = mean[i];
                        } else {  // SlowMo, lines 7 and 8, with gamma = base * factor
                            double const gamma = base * factor;
                            momentum[i] = 0.4 * momentum[i] + (anchor[i] - mean[i]) / gamma;
                            anchor[i] -= 0.9 * gamma * momentum[i];
                        }
                    }
                    at_zero += factor == 0 ? 1 : 0;
                    for (auto& one : values) one = anchor;
                    std::fill(since.begin(), since.end(), 0.0);
                },
                got[0].steps, decay);
            compare(got, expected);
            if (nesterov && !ends) compare_in_float(ranks, tcp, outer, optimizer, expected);
            REQUIRE(at_zero == (ends ? 1 : 0));
        }
}

TEST_CASE("elastic averaging and gossip are what plain loops give", "[strategy]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    std::size_t const count = static_cast<std::size_t>(ranks);
    for (int const kind : {0, 1, 2, 3}) {
        CAPTURE(ranks, tcp, kind);
        bool const elastic = kind == 0 || kind == 3;
        double const alpha = kind == 0 ? 0.125 : 0.9 / ranks;
        auto const every = every_optimizer();
        auto const& [name, by] = every[(2 * static_cast<std::size_t>(kind) + number_of(ranks, tcp)) % every.size()];
        grouped const& optimizer = by;
        CAPTURE(name);
        gossip const neighbours = kind == 1 ? gossip{.graph = gossip_graph::ring, .period = 2}
                                            : gossip{.graph = gossip_graph::exponential, .period = 1};
        strategy_of<false> const centred(kind == 0 ? elastic_averaging{.period = 3, .alpha = 0.125}
                                                   : elastic_averaging{.period = 3});
        auto const train = [&](auto& comm) {
            return elastic ? train_on(comm, centred, optimizer) : train_on(comm, neighbours, optimizer);
        };
        auto const got = ranks_over(tcp, ranks, train, patient());
        repeat_elsewhere(tcp, ranks, train, got);
        task_data<double> const data(in, out, 64);
        tanh_mlp<double> start(in, hidden, out, 1);
        numbers_of centre = flat(start.parameters());
        std::size_t meetings = 0;
        std::size_t const period = elastic ? 3 : kind == 1 ? 2 : 1;
        auto const expected = simulate(
            ranks, optimizer, [&](std::size_t s) { return s % period == 0; },
            [&](auto& values, numbers_of& since, std::size_t, double) {
                if (elastic && total(since) == 0) return;  // gossip goes on until all know that all are done
                std::fill(since.begin(), since.end(), 0.0);
                ++meetings;
                auto const before = values;
                for (std::size_t i = 0; i < centre.size(); ++i) {
                    double pulled = 0;
                    for (std::size_t r = 0; r < count; ++r) {
                        if (elastic) {
                            values[r][i] = before[r][i] - alpha * (before[r][i] - centre[i]);
                            pulled += alpha * (before[r][i] - centre[i]);
                        } else if (count == 1) {
                            continue;
                        } else if (kind == 1 && count > 2) {
                            values[r][i] =
                                (before[r][i] + before[(r + 1) % count][i] + before[(r + count - 1) % count][i]) / 3;
                        } else {
                            std::size_t distances = 0;  // of 1, 2, 4, … those below P
                            while ((std::size_t{1} << distances) < count) ++distances;
                            std::size_t const far = std::size_t{1} << (meetings - 1) % distances;
                            values[r][i] = (before[r][i] + before[(r + count - far) % count][i]) / 2;
                        }
                    }
                    centre[i] += pulled;
                }
            },
            got[0].steps);
        compare(got, expected);
        if (!elastic) compare_in_float(ranks, tcp, neighbours, optimizer, expected);
        // The last meetings, in which nobody has trained, give two, four, … ranks in the exponential graph the mean of all.
        if (ranks > 2 && !(kind == 2 && ranks == 4)) REQUIRE(got[0].values != got[1].values);
    }
}

TEST_CASE("data that ends more than once ends for all ranks together each time", "[strategy]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    auto const counted = [&](auto const& strategy) {
        return ranks_over(
            tcp, ranks,
            [&](auto& comm) {
                scripted_model<> net({{"a", {4}}});
                local_parallel trainer{net, any_optimizer(sgd{.lr = 0.01}), comm, strategy};
                std::vector<int> calls;
                for (int const batches : {5, comm.rank(), 0, comm.size() - comm.rank()}) {
                    for (int b = 0; b < batches; ++b) trainer.step(numbers{{1.0 + comm.rank()}});
                    int made = batches;
                    do ++made;
                    while (trainer.join());
                    calls.push_back(made);
                }
                trainer.synchronise();
                return calls;
            },
            patient());
    };
    for (auto const& calls :
         {counted(gossip{.graph = gossip_graph::ring}), counted(gossip{.graph = gossip_graph::exponential}),
          counted(stale_synchronous{.staleness = 2}), counted(any_strategy(local_sgd{.period = 1}))}) {
        CAPTURE(ranks, tcp);
        for (auto const& each : calls) CHECK(each == calls[0]);
    }
}

TEST_CASE("every strategy trains a model of one element, on more ranks than elements; one of none is refused",
          "[strategy]") {
    int const ranks = GENERATE(1, 2, 3, 4, 7);
    auto const trained = [&](auto const& make, double expected) {
        auto const values = run_ranks(
            ranks,
            [&](auto& comm) {
                scripted_model<> net({{"one", {1}}}), nothing(std::vector<scripted_model<>::part>{});
                std::string const refused =
                    thrown_by([&] { local_parallel trainer{nothing, any_optimizer(sgd{}), comm, make(comm)}; });
                expect(refused.find("the model has no parameters to train") != refused.npos, "refused");
                local_parallel trainer{net, any_optimizer(sgd{.lr = 1}), comm, make(comm)};
                for (int step = 0; step < 4; ++step) trainer.step(numbers{{static_cast<double>(comm.rank() + 1)}});
                trainer.synchronise();
                expect(trainer.replicas_identical(), "ranks differ");
                return net.value(0)[0];
            },
            patient());
        CAPTURE(ranks);
        for (double const value : values) REQUIRE(std::abs(value - expected) < 1e-12);
    };
    double const mean = -4 * (ranks + 1) / 2.0;  // of what four steps do
    auto const pairs = [](auto& comm) {
        return any_strategy(
            hierarchical_averaging<>{.inner = comm.split(comm.rank() / 2), .inner_period = 1, .period = 2});
    };
    trained([](auto&) { return any_strategy(local_sgd{.period = 2}); }, mean);
    trained(pairs, mean);
    trained([](auto&) { return any_strategy(diloco{.period = 4, .outer_lr = 0.5, .outer_momentum = 0}); }, mean / 2);
    trained([](auto&) { return any_strategy(slow_momentum{.period = 2}); }, mean * 1.25);  // on along half of the first
    trained([](auto&) { return gossip{.period = 1}; }, mean);
    trained([](auto&) { return gossip{.graph = gossip_graph::ring}; }, mean);
    trained([](auto&) { return stale_synchronous{.staleness = 2}; }, mean);
    // The mean of all is pulled by 0.9 / P towards the centre, and the centre by 0.9 towards it; twice.
    double const pulled = 0.9 / ranks, first = mean / 2, centre = 0.9 * first, second = (1 - pulled) * first + first;
    trained([](auto&) { return strategy_of<false>(elastic_averaging{.period = 2}); },
            second - pulled * (second - centre));
}

TEST_CASE("steps of others that come later are what plain loops give", "[strategy]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    for (auto const& [name, optimizer] : some_optimizers(ranks, tcp))
        for (std::size_t const staleness : {std::size_t{1}, std::size_t{3}}) {
            CAPTURE(ranks, tcp, name, staleness);
            auto const train = [&, &by = optimizer](auto& comm) {
                return train_on(comm, stale_synchronous{.staleness = staleness}, by);
            };
            auto const got = ranks_over(tcp, ranks, train, patient());
            task_data<double> const data(in, out, 64);
            tanh_mlp<double> start(in, hidden, out, 1);
            numbers_of common = flat(start.parameters());
            std::vector<numbers_of> before(static_cast<std::size_t>(ranks), common);
            std::vector<std::vector<numbers_of>> moved;  // by step, by rank
            std::vector<numbers_of> weights;
            std::size_t used = 0;
            auto const use_one = [&] {
                double const all = total(weights[used]);
                for (std::size_t r = 0; all > 0 && r < before.size(); ++r)
                    for (std::size_t i = 0; i < common.size(); ++i)
                        common[i] += moved[used][r][i] * (weights[used][r] / all);
                ++used;
            };
            (void)simulate(
                ranks, optimizer, [](std::size_t) { return true; },
                [&](auto& values, numbers_of& since, std::size_t, double) {
                    weights.push_back(since);
                    std::fill(since.begin(), since.end(), 0.0);
                    moved.emplace_back(values);
                    for (std::size_t r = 0; r < before.size(); ++r)
                        for (std::size_t i = 0; i < common.size(); ++i) moved.back()[r][i] -= before[r][i];
                    if (moved.size() > staleness) use_one();
                    for (std::size_t r = 0; r < before.size(); ++r) {
                        values[r] = common;
                        for (std::size_t k = used; k < moved.size(); ++k)
                            for (std::size_t i = 0; i < common.size(); ++i) values[r][i] += moved[k][r][i];
                        before[r] = values[r];
                    }
                },
                got[0].steps);
            while (used < moved.size()) use_one();
            for (ending const& one : got) REQUIRE(one.steps == got[0].steps);
            std::vector<numbers_of> const expected(before.size(), common);
            compare(got, expected);
            compare_in_float(ranks, tcp, stale_synchronous{.staleness = staleness}, optimizer, expected);
            for (std::size_t r = 0; r < got.size(); ++r) REQUIRE(got[r].values == got[0].values);
            repeat_elsewhere(tcp, ranks, train, got);  // however messages came
        }
}

TEST_CASE("a rank is ahead of the slowest by as many steps as it may, and what it learns is as old", "[strategy]") {
    using Catch::Matchers::Contains;
    std::atomic<int> ahead{0};
    auto const seen = run_ranks(
        2,
        [&](auto& comm) {
            scripted_model<> net({{"a", {2}}});
            local_parallel trainer{net, any_optimizer(sgd{.lr = 1}), comm, stale_synchronous{.staleness = 2}};
            std::vector<double> values;
            std::vector<bool> stops;
            for (int step = 1; step <= 5; ++step) {
                if (comm.rank() == 1)  // each step after rank 0 has made that one and the next
                    while (ahead.load() < std::min(step + 1, 5)) std::this_thread::yield();
                if (step == 2 && comm.rank() == 1) trainer.request_stop();
                stops.push_back(trainer.step(numbers{{comm.rank() == 0 ? 1.0 : 3.0}}).stop);
                values.push_back(net.value(0)[0]);
                if (comm.rank() == 0) ahead.store(step);
            }
            expect(stops == std::vector<bool>{false, false, false, true, true}, "who stops is learnt two steps later");
            (void)thrown_by([&] { (void)trainer.replicas_identical(); });
            trainer.synchronise();
            values.push_back(net.value(0)[0]);
            return values;
        },
        patient());
    REQUIRE(seen[0] == std::vector<double>{-1, -2, -4, -6, -8, -10});
    REQUIRE(seen[1] == std::vector<double>{-3, -6, -8, -10, -12, -10});

    run_ranks(1, [](auto& comm) {
        scripted_model<> net({{"a", {2}}});
        REQUIRE_THAT(thrown_by([&] {
                         local_parallel trainer{net, any_optimizer(sgd{}), comm, stale_synchronous{.staleness = 0}};
                     }),
                     Contains("stale_synchronous: staleness is 0"));
        local_parallel trainer{net, any_optimizer(sgd{}), comm, stale_synchronous{}};
        trainer.step(numbers{{1}});
        REQUIRE_THAT(thrown_by([&] { (void)trainer.replicas_identical(); }),
                     Contains("under stale_synchronous ranks never hold the same values"));
    });
    auto const thrown = errors_of_ranks(3, [](auto& comm) {
        scripted_model<> net({{"a", {2}}});
        local_parallel trainer{net, any_optimizer(sgd{}), comm, stale_synchronous{.staleness = 2}};
        for (int step = 0; step < 9; ++step) {
            if (comm.rank() == 1 && step == 3) net.in_forward = [] { throw std::runtime_error("the lamp fell over"); };
            trainer.step(numbers{{1}});
        }
    });
    REQUIRE(thrown[1] == "the lamp fell over");
    for (std::size_t const r : {0u, 2u}) REQUIRE_THAT(thrown[r], Contains("rank 1") && Contains("the lamp fell over"));
}

namespace {
/// Groups meet in every second step, all ranks in every sixth.
std::vector<numbers_of> simulate_groups(std::vector<std::vector<std::size_t>> const& groups, std::size_t count,
                                        grouped const& optimizer, std::size_t steps) {
    numbers_of before(count);
    return simulate(
        static_cast<int>(count), optimizer, [](std::size_t s) { return s % 2 == 0; },
        [&](auto& values, numbers_of& since, std::size_t step, double) {
            // since: samples after the last meeting of all; before: those of them that the last meeting of the group knew.
            if (step % 6 == 0) {
                if (total(since) != 0) {
                    numbers_of const mean = mean_of(values, everybody(count), since);
                    for (auto& one : values) one = mean;
                }
                std::fill(since.begin(), since.end(), 0.0);
                std::fill(before.begin(), before.end(), 0.0);
                return;
            }
            numbers_of lately(count);
            for (std::size_t r = 0; r < count; ++r) lately[r] = since[r] - before[r];
            for (auto const& group : groups) {
                double samples = 0;
                for (std::size_t const r : group) samples += lately[r];
                if (group.size() == 1 || samples == 0) continue;
                numbers_of const mean = mean_of(values, group, lately);
                for (std::size_t const r : group) values[r] = mean;
            }
            before = since;
        },
        steps);
}
}  // namespace

TEST_CASE("groups meet more often than all ranks", "[strategy]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    std::size_t const count = static_cast<std::size_t>(ranks);
    std::vector<std::vector<std::size_t>> pairs((count + 1) / 2);  // of an odd number of ranks the last is alone
    for (std::size_t r = 0; r < count; ++r) pairs[r / 2].push_back(r);
    for (auto const& [name, optimizer] : some_optimizers(ranks, tcp)) {
        CAPTURE(ranks, tcp, name);
        auto const train = [&by = optimizer](auto& comm) {
            return train_on(comm,
                            any_strategy(hierarchical_averaging<>{
                                .inner = comm.split(comm.rank() / 2), .inner_period = 2, .period = 6}),
                            by);
        };
        auto const got = ranks_over(tcp, ranks, train, patient());
        compare(got, simulate_groups(pairs, count, optimizer, got[0].steps));
        repeat_elsewhere(tcp, ranks, train, got);
    }
}

TEST_CASE("hosts of unequal size meet more often than all ranks", "[strategy]") {
    grouped const optimizer = every_optimizer()[1].second;
    auto const train = [&](auto& comm) {
        return train_on(comm,
                        any_strategy(hierarchical_averaging<>{.inner = comm.host(), .inner_period = 2, .period = 6}),
                        optimizer);
    };
    auto const got = on_hosts({7, 9, 7, 7, 9, 4}, train, patient());
    compare(got, simulate_groups({{0, 2, 3}, {1, 4}, {5}}, 6, optimizer, got[0].steps));
}

TEST_CASE("two groups train at the same time under any strategy, each to the bits of its ranks alone", "[strategy]") {
    bool const tcp = GENERATE(false, true);
    grouped const optimizer = every_optimizer()[1].second;
    auto const apart = [&](char const* name, auto const& make) {
        auto const train = [&](auto& comm) { return train_on(comm, make(comm), optimizer); };
        auto const both = ranks_over(
            tcp, 5,
            [&](auto& world) {
                auto half = world.split(world.rank() % 2);
                return train(half);
            },
            patient());
        for (std::size_t const color : {0u, 1u}) {
            auto const alone = run_ranks(color == 0 ? 3 : 2, train, patient());
            for (std::size_t r = 0; r < alone.size(); ++r) {
                ending const& mine = both[2 * r + color];
                CAPTURE(name, tcp, color, r);
                REQUIRE(mine.wrong == "");
                REQUIRE(mine.values == alone[r].values);
                REQUIRE(mine.after_meetings == alone[r].after_meetings);
                REQUIRE(mine.state == alone[r].state);
            }
        }
    };
    apart("local_sgd", [](auto&) { return any_strategy(local_sgd{.period = 3, .warm_up_steps = 2}); });
    apart("hierarchical", [](auto& comm) {
        return any_strategy(
            hierarchical_averaging<>{.inner = comm.split(comm.rank() / 2), .inner_period = 2, .period = 6});
    });
    apart("diloco", [](auto&) { return any_strategy(diloco{.period = 3}); });
    apart("slow_momentum", [](auto&) { return any_strategy(slow_momentum{.period = 3}); });
    apart("stale", [](auto&) { return stale_synchronous{.staleness = 2}; });
    apart("gossip_ring", [](auto&) { return gossip{.graph = gossip_graph::ring, .period = 2}; });
    apart("gossip", [](auto&) { return gossip{.period = 1}; });
    apart("elastic", [](auto&) { return strategy_of<false>(elastic_averaging{.period = 3}); });
}

TEST_CASE(
    "strategies in a group of ranks, in an order of its own, give the bits of as many ranks alone, and so do models "
    "with memory of their own",
    "[strategy]") {
    auto const alike = [](auto const& make, bool agree) {
        grouped const optimizer = every_optimizer()[1].second;
        auto const alone = run_ranks(3, [&](auto& comm) { return train_on(comm, make(comm), optimizer); }, patient());
        auto const within = run_ranks(
            4,
            [&](auto& world) {
                std::optional<communicator<>> group = world.subgroup({2, 0, 3});
                return group ? train_on(*group, make(*group), optimizer) : ending{};
            },
            patient());
        for (ending const& one : within) REQUIRE(one.wrong == "");
        std::size_t r = 0;
        for (std::size_t const world_rank : {2u, 0u, 3u}) REQUIRE(within[world_rank].values == alone[r++].values);
        REQUIRE((alone[0].values == alone[1].values) == agree);
        auto const copied =
            run_ranks(3, [&](auto& comm) { return train_on<memory::copied>(comm, make(comm), optimizer); }, patient());
        for (r = 0; r < 3; ++r) {
            REQUIRE(copied[r].wrong == "");
            REQUIRE(copied[r].values == alone[r].values);
            REQUIRE(copied[r].after_meetings == alone[r].after_meetings);
        }
    };
    alike([](auto&) { return any_strategy(local_sgd{.period = 3, .warm_up_steps = 2}); }, true);
    alike(
        [](auto& comm) {
            return any_strategy(
                hierarchical_averaging<>{.inner = comm.split(comm.rank() / 2), .inner_period = 2, .period = 6});
        },
        true);
    alike([](auto&) { return any_strategy(diloco{.period = 3}); }, true);
    alike([](auto&) { return any_strategy(slow_momentum{.period = 3}); }, true);
    alike([](auto&) { return stale_synchronous{.staleness = 2}; }, true);  // synchronised at the end
    alike([](auto&) { return gossip{.graph = gossip_graph::ring, .period = 2}; }, false);
    alike([](auto&) { return gossip{.period = 1}; }, false);
    alike([](auto&) { return strategy_of<false>(elastic_averaging{.period = 3}); }, false);
}

TEST_CASE("where ranks meet after each step, local SGD is data-parallel training; alone, it has its bits",
          "[strategy]") {
    int const ranks = GENERATE(1, 3);
    auto const differences = run_ranks(
        ranks,
        [](auto& comm) {
            task_data<double> const data(in, out, 64);
            tanh_mlp<double> one(in, hidden, out, 1), other(in, hidden, out, 1);
            local_parallel local{one, any_optimizer(sgd{.lr = 0.1, .momentum = 0.9}), comm,
                                 any_strategy(local_sgd{.period = 1})};
            data_parallel whole{other,
                                any_optimizer(sgd{.lr = 0.1, .momentum = 0.9}),
                                comm,
                                training_options{.update = update::replicated},
                                any_allreduce{},
                                per_parameter_buckets{}};
            for (std::size_t step = 0; step < 8; ++step) {
                std::size_t const from = step * 3 + static_cast<std::size_t>(comm.rank()) * 9;
                for (std::size_t part = 0; part < 2; ++part) {  // accumulated
                    auto const batch = data.batch(from + part * 2, from + part * 2 + 2);
                    local.forward(batch);
                    part == 0 ? local.accumulate() : local.backward();
                    whole.forward(batch);
                    part == 0 ? whole.accumulate() : whole.backward();
                }
                expect(local.finish().weight == 4, "weight");
                whole.finish();
            }
            double worst = 0;
            numbers_of const a = flat(local.parameters()), b = flat(whole.parameters());
            for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
            return worst;
        },
        patient());
    for (double const worst : differences) REQUIRE((ranks == 1 ? worst == 0 : worst < 1e-13));
}

namespace {
/// With a running mean of the numbers it has seen.
struct watchful : scripted_model<> {
    double seen = 0;
    watchful() : scripted_model<>({{"a", {2}}}) {}
    double forward(numbers const& batch) {
        seen = 0.9 * seen + 0.1 * batch.of[0];
        return scripted_model<>::forward(batch);
    }
    std::vector<model_buffer> buffers() {
        return {model_buffer{"seen", element_type::f64, {}, as_mutable_bytes(std::span(&seen, 1))}};
    }
};
}  // namespace

TEST_CASE("a meeting sends what its strategy says, counted where messages are posted", "[strategy]") {
    std::size_t const ranks = GENERATE(1u, 2u, 3u, 4u, 7u);
    CAPTURE(ranks);
    // So many that direct_allreduce adds them, with four ranks halving_doubling_allreduce. Each parameter takes whole lines of
    // 8 numbers, and their gaps are sent too.
    std::vector<scripted_model<>::part> const parts = {{"a", {36 * 4096 + 5}}, {"b", {3}}, {"c", {1}}};
    constexpr std::size_t count = (36 * 4096 + 8) + 8 + 8, values = count * sizeof(double);
    constexpr auto ticket = [](std::size_t among) { return 5 * sizeof(std::uint64_t) * (among - 1); };
    // Slices of whole lines of 8 numbers, the first of them longer: all others to their owners, and its own to all; with four
    // ranks those of one half to the neighbour, then one of its own to the next but one, and back the same way.
    constexpr auto sum_of = [](std::size_t numbers, std::size_t among, std::size_t rank) {
        std::size_t const lines = (numbers + 7) / 8;
        auto const begin = [&](std::size_t of) {
            return std::min(numbers, 8 * (lines / among * of + std::min(of, lines % among)));
        };
        auto const slice = [&](std::size_t of) { return begin(of + 1) - begin(of); };
        if (among == 4) {
            std::size_t const half = rank % 2, quarter = 2 * half + rank / 2;  // what this rank adds first and last
            std::size_t const given = slice(2 - 2 * half) + slice(3 - 2 * half),
                              mine = slice(2 * half) + slice(2 * half + 1);
            return (given + slice(quarter ^ 1) + slice(quarter) + mine) * sizeof(double);
        }
        return (numbers - slice(rank) + (among - 1) * slice(rank)) * sizeof(double);
    };
    auto const counted = [&](auto const& body) {
        auto const world = inproc_world::create(static_cast<int>(ranks));
        return on_threads(static_cast<int>(ranks), [&](int rank) {
            auto counting = std::make_unique<counting_transport<inproc_transport>>(world->connect(rank));
            auto& posted = *counting;
            communicator<> comm = any_communicator(std::move(counting), patient());
            return body(comm, posted);
        });
    };
    auto const chosen = [&](std::size_t bytes, int among) {
        return counted([&](communicator<>& comm, auto&) {
            return std::string(automatic_allreduce{}.fitted_to(comm).choice(bytes, among));
        })[0];
    };
    for (int const among : {2, static_cast<int>(ranks)})
        if (ranks > 1)
            for (std::size_t const bytes : {values, values + 3 * sizeof(double)})
                REQUIRE(chosen(bytes, among) == (among == 4 ? "halving_doubling" : "direct"));
    auto const sent_by = [&](auto make, std::uint64_t meets) {
        return counted([&](communicator<>& comm, auto& posted) {
            auto const strategy = make(comm);
            scripted_model<> net(parts);
            local_parallel trainer{net, any_optimizer(sgd{.lr = 1}), comm, strategy};
            std::size_t sent = 0;
            for (std::uint64_t step = 1; step <= meets; ++step) {
                std::uint64_t const before = comm.bytes_sent();
                posted.take_sent();
                trainer.step(numbers{{static_cast<double>(step)}});
                sent = posted.take_sent().bytes;
                expect(sent == comm.bytes_sent() - before, "bytes_sent() says another number");
                expect(sent == 0 || step == meets || step == 2, "sent out of turn");
            }
            return sent;
        });
    };
    auto const all_send = [&](auto make, std::uint64_t meets = 2) {  // a meeting of all
        auto const sent = sent_by(make, meets);
        for (std::size_t r = 0; r < ranks; ++r) REQUIRE(sent[r] == ticket(ranks) + sum_of(count, ranks, r));
    };
    all_send([](auto&) { return any_strategy(local_sgd{.period = 2}); });
    all_send([](auto&) { return any_strategy(local_sgd{.period = 8, .warm_up_steps = 1}); }, 1);
    all_send([](auto&) { return any_strategy(diloco{.period = 2}); });
    all_send([](auto&) { return any_strategy(slow_momentum{.period = 2}); });
    all_send([](auto&) { return strategy_of<false>(elastic_averaging{.period = 2}); });
    auto const pairs = [](auto& comm) {
        return any_strategy(hierarchical_averaging<>{
            .inner = comm.split(comm.rank() / 2, comm.rank()), .inner_period = 2, .period = 4});
    };
    auto const in_pairs = sent_by(pairs, 2);
    for (std::size_t r = 0; r < ranks; ++r)
        REQUIRE(in_pairs[r] == (r + 1 == ranks && ranks % 2 == 1 ? 0 : ticket(2) + sum_of(count, 2, r % 2)));
    all_send(pairs, 4);

    auto const sent_in_five = [&](auto const& strategy) {  // steps, and all done at the end
        return counted([&](communicator<>& comm, auto& posted) {
            scripted_model<> net(parts);
            local_parallel trainer{net, any_optimizer(sgd{.lr = 1}), comm, strategy};
            std::uint64_t const before = comm.bytes_sent();
            posted.take_sent();
            for (int step = 1; step <= 5; ++step) trainer.step(numbers{{static_cast<double>(step)}});
            trainer.synchronise();
            std::size_t const sent = posted.take_sent().bytes;
            expect(sent == comm.bytes_sent() - before, "bytes_sent() says another number");
            return sent;
        });
    };
    // Of an allreduce of few numbers, by the algorithm that is chosen for it.
    auto const sum_of_few = [&](std::size_t numbers, std::size_t r) {
        std::string const by = chosen(numbers * sizeof(double), static_cast<int>(ranks));
        if (ranks == 1) return std::size_t{0};
        if (by == "direct") return sum_of(numbers, ranks, r);
        REQUIRE(by == "recursive_doubling");  // as its docstring says
        std::size_t first = 0, size = std::bit_floor(ranks), left = 0;
        while (r >= first + size) first += size, left = size, size = std::bit_floor(ranks - first);
        std::size_t const place = r - first, within = static_cast<std::size_t>(std::bit_width(size) - 1);
        return (within + (first > 0              ? (left - place + size - 1) / size
                          : place < ranks - size ? 1
                                                 : 0)) *
               numbers * sizeof(double);
    };
    // Two meetings, and the mean at the end; for each meeting a sum of four numbers too.
    for (gossip_graph const graph : {gossip_graph::exponential, gossip_graph::ring}) {
        auto const sent = sent_in_five(gossip{.graph = graph, .period = 2});
        std::size_t const neighbours = ranks == 1 ? 0 : graph == gossip_graph::ring && ranks > 2 ? 2 : 1;
        for (std::size_t r = 0; r < ranks; ++r)
            REQUIRE(sent[r] == 2 * (neighbours * values + sum_of_few(4, r)) + ticket(ranks) + sum_of(count, ranks, r));
    }
    auto const late = sent_in_five(stale_synchronous{.staleness = 2});  // an allreduce in each step
    for (std::size_t r = 0; r < ranks; ++r)                             // weight, done and stop lie behind the values
        REQUIRE(late[r] == ticket(ranks) + 5 * sum_of(count + 3, ranks, r));

    // A model of one line of values, and of a buffer of one number.
    for (buffers const how : {buffers::averaged, buffers::from_rank_0, buffers::left_alone}) {
        CAPTURE(static_cast<int>(how));
        auto const sent = counted([&](communicator<>& comm, auto& posted) {
            watchful net;
            local_parallel trainer{
                net, any_optimizer(sgd{}), comm, any_strategy(local_sgd{.period = 2}), {.buffers = how}};
            trainer.step(numbers{{1}});
            posted.take_sent();
            expect(trainer.step(numbers{{2}}).met, "a meeting");
            return posted.take_sent().bytes;
        });
        std::size_t broadcast = 0;  // by all ranks together
        for (std::size_t r = 0; r < ranks; ++r) {
            std::size_t const more = sent[r] - ticket(ranks) - sum_of_few(8, r);
            if (how == buffers::from_rank_0)
                broadcast += more;
            else
                REQUIRE(more == (how == buffers::averaged ? sum_of_few(1, r) : 0));
        }
        REQUIRE(broadcast == (how == buffers::from_rank_0 ? (ranks - 1) * sizeof(double) : 0));
    }
}

TEST_CASE("what is frozen is neither stepped nor sent, and the rest is trained as if it were alone", "[strategy]") {
    auto const alike = [](auto const& make) {
        auto const wrong = run_ranks(
            3,
            [&](auto& comm) {
                scripted_model<> all({{"a", {5}}, {"b", {8}}, {"c", {}}}, 0.1), alone({{"b", {8}}}, 0.1);
                all.leaves_out = [](std::size_t i) { return i == 0; };
                local_options const how{.clip = clip_by_global_norm{.max_norm = 2.0}};
                local_options frozen = how;
                frozen.frozen = {"a", "[c]", "c"};
                std::string const refused =
                    thrown_by([&] { local_parallel trainer{all, any_optimizer(adamw{}), comm, make(comm), frozen}; });
                expect(refused.find("local_options.frozen: no parameter's name matches '[c]'") != refused.npos,
                       "refused");
                frozen.frozen = {"a", "c"};
                local_parallel one{all, any_optimizer(adamw{.lr = 0.1}), comm, make(comm), frozen};
                local_parallel other{alone, any_optimizer(adamw{.lr = 0.1}), comm, make(comm), how};
                std::uint64_t const at_first = comm.bytes_sent();
                for (int step = 0; step < 7; ++step)  // b's gradient is twice the mean in the first, once in the second
                    one.step(numbers{{0.5 * comm.rank() - step}});
                one.synchronise();
                std::uint64_t const then = comm.bytes_sent();
                for (int step = 0; step < 7; ++step) other.step(numbers{{2 * (0.5 * comm.rank() - step)}});
                other.synchronise();
                if (comm.bytes_sent() - then != then - at_first) return std::string("what is sent");
                for (std::size_t const i : {0u, 2u})
                    for (double const x : all.value(i))
                        if (x != 0.1) return std::string("what is frozen has changed");
                for (std::size_t k = 0; k < 8; ++k)
                    if (all.value(1)[k] != alone.value(0)[k] || all.value(1)[k] == 0.1) return std::string("the rest");
                bool shown = false;
                one.for_each_state([&](state_slice const& s) { shown = shown || s.of == "a" || s.of == "c"; });
                return std::string(shown ? "state of what is frozen" : "");
            },
            patient());
        for (std::string const& one : wrong) REQUIRE(one == "");
    };
    alike([](auto&) { return any_strategy(local_sgd{.period = 2}); });
    alike([](auto&) { return any_strategy(diloco{.period = 2}); });
    alike([](auto&) { return strategy_of<false>(elastic_averaging{.period = 2}); });
    alike([](auto&) { return gossip{.period = 1}; });
    alike([](auto&) { return stale_synchronous{.staleness = 2}; });
}

TEST_CASE("a parameter that a rank has not used in a step keeps value and momentum there", "[strategy]") {
    int const ranks = GENERATE(1, 3);
    constexpr double rate = 0.1, friction = 0.5;
    auto const left_out = [](int rank, int step, std::size_t i) { return i == 1 && (step + rank) % 3 != 0; };
    auto const got = run_ranks(
        ranks,
        [&](auto& comm) {
            int step = 0;
            scripted_model<> net({{"a", {2}}, {"b", {2}}}, 1.0);
            net.leaves_out = [&](std::size_t i) { return left_out(comm.rank(), step, i); };
            local_parallel trainer{net, any_optimizer(sgd{.lr = rate, .momentum = friction}), comm,
                                   any_strategy(local_sgd{.period = 2}), local_options{.unused = unused::allowed}};
            for (; step < 8; ++step)
                trainer.step(numbers{std::vector<double>(static_cast<std::size_t>(comm.rank() + 1), step + 1.0)});
            return std::vector<double>{net.value(0)[1], net.value(1)[1]};
        },
        patient());
    for (std::size_t const i : {std::size_t{0}, std::size_t{1}}) {
        std::vector<double> values(static_cast<std::size_t>(ranks), 1.0), momentum(values.size());
        for (int step = 0; step < 8; ++step) {
            double mean = 0, samples = 0;
            for (std::size_t r = 0; r < values.size(); ++r) {
                if (!left_out(static_cast<int>(r), step, i)) {
                    momentum[r] = friction * momentum[r] + static_cast<double>(i + 1) * (step + 1.0);
                    values[r] -= rate * momentum[r];
                }
                mean += values[r] * static_cast<double>(r + 1);
                samples += static_cast<double>(r + 1);
            }
            if (step % 2 == 1) values.assign(values.size(), mean / samples);
        }
        for (std::size_t r = 0; r < values.size(); ++r) CHECK(std::abs(got[r][i] - values[r]) < 1e-12);
    }
}

TEST_CASE("what is frozen when ranks have met keeps value and state, and goes on from there", "[strategy]") {
    using bytes_of = std::map<std::pair<std::string, std::string>, std::vector<std::byte>>;
    auto const state_of = [](auto& trainer) {
        bytes_of all;
        trainer.for_each_state([&](state_slice const& s) {
            all[{std::string(s.of), std::string(s.name)}] = {s.bytes.begin(), s.bytes.end()};
        });
        return all;
    };
    auto const of = [](bytes_of const& all, char const* parameter) {
        bytes_of some;
        for (auto const& [name, bytes] : all)
            if (name.first == parameter) some[name] = bytes;
        return some;
    };
    auto const frozen = [&](int ranks, auto const& make) {
        auto const wrong = run_ranks(
            ranks,
            [&](auto& comm) {
                scripted_model<> all({{"a", {5}}, {"b", {8}}, {"c", {3}}}, 0.1), alone({{"b", {8}}}, 0.1);
                local_options const how{.clip = clip_by_global_norm{.max_norm = 2.0}};
                local_options with_c = how;
                with_c.frozen = {"c"};
                local_parallel one{all, any_optimizer(adamw{.lr = 0.1}), comm, make(comm), with_c};
                double const r = comm.rank();
                auto const step = [](auto& trainer, double x) { trainer.step(numbers{{x, x + 0.3}}); };
                for (int k = 0; k < 4; ++k) step(one, 0.7 * r - k);
                one.synchronise();
                one.freeze("a*");
                std::vector<std::uint8_t> const marks(one.frozen().begin(), one.frozen().end());
                expect(marks == std::vector<std::uint8_t>{1, 0, 1}, "frozen()");
                bool left_out = false;  // a: by backward now, and reported then
                all.leaves_out = [&](std::size_t i) { return left_out && i == 0; };

                // b as it would be alone, from here on.
                local_parallel other{alone, any_optimizer(adamw{.lr = 0.1}), comm, make(comm), how};
                std::ranges::copy(all.value(1), alone.value(0).begin());
                bytes_of const at_first = state_of(one);
                other.for_each_state([&](state_slice const& s) {
                    std::ranges::copy(at_first.at({std::string(s.of), std::string(s.name)}), s.bytes.begin());
                });
                other.set_completed_steps(one.completed_steps());
                std::vector<double> const a(all.value(0).begin(), all.value(0).end());
                for (int k = 4; k < 11; ++k) {
                    left_out = k % 2 == 0;
                    step(one, 0.7 * r - k);
                    other.step(numbers{{2 * (0.7 * r - k), 2 * (0.7 * r - k + 0.3)}});  // the second's factor is 2
                    if (!std::ranges::equal(all.value(0), a)) return std::string("a has changed");
                    if (!std::ranges::equal(all.value(1), alone.value(0))) return std::string("b differs");
                }
                std::string const apart = one.between_steps() ? std::string() : thrown_by([&] { one.unfreeze("a"); });
                expect(one.between_steps() || apart.find("unfreeze: under ") != apart.npos, "apart");
                one.synchronise();
                other.synchronise();
                if (!std::ranges::equal(all.value(1), alone.value(0))) return std::string("b differs at the end");
                if (!one.replicas_identical()) return std::string("ranks differ");
                if (of(state_of(one), "a") != of(at_first, "a") || of(at_first, "a").size() < 2)
                    return std::string("state of a has changed");
                if (of(state_of(one), "b") == of(at_first, "b")) return std::string("state of b has not changed");

                auto const refused = [&](auto const& call, char const* words) {
                    std::string const text = thrown_by(call);
                    expect(text.find(words) != text.npos && text.find("DDP-E100") == 0, words);
                    expect(std::ranges::equal(one.frozen(), marks), "something was changed all the same");
                };
                refused([&] { one.unfreeze("?"); }, "unfreeze: 'c' is one of local_options::frozen, which have no");
                refused([&] { one.set_frozen(std::vector<std::uint8_t>(3)); },
                        "set_frozen: 'c' is one of local_options");
                refused([&] { one.set_frozen(std::vector<std::uint8_t>(2)); }, "set_frozen: 2 marks for 3 parameters");
                refused([&] { one.freeze("d"); }, "freeze: no parameter's name matches 'd'");
                if (comm.size() > 1) {
                    refused([&] { one.freeze(comm.rank() == 1 ? "a" : "b"); }, "freeze: ranks pass different patterns");
                    refused([&] { one.set_frozen(std::vector<std::uint8_t>{1, comm.rank() == 0, 1}); },
                            "set_frozen: ranks pass different marks; nothing was changed");
                }
                all.leaves_out = [](std::size_t) { return false; };
                one.unfreeze("a");
                for (int k = 11; k < 15; ++k) step(one, 0.7 * r - k);
                one.synchronise();
                if (std::ranges::equal(all.value(0), a)) return std::string("a is still frozen");
                bool same = true;
                std::string const text = thrown_by([&] {  // the error may reach a rank in the call before
                    same = one.replicas_identical();
                    if (comm.size() > 1) comm.rank() == 0 ? one.freeze("a") : one.unfreeze("a");
                });
                if (!same) return std::string("ranks differ");
                if (comm.size() == 1) return text;
                bool const both = text.find(" freeze #") != text.npos && text.find(" unfreeze #") != text.npos;
                return text.find("DDP-E205") == 0 && both ? std::string() : "freeze beside unfreeze: " + text;
            },
            patient());
        for (std::string const& one : wrong) REQUIRE(one == "");
    };
    for (int const ranks : {1, 2, 3, 4}) {
        CAPTURE(ranks);
        frozen(ranks, [](auto&) { return any_strategy(local_sgd{.period = 2}); });
        frozen(ranks, [](auto&) { return any_strategy(diloco{.period = 2}); });
        frozen(ranks, [](auto&) { return any_strategy(slow_momentum{.period = 2}); });
        frozen(ranks, [](auto&) { return strategy_of<false>(elastic_averaging{.period = 2}); });
        frozen(ranks, [](auto&) { return gossip{.period = 1}; });
        frozen(ranks, [](auto&) { return stale_synchronous{.staleness = 2}; });
    }
}

TEST_CASE("buffers after a meeting: averaged, rank 0's, or each rank's own", "[strategy]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    for (buffers const how : {buffers::averaged, buffers::from_rank_0, buffers::left_alone}) {
        auto const seen = ranks_over(
            tcp, ranks,
            [&](auto& comm) {
                watchful model;
                local_parallel trainer{// options before the strategy: the order does not matter
                                       model,
                                       any_optimizer(sgd{}),
                                       comm,
                                       {.buffers = how},
                                       any_strategy(local_sgd{.period = 2})};
                double const r = comm.rank();
                trainer.step(numbers{{r + 1}});
                double const apart = model.seen;
                trainer.step(numbers{{r + 5}});
                return std::pair(apart, model.seen);
            },
            patient());
        // Where ranks never agree, each rank's own until synchronise().
        auto const apart_until = [&](auto const& strategy) {
            return ranks_over(
                tcp, ranks,
                [&](auto& comm) {
                    watchful model;
                    local_parallel trainer{model, any_optimizer(sgd{}), comm, strategy, {.buffers = how}};
                    double const r = comm.rank();
                    trainer.step(numbers{{r + 1}});
                    expect(trainer.step(numbers{{r + 5}}).met, "a meeting");
                    double const met = model.seen;
                    trainer.synchronise();
                    return std::pair(met, model.seen);
                },
                patient());
        };
        auto const centred = apart_until(strategy_of<false>(elastic_averaging{.period = 2})),
                   neighbours = apart_until(gossip{.period = 2});
        // Where they agree when all have met. Groups that meet before leave buffers as they are.
        auto const met_by = [&](auto const& make) {
            return ranks_over(
                tcp, ranks,
                [&](auto& comm) {
                    watchful model;
                    local_parallel trainer{
                        model, any_optimizer(sgd{}), comm, any_strategy(make(comm)), {.buffers = how}};
                    double const r = comm.rank();
                    trainer.step(numbers{{r + 1}});
                    double const before = model.seen;
                    trainer.step(numbers{{r + 5}});
                    return std::pair(before, model.seen);
                },
                patient());
        };
        auto const outer = met_by([](auto&) { return diloco{.period = 2}; }),
                   slow = met_by([](auto&) { return slow_momentum{.period = 2}; }),
                   hosts = met_by([](auto& comm) {
                       return hierarchical_averaging<>{
                           .inner = comm.split(comm.rank() / 2), .inner_period = 1, .period = 2};
                   });
        auto const own = [](double rank) { return 0.9 * 0.1 * (rank + 1) + 0.1 * (rank + 5); };
        double mean = 0;
        for (int r = 0; r < ranks; ++r) mean += own(r) / ranks;
        for (std::size_t r = 0; r < seen.size(); ++r) {
            double const expected = how == buffers::averaged      ? mean
                                    : how == buffers::from_rank_0 ? own(0)
                                                                  : own(static_cast<double>(r));
            CAPTURE(ranks, tcp, static_cast<int>(how), r);
            for (auto const& [before, after] : {seen[r], outer[r], slow[r], hosts[r]}) {
                REQUIRE(std::abs(before - 0.1 * (static_cast<double>(r) + 1)) < 1e-12);
                REQUIRE(std::abs(after - expected) < 1e-12);
            }
            for (auto const& [met, synchronised] : {centred[r], neighbours[r]}) {
                REQUIRE(std::abs(met - own(static_cast<double>(r))) < 1e-12);
                REQUIRE(std::abs(synchronised - expected) < 1e-12);
            }
        }
    }
}

TEST_CASE("when ranks are apart, and what is refused in words", "[strategy]") {
    using Catch::Matchers::Contains;
    run_ranks(1, [](auto& comm) {
        scripted_model<> net({{"a", {2}}});
        auto const refusal = [&](auto strategy) {
            return thrown_by([&] { local_parallel trainer{net, any_optimizer(sgd{}), comm, strategy}; });
        };
        REQUIRE_THAT(refusal(any_strategy(local_sgd{.period = 0})), Contains("local_sgd: period is 0"));
        REQUIRE_THAT(refusal(any_strategy(diloco{.period = 0})),
                     Contains("diloco: period is 0; use 1 to meet after every step"));
        REQUIRE_THAT(refusal(any_strategy(slow_momentum{.period = 0})), Contains("slow_momentum: period is 0"));
        REQUIRE_THAT(refusal(strategy_of<false>(elastic_averaging{.period = 0})),
                     Contains("elastic_averaging: period is 0"));
        REQUIRE_THAT(refusal(any_strategy(hierarchical_averaging<>{.inner = comm, .inner_period = 0, .period = 4})),
                     Contains("inner_period is 0 and period 4"));
        REQUIRE_THAT(refusal(any_strategy(diloco{.outer_lr = 0})), Contains("diloco: the outer learning rate is 0;"));
        REQUIRE_THAT(refusal(any_strategy(slow_momentum{.momentum = 1})),
                     Contains("slow_momentum: the outer momentum is 1;"));
        REQUIRE_THAT(
            refusal(strategy_of<false>(elastic_averaging{.alpha = 2})),
            Contains("elastic_averaging: alpha is 2;") && Contains("; it lies between 0 and 1, and with 0 is 0.9"));
        REQUIRE_THAT(refusal(strategy_of<false>(elastic_averaging{.alpha = -0.1})), Contains("alpha is -0.1;"));
        REQUIRE_THAT(refusal(gossip{.period = 0}), Contains("gossip: period is 0; use 1 to meet after every step"));
        REQUIRE_THAT(refusal(any_strategy(hierarchical_averaging<>{.inner = comm, .inner_period = 3, .period = 4})),
                     Contains("inner_period is 3 and period 4"));
        REQUIRE_THAT(refusal(any_strategy(hierarchical_averaging<>{.inner = comm, .inner_period = 3, .period = 0})),
                     Contains("inner_period is 3 and period 0"));
        REQUIRE_THAT(refusal(stale_synchronous{.staleness = 1025}),
                     Contains("staleness is 1025; it lies between 1 and"));
        REQUIRE_THAT(refusal(any_strategy(diloco{.outer_lr = 1e6})),
                     Contains("the outer learning rate is 1000000; it has to be positive"));
        REQUIRE_THAT(refusal(any_strategy(diloco{.outer_momentum = -0.1})), Contains("the outer momentum is -0.1"));
        local_parallel begun{net, any_optimizer(sgd{}), comm, any_strategy(local_sgd{})};
        begun.forward(numbers{{1}});
        begun.backward();
        REQUIRE_THAT(thrown_by([&] { begun.values_replaced(); }),
                     Contains("values_replaced() within a step: finish() it first"));
        REQUIRE_THAT(thrown_by([&] { load_weights(begun, "nowhere.safetensors"); }),
                     Contains("load_weights_as within a step: finish() it first"));
        begun.finish();
    });
    // Groups that do not divide the trainer's ranks, of which the job has one more: a deadline would end the first meeting.
    auto const divided = run_ranks(4, [](auto& world) {
        std::vector<std::string> said;
        std::optional<communicator<>> const three = world.subgroup({0, 1, 2});
        communicator<> const pair = world.split(world.rank() / 2), alone = world.split(world.rank()),
                             other = world.split(world.rank() / 2);
        auto const made = [&](communicator<> const& among, communicator<> const& inner) {
            scripted_model<> net({{"a", {2}}});
            return thrown_by([&] {
                local_parallel trainer{
                    net, any_optimizer(sgd{.lr = 1}), among,
                    any_strategy(hierarchical_averaging<>{.inner = inner, .inner_period = 1, .period = 2})};
                for (int step = 0; step < 2; ++step) trainer.step(numbers{{static_cast<double>(world.rank())}});
                expect(trainer.replicas_identical(), "two steps");
            });
        };
        if (three) said.push_back(made(*three, pair));  // rank 3 is outside
        said.push_back(made(world, world.rank() == 1 ? alone : pair));
        said.push_back(made(world, world.rank() == 1 ? other : pair));  // the same ranks, but not the same group
        said.push_back(made(world, pair));                              // nobody has failed
        return said;
    });
    for (std::vector<std::string> const& said : divided) {
        std::size_t const n = said.size();  // 3 on rank 3
        REQUIRE(said[n - 1] == "");
        for (std::size_t const i : {n - 3, n - 2})
            REQUIRE_THAT(said[i],
                         Contains("hierarchical_averaging: inner of rank 0 is a group of 2, and the trainer's ranks "
                                  "that pass it are 1. The groups divide the trainer's ranks"));
        if (n == 4)
            REQUIRE_THAT(said[0],
                         Contains("inner of rank 2 is a group of 2, and the trainer's ranks that pass it are 1. ") &&
                             Contains("none of them is outside the trainer"));
    }
    auto const pulling = [](double alpha) {
        return errors_of_ranks(3, [&](auto& comm) {
            scripted_model<> net({{"a", {2}}});
            local_parallel trainer{net, any_optimizer(sgd{}), comm,
                                   strategy_of<false>(elastic_averaging{.alpha = alpha})};
        });
    };
    for (std::string const& text : pulling(1.0 / 3)) REQUIRE(text == "");
    for (std::string const& text : pulling(0.34))
        REQUIRE_THAT(text,
                     Contains("alpha is 0.34 ") && Contains("with 3 ranks; above 1 / ranks the centre overshoots"));
    auto const between = run_ranks(2, [](auto& comm) {
        std::vector<std::string> said;
        auto const after_one_step = [&](auto const& strategy) {
            scripted_model<> net({{"a", {2}}});
            local_parallel trainer{net, any_optimizer(sgd{.lr = 1}), comm, strategy};
            trainer.step(numbers{{1}});
            said.push_back(thrown_by([&] { (void)trainer.replicas_identical(); }));
        };
        after_one_step(any_strategy(diloco{.period = 2}));
        after_one_step(any_strategy(slow_momentum{.period = 2}));
        // Before and after a meeting of its group, which here are both ranks: only one of all the trainer's ranks counts.
        scripted_model<> net({{"a", {2}}});
        local_parallel trainer{
            net, any_optimizer(sgd{.lr = 1}), comm,
            any_strategy(hierarchical_averaging<>{.inner = comm.split(0), .inner_period = 2, .period = 4})};
        for (int step = 1; step <= 4; ++step) {
            expect(trainer.step(numbers{{static_cast<double>(comm.rank())}}).met == (step == 4), "met");
            if (step < 3) said.push_back(thrown_by([&] { (void)trainer.replicas_identical(); }));
        }
        expect(trainer.replicas_identical(), "ranks differ after a meeting of all");
        after_one_step(strategy_of<false>(elastic_averaging{.period = 2}));
        return said;
    });
    REQUIRE(between[0] == between[1]);
    char const* const names[] = {"diloco", "slow_momentum", "hierarchical_averaging", "hierarchical_averaging"};
    for (std::size_t i = 0; i < std::size(names); ++i)
        REQUIRE(between[0][i] == std::string("DDP-E100 usage: replicas_identical(): under ") + names[i] +
                                     " ranks hold the same values right after a meeting only (local_result::met); wait "
                                     "for that, or call synchronise() on all ranks first");
    REQUIRE(between[0][4] ==
            "DDP-E100 usage: replicas_identical(): under elastic_averaging ranks never hold the same values; call "
            "synchronise() on all ranks first");
    auto const apart = run_ranks(2, [](auto& comm) {
        scripted_model<> net({{"a", {2}}});
        std::vector<std::string> said;
        {
            local_parallel trainer{net, any_optimizer(sgd{.lr = 1}), comm, any_strategy(local_sgd{.period = 3})};
            trainer.step(numbers{{static_cast<double>(comm.rank())}});
            expect(!trainer.between_steps(), "apart");
            said.push_back(thrown_by([&] { (void)trainer.replicas_identical(); }));
            std::string const unsaved = thrown_by([&] { save_weights(trainer, "/nowhere/at/all"); });
            expect(unsaved.find("save_weights: under local_sgd ranks hold the same values right after") != unsaved.npos,
                   "rank 0's values alone are not written");
            trainer.synchronise();
            expect(trainer.replicas_identical() && trainer.between_steps(), "together");
            expect(net.value(0)[0] == -0.5, "the mean");
            trainer.forward(numbers{{1}});
            said.push_back(thrown_by([&] { trainer.finish(); }));
            trainer.backward();
            said.push_back(thrown_by([&] { trainer.synchronise(); }));
            expect(thrown_by([&] { trainer.forward(numbers{{1}}); }) ==
                       "DDP-E100 usage: forward() begins a step, and the last one has not ended: finish() it first",
                   "a second forward()");
            for (bool const last : {false, true})
                expect(thrown_by([&] { last ? trainer.backward() : trainer.accumulate(); }) ==
                           "DDP-E100 usage: backward() and accumulate() need a trainer.forward(batch) before them",
                       "a second backward()");
            trainer.finish();
            expect(trainer.step(numbers{}).met && trainer.between_steps(), "the third step ends with a meeting");
            expect(trainer.replicas_identical(), "together");
            trainer.step(comm.rank() == 0 ? numbers{{1}} : numbers{});
            expect(!trainer.between_steps(), "apart on both ranks, though one had no samples");
        }
        auto const apart_for_good = [&](auto& trainer) {
            trainer.step(numbers{{static_cast<double>(comm.rank())}});
            trainer.step(numbers{{static_cast<double>(comm.rank())}});
            said.push_back(thrown_by([&] { (void)trainer.replicas_identical(); }));
            expect(!trainer.between_steps(), "apart right after a meeting");
            trainer.synchronise();
            expect(trainer.replicas_identical() && trainer.between_steps(), "synchronised");
        };
        {
            local_parallel trainer{net, any_optimizer(sgd{.lr = 1}), comm, gossip{.period = 2}};
            apart_for_good(trainer);
        }
        local_parallel trainer{net, any_optimizer(sgd{.lr = 1}), comm,
                               strategy_of<false>(elastic_averaging{.period = 2})};
        apart_for_good(trainer);
        // One rank meets, the other synchronises.
        said.push_back(thrown_by([&] {
            if (comm.rank() == 0)
                trainer.synchronise();
            else
                (void)trainer.join();
        }));
        return said;
    });
    auto const beside = errors_of_ranks(2, [](auto& comm) {
        scripted_model<> net({{"a", {2}}});
        local_parallel trainer{net, any_optimizer(sgd{}), comm, gossip{.period = 2}};
        if (comm.rank() == 0)
            trainer.synchronise();
        else
            (void)trainer.join();
    });
    REQUIRE(beside[0] == beside[1]);
    REQUIRE_THAT(beside[0], Contains("DDP-E205 mismatch") && Contains("meeting"));
    REQUIRE(apart[0] == apart[1]);
    REQUIRE_THAT(apart[0][0], Contains("under local_sgd ranks hold the same values right after a meeting only"));
    REQUIRE_THAT(apart[0][1], Contains("finish(): no step is under way; call forward() and backward() first"));
    REQUIRE_THAT(apart[0][2], Contains("synchronise() within a step: finish() it first"));
    REQUIRE_THAT(apart[0][3], Contains("under gossip ranks never hold the same values"));
    REQUIRE_THAT(apart[0][4], Contains("under elastic_averaging ranks never hold the same values; call synchronise()"));
    REQUIRE_THAT(apart[0][5], Contains("different numbers of local steps: 2 in synchronise() on rank 0, 4 on rank 1"));
}

TEST_CASE("in gossip a rank waits for its neighbours only, and learns later what all ranks have said", "[strategy]") {
    using Catch::Matchers::Contains;
    bool const tcp = GENERATE(false, true);
    for (gossip_graph const graph : {gossip_graph::ring, gossip_graph::exponential}) {
        CAPTURE(tcp, static_cast<int>(graph));
        std::atomic<bool> ended[7] = {};  // the first meeting, before rank 3 has begun its own
        std::atomic<bool> held{true};
        auto const values = ranks_over(
            tcp, 7,
            [&](auto& comm) {
                scripted_model<> net({{"a", {2}}});
                local_parallel trainer{net, any_optimizer(sgd{.lr = 1}), comm, gossip{.graph = graph}};
                auto const until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
                while (comm.rank() == 3 && !(ended[0] && ended[1] && ended[5] && ended[6]) &&
                       std::chrono::steady_clock::now() < until)
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                if (comm.rank() == 3) held = false;
                for (int step = 0; step < 9; ++step) {
                    trainer.step(numbers{{static_cast<double>(comm.rank())}});
                    if (step == 0 && held) ended[comm.rank()] = true;
                }
                trainer.synchronise();
                expect(trainer.replicas_identical(), "ranks differ");
                return net.value(0)[0];
            },
            patient());
        for (int const rank : {0, 1, 5, 6}) CHECK(ended[rank]);
        CHECK(!ended[4]);  // needs rank 3's values
        for (double const value : values) CHECK(std::abs(value + 27) < 1e-12);
    }
    // Stop: two meetings later with four ranks. The end of all data: as late.
    auto const seen = ranks_over(
        tcp, 4,
        [](auto& comm) {
            scripted_model<> net({{"a", {2}}});
            local_parallel trainer{net, any_optimizer(sgd{}), comm, gossip{.period = 2}};
            std::string stops;
            for (int step = 1; step <= 10; ++step) {
                if (step == 3 && comm.rank() == 1) trainer.request_stop();  // said in meeting 2
                stops += trainer.step(numbers{{1}}).stop ? 'x' : '-';
            }
            int joined = 1;
            while (trainer.join()) ++joined;
            return stops + std::to_string(joined);
        },
        patient());
    for (std::string const& one : seen) CHECK(one == "-------xxx3");
    // Who ends everything that is under way after each meeting learns it then.
    auto const impatient = [&](auto const& strategy) {
        auto const stops = ranks_over(
            tcp, 3,
            [&](auto& comm) {
                scripted_model<> net({{"a", {2}}});
                local_parallel trainer{net, any_optimizer(sgd{}), comm, strategy};
                std::string all;
                for (int step = 1; step <= 4; ++step) {
                    if (step == 2 && comm.rank() == 1) trainer.request_stop();
                    all += trainer.step(numbers{{1}}).stop ? 'x' : '-';
                    trainer.synchronise();
                }
                return all;
            },
            patient());
        for (std::string const& one : stops) CHECK(one == "--xx");
    };
    impatient(gossip{});
    impatient(stale_synchronous{.staleness = 3});
    auto const counted = errors_over(
        tcp, 3,
        [](auto& comm) {
            scripted_model<> net({{"a", {2}}});
            local_parallel trainer{net, any_optimizer(sgd{}), comm, gossip{}};
            trainer.set_completed_steps(comm.rank() == 1 ? 40 : 50);
            for (int step = 0; step < 9; ++step) trainer.step(numbers{{1}});
        },
        patient());
    for (std::string const& text : counted)  // what each has found itself, or another's verdict
        CHECK_THAT(text, Contains("gossip: ranks meet after different numbers of local steps (") &&
                             Contains("set_completed_steps() takes the same number on all ranks"));
}

/// local_sgd whose rank 1 throws in its second meeting, before the sum or after it.
struct stumbling {
    static constexpr char const* name = "stumbling";
    static constexpr bool agrees = true;
    bool before = false;
    [[nodiscard]] std::uint64_t hash() const { return before ? 1 : 2; }
    void validate() const {}
    [[nodiscard]] bool due(std::uint64_t step) const { return step % 2 == 0; }
    [[nodiscard]] no_strategy_state prepare(strategy_plan<double> const& /*plan*/) const { return {}; }
    void meet(no_strategy_state& /*state*/, meeting<any_transport, double> const& with) const {
        bool const now = with.number == 2 && with.comm.rank() == 1;
        if (now && before) throw std::runtime_error("the lamp fell over");
        ddp::detail::average(with, with.values);
        if (now) throw std::runtime_error("the lamp fell over");
    }
};

/// local_sgd that keeps something of a parameter, but only from its second meeting on.
struct belated {
    static constexpr char const* name = "belated";
    static constexpr bool agrees = true;
    [[nodiscard]] std::uint64_t hash() const { return 1; }
    void validate() const {}
    [[nodiscard]] bool due(std::uint64_t /*step*/) const { return true; }
    struct state {
        std::vector<double> of_a = {};
        void for_each_state(state_visitor visit) {
            if (!of_a.empty())
                visit(
                    {.of = "a", .name = "late", .type = element_type::f64, .bytes = as_mutable_bytes(std::span(of_a))});
        }
    };
    [[nodiscard]] state prepare(strategy_plan<double> const& /*plan*/) const { return {}; }
    void meet(state& kept, meeting<any_transport, double> const& with) const {
        ddp::detail::average(with, with.values);
        if (with.number == 2) kept.of_a.assign(2, 0.0);
    }
};

struct packed_model : scripted_model<> {
    using scripted_model<>::scripted_model;
    static constexpr bool contiguous = true;
};

TEST_CASE("ranks that differ or fail say so on all of them", "[strategy]") {
    using Catch::Matchers::Contains;
    auto const settings = errors_of_ranks(2, [](auto& comm) {
        scripted_model<> net({{"a", {2}}});
        local_parallel trainer{net, any_optimizer(sgd{}), comm,
                               any_strategy(local_sgd{.period = 3 + static_cast<std::uint64_t>(comm.rank())})};
    });
    for (std::string const& text : settings) REQUIRE_THAT(text, Contains("E102") && Contains("strategy"));
    auto const gaps = errors_of_ranks(2, [](auto& comm) {
        if (comm.rank() == 0) {
            scripted_model<> net({{"a", {2}}, {"b", {2}}});
            local_parallel trainer{net, any_optimizer(sgd{}), comm, any_strategy(local_sgd{})};
        } else {
            packed_model net({{"a", {2}}, {"b", {2}}});
            local_parallel trainer{net, any_optimizer(sgd{}), comm, any_strategy(local_sgd{})};
        }
    });
    for (std::string const& text : gaps) REQUIRE_THAT(text, Contains("E102") && Contains("the model's `contiguous`"));
    auto const late = errors_of_ranks(1, [](auto& comm) {
        scripted_model<> net({{"a", {2}}, {"b", {2}}});
        local_parallel trainer{net, any_optimizer(sgd{}), comm, any_strategy(belated{})};
        trainer.step(numbers{{1}});
        trainer.freeze("a");
        trainer.step(numbers{{1}});
    });
    REQUIRE(
        late[0] ==
        "DDP-E100 usage: belated: its state shows more after a meeting than before it; make all of it in prepare()");
    for (std::string const frozen : {"a", "b"}) {  // without gaps, only the last can lie behind the others
        auto const order = errors_of_ranks(2, [&](auto& comm) {
            packed_model net({{"a", {2}}, {"b", {2}}});
            local_options how;
            how.frozen = {frozen};
            local_parallel trainer{net, any_optimizer(sgd{}), comm, any_strategy(local_sgd{}), how};
        });
        for (std::string const& text : order)
            REQUIRE(text == (frozen == "b"
                                 ? ""
                                 : "DDP-E100 usage: the model is `contiguous`: its parameters lie as it lists them, "
                                   "so neither a bucket policy nor frozen parameters of a local_parallel may give "
                                   "them another order. Take a policy without one, or list what is frozen last"));
    }
    bool const tcp = GENERATE(false, true);
    CAPTURE(tcp);
    auto const fails_alike = [&](auto const& strategy) {
        auto const thrown = errors_over(
            tcp, 3,
            [&](auto& comm) {
                scripted_model<> net({{"a", {2}}});
                local_parallel trainer{net, any_optimizer(sgd{}), comm, strategy};
                if (comm.rank() == 1)
                    net.in_forward = [&, at = 0]() mutable {
                        if (++at == 3) throw std::runtime_error("the lamp fell over");
                    };
                for (int step = 0; step < 8; ++step) trainer.step(numbers{{1}});
            },
            patient());
        REQUIRE(thrown[1] == "the lamp fell over");
        for (std::size_t const r : {0u, 2u})
            REQUIRE_THAT(thrown[r], Contains("rank 1") && Contains("the lamp fell over"));
    };
    fails_alike(any_strategy(local_sgd{.period = 2}));
    fails_alike(any_strategy(diloco{.period = 2}));
    fails_alike(any_strategy(slow_momentum{.period = 2}));
    fails_alike(strategy_of<false>(elastic_averaging{.period = 2}));
    fails_alike(gossip{.graph = gossip_graph::ring, .period = 2});
    fails_alike(gossip{.graph = gossip_graph::exponential, .period = 2});
    fails_alike(stale_synchronous{.staleness = 2});
    for (bool const before :
         {true, false}) {  // in the middle of a meeting, while the others wait in it, or have just left it
        std::vector<int> torn(3, -1);
        auto const thrown = errors_over(
            tcp, 3,
            [&](auto& comm) {
                scripted_model<> net({{"a", {2}}});
                local_parallel trainer{net, any_optimizer(sgd{}), comm, stumbling{before}};
                try {
                    for (int step = 0; step < 8; ++step) trainer.step(numbers{{1}});
                } catch (...) {
                    torn[static_cast<std::size_t>(comm.rank())] = trainer.torn() ? 1 : 0;
                    throw;
                }
            },
            patient());
        CAPTURE(before);
        REQUIRE(thrown[1] == "the lamp fell over");
        for (std::size_t const r : {0u, 2u})
            REQUIRE_THAT(thrown[r], Contains("rank 1 failed in its own code") && Contains("the lamp fell over"));
        REQUIRE(torn[1] == 1);  // the others may have heard of it before the strategy began, or after it had ended
    }
    auto const in_group = errors_over(
        tcp, 3,
        [&](auto& comm) {
            scripted_model<> net({{"a", {2}}});
            local_parallel trainer{net, any_optimizer(sgd{}), comm,
                                   any_strategy(hierarchical_averaging<>{
                                       .inner = comm.split(comm.rank() / 2), .inner_period = 2, .period = 4})};
            if (comm.rank() == 1)
                net.in_stepped = [&, at = 0]() mutable {  // by its group's values
                    if (++at == 3) throw std::runtime_error("the lamp fell over");
                };
            for (int step = 0; step < 8; ++step) trainer.step(numbers{{1}});
        },
        patient());
    REQUIRE(in_group[1] == "the lamp fell over");
    for (std::size_t const r : {0u, 2u})
        REQUIRE_THAT(in_group[r], Contains("rank 1 failed in its own code") && Contains("the lamp fell over"));
}

TEST_CASE("settings that differ, and gradients left out, are named as local_options has them", "[strategy]") {
    using Catch::Matchers::Contains;
    struct example {
        std::function<void(local_options&)> set;
        std::string field, before, after;
    };
    std::string const none = "unused::error, nothing frozen";
    std::vector<example> const examples = {
        {[](local_options& o) { o.clip = clip_by_global_norm{}; }, "clip", "none", "clip_by_global_norm 1"},
        {[](local_options& o) { o.schedule = step_decay{}; }, "schedule", "constant_rate",
         "step_decay(every 1000, factor 0.1)"},
        {[](local_options& o) { o.unused = unused::allowed; }, "unused or frozen", none,
         "unused::allowed, nothing frozen"},
        {[](local_options& o) { o.frozen = {"b"}; }, "unused or frozen", none, "unused::error, frozen 'b'"},
        {[](local_options& o) { o.buffers = buffers::left_alone; }, "buffers", "averaged", "left_alone"}};
    for (int const guilty : {0, 1}) {
        for (example const& one : examples) {
            CAPTURE(guilty, one.field);
            auto const errors = errors_of_ranks(2, [&](auto& comm) {
                scripted_model<> net({{"a", {2}}, {"b", {2}}});
                local_options how;
                if (comm.rank() == guilty) one.set(how);
                local_parallel trainer{net, any_optimizer(sgd{}), comm, any_strategy(local_sgd{}), how};
            });
            for (std::string const& text : errors)
                REQUIRE(text == "DDP-E102 model differs: rank 1 differs from rank 0: another local_options." +
                                    one.field + " (" + (guilty == 0 ? one.after : one.before) + " on rank 0, " +
                                    (guilty == 0 ? one.before : one.after) +
                                    " on rank 1). Build the same model with the same trainer settings on all ranks.");
        }
        auto const left_out = errors_of_ranks(2, [&](auto& comm) {
            scripted_model<> net({{"a", {2}}, {"b", {2}}});
            local_parallel trainer{net, any_optimizer(sgd{}), comm, any_strategy(local_sgd{.period = 1})};
            if (comm.rank() == guilty) net.leaves_out = [](std::size_t i) { return i == 0; };
            trainer.step(numbers{{1}});
        });
        for (std::string const& text : left_out)
            REQUIRE(text == "DDP-E103 gradient: rank " + std::to_string(guilty) +
                                ": backward never reported parameter #0 'a': call ready(i) for each, or set "
                                "local_options.unused = ddp::unused::allowed");
        auto const another_call = errors_of_ranks(2, [&](auto& comm) {
            scripted_model<> net({{"a", {2}}});
            if (comm.rank() == guilty) return barrier(comm);
            local_parallel trainer{net, any_optimizer(sgd{}), comm, any_strategy(local_sgd{})};
        });
        for (std::string const& text : another_call)
            REQUIRE_THAT(text, Contains("E205") && Contains("local_parallel #1") && Contains("barrier #1"));
    }
}

TEST_CASE("stopping is agreed when ranks meet", "[strategy]") {
    auto const seen = run_ranks(2, [](auto& comm) {
        scripted_model<> net({{"a", {2}}});
        local_parallel trainer{net, any_optimizer(sgd{}), comm, any_strategy(local_sgd{.period = 3})};
        std::vector<bool> stops;
        for (int step = 1; step <= 6; ++step) {
            if (step == 4 && comm.rank() == 1) trainer.request_stop();
            stops.push_back(trainer.step(numbers{{1}}).stop);
        }
        return stops;
    });
    for (auto const& one : seen) REQUIRE(one == std::vector<bool>{false, false, false, false, false, true});
}

TEST_CASE("a checkpoint of a meeting continues to the same bits", "[strategy]") {
    using Catch::Matchers::Contains;
    auto const directory = std::filesystem::temp_directory_path() / ("ddp-strategy-test-" + std::to_string(::getpid()));
    constexpr std::size_t kept_at = 9, last = 17;  // local steps
    int const ranks = GENERATE(1, 2, 3, 4), other_ranks = ranks == 2 ? 3 : 2;
    CAPTURE(ranks);
    struct run {
        std::uint64_t digest = 0;
        std::string early, refused;  // what save said between meetings, and at one
        bool as_told = true;
    };
    any_optimizer const optimizer = adamw{.lr = 0.01};
    auto const options = local_options{.schedule = ddp::schedule{cosine_decay{.steps = 40}}};
    task_data<double> const data(in, out, 64);
    // Batches are uneven, and some empty: ranks differ in how many updates they have made.
    auto const train = [&](auto& trainer, std::size_t from, std::size_t to, auto const& after_step) {
        int const rank = trainer.comm().rank();
        for (std::size_t step = from + 1; step <= to; ++step) {
            std::size_t const at = offset_of(rank, step);
            trainer.step(data.batch(at, at + rows_of(rank, step)));
            after_step(step);
        }
        trainer.synchronise();
        return trainer.digest_of_values();
    };
    auto const kept_and_resumed = [&](auto const& make, bool agrees) {
        std::filesystem::remove_all(directory);
        auto const whole = run_ranks(
            ranks,
            [&](auto& comm) {
                tanh_mlp<double> model(in, hidden, out, 1);
                local_parallel trainer{model, optimizer, comm, make(comm), options};
                checkpoints kept(directory.string());
                run mine;
                mine.digest = train(trainer, 0, last, [&](std::size_t step) {
                    if (step == 5) mine.early = thrown_by([&] { kept.save(trainer); });
                    if (step != kept_at) return;
                    if (!agrees) mine.refused = thrown_by([&] { kept.save(trainer); });
                    if (!agrees) trainer.synchronise();
                    trainer.freeze("w1");
                    kept.save(trainer);
                });
                mine.as_told = trainer.agrees() == agrees;
                return mine;
            },
            patient());
        auto const rest = run_ranks(
            ranks,
            [&](auto& comm) {
                tanh_mlp<double> model(in, hidden, out, 9);
                local_parallel trainer{model, optimizer, comm, make(comm), options};
                checkpoints kept(directory.string());
                expect(kept.resume(trainer).has_value() && trainer.completed_steps() == kept_at,
                       "there is a checkpoint");
                return train(trainer, kept_at, last, [](std::size_t) {});
            },
            patient());
        for (std::size_t r = 0; r < whole.size(); ++r) {
            REQUIRE(whole[r].as_told);
            REQUIRE(rest[r] == whole[0].digest);
            REQUIRE(whole[r].digest == whole[0].digest);
            REQUIRE_THAT(whole[r].early,
                         Contains("checkpoints: under ") && Contains("synchronise() on all ranks first"));
            REQUIRE_THAT(
                whole[r].refused,
                agrees ? Contains("") : Contains("ranks never hold the same values; call synchronise() on all ranks"));
        }
        // On another number of ranks: values and what the strategy keeps are there, each rank's optimizer begins anew.
        auto const others = run_ranks(
            other_ranks,
            [&](auto& comm) {
                tanh_mlp<double> model(in, hidden, out, 9), same(in, hidden, out, 9);
                local_parallel trainer{model, optimizer, comm, make(comm), options};
                checkpoints kept(directory.string());
                expect(kept.resume(trainer).has_value() && trainer.replicas_identical(), "there is a checkpoint");
                local_parallel other{same, optimizer, comm, make(comm), options};
                auto const from = trainer.parameters(), to = other.parameters();
                for (std::size_t i = 0; i < from.size(); ++i) std::ranges::copy(from[i].value, to[i].value.begin());
                std::vector<std::pair<std::string, std::vector<std::byte>>> shared;
                trainer.for_each_state([&](state_slice const& s) {
                    if (!s.per_rank)
                        shared.emplace_back(std::string(s.of) + "/" + std::string(s.name),
                                            std::vector<std::byte>(s.bytes.begin(), s.bytes.end()));
                });
                other.for_each_state([&](state_slice const& s) {
                    for (auto const& [name, bytes] : shared)
                        if (!s.per_rank && name == std::string(s.of) + "/" + std::string(s.name))
                            std::ranges::copy(bytes, s.bytes.begin());
                });
                other.set_completed_steps(kept_at);
                other.freeze("w1");
                std::uint64_t const digest = train(trainer, kept_at, last, [](std::size_t) {});
                return std::pair(digest, train(other, kept_at, last, [](std::size_t) {}));
            },
            patient());
        for (auto const& [digest, by_hand] : others) {
            REQUIRE(digest == others[0].first);
            REQUIRE(digest == by_hand);
            REQUIRE(digest != whole[0].digest);
        }
    };
    kept_and_resumed([](auto&) { return any_strategy(local_sgd{.period = 3, .warm_up_steps = 3}); }, true);
    kept_and_resumed(
        [](auto& comm) {
            return any_strategy(
                hierarchical_averaging<>{.inner = comm.split(comm.rank() / 2), .inner_period = 1, .period = 9});
        },
        true);
    kept_and_resumed([](auto&) { return any_strategy(diloco{.period = 3}); }, true);
    kept_and_resumed([](auto&) { return any_strategy(slow_momentum{.period = 3}); }, true);
    kept_and_resumed([](auto&) { return strategy_of<false>(elastic_averaging{.period = 3}); }, false);
    kept_and_resumed([](auto&) { return gossip{.period = 1}; }, false);
    kept_and_resumed([](auto&) { return gossip{.graph = gossip_graph::ring, .period = 3}; }, false);
    kept_and_resumed([](auto&) { return stale_synchronous{.staleness = 3}; }, false);
    std::filesystem::remove_all(directory);
}

TEST_CASE("a checkpoint of other local_options::frozen is refused in words, or goes on where nothing is missing",
          "[strategy]") {
    auto const directory = std::filesystem::temp_directory_path() / ("ddp-strategy-test-" + std::to_string(::getpid()));
    using patterns = std::vector<std::string>;
    struct told {
        std::string error, frozen, unfreeze;
        std::uint64_t digest = 0;
        std::vector<double> last;  // the first element of each parameter, before and after a step that goes on
    };
    // One job trains with `saved` frozen from the start and keeps that; another with `resumed`.
    auto const go = [&](any_optimizer const& optimizer, patterns const& saved, patterns const& resumed,
                        any_optimizer const& then_by) {
        std::filesystem::remove_all(directory);
        auto const trained = [&](auto& comm, any_optimizer const& by, patterns const& frozen, double initial,
                                 auto const& then) {
            scripted_model<> net({{"a", {2}}, {"b", {3}}, {"c", {1}}, {"d", {2}}}, initial);
            local_parallel trainer{net, by, comm, any_strategy(local_sgd{.period = 1}),
                                   local_options{.frozen = frozen}};
            checkpoints kept(directory.string());
            told all;
            then(net, trainer, kept, all);
            return all;
        };
        auto const whole = run_ranks(
            2,
            [&](auto& comm) {
                return trained(comm, optimizer, saved, 1.0, [&](auto&, auto& trainer, auto& kept, told& all) {
                    for (int step = 0; step < 3; ++step) trainer.step(numbers{{1.0 + comm.rank()}});
                    kept.save(trainer);
                    trainer.step(numbers{{1.0}});
                    all.digest = trainer.digest_of_values();
                });
            },
            patient());
        auto rest = run_ranks(
            2,
            [&](auto& comm) {
                return trained(comm, then_by, resumed, 7.0, [&](auto& net, auto& trainer, auto& kept, told& all) {
                    std::uint64_t const before = trainer.digest_of_values();
                    all.error = thrown_by([&] { (void)kept.resume(trainer); });
                    if (!all.error.empty() && (trainer.digest_of_values() != before || trainer.completed_steps() != 0))
                        all.error += " and changed";
                    for (std::size_t i = 0; i < 4; ++i) all.frozen += trainer.frozen()[i] != 0 ? "x" : "-";
                    for (std::size_t i = 0; i < 4; ++i) all.last.push_back(net.value(i)[0]);
                    trainer.step(numbers{{1.0}});
                    all.digest = trainer.digest_of_values();
                    all.unfreeze = thrown_by([&] { trainer.unfreeze("?"); });
                    trainer.step(numbers{{1.0}});
                    for (std::size_t i = 0; i < 4; ++i) all.last.push_back(net.value(i)[0]);
                });
            },
            patient());
        REQUIRE(rest[0].error == rest[1].error);
        REQUIRE(rest[0].last == rest[1].last);
        rest[0].digest ^= whole[0].digest;  // 0: the bits of the one that nothing has disturbed
        return rest[0];
    };
    auto const line = [](char const* key, char const* what, bool kept) {
        return std::string("\n  state 'rank_state/") + key + "': " + (kept ? "" : "not in the checkpoint, ") + what +
               (kept ? " in the checkpoint, not in this one" : " in this one");
    };
    std::string const what_to_do =
        ": frozen by local_options::frozen, and such a parameter has no state. Make the trainer with the "
        "local_options::frozen that the checkpoint's had; others can be frozen and unfrozen after resume, by freeze() "
        "and "
        "unfreeze()";
    std::string const begin =
        "DDP-E302 format: " + directory.string() + "/step-000000000003: is a checkpoint of another training:";
    any_optimizer const slots = sgd{.lr = 0.1, .momentum = 0.5}, none = sgd{.lr = 0.1};
    CHECK(go(slots, {"b"}, {}, slots).error ==
          begin + line("b/momentum", "F64 [3]", false) + "\n  'b' in the checkpoint only" + what_to_do);
    CHECK(go(slots, {}, {"b"}, slots).error ==
          begin + line("b/momentum", "F64 [3]", true) + "\n  'b' in this one only" + what_to_do);
    CHECK(go(slots, {"a"}, {"d"}, slots).error ==
          begin + line("a/momentum", "F64 [2]", false) + line("d/momentum", "F64 [2]", true) +
              "\n  'a' in the checkpoint only, 'd' in this one only" + what_to_do);
    CHECK(go(slots, {"?"}, {}, slots).error.find("\n  'a', 'b', 'c' and 1 more in the checkpoint only: frozen") !=
          std::string::npos);
    // Where the optimizer is another, it is not what is frozen that is missing.
    std::string const other = go(none, {"b"}, {}, slots).error;
    CHECK(other.find(line("b/momentum", "F64 [3]", false) + line("c/momentum", "F64 [1]", false)) != std::string::npos);
    CHECK(other.find("local_options") == std::string::npos);
    auto const same = go(slots, {"b"}, {"b"}, slots);
    CHECK(same.error == "");
    CHECK(same.frozen == "-x--");
    CHECK(same.digest == 0);
    // Without state nothing is missing: what was frozen is frozen, and can be unfrozen; what is frozen here from the start stays so.
    auto const fewer_now = go(none, {"b"}, {}, none);
    CHECK(fewer_now.error == "");
    CHECK(fewer_now.frozen == "-x--");
    CHECK(fewer_now.digest == 0);
    CHECK(fewer_now.unfreeze == "");
    CHECK(fewer_now.last[1] == 1.0);
    CHECK(fewer_now.last[5] != 1.0);
    auto const more_now = go(none, {}, {"b"}, none);
    CHECK(more_now.error == "");
    CHECK(more_now.frozen == "-x--");
    CHECK(more_now.last[5] == more_now.last[1]);
    CHECK(more_now.last[1] != 1.0);  // what the training without it had come to
    CHECK(more_now.unfreeze.find("unfreeze: 'b' is one of local_options::frozen") != std::string::npos);
    std::filesystem::remove_all(directory);
}
