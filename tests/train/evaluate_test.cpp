// Metrics over data that is spread over the ranks.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ddp/train/evaluate.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

struct sums {
    double loss = 0;
    std::uint64_t weight = 0;
    sums& operator+=(sums const& other) noexcept {
        loss += other.loss;
        weight += other.weight;
        return *this;
    }
};

struct judge {
    bool trains = true;
    bool was_asked_in_training = false;
    bool throws = false;
    void training(bool on) { trains = on; }
    sums evaluate(numbers const& batch) {
        if (throws) throw std::runtime_error("a label is out of range");
        was_asked_in_training = was_asked_in_training || trains;
        sums all;
        for (double const x : batch.of) all += {x, 1};
        return all;
    }
};

/// Hands out `count` batches, the k-th of k + 1 samples of value `value`.
struct batches {
    std::size_t count;
    std::size_t next_one = 0;
    std::optional<std::size_t> operator()() { return next_one < count ? std::optional(next_one++) : std::nullopt; }
};

}  // namespace

TEST_CASE("evaluation adds the metrics of all ranks, whatever their numbers of batches", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const got = ranks_over(
        tcp, ranks,
        [](auto& comm) {
            judge model;
            double const value = 0.1 * (comm.rank() + 1);
            sums const all = evaluate(comm, model, batches{static_cast<std::size_t>(comm.rank())},
                                      [&](std::size_t k) { return numbers{std::vector(k + 1, value)}; });
            return std::pair(all, model.trains && !model.was_asked_in_training);
        },
        patient());
    double loss = 0;
    std::uint64_t weight = 0;
    for (int r = 0; r < ranks; ++r) {
        loss += 0.1 * (r + 1) * (r * (r + 1) / 2);
        weight += static_cast<std::uint64_t>(r * (r + 1) / 2);
    }
    for (auto const& [all, mode] : got) {
        REQUIRE(mode);
        REQUIRE(all.weight == weight);
        REQUIRE(all.loss == Approx(loss));
        REQUIRE(all.loss == got.front().first.loss);
    }
}

TEST_CASE("what a rank's evaluation throws comes back as itself, and the others are told", "[train]") {
    auto const errors = run_ranks(
        3,
        [](auto& comm) {
            judge model;
            model.throws = comm.rank() == 2;
            return thrown_by([&] {  // caught here: the communicator lives on, and the others must not wait for its end
                (void)evaluate(comm, model, batches{2}, [](std::size_t) { return numbers{{1}}; });
            });
        },
        patient());
    REQUIRE(errors[2] == "a label is out of range");
    for (int rank : {0, 1}) {
        std::string const& one = errors[static_cast<std::size_t>(rank)];
        CAPTURE(one);
        REQUIRE((one.find("DDP-E206") == 0 && one.find("a label is out of range") != std::string::npos));
    }
}

namespace {

/// A model that tells its mode.
struct telling : judge {
    using judge::training;
    [[nodiscard]] bool training() const { return trains; }
};

/// Top-2 and a weighted mean: metrics of a user's own, over a model that has others.
struct own_metrics {
    mean_metric value;
    std::uint64_t in_top_two = 0;
    own_metrics& operator+=(own_metrics const& other) noexcept {
        value += other.value;
        in_top_two += other.in_top_two;
        return *this;
    }
};
struct judge_by_own {
    judge& model;
    void training(bool on) const { model.training(on); }
    own_metrics evaluate(numbers const& batch) const {
        own_metrics all;
        for (double const x : batch.of) {
            all.value.add(x, 2);
            all.in_top_two += x < 2.5 ? 1 : 0;
        }
        return all;
    }
};

}  // namespace

TEST_CASE("evaluation puts the model back into the mode it was in, also when it throws", "[train]") {
    bool const trains = GENERATE(false, true), throws = GENERATE(false, true);
    auto const after = run_ranks(1, [&](auto& comm) {
        telling model;
        model.training(trains);
        model.throws = throws;
        (void)thrown_by([&] { (void)evaluate(comm, model, batches{2}, [](std::size_t) { return numbers{{1}}; }); });
        return std::pair(model.training(), model.was_asked_in_training);
    });
    REQUIRE(after[0] == std::pair(trains, false));
}

TEST_CASE("a model that does not tell its mode is trained after its evaluation", "[train]") {
    auto const after = run_ranks(1, [&](auto& comm) {
        judge model;
        model.training(false);
        (void)evaluate(comm, model, batches{2}, [](std::size_t) { return numbers{{1}}; });
        return model.trains;
    });
    REQUIRE(after[0]);
}

TEST_CASE("a weighted mean over ranks is that of all samples together", "[train]") {
    int const ranks = GENERATE(1, 3, 4);
    auto const means = run_ranks(ranks, [](auto& comm) {
        mean_metric mine;
        for (int k = 0; k < comm.rank(); ++k) mine.add(comm.rank(), 1u);  // rank 0 has no samples
        mine.add(std::nan(""), 0);                                        // the loss of an empty batch says nothing
        return sum_over_ranks(comm, mine).mean();
    });
    double sum = 0, count = 0;
    for (int r = 0; r < ranks; ++r) sum += r * r, count += r;
    for (double const mean : means) REQUIRE(mean == (count == 0 ? 0 : sum / count));
}

TEST_CASE("metrics of a user's own are a struct with +=, and a type that returns them", "[train]") {
    auto const got = run_ranks(2, [](auto& comm) {
        judge model;
        judge_by_own const by_own{model};
        own_metrics const all = evaluate(comm, by_own, batches{1}, [&](std::size_t) {
            return comm.rank() == 0 ? numbers{{1, 2}} : numbers{{3, 4, 5}};
        });
        return std::pair(all, model.trains);
    });
    for (auto const& [all, trains] : got) {
        REQUIRE(all.value.mean() == 3);
        REQUIRE(all.value.weight == 10);
        REQUIRE(all.in_top_two == 2);
        REQUIRE(trains);
    }
}
