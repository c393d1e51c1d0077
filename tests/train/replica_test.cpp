// A replica trains without any communicator: by itself, beside others that are averaged by hand, with several batches
// between forward and backward.
#include <ddp/train/replica.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/kernel/sum.hpp>
#include <ddp/train/stepper.hpp>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

/// A replica and its own optimizer: all that local training needs.
template <class M>
struct trains_alone {
    using E = typename M::element;
    M& model;
    replica<M> net{model};
    std::unique_ptr<stepper<E>> local;
    std::uint64_t updates = 0;

    trains_alone(M& m, any_optimizer const& optimizer, std::vector<std::size_t> const& order = {}) : model(m) {
        net.attach(net.make_arena(order));
        local = std::make_unique<stepper<E>>(optimizer, net.where(), net.parameters());
    }
    template <class Batch>
    double step(Batch const& batch) {
        net.copy_values_in();
        double const loss = net.forward(batch);
        net.backward({.weight = batch.size()});
        scale(net.gradients(), static_cast<E>(1.0 / static_cast<double>(batch.size())));
        local->step({.update = ++updates}, net.gradients(), net.values());
        net.values_changed();
        return loss;
    }
};

template <Element E, memory Kind>
std::pair<std::uint64_t, std::uint64_t> alone_and_as_one_rank(any_optimizer const& optimizer,
                                                              std::vector<std::size_t> const& order) {
    task_data<E> const data(7, 3, 64);
    tanh_mlp<E, Kind> one(7, 24, 3, 1), two(7, 24, 3, 1);
    trains_alone<tanh_mlp<E, Kind>> alone(one, optimizer, order);
    for (std::size_t step = 0; step < 10; ++step) alone.step(data.batch(step, 2 * step + 1));
    std::uint64_t const trainers = run_ranks(1, [&](auto& comm) {
        data_parallel trainer{two, optimizer, comm};
        for (std::size_t step = 0; step < 10; ++step) trainer.step(data.batch(step, 2 * step + 1));
        return trainer.digest_of_values();
    })[0];
    return {alone.net.digest_of_values(), trainers};
}

}  // namespace

TEMPLATE_TEST_CASE("a replica alone trains to the bits of a trainer on one rank", "[train]", float, double) {
    for (auto const& [name, optimizer] : optimizers())
        for (auto const& order : {std::vector<std::size_t>{}, std::vector<std::size_t>{4, 1, 0, 2, 3}}) {
            CAPTURE(name, order.size());
            auto const bound = alone_and_as_one_rank<TestType, memory::bound>(optimizer, order);
            auto const copied = alone_and_as_one_rank<TestType, memory::copied>(optimizer, order);
            REQUIRE(bound.first == bound.second);
            REQUIRE(copied.first == copied.second);
            REQUIRE(copied.first == bound.first);
        }
}

TEST_CASE("two replicas that step on their own and are averaged by hand every few steps hold the same values",
          "[train]") {
    using model = tanh_mlp<float, memory::bound>;
    task_data<float> const data(7, 3, 64);
    model one(7, 24, 3, 1), two(7, 24, 3, 1);
    trains_alone<model> a(one, sgd{.lr = 0.1, .momentum = 0.9}), b(two, sgd{.lr = 0.1, .momentum = 0.9});
    double first_loss = 0, loss = 0;
    for (std::size_t round = 0; round < 20; ++round) {
        for (std::size_t step = 0; step < 4; ++step) {
            loss = a.step(data.batch(0, 16)) + b.step(data.batch(16, 32));
            if (round == 0 && step == 0) first_loss = loss;
        }
        REQUIRE(a.net.digest_of_values() != b.net.digest_of_values());
        std::span<float> const x = a.net.values(), y = b.net.values();
        for (std::size_t k = 0; k < x.size(); ++k) x[k] = y[k] = (x[k] + y[k]) / 2;
        a.net.values_changed();
        b.net.values_changed();
        REQUIRE(a.net.digest_of_values() == b.net.digest_of_values());
    }
    REQUIRE(loss < 0.5 * first_loss);
}

namespace {
/// Keeps every batch until backward has gone through it: the loss is w x, summed over the batch's mean.
struct remembers_batches {
    using element = double;
    std::vector<double> w{1.0}, g{0.0};
    std::deque<double> means;

