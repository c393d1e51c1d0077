// Metrics over data that is spread over the ranks.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ddp/train/evaluate.hpp>

#include "support/catch.hpp"
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
    int const ranks = GENERATE(1, 2, 5);
    auto const got = run_ranks(
        ranks,
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
