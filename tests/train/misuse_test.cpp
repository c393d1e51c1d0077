// What users will try with trainers and hooks, and what they are told.
#include <chrono>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/collective/algorithms/any_allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/events.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

using model = scripted_model<true, false>;

bool said(std::string const& text, std::string const& words) {
    return text.find(words) != std::string::npos;
}

std::vector<model::part> two_parts() {
    return {{"a", {3}}, {"b", {2}}};
}

struct throws_at_the_end {
    void on(step_finished const&) const { throw std::runtime_error("the log is full"); }
};
template <class Comm>
struct calls_a_barrier {
    Comm* comm;
    void on(bucket_reduced const&) const { barrier(*comm); }
};
struct tied {
    using element = double;
    std::vector<double> value = std::vector<double>(4), gradients = std::vector<double>(8);
    std::vector<parameter<double>> parameters() {
        std::span<double> const g = gradients;
        return {{"in", {4}, value, g.first(4)}, {"out", {4}, value, g.last(4)}};
    }
    double forward(numbers const&) { return 0; }
    template <class Ready>
    void backward(pass<double>, Ready const&) {}
};

}  // namespace

TEST_CASE("a trainer refuses to clip by what is no bound", "[train]") {
    for (double const bound :
         {std::numeric_limits<double>::quiet_NaN(), -1.0, 0.0, std::numeric_limits<double>::infinity()})
        for (clipping const& clip : {clipping(clip_by_global_norm{bound}), clipping(clip_by_value{bound})}) {
            auto const errors = errors_of_ranks(2, [&](auto& comm) {
                model net(two_parts());
                data_parallel trainer{net, sgd{.lr = 1}, comm, {.clip = clip}};
            });
            CAPTURE(bound, clip.index());
            for (std::string const& text : errors) CHECK(said(text, "must be a finite number > 0"));
        }
}

TEST_CASE("two trainers on one communicator may be within their steps at the same time", "[train]") {
    auto const same = run_ranks(2, [](auto& comm) {
        model one(two_parts()), two(two_parts()), alone(two_parts());
        data_parallel first{one, sgd{.lr = 1}, comm}, second{two, sgd{.lr = 1}, comm}, third{alone, sgd{.lr = 1}, comm};
        numbers const batch{{1.0}};
        first.forward(batch);
        first.backward();
        second.forward(batch);
        second.backward();
        second.finish();
        first.finish();
        third.step(batch);
        bool const equal = first.digest_of_values() == third.digest_of_values() &&
                           second.digest_of_values() == third.digest_of_values();
        return equal && first.replicas_identical() && second.replicas_identical();
    });
    for (bool const each : same) CHECK(each);
}

TEST_CASE("an observer that throws fails the job, and nothing hangs", "[train]") {
    auto const errors = errors_of_ranks(2, [](auto& comm) {
        model net(two_parts());
        data_parallel trainer{
            net, sgd{.lr = 1}, comm, training_options{}, automatic_allreduce{}, single_bucket{}, throws_at_the_end{}};
        for (int step = 0; step < 2; ++step) trainer.step(numbers{{1.0}});
    });
    for (std::string const& text : errors) CHECK(said(text, "the log is full"));
}

TEST_CASE("what a model throws when its values have changed is heard by the others at once", "[train]") {
    timing times = timing::for_tests();
    times.collective = std::chrono::seconds(60);
    bool const tcp = GENERATE(false, true), share = GENERATE(false, true);
    update const how = GENERATE(update::replicated, update::sharded);
    CAPTURE(tcp, share, how);
    auto const since = monotonic_clock::now();
    auto const errors = errors_over(
        tcp, 3,
        [&](auto& comm) {
            model net(two_parts());
            data_parallel trainer{net, sgd{.lr = 1}, comm, {.update = how, .share_memory = share}};
            if (comm.rank() == 1) net.in_stepped = [] { throw std::runtime_error("no room for a copy"); };
            for (int step = 0; step < 3; ++step) trainer.step(numbers{{1.0}});
        },
        times);
    CHECK(monotonic_clock::now() - since < std::chrono::seconds(20));
    CHECK(errors[1] == "no room for a copy");
    for (int const rank : {0, 2}) {
        std::string const& text = errors[static_cast<std::size_t>(rank)];
        CAPTURE(text);
        CHECK((said(text, "DDP-E206") && said(text, "rank 1") && said(text, "no room for a copy")));
    }
}

