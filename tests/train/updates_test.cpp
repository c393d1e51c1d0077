// What may come between the mean gradient and the new values: norms of parameters, an observer that writes, frozen parameters.
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/random.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/optim/parameter_groups.hpp>
#include <ddp/strategy/averaging.hpp>
#include <ddp/strategy/local_parallel.hpp>
#include <ddp/testing/check_optimizer.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
#include "support/counting_transport.hpp"
#include "support/loopback.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/thrown_by.hpp"
#include "support/training_checks.hpp"
#include "train/distance_model.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

/// What one process makes of whole batches, in plain loops.
struct oracle {
    std::vector<std::vector<double>> x, m, v;
    std::uint64_t t = 0;
    oracle() {
        for (std::size_t i = 0; i < parts.size(); ++i) {
            x.emplace_back();
            for (std::size_t j = 0; j < parts[i].count; ++j) x[i].push_back(start(i, j));
        }
        m = v = x;
        for (auto* const all : {&m, &v})
            for (auto& one : *all) one.assign(one.size(), 0);
    }
    [[nodiscard]] std::vector<std::vector<double>> gradient(batch const& all) const {
        auto g = x;
        for (std::size_t i = 0; i < g.size(); ++i)
            for (std::size_t j = 0; j < g[i].size(); ++j) {
                double sum = 0;
                for (std::uint64_t const s : all) sum += x[i][j] - target(s, i, j);
                g[i][j] = sum / static_cast<double>(all.size());
            }
        return g;
    }
    static double norm(std::vector<double> const& all) {
        return std::sqrt(std::inner_product(all.begin(), all.end(), all.begin(), 0.0));
    }
    static void clip(std::vector<std::vector<double>>& g, double most) {
        double square = 0;
        for (auto const& one : g) square += norm(one) * norm(one);
        double const factor = std::min(1.0, most / (std::sqrt(square) + 1e-6));
        for (auto& one : g)
            for (double& each : one) each *= factor;
    }
    void lamb_step(std::size_t i, std::vector<double> const& g, lamb const& by) {
        std::vector<double> u(g.size());
        for (std::size_t j = 0; j < g.size(); ++j) {
            m[i][j] = by.beta1 * m[i][j] + (1 - by.beta1) * g[j];
            v[i][j] = by.beta2 * v[i][j] + (1 - by.beta2) * g[j] * g[j];
            double const mean = m[i][j] / (1 - std::pow(by.beta1, t)), square = v[i][j] / (1 - std::pow(by.beta2, t));
            u[j] = mean / (std::sqrt(square) + by.eps) + by.weight_decay * x[i][j];
        }
        double const ratio = norm(x[i]) / norm(u);
        for (std::size_t j = 0; j < g.size(); ++j) x[i][j] -= by.lr * ratio * u[j];
    }
    void lars_step(std::size_t i, std::vector<double> const& g, lars const& by) {
        double const ratio = by.trust * norm(x[i]) / (norm(g) + by.weight_decay * norm(x[i]) + by.eps);
        for (std::size_t j = 0; j < g.size(); ++j) {
            m[i][j] = by.momentum * m[i][j] + by.lr * ratio * (g[j] + by.weight_decay * x[i][j]);
            x[i][j] -= m[i][j];
        }
    }
    void sgd_step(std::size_t i, std::vector<double> const& g, sgd const& by) {
        for (std::size_t j = 0; j < g.size(); ++j) {
            m[i][j] = by.momentum * m[i][j] + g[j] + by.weight_decay * x[i][j];
            x[i][j] -= by.lr * m[i][j];
        }
    }
};

template <class M>
double distance_from(M const& model, oracle const& other) {
    double most = 0;
    for (std::size_t i = 0; i < parts.size(); ++i)
        for (std::size_t j = 0; j < parts[i].count; ++j)
            most = std::max(most, std::abs(model.values[i][j] - other.x[i][j]));
    return most;
}

