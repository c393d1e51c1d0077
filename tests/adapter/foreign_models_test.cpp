// Models from elsewhere: one vector with one call, and passes that always assign.
#include <array>
#include <concepts>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/adapter/accumulating.hpp>
#include <ddp/adapter/flat_model.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/testing/check_model.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

using samples = std::vector<std::array<double, 3>>;  // x, y, target
constexpr std::size_t unknowns = 4;                  // of a x + b y + c x y + d

samples drawn(std::size_t begin, std::size_t count) {
    samples all;
    for (std::size_t i = begin; i < begin + count; ++i) {
        double const x = static_cast<double>(i % 7) - 3, y = static_cast<double>(i % 5) - 2;
        all.push_back({x, y, 2 * x - y + 0.5 * x * y + 1});
    }
    return all;
}
/// The mean of half the squared error; its gradient is assigned.
double mean_loss(std::span<double const> at, samples const& batch, std::span<double> gradient) {
    double loss = 0;
    for (double& g : gradient) g = 0;
    for (auto const& [x, y, target] : batch) {
        double const error = at[0] * x + at[1] * y + at[2] * x * y + at[3] - target;
        loss += error * error / 2;
        gradient[0] += error * x, gradient[1] += error * y, gradient[2] += error * x * y, gradient[3] += error;
    }
    for (double& g : gradient) g /= static_cast<double>(batch.size());
    return loss / static_cast<double>(batch.size());
}

/// Passes that assign; `Announces` says when each gradient is there.
template <bool Announces>
struct assigns {
    using element = double;
    std::vector<double> values = std::vector<double>(unknowns), gradients = values;
    std::span<double> slopes = std::span(values).first(2), rest = std::span(values).last(2);
    std::span<double> d_slopes = std::span(gradients).first(2), d_rest = std::span(gradients).last(2);
    std::array<double, unknowns> found{};

    assigns() = default;
    assigns(assigns const&) = delete;
    std::vector<parameter<double>> parameters() {
        return {{"slopes", {2}, slopes, d_slopes}, {"rest", {2}, rest, d_rest}};
    }
    double forward(samples const& batch) {
        std::array const at{slopes[0], slopes[1], rest[0], rest[1]};
        return mean_loss(at, batch, found);
    }
    void assign() {
        for (std::size_t i = 0; i < 2; ++i) d_slopes[i] = found[i], d_rest[i] = found[2 + i];
    }
    void backward()
        requires(!Announces)
    {
        assign();
    }
    template <class Ready>
        requires Announces
    void backward(Ready const& ready) {
        static_assert(!std::invocable<Ready const&, std::size_t, std::size_t, std::size_t>);  // no ranges
        assign();
        ready(1), ready(0);
    }
    void bind(storage<double> memory)
        requires Announces
    {
        slopes = memory.values[0], rest = memory.values[1];
        d_slopes = memory.gradients[0], d_rest = memory.gradients[1];
        owner = memory.owner;
    }
    std::shared_ptr<void> owner;
};
static_assert(BindableModel<accumulating<assigns<true>>> && !BindableModel<accumulating<assigns<false>>>);

/// Four updates of three uneven micro-batches a rank.
template <class M, class Comm>
std::uint64_t train(M& model, Comm const& comm) {
    data_parallel trainer{model, sgd{.lr = 0.05, .momentum = 0.5}, comm};
    auto const rank = static_cast<std::size_t>(comm.rank()), ranks = static_cast<std::size_t>(comm.size());
    for (std::size_t update = 0; update < 4; ++update) {
        std::size_t const begin = 60 * update;  // rank r: samples r, r + P, …, in three parts
        samples mine;
        for (std::size_t i = rank; i < 60; i += ranks) mine.push_back(drawn(begin + i, 1)[0]);
        std::size_t const first = 1 + rank % 4, second = 4;
        trainer.forward(samples(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(first)));
        trainer.accumulate();
        trainer.forward(samples(mine.begin() + static_cast<std::ptrdiff_t>(first),
                                mine.begin() + static_cast<std::ptrdiff_t>(first + second)));
        trainer.accumulate();
        trainer.forward(samples(mine.begin() + static_cast<std::ptrdiff_t>(first + second), mine.end()));
        trainer.backward();
        trainer.finish();
    }
    return trainer.digest_of_values();
}

}  // namespace

