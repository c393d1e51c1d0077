// What a training step means, all at once, against one process with the whole batch in plain loops: threads and TCP, 1 to 4 ranks,
// one host and two.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/optim/any_optimizer.hpp>
#include <ddp/optim/parameter_groups.hpp>
#include <ddp/train/data_parallel.hpp>
#include <ddp/train/evaluate.hpp>
#include <ddp/train/reduce_on_plateau.hpp>
#include <ddp/transport/inproc.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/on_threads.hpp"
#include "support/ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/thrown_by.hpp"
#include "train/distance_model.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr std::uint64_t steps = 6;
constexpr double factors[steps] = {0.25, 0.5, 0.75, 1, 0.5, 0.5};  // of the schedule, and from step 4 on of the program
adamw const by_adam{.lr = 0.05, .weight_decay = 0.1};
sgd const by_sgd{.lr = 0.2, .momentum = 0.5};
constexpr double bound = 20;

/// What of step k is left out by ranks below the last, and by all.
std::string left_out(std::uint64_t k, bool last) {
    return k != 3 ? "" : last ? "second.*" : "*";
}
/// What of step k is frozen.
std::string frozen(std::uint64_t k) {
    return k == 4 ? "first.*" : "";
}
/// The samples of step k on rank r: in the last step the last rank has all.
batch samples(std::uint64_t k, int rank, int ranks) {
    if (k + 1 < steps) return share(k, rank, ranks);
    return rank + 1 == ranks ? whole(k) : batch{};
}

struct one_process {
    std::vector<std::vector<double>> x, m, v;
    std::vector<double> losses, norms, seen;  // by step; seen by rank, and then for all

    explicit one_process(int ranks) {
        for (std::size_t i = 0; i < parts.size(); ++i) {
            x.emplace_back();
            for (std::size_t j = 0; j < parts[i].count; ++j) x[i].push_back(start(i, j));
        }
        m = v = x;
        for (auto* const all : {&m, &v})
            for (auto& one : *all) one.assign(one.size(), 0);
        double running = 0;
        for (std::uint64_t k = 0; k < steps; ++k) {
            step(k, ranks);
            running = mean_seen(k, ranks, running);
            seen.push_back(running);
        }
    }
    [[nodiscard]] mean_metric evaluate(std::vector<std::uint64_t> const& batches) const {
        mean_metric result;
        for (std::uint64_t const k : batches)
            for (std::uint64_t const s : whole(k))
                for (std::size_t i = 0; i < parts.size(); ++i)
                    for (std::size_t j = 0; j < parts[i].count; j += 100)
                        result.add(seen.back() * (x[i][j] - target(s, i, j)), 1);
        return result;
    }
    /// The mean over the ranks that have samples of each rank's running mean after step k, which makes as many passes as there
    /// are below.
    static double mean_seen(std::uint64_t k, int ranks, double before) {
        double sum = 0;
        int count = 0;
        for (int r = 0; r < ranks; ++r) {
            double mine = before;
            batch const all = samples(k, r, ranks);
            if (all.empty()) continue;
            ++count;
            for (auto const& [from, to] : passes(k, all.size())) {
                double ids = 0;
                for (std::size_t s = from; s < to; ++s) ids += static_cast<double>(all[s]);
                if (from != to) mine = 0.9 * mine + 0.1 * ids / static_cast<double>(to - from);
            }
            sum += mine;
        }
        return sum / count;
    }
    /// The passes that a rank makes in step k over its samples.
    static std::vector<std::pair<std::size_t, std::size_t>> passes(std::uint64_t k, std::size_t count) {
        std::size_t const cut = count == 0 ? 0 : 1;
        if (k == 1) return {{0, cut}, {cut, count}};
        if (k == 2) return {{0, cut}, {cut, cut}, {cut, count}};
        return {{0, count}};
    }
    void step(std::uint64_t k, int ranks) {
        auto g = x;
        double loss = 0, square = 0;
        for (auto& one : g) one.assign(one.size(), 0);
        for (int r = 0; r < ranks; ++r)
            for (std::uint64_t const s : samples(k, r, ranks))
                for (std::size_t i = 0; i < parts.size(); ++i) {
                    bool const out =
                        name_fits(left_out(k, r + 1 == ranks), parts[i].name) || name_fits(frozen(k), parts[i].name);
                    for (std::size_t j = 0; j < parts[i].count; ++j) {
                        double const off = x[i][j] - target(s, i, j);
                        if (!out) g[i][j] += off / 7;
                        if (j % 100 == 0) loss += off * off / 7;
                    }
                }
        for (auto const& one : g)
            for (double const each : one) square += each * each;
        double const norm = std::sqrt(square), clip = std::min(1.0, bound / (norm + 1e-6));
        losses.push_back(loss);
        norms.push_back(norm);
        double const t = static_cast<double>(k + 1);
        for (std::size_t i = 0; i < parts.size(); ++i) {
            // Frozen, or no rank has used it: neither value nor state changes. On 2 to 4 ranks the last has samples in that step only with 2.
            bool used = false;
            for (int r = 0; r < ranks; ++r)
                used =
                    used || (!name_fits(left_out(k, r + 1 == ranks), parts[i].name) && !samples(k, r, ranks).empty());
            if (!used || name_fits(frozen(k), parts[i].name)) continue;
            for (std::size_t j = 0; j < parts[i].count; ++j) {
                double const grad = g[i][j] * clip;
                if (name_fits("*.bias", parts[i].name)) {
                    m[i][j] = by_sgd.momentum * m[i][j] + grad;
                    x[i][j] -= by_sgd.lr * factors[k] * m[i][j];
                    continue;
                }
                m[i][j] = by_adam.beta1 * m[i][j] + (1 - by_adam.beta1) * grad;
                v[i][j] = by_adam.beta2 * v[i][j] + (1 - by_adam.beta2) * grad * grad;
                double const lr = by_adam.lr * factors[k];
                x[i][j] *= 1 - lr * by_adam.weight_decay;
                x[i][j] -= lr * m[i][j] / (1 - std::pow(by_adam.beta1, t)) /
                           (std::sqrt(v[i][j] / (1 - std::pow(by_adam.beta2, t))) + by_adam.eps);
            }
        }
    }
};