/// A way for gradients and values to travel, and where cuts fall.
struct way {
    std::string name;
    std::vector<std::uint64_t> hosts;  // empty: messages between all
    bool tcp = false;
    ddp::update update = ddp::update::automatic;
    size_capped_buckets buckets = {};
};
std::vector<way> ways(int ranks) {
    std::vector<way> all;
    size_capped_buckets const small{30'000, 5'000}, one{1 << 20, 1 << 20};
    std::vector<std::uint64_t> const single(static_cast<std::size_t>(ranks), 1);
    std::vector<std::uint64_t> two = single;
    two.back() = 2;
    for (update const by : {update::replicated, update::sharded}) {
        std::string const name = by == update::sharded ? "sharded" : "replicated";
        all.push_back({"messages, small buckets, " + name, {}, false, by, small});
        all.push_back({"memory, small buckets, " + name, single, false, by, small});
        if (sanitizers_leave_out("updates in one bucket")) continue;
        all.push_back({"messages, one bucket, " + name, {}, false, by, one});
        all.push_back({"memory, one bucket, " + name, single, false, by, one});
        if (ranks > 2) all.push_back({"hosts, small buckets, " + name, two, false, by, small});
        all.push_back({"tcp, small buckets, " + name, {}, true, by, small});
    }
    return all;
}

/// body(comm, options) on all ranks, that way: returns the digest, the same on all ranks, and what is wrong.
template <class Body>
std::pair<std::uint64_t, std::string> run(int ranks, way const& how, training_options options, Body const& body) {
    options.update = how.update;
    options.share_memory = !how.hosts.empty();
    auto const one = [&](communicator<>& comm) { return body(comm, options); };
    std::vector<std::pair<std::uint64_t, std::string>> got;
    if (how.tcp) {
        got = on_ranks(ranks, one);
    } else {
        auto const world = how.hosts.empty() ? inproc_world::create(ranks) : inproc_world::create(ranks, how.hosts);
        got = on_threads(ranks, [&](int rank) {
            communicator<> comm = any_communicator(world->connect(rank), patient());
            return one(comm);
        });
    }
    for (auto const& [digest, wrong] : got) {
        if (!wrong.empty()) return {0, how.name + ": " + wrong};
        if (digest != got.front().first) return {0, how.name + ": ranks differ"};
    }
    return got.front();
}

/// The same bits every way, and `expected` to 1e-10. `observer` comes anew to each trainer.
template <class M, class Opt, class Watch>
void check_steps(int ranks, Opt const& optimizer, training_options const& options, Watch const& observer,
                 oracle const& expected) {
    std::uint64_t first = 0;
    for (way const& how : ways(ranks)) {
        auto const [digest, wrong] = run(ranks, how, options, [&](auto& comm, training_options const& with) {
            M model;
            data_parallel trainer{model, optimizer, comm, with, how.buckets, observer};
            for (std::uint64_t k = 0; k < 3; ++k) trainer.step(share(k, comm.rank(), comm.size()));
            double const off = distance_from(model, expected);
            std::string text = off < 1e-10 ? "" : "off by " + std::to_string(off * 1e10) + "e-10";
            if (!trainer.replicas_identical()) text += "; replicas differ";
            return std::pair(trainer.digest_of_values(), text);
        });
        CHECK(wrong == "");
        if (first == 0) first = digest;
        CHECK(digest == first);
    }
}

/// Pulls towards +1 by a noise of its own for each element.
double noise(std::uint64_t step, std::size_t parameter, std::size_t element) {
    return 0.1 *
           random_stream(11, random_use::user, step).at(parameter * 1'000'000 + element).template symmetric<double>();
}
struct noisy {
    std::vector<std::uint8_t>* seen;  // by element of all parameters, one after the other
    void on(mean_gradient<double> const& event) const {
        for (std::size_t k = 0; k < event.gradient.size(); ++k) {
            std::size_t const j = event.begin + k;
            double const product = 0.5 * event.values[k];  // exact
            event.gradient[k] = event.gradient[k] + product + noise(event.step, event.parameter, j);
        }
        if (seen == nullptr || event.weight != 7) return;
        std::size_t at = event.begin;
        for (std::size_t i = 0; i < event.parameter; ++i) at += parts[i].count;
        for (std::size_t k = 0; k < event.gradient.size(); ++k) ++seen->at(at + k);
    }
};

}  // namespace