TEST_CASE("foreign models train as one process with the whole batch does", "[adapter]") {
    std::array<double, unknowns> expected{}, momentum{}, gradient{};
    for (std::size_t update = 0; update < 4; ++update) {
        mean_loss(expected, drawn(60 * update, 60), gradient);
        for (std::size_t i = 0; i < unknowns; ++i)
            expected[i] -= 0.05 * (momentum[i] = 0.5 * momentum[i] + gradient[i]);
    }
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    using found = std::pair<std::vector<std::uint64_t>, std::vector<double>>;
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            std::vector<double> values(unknowns), slopes(unknowns);
            flat_model flat{values,
                            slopes,
                            [&](samples const& batch) { return mean_loss(values, batch, slopes); },
                            {{"slopes", {2}}, {"rest", {2}}}};
            accumulating<assigns<true>> bound;
            accumulating<assigns<false>> copied;
            std::vector const digests{train(flat, comm), train(bound, comm), train(copied, comm)};
            return found(digests, values);
        },
        patient());
    for (auto const& [digests, values] : got) {
        for (std::size_t i = 0; i < unknowns; ++i) CHECK(values[i] == Approx(expected[i]).epsilon(1e-12));
        CHECK(digests == std::vector(3, got.front().first.front()));
    }
}

TEST_CASE("foreign models keep the rules of passes", "[adapter]") {
    std::vector<double> values{1, 2, 3, 4}, slopes(unknowns);
    flat_model flat{std::span(values), std::span(slopes),
                    [&](samples const& batch) { return mean_loss(values, batch, slopes); }};
    static_assert(std::same_as<element_of<decltype(flat)>, double> && ModelFor<decltype(flat), samples>);
    CHECK(testing::check_model(flat, drawn(3, 9)) == std::vector<std::string>{});
    CHECK(flat.parameters().size() == 1);
    CHECK(flat.parameters()[0].name == "parameters");
    accumulating<assigns<true>> announces;
    CHECK(testing::check_model(announces, drawn(3, 9)) == std::vector<std::string>{});
    accumulating<assigns<false>> all_at_once;
    CHECK(testing::check_model(all_at_once, drawn(3, 9)) == std::vector<std::string>{});
}

TEST_CASE("a copy of an accumulating model works in memory of its own", "[adapter]") {
    struct one {
        using element = double;
        std::vector<double> value{1}, gradient{0};
        std::vector<parameter<double>> parameters() { return {{"value", {1}, value, gradient}}; }
        void backward() { gradient[0] = 3; }
    };
    accumulating<one> first;
    auto const ignored = [](std::size_t) {};
    first.backward({.scale = 2}, ignored);
    accumulating<one> copy = first;
    copy.backward({.scale = 1, .accumulate = true}, ignored);
    CHECK(first.gradient[0] == 6);
    CHECK(copy.gradient[0] == 9);
}

TEST_CASE("a flat model's parts fill its vectors", "[adapter]") {
    std::vector<double> four(4), three(3);
    auto const make = [&](std::vector<double>& gradient, std::vector<flat_part> parts) {
        std::string said;
        try {
            flat_model const model{four, gradient, [](samples const&) { return 0.0; }, std::move(parts)};
        } catch (usage_error const& e) {
            said = e.what();
        }
        return said;
    };
    CHECK(make(four, {{"a", {2}}, {"nothing", {0, 3}}, {"b", {2, 1}}}).empty());
    CHECK_THAT(make(three, {{"a", {4}}}), Catch::Contains("there are 4 values, but 3 elements of the gradient"));
    CHECK_THAT(make(four, {{"a", {2}}, {"b", {1}}}),
               Catch::Contains("the parts have 3 elements in all, but there are 4 values"));
}