    std::vector<parameter<double>> parameters() { return {{"w", {1}, w, g}}; }
    double forward(numbers const& batch) {
        double sum = 0;
        for (double const x : batch.of) sum += x;
        means.push_back(sum / static_cast<double>(batch.of.size()));
        return w[0] * means.back();
    }
    template <class Ready>
    void backward(pass<double> how, Ready const& ready) {
        g[0] = (how.accumulate ? g[0] : 0) + how.scale * means.front();
        means.pop_front();
        ready(0);
    }
};
}  // namespace

TEST_CASE("several micro-batches may lie between forward and backward", "[train]") {
    remembers_batches model;
    replica net{model};
    net.attach(net.make_arena());
    std::vector<numbers> const batches = {{{1, 2, 3}}, {{10}}, {{4, 6}}};
    std::vector<double> losses;
    for (numbers const& batch : batches) losses.push_back(net.forward(batch));
    REQUIRE(losses == std::vector<double>{2, 10, 5});
    std::vector<std::size_t> ready;
    for (std::size_t k = 0; k < batches.size(); ++k)
        net.backward({.weight = batches[k].size(), .accumulate = k > 0, .last = k + 1 == batches.size()},
                     [&](std::size_t i) { ready.push_back(i); });
    REQUIRE(ready == std::vector<std::size_t>{0});  // in the last pass only
    REQUIRE(net.gradients()[0] == 6 + 10 + 10);
    // In another order, and with a fourth before the first is done.
    net.forward(numbers{{1}});
    net.forward(numbers{{2}});
    net.backward({.weight = 1, .accumulate = false, .last = false});
    net.forward(numbers{{3}});
    net.backward({.weight = 1, .accumulate = true, .last = false});
    net.backward({.weight = 1, .accumulate = true});
    REQUIRE(net.gradients()[0] == 6);
}

TEMPLATE_TEST_CASE("a pass without samples leaves what was accumulated, or zeros, and reports everything", "[train]",
                   scripted_model<true>, scripted_model<false>) {
    TestType model({{"a", {3}}, {"b", {2}}});
    replica net{model};
    net.attach(net.make_arena());
    std::vector<std::size_t> ready;
    auto const report = [&](std::size_t i) { ready.push_back(i); };
    auto const first = [&] {
        return std::array{net.gradients()[net.where().begin(0)], net.gradients()[net.where().begin(1)]};
    };
    net.forward(numbers{{2, 4}});
    net.backward({.weight = 2}, report);
    REQUIRE(first() == std::array{6.0, 12.0});
    REQUIRE(ready == std::vector<std::size_t>{1, 0});
    net.backward({.weight = 0, .accumulate = true}, report);
    REQUIRE(first() == std::array{6.0, 12.0});
    REQUIRE(ready.size() == 4);
    net.backward({.weight = 0}, report);
    REQUIRE(first() == std::array{0.0, 0.0});
    REQUIRE(ready.size() == 6);
}

namespace {
/// Two parameters, of 5 and 3 elements, whose gradients are 10 i + k, reported as `reports` says: (i, first, count), or ready(i)
/// for a count of 9.
template <bool Bound>
struct sliced_model {
    using element = double;
    std::vector<double> memory = std::vector<double>(16);
    std::vector<std::span<double>> value{{memory.data(), 5}, {memory.data() + 5, 3}};
    std::vector<std::span<double>> gradient{{memory.data() + 8, 5}, {memory.data() + 13, 3}};
    std::shared_ptr<void> owner = {};
    std::vector<std::array<std::size_t, 3>> reports = {};

    std::vector<parameter<double>> parameters() {
        return {{"a", {5}, value[0], gradient[0]}, {"b", {3}, value[1], gradient[1]}};
    }
    void bind(storage<double> const& in)
        requires Bound
    {
        value = in.values, gradient = in.gradients, owner = in.owner;
    }
    double forward(numbers const&) { return 0; }
    template <class Ready>
    void backward(pass<double>, Ready const& ready) {
        for (std::size_t i : {0u, 1u}) std::ranges::fill(gradient[i], -1.0);
        for (auto const& [i, first, count] : reports) {
            if (count == 9)
                for (std::size_t k = 0; k < gradient[i].size(); ++k) gradient[i][k] = static_cast<double>(10 * i + k);
            else if (i < 2)
                for (std::size_t k = first; k < std::min(first + count, gradient[i].size()); ++k)
                    gradient[i][k] = static_cast<double>(10 * i + k);
            count == 9 ? ready(i) : ready(i, first, count);
        }
    }
};
}  // namespace