TEST_CASE("optimizers that step by norms of parameters keep the promises of an optimizer", "[train]") {
    CHECK(testing::check_optimizer(lamb{.lr = 0.01}).empty());
    CHECK(testing::check_optimizer<double>(lamb{.weight_decay = 0}).empty());
    CHECK(testing::check_optimizer(lars{.lr = 2, .weight_decay = 0.1}).empty());
    CHECK(testing::check_optimizer<double>(any_optimizer(lars{})).empty());
    CHECK_THROWS_WITH(lars{.trust = 0}.validate(), Catch::Contains("lars: trust must be a finite number > 0"));
    CHECK_THROWS_WITH(lamb{.eps = 0}.validate(), Catch::Contains("lamb: eps must be a finite number > 0"));
    CHECK(lars{}.hash() != lars{.eps = 1e-7}.hash());
    double value = 3, gradient = 2, slot = 0;  // nothing to go by: the ratio is 1
    std::span<double> slots[] = {std::span(&slot, 1)};
    lars{.lr = 0.5, .momentum = 0}.step<double>({.learning_rate = 0.5}, {&gradient, 1}, {&value, 1}, slots);
    CHECK(value == 2);
}

TEMPLATE_TEST_CASE("LAMB and LARS step by the whole parameter's norms however it is cut", "[train]", distance<false>,
                   distance<true>) {
    int const ranks = GENERATE(1, 2, 3, 4);
    if (ranks != 3 && (TestType::ready_releases || sanitizers_leave_out("updates", ranks))) return;
    for (int const clipping : {0, 1, 2}) {
        training_options options;
        if (clipping == 1) options.clip = clip_by_global_norm{20};
        if (clipping == 2) options.clip = clip_by_value{0.25};
        auto const follow = [&](auto const& step) {
            oracle all;
            for (std::uint64_t k = 0; k < 3; ++k) {
                auto g = all.gradient(whole(k));
                if (clipping == 1) oracle::clip(g, 20);
                if (clipping == 2)
                    for (auto& one : g)
                        for (double& each : one) each = std::clamp(each, -0.25, 0.25);
                ++all.t;
                for (std::size_t i = 0; i < parts.size(); ++i)
                    if (parts[i].count != 0) step(all, i, g[i]);
            }
            return all;
        };
        lamb const by_lamb{.lr = 0.05, .weight_decay = 0.1};
        check_steps<TestType>(ranks, by_lamb, options, null_observer{},
                              follow([&](oracle& all, std::size_t i, auto const& g) { all.lamb_step(i, g, by_lamb); }));
        if (clipping == 2) continue;
        lars const by_lars{.lr = 3, .weight_decay = 0.01, .trust = 0.1};
        sgd const plain{.lr = 0.1, .momentum = 0.5};
        parameter_groups<any_optimizer> const groups{by_lars, {{"*.bias", plain}}};
        check_steps<TestType>(ranks, groups, options, null_observer{},
                              follow([&](oracle& all, std::size_t i, auto const& g) {
                                  i % 3 == 1 ? all.sgd_step(i, g, plain) : all.lars_step(i, g, by_lars);
                              }));
    }
}

TEST_CASE("a rank that trains by itself takes its own parameters' norms", "[train]") {
    lamb const by{.lr = 0.05};
    oracle expected;
    for (std::uint64_t k = 0; k < 3; ++k) {
        ++expected.t;
        auto const g = expected.gradient(whole(k));
        for (std::size_t i = 0; i < parts.size(); ++i)
            if (parts[i].count != 0) expected.lamb_step(i, g[i], by);
    }
    auto const off = run_ranks(
        2,
        [&](auto& comm) {
            distance<false> model;
            local_parallel trainer{model, by, comm, local_sgd{.period = 10}};
            for (std::uint64_t k = 0; k < 3; ++k) trainer.step(whole(k));
            return distance_from(model, expected);
        },
        patient());
    for (double const one : off) CHECK(one < 1e-10);

    std::vector<parameter<double>> const all = distance<false>().parameters();
    layout const where({9000, 7, 0, 13000, 3}, {}, sizeof(double));
    stepper<double> local(by, where, all);
    std::vector<double> memory(where.size());
    CHECK_THROWS_WITH(local.step({}, std::span<double const>(memory), memory),
                      Catch::Contains("steps by norms of parameters; prepare() all, and pass their norms"));
}