bool near(double a, double b) {
    return std::abs(a - b) <= 1e-10 * std::max(1.0, std::abs(b));
}

/// One rank's part of the training; what differs from one process.
std::string train(communicator<>& comm, update how, one_process const& expected) {
    std::string wrong;
    auto const expect = [&](bool right, std::string const& what) {
        if (!right) wrong += what + "; ";
    };
    distance<true> model;
    // Ranges of gradients, others on each rank, and now and then none: what is averaged depends on none of it.
    if (how != update::automatic) model.slice = comm.size() == 1 ? 700 : 900 * static_cast<std::size_t>(comm.rank());
    parameter_groups<any_optimizer> const optimizer{by_adam, {{"*.bias", by_sgd}}};
    data_parallel trainer{model, optimizer, comm,
                          training_options{.update = how,
                                           .clip = clip_by_global_norm{bound},
                                           .schedule = {linear_warmup{.steps = 3, .from = 0.25}, constant_rate{}},
                                           .unused = unused::allowed,
                                           .buffers = buffers::averaged},
                          size_capped_buckets{30'000, 5'000}};
    for (std::uint64_t k = 0; k < steps; ++k) {
        std::string const at = "step " + std::to_string(k);
        batch const mine = samples(k, comm.rank(), comm.size());
        bool const last = comm.rank() + 1 == comm.size();
        model.silent = left_out(k, last);
        if (k == 4) trainer.set_rate_factor(0.5), trainer.freeze(frozen(k));
        if (k == 5) trainer.unfreeze("*");
        finish_result result;
        auto const pass = [&](std::size_t which) {
            auto const [from, to] = one_process::passes(k, mine.size())[which];
            trainer.forward(batch(mine.begin() + static_cast<std::ptrdiff_t>(from),
                                  mine.begin() + static_cast<std::ptrdiff_t>(to)));
        };
        if (k == 1) {
            pass(0), trainer.accumulate();
            pass(1), trainer.backward();
            result = trainer.finish();
        } else if (k == 2) {
            {
                auto const guard = trainer.no_sync();
                pass(0), trainer.backward();
                pass(1), trainer.backward();
            }
            pass(2), trainer.backward();
            result = trainer.finish();
        } else if (k + 1 == steps && !last) {
            expect(trainer.join(), "join() says that all are done");
            result.weight = 7;
            result.gradient_norm = expected.norms[k];
            result.previous_loss = trainer.previous_loss();
        } else {
            step_result const one = trainer.step(mine);
            result = {one.weight, one.gradient_norm, one.skipped, one.stop, one.previous_loss};
        }
        expect(result.weight == 7, at + ": " + std::to_string(result.weight) + " samples");
        expect(near(result.gradient_norm, expected.norms[k]), at + ": norm " + std::to_string(result.gradient_norm));
        expect(k == 0 ? std::isnan(result.previous_loss) : near(result.previous_loss, expected.losses[k - 1]),
               at + ": loss before " + std::to_string(result.previous_loss));
        expect(near(model.seen, expected.seen[k]), at + ": buffer " + std::to_string(model.seen));
        expect(trainer.replicas_identical(), at + ": replicas differ");
    }
    double most = 0;
    for (std::size_t i = 0; i < parts.size(); ++i)
        for (std::size_t j = 0; j < parts[i].count; ++j)
            most = std::max(most, std::abs(model.values[i][j] - expected.x[i][j]));
    expect(most < 1e-10, "values are off by " + std::to_string(most * 1e10) + "e-10");

    std::uint64_t next = 8;  // batches 8 and 9, and 10 on the last rank
    std::uint64_t const end = comm.rank() + 1 == comm.size() ? 11 : 10;
    mean_metric const seen = evaluate(
        trainer, [&] { return next < end ? std::optional(next++) : std::nullopt; },
        [&](std::uint64_t k) { return k == 10 ? whole(k) : share(k, comm.rank(), comm.size()); });
    mean_metric const alone = expected.evaluate({8, 9, 10});
    expect(seen.weight == alone.weight && near(seen.mean(), alone.mean()),
           "evaluation: " + std::to_string(seen.mean()));

    while (trainer.join()) {
    }  // all of them
    expect(trainer.completed_steps() == steps, "steps");
    if (comm.size() > 1) {  // a value that one rank changes is found before the next step
        if (comm.rank() == 0 && how == update::replicated) model.values[0][0] += 1;
        std::string const text = thrown_by([&] {
            for (int k = 0; how == update::replicated && k < 256; ++k)
                trainer.step(samples(0, comm.rank(), comm.size()));
        });
        std::string const who = comm.size() == 2
                                    ? "ranks 0, 1 hold different values (or optimizer states), without a majority"
                                    : "rank 0 holds other values (or another optimizer state) than the other " +
                                          std::to_string(comm.size() - 1);
        expect(how != update::replicated ||
                   text == "DDP-E106 replicas differ: " + who +
                               ", seen before step 257 in \"first.weight\". Either a rank "
                               "has changed its model between steps, where all ranks must make the same "
                               "change, or its memory is faulty. Start again from a checkpoint.",
               "not found: " + text);
    }
    return wrong;
}

