// State that is not trained: what becomes of it on every rank, by policy, of any element type and wherever it lies.
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

#include <ddp/checkpoint/checkpoints.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/train/data_parallel.hpp>
#include <ddp/train/evaluate.hpp>
#include <ddp/train/state_digest.hpp>
#include <ddp/train/weights.hpp>

#include "data/files.hpp"
#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/thrown_by.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

struct held {
    std::array<float, 3> mean = {1, 2, 3};
    double square = 4;
    std::array<std::int64_t, 2> count = {5, 1};
    std::array<std::uint8_t, 5> mask = {1, 2, 3, 4, 5};
    std::array<std::uint16_t, 3> half = {0x3c00, 0x4000, 1}, brain = {0x3f80, 0x4000, 1};  // f16 and bf16
    std::array<bool, 3> seen = {true, false, false};

    void see(std::vector<double> const& batch) {
        double sum = 0, squares = 0;
        for (double const x : batch) sum += x, squares += x * x;
        double const n = static_cast<double>(batch.size());
        for (std::size_t j = 0; j < mean.size(); ++j)
            mean[j] = static_cast<float>(0.5 * mean[j] + 0.5 * sum / n * static_cast<double>(j + 1));
        square = 0.75 * square + 0.25 * squares / n;
        count[0] += static_cast<std::int64_t>(batch.size()), count[1] *= -3;
        for (std::uint8_t& one : mask) one = static_cast<std::uint8_t>(one * 3 + static_cast<int>(sum));
        for (std::size_t j = 0; j < half.size(); ++j) {
            half[j] = static_cast<std::uint16_t>(half[j] + 3 * batch.size() + j);
            brain[j] = static_cast<std::uint16_t>(brain[j] + 5 * batch.size() + j);
            seen[j] = seen[j] != ((batch.size() + j) % 2 == 0);
        }
    }
    [[nodiscard]] bool near(held const& other) const {
        bool same = std::abs(square - other.square) <= 1e-12 * std::abs(other.square) && count == other.count &&
                    mask == other.mask && half == other.half && brain == other.brain && seen == other.seen;
        for (std::size_t j = 0; j < mean.size(); ++j)
            same = same && std::abs(mean[j] - other.mean[j]) <= 1e-6f * std::abs(other.mean[j]);
        return same;
    }
};

struct batch {
    std::vector<double> of;
    [[nodiscard]] std::size_t size() const noexcept { return of.size(); }
};

/// One weight, and a buffer of six numbers in this shape.
struct shaped {
    using element = double;
    std::vector<double> value = {1}, gradient = {0};
    std::array<float, 6> state = {};
    std::vector<std::size_t> shape;

    std::vector<parameter<double>> parameters() { return {{"w", {1}, value, gradient}}; }
    std::vector<model_buffer> buffers() {
        return {{"late", element_type::f32, shape, as_mutable_bytes(std::span(state))}};
    }
    double forward(batch const&) { return 0; }
    void backward(pass<double>, auto const& ready) { ready(0); }
};

/// One weight, and buffers that lie somewhere else after each forward.
struct moving {
    using element = double;
    std::vector<double> value = {1}, gradient = {0};
    std::unique_ptr<held> state = std::make_unique<held>();
    bool trains = true, seen_in_training = false, bad = false, grows = false;