TEMPLATE_TEST_CASE("an observer that changes the mean gradient leaves the same bits every way", "[train]",
                   distance<false>, distance<true>) {
    int const ranks = GENERATE(1, 2, 3, 4);
    if (ranks != 3 && (TestType::ready_releases || sanitizers_leave_out("updates", ranks))) return;
    for (bool const clips : {false, true}) {
        training_options options;
        if (clips) options.clip = clip_by_global_norm{20};
        sgd const by{.lr = 0.3, .momentum = 0.5};
        oracle expected;
        for (std::uint64_t k = 0; k < 3; ++k) {
            auto g = expected.gradient(whole(k));
            for (std::size_t i = 0; i < parts.size(); ++i)
                for (std::size_t j = 0; j < g[i].size(); ++j) g[i][j] += 0.5 * expected.x[i][j] + noise(k + 1, i, j);
            if (clips) oracle::clip(g, 20);
            for (std::size_t i = 0; i < parts.size(); ++i) expected.sgd_step(i, g[i], by);
        }
        check_steps<TestType>(ranks, by, options, noisy{nullptr}, expected);
    }
    for (way const& how : ways(ranks)) {  // each element once a step: on one rank, or on all
        std::vector<std::vector<std::uint8_t>> seen(static_cast<std::size_t>(ranks),
                                                    std::vector<std::uint8_t>(9000 + 7 + 13000 + 3));
        auto const [digest, wrong] = run(ranks, how, {}, [&](auto& comm, training_options const& with) {
            TestType model;
            noisy observer{&seen[static_cast<std::size_t>(comm.rank())]};
            data_parallel trainer{model, sgd{}, comm, how.buckets, std::ref(observer), with};
            for (std::uint64_t k = 0; k < 2; ++k) trainer.step(share(k, comm.rank(), comm.size()));
            return std::pair(trainer.digest_of_values(), std::string());
        });
        CHECK(wrong == "");
        std::vector<int> times(seen.front().size());
        for (auto const& of_rank : seen)
            for (std::size_t k = 0; k < times.size(); ++k) times[k] += of_rank[k];
        CHECK(times == std::vector<int>(times.size(), how.update == update::replicated ? 2 * ranks : 2));
    }
}

TEST_CASE("an observer that throws at the mean gradient fails the step on every rank", "[train]") {
    struct broken {
        void on(mean_gradient<double> const& event) const {
            if (event.step == 2 && event.parameter == 1) throw std::runtime_error("the noise ran out");
        }
    };
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true), shares = GENERATE(false, true);
    CAPTURE(ranks, tcp, sharded, shares);
    training_options const options{.update = sharded ? update::sharded : update::replicated, .share_memory = shares};
    auto const texts = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            distance<false> model;
            data_parallel trainer{model, sgd{}, comm, options, broken{}};
            std::string const text = thrown_by([&] {
                for (std::uint64_t k = 0; k < 3; ++k) trainer.step(share(k, comm.rank(), comm.size()));
            });
            return std::pair(text, trainer.completed_steps());
        },
        patient());
    int own = 0;
    for (auto const& [text, steps] : texts) {
        CHECK_THAT(text, Catch::Contains("the noise ran out"));
        CHECK(steps == 1);
        own += text == "the noise ran out" ? 1 : 0;
    }
    CHECK(own >= 1);
    CHECK(own <= (sharded ? 1 : ranks));  // the ranks that have the element, each with its own exception
}

TEST_CASE("the check for NaN sees what an observer has made of the mean gradient", "[train]") {
    struct poisons {
        void on(mean_gradient<double> const& event) const {
            if (event.step == 2 && event.parameter == 3 && event.begin == 0) event.gradient[0] = NAN;
        }
    };
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true), shares = GENERATE(false, true);
    CAPTURE(ranks, tcp, sharded, shares);
    training_options const options{
        .update = sharded ? update::sharded : update::replicated, .nonfinite = nonfinite::stop, .share_memory = shares};
    auto const texts = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            distance<false> model;
            data_parallel trainer{model, sgd{.lr = 0.1}, comm, options, poisons{}};
            trainer.step(share(0, comm.rank(), comm.size()));
            std::uint64_t const before = trainer.digest_of_values();
            std::string text = thrown_by([&] { trainer.step(share(1, comm.rank(), comm.size())); });
            if (trainer.digest_of_values() != before || trainer.completed_steps() != 1) text += "; other values";
            trainer.step(share(1, comm.rank(), comm.size()));
            return text + (trainer.replicas_identical() ? "" : "; other values on ranks");
        },
        patient());
    for (std::string const& text : texts) {
        CHECK(text == texts.front());
        CHECK_THAT(text, Catch::StartsWith("DDP-E105 not finite: step 2") &&
                             Catch::Contains("or what an observer made of it, is not") &&
                             !Catch::Contains("other values"));
    }
}