/// An auto-encoder whose decoder is its encoder turned round: one matrix (2, 3), listed once and used twice. y = x W' W.
struct tied_pair {
    using element = double;
    static constexpr std::size_t hidden = 2, width = 3;
    using point = std::array<double, width>;
    std::vector<double> own = {0.5, -0.25, 0.75, 0.125, 1, -0.5, 0, 0, 0, 0, 0, 0};
    std::span<double> w = std::span(own).first(6), dw = std::span(own).last(6);
    std::shared_ptr<void> owner;
    batch now;
    std::vector<std::array<double, hidden>> codes;
    std::vector<point> errors;

    tied_pair() = default;
    tied_pair(tied_pair const&) = delete;
    static point sample(std::uint64_t s) { return {scattered(3 * s), scattered(3 * s + 1), scattered(3 * s + 2)}; }
    std::vector<parameter<double>> parameters() { return {{"tied", {hidden, width}, w, dw}}; }
    void bind(storage<double> memory) { w = memory.values[0], dw = memory.gradients[0], owner = memory.owner; }
    double forward(batch const& samples) {
        now = samples, codes.clear(), errors.clear();
        double sum = 0;
        for (std::uint64_t const s : now) {
            point const x = sample(s);
            auto& code = codes.emplace_back();
            auto& error = errors.emplace_back();
            for (std::size_t k = 0; k < hidden; ++k)
                for (std::size_t j = 0; j < width; ++j) code[k] += w[k * width + j] * x[j];
            for (std::size_t j = 0; j < width; ++j) {
                error[j] = -x[j];
                for (std::size_t k = 0; k < hidden; ++k) error[j] += w[k * width + j] * code[k];
                sum += error[j] * error[j] / 2;
            }
        }
        return sum / static_cast<double>(now.size());
    }
    template <class Ready>
    void backward(pass<double> how, Ready const& ready) {
        double const factor = how.scale / static_cast<double>(now.size());
        if (!how.accumulate) std::fill(dw.begin(), dw.end(), 0.0);
        for (std::size_t n = 0; n < now.size(); ++n)  // the decoder's use
            for (std::size_t k = 0; k < hidden; ++k)
                for (std::size_t j = 0; j < width; ++j) dw[k * width + j] += factor * codes[n][k] * errors[n][j];
        for (std::size_t n = 0; n < now.size(); ++n)  // the encoder's
            for (std::size_t k = 0; k < hidden; ++k) {
                double slope = 0;
                for (std::size_t j = 0; j < width; ++j) slope += w[k * width + j] * errors[n][j];
                for (std::size_t j = 0; j < width; ++j) dw[k * width + j] += factor * slope * sample(now[n])[j];
            }
        ready(0);
    }
};

