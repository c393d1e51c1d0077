// training_options::overlap_gather: new values travel while the next batch goes forward. The same bits, and none is read too early.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/thrown_by.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

/// Says which value it needs next. `when_asked(i)` is called before, `when_here(i)` after each is there.
template <memory Kind>
struct needing : tanh_mlp<double, Kind> {
    using tanh_mlp<double, Kind>::tanh_mlp;
    using tanh_mlp<double, Kind>::forward;
    std::function<void(std::size_t)> when_asked = [](std::size_t) {}, when_here = [](std::size_t) {};
    template <class Needed>
    double forward(regression<double> const& batch, Needed const& needed) {
        for (std::size_t i = 0; i < 5; ++i) {
            when_asked(i);
            needed(i);
            when_here(i);
        }
        return forward(batch);
    }
};

/// Holds up what comes after a rank's own step: the others get its slices so much later.
struct slow_to_send {
    bool slow = false;
    void on(step_finished const&) const {
        if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
};

training_options sharded_by_messages(bool late, bool clipped) {
    training_options options = options_of(true, clipped);
    options.share_memory = false;
    options.overlap_gather = late;
    if (late) options.update = update::automatic;  // becomes sharded
    return options;
}

/// What a training of every kind of step gives, step by step: digests of values, losses, norms.
template <class Model, class Comm>
std::vector<std::uint64_t> trained_every_way(Comm& comm, recipe const& by) {
    task_data<double> const data(7, 3, 64);
    Model model(7, 24, 3, 5);
    data_parallel trainer{
        model, by.optimizer, comm, by.options, by.algorithm, by.buckets, slow_to_send{comm.rank() + 1 == comm.size()}};
    std::vector<std::uint64_t> seen;
    auto const batch = [&](std::size_t k, std::size_t rows) {
        auto const [begin, end] = share(rows, k, comm.rank(), comm.size());
        return data.batch(k + begin, k + end);
    };
    auto const note = [&](double loss, auto const& result) {
        seen.push_back(digest{}.add(bytes_of(loss)).add(bytes_of(result.gradient_norm)).value());
        seen.push_back(result.weight);
    };
    auto const step = [&](std::size_t k, std::size_t rows) {
        step_result const result = trainer.step(batch(k, rows));
        note(result.loss, result);
    };
    for (std::size_t k = 0; k < 3; ++k) step(k, 13);
    seen.push_back(trainer.digest_of_values());
    step(9, 5);  // all of it on one rank
    {
        auto const guard = trainer.no_sync();
        trainer.forward(batch(3, 8));
        trainer.backward();
        trainer.forward(batch(4, 3));
        trainer.backward();
    }
    double const loss = trainer.forward(batch(5, 6));
    trainer.backward();
    note(loss, trainer.finish());
    if (comm.rank() == 0) {
        step_result const result = trainer.step(data.batch(6, 10));
        note(result.loss, result);
    } else {
        trainer.join();
    }
    trainer.freeze("w1");
    step(7, 9);
    trainer.unfreeze("*");
    trainer.set_rate_factor(0.5);
    step(8, 9);
    for (auto const& p : trainer.parameters()) seen.push_back(digest{}.add(std::span<double const>(p.value)).value());
    step(10, 9);
    trainer.for_each_state([&](state_slice const& one) { seen.push_back(one.bytes.size()); });
    step(11, 9);
    for (auto const& p : trainer.model().parameters())
        seen.push_back(digest{}.add(std::span<double const>(p.value)).value());
    step(12, 9);  // ends with values under way
    if (comm.rank() % 2 == 0) trainer.settle();
    return seen;
}

template <class Model>
void expect_same_bits(int ranks, bool tcp, recipe by) {
    auto const train_late = [&](bool late) {
        by.options.share_memory = false;
        by.options.overlap_gather = late;
        by.options.update = late ? update::automatic : update::sharded;
        return ranks_over(tcp, ranks, [&](auto& comm) { return trained_every_way<Model>(comm, by); }, patient());
    };
    auto const expected = train_late(false), got = train_late(true);
    for (std::size_t r = 0; r < got.size(); ++r) REQUIRE(got[r] == expected[r]);
}

}  // namespace

TEST_CASE("values that are gathered late have the bits of those gathered at once", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const clipped = GENERATE(false, true);
    CAPTURE(ranks, tcp, clipped);
    recipe by{.name = "late",
              .optimizer = adamw{.lr = 0.01, .weight_decay = 1e-2},
              .buckets = size_capped_buckets{.cap_bytes = 512, .first_bytes = 128},
              .options = options_of(true, clipped)};
    expect_same_bits<needing<memory::releasing>>(ranks, tcp, by);
    by.optimizer = lamb{.lr = 0.01};
    by.algorithm = any_allreduce::parse("ring");
    expect_same_bits<needing<memory::copied>>(ranks, tcp, by);
    expect_same_bits<tanh_mlp<double, memory::packed>>(ranks, tcp, by);  // knows nothing of it
}