TEMPLATE_TEST_CASE("frozen parameters stay as they are, and go on when they thaw", "[train]", distance<false>,
                   distance<true>) {
    int const ranks = GENERATE(1, 2, 3, 4);
    if (ranks != 3 && (TestType::ready_releases || sanitizers_leave_out("updates", ranks))) return;
    // Frozen in the first step: first.*, in buckets of their own or, by freeze(), in one with others. In step 2 second.bias
    // too, in step 3 first.* goes on, in step 4 all do.
    auto const is_frozen = [](std::uint64_t k, std::size_t i) {
        return (k < 2 && i < 2) || (k >= 1 && k < 3 && i == 4);
    };
    bool const by_norms = GENERATE(false, true), reported = GENERATE(true, false);
    training_options options;
    if (reported) options.frozen = {"first.*"};
    if (by_norms) options.clip = clip_by_global_norm{20};
    sgd const plain{.lr = 0.3, .momentum = 0.5, .weight_decay = 0.01};
    lamb const layered{.lr = 0.05};
    oracle expected;
    for (std::uint64_t k = 0; k < 4; ++k) {
        auto g = expected.gradient(whole(k));
        for (std::size_t i = 0; i < parts.size(); ++i)
            if (is_frozen(k, i)) g[i].assign(g[i].size(), 0);
        if (by_norms) oracle::clip(g, 20);
        ++expected.t;
        for (std::size_t i = 0; i < parts.size(); ++i)
            if (!is_frozen(k, i) && parts[i].count != 0)
                by_norms ? expected.lamb_step(i, g[i], layered) : expected.sgd_step(i, g[i], plain);
    }
    std::uint64_t first = 0;
    for (way const& how : ways(ranks)) {
        auto const [digest, wrong] = run(ranks, how, options, [&](auto& comm, training_options const& with) {
            TestType model;
            any_optimizer const by = by_norms ? any_optimizer(layered) : any_optimizer(plain);
            data_parallel trainer{model, by, comm, with, how.buckets};
            std::string text;
            for (std::uint64_t k = 0; k < 4; ++k) {
                if (k == 0 && !reported) trainer.freeze("first.*");
                if (k == 1) trainer.freeze("second.bias");
                if (k == 2) trainer.unfreeze("first.*");
                if (k == 3) trainer.unfreeze("*");
                for (std::size_t i = 0; i < parts.size(); ++i)
                    if ((trainer.frozen()[i] != 0) != is_frozen(k, i)) text += "frozen() is wrong; ";
                model.silent = reported ? "" : k == 0 ? "first.*" : k == 2 ? "second.bias" : "";
                // In two passes, so that what was accumulated counts neither.
                batch const mine = share(k, comm.rank(), comm.size());
                batch const one(mine.begin(), mine.begin() + (mine.empty() ? 0 : 1)),
                    rest(mine.begin() + (mine.empty() ? 0 : 1), mine.end());
                trainer.forward(one);
                trainer.accumulate();
                trainer.forward(rest);
                trainer.backward();
                trainer.finish();
            }
            double const off = distance_from(model, expected);
            if (!(off < 1e-10)) text += "off by " + std::to_string(off * 1e10) + "e-10";
            if (!trainer.replicas_identical()) text += "; replicas differ";
            return std::pair(trainer.digest_of_values(), text);
        });
        CHECK(wrong == "");
        if (first == 0) first = digest;
        CHECK(digest == first);
    }
}