TEST_CASE("ranks that count steps differently are told so, long before a deadline", "[train]") {
    timing times = timing::for_tests();
    times.collective = std::chrono::seconds(60);
    auto const errors = errors_over(
        GENERATE(false, true), 2,
        [](auto& comm) {
            model net(two_parts());
            data_parallel trainer{net, sgd{.lr = 1}, comm};
            trainer.set_completed_steps(comm.rank() == 0 ? 2 : 7);
            trainer.step(numbers{{1.0}});
        },
        times);
    for (std::string const& text : errors) {
        CAPTURE(text);
        CHECK((said(text, "DDP-E205") && said(text, "step #3") && said(text, "step #8")));
    }
}

TEST_CASE("a hook that calls a collective is told that it may not", "[train]") {
    auto const errors = errors_of_ranks(2, [](auto& comm) {
        using comm_type = std::remove_reference_t<decltype(comm)>;
        model net(two_parts());
        data_parallel trainer{net,
                              sgd{.lr = 1},
                              comm,
                              training_options{},
                              automatic_allreduce{},
                              single_bucket{},
                              calls_a_barrier<comm_type>{&comm}};
        trainer.step(numbers{{1.0}});
    });
    for (std::string const& text : errors) CHECK(said(text, "may not call collectives"));
}

TEST_CASE("parameters that share memory are refused", "[train]") {
    auto const errors = errors_of_ranks(1, [](auto& comm) {
        tied net;
        data_parallel trainer{net, sgd{.lr = 1}, comm};
    });
    CHECK(said(errors.front(), "parameters 'in' and 'out' share memory; list tied parameters once"));
}

TEST_CASE("backward without the trainer's forward is refused, not taken for an empty batch", "[train]") {
    auto const errors = errors_of_ranks(1, [](auto& comm) {
        model net(two_parts());
        data_parallel trainer{net, sgd{.lr = 1}, comm};
        net.forward(numbers{{1.0}});
        trainer.backward();
    });
    CHECK(said(errors.front(), "backward() needs a trainer.forward(batch) before it"));
    auto const again = run_ranks(1, [](auto& comm) {  // nor is one forward gone back through twice
        model net(two_parts());
        data_parallel trainer{net, sgd{.lr = 1}, comm};
        trainer.forward(numbers{{1.0}});
        trainer.accumulate();
        std::string const accumulated = thrown_by([&] { trainer.accumulate(); });
        std::string const waiting = thrown_by([&] { (void)trainer.progress(); });
        trainer.backward();
        std::string const begun = thrown_by([&] { trainer.backward(); });
        std::string const early = thrown_by([&] { trainer.forward(numbers{{1.0}}); });
        trainer.finish();
        std::string const over = thrown_by([&] { trainer.backward(); });
        return std::vector{accumulated, begun, over, std::to_string(net.value(0)[0]), waiting, early};
    });
    CHECK(said(again[0][0], "accumulate() needs a trainer.forward(batch) before it"));
    CHECK(said(again[0][1], "a step is under way: finish() it before the next one begins"));
    CHECK(said(again[0][2], "backward() needs a trainer.forward(batch) before it"));
    CHECK(again[0][3] == "-1.000000");
    CHECK(
        said(again[0][4], "progress: gradients of accumulate() wait for their step; make it first, by backward() and"));
    CHECK(said(again[0][5], "forward: a step is under way, which changes values; finish() it first"));
}

TEST_CASE("algorithms with other message sizes are refused when the trainers are made", "[train]") {
    bool const ring = GENERATE(false, true);
    auto const errors = errors_of_ranks(2, [&](auto& comm) {
        model net(two_parts());
        std::size_t const bytes = comm.rank() == 0 ? 1024 : 2048;
        any_allreduce const algorithm = ring ? any_allreduce(ring_allreduce{.segment_bytes = bytes})
                                             : any_allreduce(direct_allreduce{.chunk_bytes = bytes});
        data_parallel trainer{net, sgd{.lr = 1}, comm, training_options{}, algorithm};
    });
    for (std::string const& text : errors) CHECK((said(text, "E102") && said(text, "allreduce algorithm")));
}