/// What one process comes to with the whole batch, whose gradient is made of differences of the loss.
std::vector<double> tied_alone(std::uint64_t count, double rate) {
    std::vector<double> w = tied_pair().own;
    w.resize(6);
    auto const loss = [](std::vector<double> const& at, std::uint64_t k) {
        double sum = 0;
        for (std::uint64_t const s : whole(k)) {
            tied_pair::point const x = tied_pair::sample(s);
            for (std::size_t j = 0; j < 3; ++j) {
                double y = 0;
                for (std::size_t i = 0; i < 6; ++i) y += at[i / 3 * 3 + j] * at[i] * x[i % 3];
                sum += (y - x[j]) * (y - x[j]) / 2;
            }
        }
        return sum / 7;
    };
    for (std::uint64_t k = 0; k < count; ++k) {
        std::vector<double> slope(6);
        for (std::size_t i = 0; i < 6; ++i) {  // the loss has degree 4 in each element: two differences make it exact
            auto const between = [&](double h) {
                auto above = w, below = w;
                above[i] += h, below[i] -= h;
                return (loss(above, k) - loss(below, k)) / (2 * h);
            };
            slope[i] = (4 * between(0.25) - between(0.5)) / 3;
        }
        for (std::size_t i = 0; i < 6; ++i) w[i] -= rate * slope[i];
    }
    return w;
}

}  // namespace

TEST_CASE("a matrix that is listed once and used twice is trained by both uses", "[train]") {
    std::vector<double> const expected = tied_alone(20, 0.3);
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    if (ranks > 4) return;
    CAPTURE(ranks, tcp);
    auto const got = ranks_over(
        tcp, ranks,
        [](communicator<>& comm) {
            tied_pair model;
            data_parallel trainer{model, sgd{.lr = 0.3}, comm};
            for (std::uint64_t k = 0; k < 20; ++k) {
                batch mine = share(k, comm.rank(), comm.size());
                if (k % 2 == 1 && !mine.empty()) {  // in two passes
                    trainer.forward(batch{mine.back()});
                    trainer.accumulate();
                    mine.pop_back();
                }
                trainer.forward(mine);
                trainer.backward();
                trainer.finish();
            }
            return std::vector<double>(model.w.begin(), model.w.end());
        },
        patient());
    for (auto const& w : got)
        for (std::size_t i = 0; i < 6; ++i) CHECK(std::abs(w[i] - expected[i]) < 1e-10);
    CHECK(std::abs(expected[0] - 0.5) > 0.01);  // it has moved
}