TEST_CASE("nothing of frozen parameters travels unless trained ones lie around them, and NaN in them is not looked at",
          "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true);
    CAPTURE(ranks, tcp, sharded);
    struct counted {
        std::size_t bytes, afterwards;  // sent in the second step, and in the third, in which nothing is frozen
        bool finite;
    };
    struct setting {
        std::vector<std::string> frozen = {};
        bool poisoned = false;
        std::string silent = "", later = "";  // left out of backward; frozen before the second step
        any_buckets buckets = size_capped_buckets{};
    };
    auto const bytes_of = [&, number = ranks, over_tcp = tcp](setting const& with) {
        auto const threads = inproc_world::create(number);
        loopback_world const loopback(number);
        auto const train = [&](auto transport) {
            auto counting =
                std::make_unique<counting_transport<typename decltype(transport)::element_type>>(std::move(transport));
            auto& count = *counting;
            communicator<> comm = any_communicator(std::move(counting), patient());
            distance<false> model;
            data_parallel trainer{model,
                                  sgd{.lr = 0.1},
                                  comm,
                                  training_options{.update = sharded ? update::sharded : update::replicated,
                                                   .unused = unused::allowed,
                                                   .frozen = with.frozen,
                                                   .nonfinite = nonfinite::stop,
                                                   .agreement_steps = 0},
                                  direct_allreduce{},
                                  with.buckets};
            int const rank = comm.rank();
            model.silent = with.silent;
            if (with.poisoned) model.values[0][17] = NAN;
            trainer.step(share(0, rank, number));
            if (!with.later.empty()) trainer.freeze(with.later);
            count.take_sent();
            trainer.step(share(1, rank, number));
            std::size_t const bytes = count.take_sent().bytes;
            bool const finite = std::isfinite(model.values[3][0]);
            if (with.poisoned) return counted{bytes, 0, finite};
            trainer.unfreeze("*");
            count.take_sent();
            trainer.step(share(2, rank, number));
            return counted{bytes, count.take_sent().bytes, finite};
        };
        auto const all = on_threads(
            number, [&](int rank) { return over_tcp ? train(loopback.connect(rank)) : train(threads->connect(rank)); });
        counted sum{0, 0, true};
        for (counted const& one : all) {
            CHECK(one.finite);
            sum.bytes += one.bytes, sum.afterwards += one.afterwards;
        }
        return sum;
    };
    std::size_t const p = static_cast<std::size_t>(ranks);
    // A parameter's elements travel p - 1 times to be added, and as often as the result.
    auto const of = [&](std::size_t elements) { return 2 * (p - 1) * elements * sizeof(double); };
    std::size_t const nothing = bytes_of({}).bytes, first = bytes_of({.frozen = {"first.*"}, .poisoned = true}).bytes;
    CHECK(nothing - first >= of(9000));
    CHECK(nothing - first <= of(9200));
    CHECK(bytes_of({.frozen = {"*"}}).bytes <= 256 * p * (p - 1));
    CHECK(bytes_of({.silent = "first.*"}).bytes == nothing);  // left out, and not frozen: as zeros

    // Frozen later: nothing is sent of what lies at an end of its bucket, and zeros of what lies between others.
    counted const together = bytes_of({.buckets = single_bucket{}});
    for (auto const& [pattern, left_out] :
         {std::pair{"first.*", std::size_t{9008 + 5}}, {"second.bias", 8}, {"second.w*", 5}}) {
        CAPTURE(pattern);
        counted const one = bytes_of({.later = pattern, .buckets = single_bucket{}});
        CHECK(together.bytes - one.bytes == of(left_out));  // with gaps, and that at the end
        CHECK(one.afterwards == together.afterwards);
    }
    setting apart{.buckets = per_parameter_buckets{}};
    counted const each = bytes_of(apart);
    apart.later = "first.*";
    counted const later = bytes_of(apart);
    CHECK(each.bytes - later.bytes >= of(9000 + 7));
    CHECK(each.bytes - later.bytes <= of(9200));
    CHECK(later.afterwards == each.afterwards);  // it goes on once it thaws
}