TEST_CASE("what a model leaves out or reports twice is named, without a rank", "[train]") {
    scripted_model<> model({{"a", {3}}, {"b", {2}}});
    replica net{model};
    net.attach(net.make_arena());
    std::vector<std::size_t> ready;
    auto const said = [&](unused how) {
        return thrown_by([&] {
            net.forward(numbers{{1}});
            net.backward({.weight = 1, .unused = how}, [&](std::size_t i) { ready.push_back(i); });
        });
    };
    model.leaves_out = [](std::size_t i) { return i == 0; };
    REQUIRE(said(unused::error) ==
            "DDP-E103 gradient: backward never reported parameter #0 'a': call ready(i) for each, or set "
            "backward_pass.unused = ddp::unused::allowed");
    REQUIRE(ready == std::vector<std::size_t>{1});
    REQUIRE(said(unused::allowed) == "");
    REQUIRE(ready == std::vector<std::size_t>{1, 1, 0});
    model.at_end = [](auto const& report) { report(1); };
    REQUIRE(said(unused::allowed).find("backward reported parameter #1 'b' twice") != std::string::npos);
    REQUIRE(ready == std::vector<std::size_t>{1, 1, 0, 1, 0});
}

TEMPLATE_TEST_CASE("a replica can be attached to another arena, and goes on with the values there", "[train]",
                   scripted_model<true>, scripted_model<false>) {
    TestType model({{"a", {3}}, {"b", {2}}}, 1);
    replica net{model};
    REQUIRE(model.steps_seen.empty());
    net.attach(net.make_arena());
    arena<double> const first = net.memory();
    arena<double> const second(net.where());
    for (double& x : second.values()) x = 7;
    net.attach(second);
    REQUIRE(model.value(0)[2] == 7);
    REQUIRE(net.parameters()[1].value[1] == 7);
    net.forward(numbers{{3}});
    net.backward({.weight = 1});
    REQUIRE(second.gradients()[0] == 3);
    REQUIRE(first.gradients()[0] == 0);
    net.attach(first);
    REQUIRE(model.value(0)[2] == 1);
    REQUIRE(model.steps_seen == std::vector<int>{3, 3});
    // What the user writes into the model counts, too.
    model.value(1)[0] = 5;
    net.copy_values_in();
    REQUIRE(first.value(1)[0] == 5);
}

TEST_CASE("a stepper steps what it holds and nothing else", "[train]") {
    layout const where({16, 16, 16}, {}, sizeof(double));
    std::vector<parameter<double>> parameters;
    for (char const* const name : {"a", "b", "c"}) parameters.push_back({name, {16}, {}, {}});
    stepper<double> local(sgd{.lr = 1, .momentum = 0.5}, where, parameters);
    arena_range const ranges[] = {{8, 24}, {24, 24}, {40, 48}};
    local.hold(ranges);
    std::vector<double> gradients(48, 1.0), values(48);
    local.step({}, gradients, values);
    local.step({.update = 2}, gradients, values, 8, 16);
    for (std::size_t k = 0; k < 48; ++k)
        REQUIRE(values[k] == (k < 8 ? 0 : k < 16 ? -2.5 : k < 24 ? -1 : k < 40 ? 0 : -1));
    for (auto const& range : {arena_range{0, 8}, arena_range{16, 32}, arena_range{36, 48}})
        REQUIRE(thrown_by([&] {
                    local.step({}, gradients, values, range.begin, range.end);
                }).find("stepper: only what is held can be stepped") != std::string::npos);
    std::vector<std::pair<std::string, std::size_t>> shown;
    local.for_each_state(where, parameters, [&](state_slice const& s) { shown.emplace_back(s.of, s.begin); });
    REQUIRE(shown == std::vector<std::pair<std::string, std::size_t>>{{"a", 8}, {"b", 0}, {"c", 8}});
    arena_range const wrong[] = {{8, 24}, {16, 32}};
    REQUIRE(thrown_by([&] {
                local.hold(wrong);
            }).find("stepper: the ranges that are held must ascend and not overlap") != std::string::npos);
}