TEST_CASE("a rate that falls by the loss over all ranks falls as in one process with the whole batch", "[train]") {
    // One process, in plain loops: the rate is so high that the loss grows, and falls until it no longer does.
    constexpr std::uint64_t updates = 12;
    constexpr double rate = 2.2, by = 0.5;
    std::vector<std::vector<double>> x;
    std::vector<double> lowered;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        x.emplace_back();
        for (std::size_t j = 0; j < parts[i].count; ++j) x[i].push_back(start(i, j));
    }
    double best = HUGE_VAL, factor = 1;
    int bad = 0;
    for (std::uint64_t k = 0; k < updates; ++k) {
        double loss = 0;
        for (std::size_t i = 0; i < parts.size(); ++i)
            for (std::size_t j = 0; j < parts[i].count; ++j) {
                double slope = 0;
                for (std::uint64_t const s : whole(k)) {
                    double const off = x[i][j] - target(s, i, j);
                    slope += off / 7;
                    if (j % 100 == 0) loss += off * off / 7;
                }
                x[i][j] -= rate * factor * slope;
            }
        bad = loss < best ? 0 : bad + 1;
        best = std::min(best, loss);
        if (bad > 1) factor *= by, bad = 0;
        lowered.push_back(factor);
    }
    CHECK(lowered[1] == 1);
    CHECK(lowered.back() < by);

    auto const [ranks, tcp] = GENERATE(ways_to_run());
    if (ranks > 4) return;  // what share() knows
    CAPTURE(ranks, tcp);
    auto const got = ranks_over(
        tcp, ranks,
        [](communicator<>& comm) {
            distance<false> model;
            data_parallel trainer{model, sgd{.lr = rate}, comm};
            reduce_on_plateau plateau{{.factor = by, .patience = 1, .threshold = 0}};
            std::vector<double> all;
            for (std::uint64_t k = 0; k < updates; ++k) {
                batch const mine = share(k, comm.rank(), comm.size());
                double const loss = trainer.step(mine).loss;
                mean_metric over_all;
                over_all.add(mine.empty() ? 0 : loss, mine.size());
                all.push_back(plateau.update(sum_over_ranks(comm, over_all).mean()));
                trainer.set_rate_factor(all.back());
            }
            std::vector<std::vector<double>> values;
            for (auto const& one : model.values) values.emplace_back(one.begin(), one.end());
            return std::pair(all, values);
        },
        patient());
    for (auto const& [all, values] : got) {
        CHECK(all == lowered);
        double most = 0;
        for (std::size_t i = 0; i < parts.size(); ++i)
            for (std::size_t j = 0; j < parts[i].count; ++j) most = std::max(most, std::abs(values[i][j] - x[i][j]));
        CHECK(most < 1e-10);
    }
}

TEST_CASE("a training means what one process does, whatever the ranks and the transport", "[train]") {
    int const ranks = GENERATE(1, 2, 3, 4);
    if (ranks != 3 && sanitizers_leave_out("trainings", ranks)) return;
    one_process const expected(ranks);
    for (update const how : {update::replicated, update::sharded, update::automatic}) {
        auto const body = [&](communicator<>& comm) { return train(comm, how, expected); };
        for (bool const tcp : {false, true}) {
            CAPTURE(ranks, static_cast<int>(how), tcp);
            for (auto const& wrong :
                 tcp ? on_ranks(ranks, body, how == update::automatic) : run_ranks(ranks, body, patient()))
                CHECK(wrong == "");
        }
        if (ranks < 3) continue;  // two hosts, ranks placed round-robin: memory inside each, messages between them
        std::vector<std::uint64_t> const hosts{8, 9, 8, 9};
        auto const world = inproc_world::create(ranks, {hosts.begin(), hosts.begin() + ranks});
        CAPTURE(ranks, static_cast<int>(how));
        for (auto const& wrong : on_threads(ranks, [&](int rank) {
                 communicator<> comm = any_communicator(world->connect(rank), patient());
                 return body(comm);
             }))
            CHECK(wrong == "");
    }
}