    std::vector<parameter<double>> parameters() { return {{"w", {1}, value, gradient}}; }
    std::vector<model_buffer> buffers() {
        std::vector<model_buffer> all = {
            {"mean", element_type::f32, {3}, as_mutable_bytes(std::span<float>(state->mean))},
            {"square", element_type::f64, {}, as_mutable_bytes(std::span(&state->square, 1))},
            {"count", element_type::i64, {2}, as_mutable_bytes(std::span<std::int64_t>(state->count))},
            {"mask", element_type::u8, {5}, as_mutable_bytes(std::span<std::uint8_t>(state->mask))},
            {"half", element_type::f16, {3}, as_mutable_bytes(std::span<std::uint16_t>(state->half))},
            {"brain", element_type::bf16, {3}, as_mutable_bytes(std::span<std::uint16_t>(state->brain))},
            {"seen", element_type::boolean, {3}, as_mutable_bytes(std::span<bool>(state->seen))}};
        if (grows) all.push_back(all.front());
        return all;
    }
    void training(bool on) { trains = on; }
    [[nodiscard]] bool training() const { return trains; }
    double forward(batch const& samples) {
        auto next = std::make_unique<held>(*state);
        next->see(samples.of);
        state->mask = {}, state->half = {}, state->brain = {};  // of no use from here on
        state = std::move(next);
        return 0;
    }
    template <class Ready>
    void backward(pass<double> how, Ready const& ready) {
        gradient[0] = (how.accumulate ? gradient[0] : 0) + how.scale;
        if (bad) gradient[0] = std::nan("");
        ready(0);
    }
    mean_metric evaluate(batch const& samples) {
        seen_in_training = seen_in_training || trains;
        return mean_metric().add(state->mean[0] + static_cast<double>(state->mask[4]), samples.size());
    }
};

/// What rank r sees in a step: another number of samples on each, none on the last of three in the second one, and none on rank 0
/// of several in the third.
batch samples(int step, int rank, int ranks) {
    batch all;
    if ((step == 1 && ranks == 3 && rank == 2) || (step == 2 && ranks > 1 && rank == 0)) return all;
    for (int k = 0; k <= rank; ++k) all.of.push_back(8 * rank + 2 * k + step + 1);
    return all;
}

constexpr int steps = 4;

/// What every rank has after each step, in plain loops; by step, then by rank.
std::vector<std::vector<held>> by_hand(int ranks, buffers policy) {
    std::vector<held> now(static_cast<std::size_t>(ranks));
    std::vector<std::vector<held>> all;
    for (int step = 0; step < steps; ++step) {
        held mean = {.mean = {}, .square = 0};
        std::vector<std::size_t> with_samples;
        for (int r = 0; r < ranks; ++r)
            if (batch const seen = samples(step, r, ranks); seen.size() != 0) {
                with_samples.push_back(static_cast<std::size_t>(r));
                now[with_samples.back()].see(seen.of);
            }
        for (std::size_t const r : with_samples) {
            for (std::size_t j = 0; j < 3; ++j)
                mean.mean[j] += now[r].mean[j] / static_cast<float>(with_samples.size());
            mean.square += now[r].square / static_cast<double>(with_samples.size());
        }
        held const first = now[with_samples[0]];
        mean.count = first.count, mean.mask = first.mask;  // of all but float and double
        mean.half = first.half, mean.brain = first.brain, mean.seen = first.seen;
        for (held& one : now) {
            if (policy == buffers::averaged) one = mean;
            if (policy == buffers::from_rank_0) one = first;
        }
        all.push_back(now);
    }
    return all;
}