TEMPLATE_TEST_CASE("a replica passes on the ranges that a model reports, and names those that are wrong", "[train]",
                   (sliced_model<true>), (sliced_model<false>)) {
    using ranges = std::vector<std::array<std::size_t, 3>>;
    TestType model;
    replica net{model};
    net.attach(net.make_arena());
    ranges got;
    std::vector<std::size_t> wholes;
    bool final = true;
    auto const range = [&](std::size_t i, std::size_t first, std::size_t count) {
        got.push_back({i, first, count});
        for (std::size_t k = first; k < first + count; ++k)
            final = final && net.memory().gradient(i)[k] == static_cast<double>(10 * i + k);
    };
    auto const said = [&](ranges const& reports, unused how = unused::error) {
        model.reports = reports;
        got.clear();
        net.forward(numbers{{1}});
        return thrown_by([&] { net.backward({.weight = 1, .unused = how}, range); });
    };
    REQUIRE(said({{1, 2, 1}, {0, 3, 2}, {1, 0, 2}, {0, 1, 2}, {0, 9, 9}}) == "");  // 9, 9: ready(i)
    REQUIRE(got == ranges{{1, 2, 1}, {0, 3, 2}, {1, 0, 2}, {0, 1, 2}, {0, 0, 1}});
    REQUIRE(final);
    net.forward(numbers{{1}});
    net.backward({.weight = 1}, [&](std::size_t i) { wholes.push_back(i); });  // once all of it is final
    REQUIRE(wholes == std::vector<std::size_t>{1, 0});
    got.clear();
    net.backward({.weight = 1, .last = false}, range);
    REQUIRE(got.empty());

    std::string const left = "whose elements [0, ";
    REQUIRE(said({{1, 9, 9}, {0, 0, 3}}).find("elements [0, 3) of parameter #0 'a', " + left + "5) were left") !=
            std::string::npos);
    REQUIRE(said({{1, 9, 9}, {0, 2, 3}, {0, 1, 2}, {0, 9, 9}}).find(left + "2) were left") != std::string::npos);
    REQUIRE(said({{1, 9, 9}, {0, 4, 2}, {0, 9, 9}}).find("DDP-E103 gradient: backward reported elements [4, 6)") == 0);
    REQUIRE(said({{1, 9, 9}, {0, 5, 0}, {0, 9, 9}}).find("takes ranges from the end backwards") != std::string::npos);
    REQUIRE(said({{1, 9, 9}, {0, std::size_t(-1), 2}, {0, 9, 9}}).find("without gaps") != std::string::npos);
    REQUIRE(said({{1, 9, 9}, {2, 0, 1}, {0, 9, 9}}).find("reported parameter #2, but the model has 2") !=
            std::string::npos);
    REQUIRE(said({{1, 9, 9}, {0, 0, 5}, {0, 9, 9}}).find("parameter #0 'a' twice") != std::string::npos);
    REQUIRE(said({{1, 9, 9}, {0, 0, 5}, {0, 4, 1}}).find("parameter #0 'a' twice") != std::string::npos);
    for (unused const how : {unused::error, unused::allowed})
        REQUIRE(said({{1, 9, 9}, {0, 2, 3}}, how).find("never reported the first 2 elements of parameter #0 'a'") !=
                std::string::npos);
    REQUIRE(said({{1, 0, 3}}, unused::allowed) == "");
    REQUIRE(got == ranges{{1, 0, 3}, {0, 0, 5}});
}

TEST_CASE("what a model reports for a batch without samples counts as unused", "[train]") {
    scripted_model<> net({{"a", {3}}, {"b", {2}}});
    replica<scripted_model<>> of(net);
    of.attach(of.make_arena());
    auto const used_after = [&](backward_pass const& how) {
        of.backward(how);
        return std::vector<std::uint8_t>(of.used().begin(), of.used().end());
    };
    (void)of.forward(numbers{{1}});
    CHECK(used_after({.weight = 1}) == std::vector<std::uint8_t>{1, 1});
    CHECK(used_after({.weight = 0, .empty = true, .unused = unused::allowed}) == std::vector<std::uint8_t>{0, 0});
}