TEST_CASE("a step returns before the others' values have come, and forward waits for those that it needs", "[train]") {
    bool const tcp = GENERATE(false, true);
    std::atomic<int> returned = 0;
    std::atomic<bool> early = true;
    struct until_all_have_returned {
        std::atomic<int>* returned;
        std::atomic<bool>* early;
        void on(step_finished const& event) const {
            if (event.step != 1 || returned == nullptr) return;
            auto const until = monotonic_clock::now() + std::chrono::seconds(20);
            while (returned->load() < 1 && monotonic_clock::now() < until)
                std::this_thread::sleep_for(std::chrono::microseconds(100));
            if (returned->load() < 1) early->store(false);
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
    };
    auto const wrong = ranks_over(
        tcp, 2,
        [&](auto& comm) -> std::string {
            task_data<double> const data(7, 3, 64);
            needing<memory::releasing> model(7, 24, 3, 5), other(7, 24, 3, 5);
            auto const options = [](bool late) { return sharded_by_messages(late, false); };
            size_capped_buckets const buckets{.cap_bytes = 512, .first_bytes = 128};
            data_parallel reference{other, sgd{.lr = 0.5}, comm, options(false), buckets};
            bool const held = comm.rank() == 1;
            data_parallel trainer{model,   sgd{.lr = 0.5},
                                  comm,    options(true),
                                  buckets, until_all_have_returned{held ? &returned : nullptr, &early}};
            std::string found;
            std::vector<std::size_t> order;
            model.when_asked = [&](std::size_t i) { order.push_back(i); };
            model.when_here = [&](std::size_t i) {
                auto const now = model.value(i), then = other.value(i);
                if (!std::equal(now.begin(), now.end(), then.begin())) found = "old values of " + std::to_string(i);
            };
            reference.step(data.batch(0, 4));
            trainer.step(data.batch(0, 4));
            ++returned;
            if (!order.empty()) return "it waits before the first step";
            auto const old = model.value(0), now = other.value(0);
            if (comm.rank() == 0 && std::equal(old.begin(), old.end(), now.begin()))
                return "values of the other rank are here already";
            trainer.forward(data.batch(4, 9));
            if (order != std::vector<std::size_t>{0, 1, 2, 3, 4}) return "asked in another order";
            trainer.backward();
            trainer.finish();
            return found;
        },
        patient());
    for (std::string const& one : wrong) REQUIRE(one == "");
    REQUIRE(early);
}

TEST_CASE("a rank that fails before its values have gone fails the others' next forward", "[train]") {
    bool const tcp = GENERATE(false, true);
    struct throws_once {
        bool yes;
        void on(step_finished const& event) const {
            if (yes && event.step == 2) throw std::runtime_error("the disk is full");
        }
    };
    auto const errors = errors_over(
        tcp, 3,
        [&](auto& comm) {
            task_data<double> const data(7, 3, 64);
            needing<memory::releasing> model(7, 24, 3, 5);
            data_parallel trainer{model,
                                  sgd{.lr = 0.5},
                                  comm,
                                  sharded_by_messages(true, false),
                                  size_capped_buckets{.cap_bytes = 512, .first_bytes = 128},
                                  throws_once{comm.rank() == 1}};
            trainer.step(data.batch(0, 4));
            std::string const first = thrown_by([&] {
                trainer.step(data.batch(4, 8));
                trainer.forward(data.batch(8, 12));
            });
            if (first.empty()) throw std::logic_error("nothing failed");
            if (&trainer.model() != &model) throw std::logic_error("another model");  // and does not throw
            if (!trainer.torn()) throw std::logic_error("values of two steps are said to be of one");
            if (thrown_by([&] { trainer.step(data.batch(0, 4)); }).empty()) throw std::logic_error("goes on");
            throw std::runtime_error(first);
        },
        patient());
    std::string const told =
        "DDP-E206 remote exception: rank 1 failed in its own code during step #2: the disk is full";
    REQUIRE(errors[0] == errors[2]);
    REQUIRE((errors[0] == told || errors[0].starts_with(told + " (rank 1: pid ")));  // over TCP
    REQUIRE(errors[1] == "the disk is full");
}

TEST_CASE("overlap_gather is refused where nothing is gathered, and compared between ranks", "[train]") {
    auto const errors = errors_over(
        false, 2,
        [&](auto& comm) {
            needing<memory::releasing> model(7, 24, 3, 5);
            training_options options{.update = update::replicated, .overlap_gather = true};
            std::string const refused = thrown_by([&] { data_parallel trainer{model, sgd{}, comm, options}; });
            if (refused.find("overlap_gather: with update::replicated no values travel") == std::string::npos)
                throw std::logic_error("not refused: " + refused);
            options.update = update::sharded;
            options.overlap_gather = comm.rank() == 0;
            data_parallel trainer{model, sgd{}, comm, options};
        },
        patient());
    for (std::string const& one : errors) {
        CAPTURE(one);
        REQUIRE(one.find("DDP-E102") == 0);
        REQUIRE(one.find("training_options.update or overlap_gather") != std::string::npos);
    }
}

TEST_CASE("a trainer that is destroyed with values under way waits for them", "[train]") {
    int const ranks = GENERATE(2, 3);
    auto const digests = run_ranks(
        ranks,
        [&](auto& comm) {
            task_data<double> const data(7, 3, 64);
            needing<memory::bound> model(7, 24, 3, 5);
            {
                data_parallel trainer{model, sgd{.lr = 0.5}, comm, sharded_by_messages(true, false),
                                      slow_to_send{comm.rank() == 0}};
                trainer.step(data.batch(0, 4));
            }
            digest all;
            for (auto const& p : model.parameters()) all.add(std::span<double const>(p.value));
            return all.value();
        },
        patient());
    for (std::uint64_t const one : digests) REQUIRE(one == digests.front());
}