std::vector<std::string> train(communicator<>& comm, buffers policy, std::vector<std::vector<held>> const& expected) {
    std::vector<std::string> wrong;
    auto const expect = [&](bool right, std::string const& what) {
        if (!right) wrong.push_back(what);
    };
    moving model;
    auto const me = static_cast<std::size_t>(comm.rank());
    if (comm.rank() != 0) model.state->see({7});  // rank 0's are what all begin with
    data_parallel trainer{model, sgd{.lr = 0.1}, comm, training_options{.buffers = policy}};
    expect(model.state->near({}), "at the start");
    for (int step = 0; step < steps; ++step) {
        trainer.step(samples(step, comm.rank(), comm.size()));
        expect(model.state->near(expected[static_cast<std::size_t>(step)][me]),
               "step " + std::to_string(step) + ": count " + std::to_string(model.state->count[0]) + ", square " +
                   std::to_string(model.state->square));
    }

    bool const alike = policy == buffers::from_rank_0 || policy == buffers::averaged;
    bool const from_0 = policy == buffers::from_rank_0_at_evaluation;
    int left = comm.rank() == 0 ? 2 : 1;
    auto const mean = evaluate(
        trainer, [&] { return left-- > 0 ? std::optional(1) : std::nullopt; }, [](int) { return batch{{1, 1}}; });
    double sum = 0;
    for (std::size_t r = 0; r < expected.back().size(); ++r) {
        held const& used = expected.back()[from_0 ? 0 : r];
        sum += (r == 0 ? 4 : 2) * (used.mean[0] + static_cast<double>(used.mask[4]));
    }
    expect(std::abs(mean.sum - sum) <= 1e-5 * std::abs(sum), "evaluation: " + std::to_string(mean.sum));
    expect(mean.weight == 2 * (comm.size() + 1), "evaluation of other samples");
    expect(model.trains && !model.seen_in_training, "the mode");
    expect(model.state->near(expected.back()[from_0 ? 0 : me]), "after evaluation");

    trainer.forward(samples(0, comm.rank(), comm.size()));
    trainer.backward();
    std::string const early = thrown_by([&] {
        static_cast<void>(evaluate(trainer, [] { return std::optional<int>(); }, [](int) { return batch{}; }));
    });
    expect(early == "DDP-E100 usage: evaluate: a step is under way, and may change values; finish() it first", early);
    std::string const within = thrown_by([&] { trainer.synchronise_buffers(); });
    expect(within == "DDP-E100 usage: synchronise_buffers: a step is under way; finish() it first", within);
    trainer.finish();

    expect(trainer.replicas_identical(), "ranks differ");
    if (comm.rank() + 1 == comm.size()) model.state->mask[4] ^= 1;
    expect(trainer.replicas_identical() == (!alike || comm.size() == 1), "a bit of one rank's is not seen");
    trainer.synchronise_buffers();
    expect(trainer.replicas_identical(), "not alike when asked for");

    std::uint64_t const kept = digest_of_state(trainer);
    for (model_buffer const& b : model.buffers()) {
        b.bytes.back() ^= std::byte{1};
        expect(digest_of_state(trainer) != kept, "not in the digest: " + b.name);
        b.bytes.back() ^= std::byte{1};
    }
    expect(digest_of_state(trainer) == kept, "the digest is another one of the same");
    return wrong;
}

}  // namespace

TEST_CASE("buffers are alike, or each rank's own, as options say, of any type and wherever they lie", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    for (buffers const policy :
         {buffers::from_rank_0, buffers::averaged, buffers::left_alone, buffers::from_rank_0_at_evaluation}) {
        CAPTURE(ranks, tcp, static_cast<int>(policy));
        auto const expected = by_hand(ranks, policy);
        for (auto const& wrong :
             ranks_over(tcp, ranks, [&](communicator<>& comm) { return train(comm, policy, expected); }, patient()))
            CHECK(wrong == std::vector<std::string>{});
    }
}

TEST_CASE("buffers of any type come back from weights files, which hold rank 0's, and from checkpoints", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    for (buffers const policy : {buffers::averaged, buffers::left_alone}) {
        CAPTURE(ranks, tcp, static_cast<int>(policy));
        ::test::scratch_directory const scratch;
        std::string const weights = (scratch.path() / "weights.safetensors").string(),
                          kept = (scratch.path() / "kept").string();
        auto const expected = by_hand(ranks, policy);
        auto const wrong = ranks_over(
            tcp, ranks,
            [&](communicator<>& comm) {
                std::vector<std::string> all;
                auto const expect = [&](moving const& model, int step, int rank, std::string const& what) {
                    if (!model.state->near(expected[static_cast<std::size_t>(step)][static_cast<std::size_t>(rank)]))
                        all.push_back(what + ": count " + std::to_string(model.state->count[0]));
                };
                auto const go = [&](auto const& then) {
                    moving model;
                    data_parallel trainer{model, sgd{.lr = 0.1}, comm, training_options{.buffers = policy}};
                    then(model, trainer);
                };
                go([&](moving&, auto& trainer) {
                    for (int step = 0; step < 3; ++step) trainer.step(samples(step, comm.rank(), comm.size()));
                    save_weights(trainer, weights);
                    checkpoints(kept).save(trainer);
                });
                go([&](moving& model, auto& trainer) {
                    load_weights(trainer, weights);
                    expect(model, 2, 0, "weights");
                });
                go([&](moving& model, auto& trainer) {
                    if (!checkpoints(kept).resume(trainer)) all.emplace_back("nothing was found");
                    expect(model, 2, comm.rank(), "checkpoint");
                    trainer.step(samples(3, comm.rank(), comm.size()));
                    expect(model, 3, comm.rank(), "the step after it");
                });
                return all;
            },
            patient());
        for (auto const& each : wrong) CHECK(each == std::vector<std::string>{});
    }
}