TEST_CASE("a step sends the messages of its ticket and its buckets, and what goes with the ticket costs none",
          "[train]") {
    int const ranks = GENERATE(1, 2, 3, 4);
    bool const sharded = GENERATE(false, true);
    CAPTURE(ranks, sharded);
    auto const p = static_cast<std::size_t>(ranks);
    // What each rank sends in the second step.
    auto const sent = [&](training_options options, bool stops = false) {
        options.update = sharded ? update::sharded : update::replicated;
        auto const world = inproc_world::create(ranks);
        return on_threads(ranks, [&](int rank) {
            auto counting = std::make_unique<counting_transport<inproc_transport>>(world->connect(rank));
            auto& count = *counting;
            communicator<> comm = any_communicator(std::move(counting), patient());
            distance<false> model;
            data_parallel trainer{model, sgd{.lr = 0.1}, comm, options, direct_allreduce{}, per_parameter_buckets{}};
            batch const mine = share(0, rank, ranks);
            trainer.step(mine);
            count.take_sent();
            if (stops && rank == ranks - 1) trainer.request_stop();
            trainer.forward(mine);
            trainer.accumulate();
            if (count.take_sent().messages != 0) throw std::logic_error("accumulate() has sent something");
            step_result const got = trainer.step(mine);
            std::size_t const messages = count.take_sent().messages;
            if (!(got.previous_loss > 0)) throw std::logic_error("what the loss was is not known");
            if (got.stop != stops || trainer.stop_agreed() != stops) throw std::logic_error("another word on stopping");
            return messages;
        });
    };
    // By direct_allreduce a bucket's slices to their owners, and one's own slice to all: of the mean, or of the values.
    std::size_t const ticket = static_cast<std::size_t>(std::bit_width(p - 1)), bucket = 2 * (p - 1);
    std::vector<std::size_t> const plain(p, ticket + 2 * bucket), with_use(p, ticket + 2 * bucket + (p - 1));
    // Biases are frozen: too short for a slice a rank.
    training_options const least{.frozen = {"*.bias"}, .agreement_steps = 0, .buffers = buffers::left_alone};
    CHECK(sent(least) == plain);
    CHECK(sent(least, true) == plain);
    for (std::size_t const steps : {std::size_t{1}, training_options{}.agreement_steps}) {
        training_options compares = least;
        compares.agreement_steps = steps;
        CHECK(sent(compares, true) == plain);
    }
    training_options other = least;
    other.unused = unused::allowed;
    CHECK(sent(other) == with_use);  // a bit a parameter, to each rank
    other = least;
    other.frozen = {"*.bias", "first.*"};
    CHECK(sent(other) == std::vector<std::size_t>(p, ticket + bucket));
    other = least;
    other.nonfinite = nonfinite::skip;
    auto const guarded = sent(other);
    CAPTURE(guarded);
    // Slices of whole blocks: some ranks have none. Sharded, each sends the squares of its own to all; else all exchange the norm.
    for (std::size_t const one : guarded) CHECK(one <= plain[0] + (sharded ? bucket : ticket));
    other = least;
    other.buffers = buffers::from_rank_0_at_evaluation;
    CHECK(sent(other) == plain);
    other.buffers = buffers::from_rank_0;  // a broadcast
    auto const broadcast = sent(other);
    CHECK(std::accumulate(broadcast.begin(), broadcast.end(), std::size_t{0}) == p * plain[0] + (p - 1));
}

TEST_CASE("ranks freeze alike, or not at all", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const sharded = GENERATE(false, true);
    CAPTURE(ranks, tcp, sharded);
    training_options const options{.update = sharded ? update::sharded : update::replicated};
    auto const texts = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            distance<false> model;
            data_parallel trainer{model, sgd{.lr = 0.1}, comm, options};
            std::string all = thrown_by([&] { trainer.freeze("third.*"); }) + "\n";
            if (comm.size() > 1)
                all += thrown_by([&] { trainer.freeze(comm.rank() == 0 ? "first.*" : "second.*"); }) + "\n";
            all += thrown_by([&] {
                       distance<false> other;
                       data_parallel wrong{other, sgd{}, comm, training_options{.frozen = {"third.*"}}};
                   }) +
                   "\n";
            trainer.forward(whole(0));
            trainer.accumulate();
            all += thrown_by([&] { trainer.unfreeze("*"); });
            trainer.forward(whole(0));
            trainer.backward();
            trainer.finish();
            return all + (trainer.frozen()[0] == 0 && trainer.replicas_identical() ? "" : " wrong");
        },
        patient());
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
        CHECK_THAT(texts[rank], Catch::Contains("freeze: no parameter's name matches 'third.*'"));
        if (ranks > 1)
            CHECK_THAT(texts[rank],
                       Catch::Contains(rank == 0 ? std::string("ranks pass different patterns ('first.*' on rank 0)")
                                                 : "ranks pass different patterns ('second.*' on rank " +
                                                       std::to_string(rank) + ")"));
        CHECK_THAT(texts[rank], Catch::Contains("training_options.frozen: no parameter's name matches 'third.*'"));
        CHECK_THAT(texts[rank],
                   Catch::Contains("unfreeze: gradients of accumulate() wait for their step; make it first, by"));
        CHECK_THAT(texts[rank], !Catch::Contains("wrong"));
    }
    if (ranks == 1) return;
    auto const errors = errors_over(
        tcp, ranks,
        [&](auto& comm) {
            distance<false> model;
            data_parallel trainer{
                model, sgd{}, comm,
                training_options{.update = options.update, .frozen = {comm.rank() == 0 ? "first.*" : "second.*"}}};
        },
        patient());
    for (auto const& text : errors) CHECK_THAT(text, Catch::Contains("another training_options.unused or frozen"));
}