TEST_CASE("ranks with another policy of buffers are told so", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    if (ranks == 1) return;
    auto const said = errors_over(
        tcp, ranks,
        [](communicator<>& comm) {
            moving model;
            data_parallel trainer{
                model, sgd{.lr = 0.1}, comm,
                training_options{.buffers = comm.rank() + 1 == comm.size() ? buffers::left_alone
                                                                           : buffers::from_rank_0_at_evaluation}};
        },
        patient());
    std::string const odd = "rank " + std::to_string(ranks - 1);
    for (std::string const& one : said)
        CHECK(one == "DDP-E102 model differs: " + odd +
                         " differs from rank 0: another training_options.buffers "
                         "(from_rank_0_at_evaluation on rank 0, left_alone on " +
                         odd +
                         "). Build the same model with the same trainer "
                         "settings on all ranks.");
}

TEST_CASE("buffers whose shapes differ in a late extent on one rank are named", "[train]") {
    auto const said = errors_of_ranks(
        2,
        [](auto& comm) {
            shaped model;
            model.shape = {1, 1, 1, 1, 1, 1, 1, 1, 2, 3};
            if (comm.rank() == 1) std::swap(model.shape[8], model.shape[9]);
            data_parallel trainer{model, sgd{.lr = 0.1}, comm};
        },
        patient());
    for (std::string const& one : said) {
        CAPTURE(one);
        REQUIRE(one.find("their buffers differ: buffer 'late' F32 [1 x 1 x 1 x 1 x 1 x 1 x 1 x 1 x 2 x 3] on rank 0 "
                         "and buffer 'late' F32 [1 x 1 x 1 x 1 x 1 x 1 x 1 x 1 x 3 x 2] on rank 1") != one.npos);
    }
}

TEST_CASE("a step that is skipped leaves the buffers as they were, wherever they lie", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    auto const policy = GENERATE(buffers::from_rank_0, buffers::averaged, buffers::left_alone);
    auto const how = GENERATE(nonfinite::skip, nonfinite::stop);
    auto const wrong = ranks_over(
        tcp, ranks,
        [&, policy = policy, how = how](communicator<>& comm) {
            moving model;
            data_parallel trainer{model, sgd{.lr = 0.1}, comm, training_options{.nonfinite = how, .buffers = policy}};
            trainer.step(samples(0, comm.rank(), ranks));
            held const before = *model.state;
            model.bad = comm.rank() + 1 == ranks;
            for (int pass = 0; pass < 2; ++pass) {  // the second one's forward begins where the first one has ended
                (void)trainer.forward(samples(2 + pass, comm.rank(), ranks));
                if (pass == 0) trainer.accumulate();
            }
            trainer.backward();
            bool const stopped = thrown_by([&] { trainer.finish(); }).find("DDP-E105") != std::string::npos;
            model.bad = false;
            bool const same = before.near(*model.state) && before.mask == model.state->mask;
            trainer.step(samples(3, comm.rank(), ranks));
            return stopped == (how == nonfinite::stop) && same && !model.state->near(before);
        },
        patient());
    for (bool const right : wrong) CHECK(right);
}

TEST_CASE("buffers that grow within a step that is then skipped are a mistake", "[train]") {
    auto const said = errors_over(
        false, 1,
        [](communicator<>& comm) {
            moving model;
            data_parallel trainer{model, sgd{.lr = 0.1}, comm, training_options{.nonfinite = nonfinite::skip}};
            (void)trainer.forward(samples(0, 0, 1));
            model.grows = model.bad = true;
            trainer.backward();
            trainer.finish();
        },
        patient());
    CHECK(said.front() == "DDP-E100 usage: the model's buffers have grown within a step");
}
