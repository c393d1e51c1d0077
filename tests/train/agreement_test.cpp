// Ranks that are about to train different things are told so, all of them, and what differs.
#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

using model = scripted_model<>;

struct packed : model {
    using model::model;
    static constexpr bool contiguous = true;
};
struct releasing : model {
    using model::model;
    static constexpr bool ready_releases = true;
};

template <class E>
struct one_tensor {
    using element = E;
    std::vector<E> value = std::vector<E>(6), gradient = std::vector<E>(6);
    std::vector<parameter<E>> parameters() { return {{"a", {2, 3}, value, gradient}}; }
    double forward(numbers const& /*batch*/) { return 0; }
    void backward(pass<E> /*how*/, auto const& ready) { ready(std::size_t{0}); }
};

/// Everything that ranks agree about.
struct setup {
    std::vector<model::part> parts = {{"a", {2, 3}}, {"b", {4}}, {"c", {6}}};
    any_optimizer optimizer = sgd{.lr = 0.5};
    any_allreduce algorithm = {};
    any_buckets buckets = size_capped_buckets{};
    training_options options = {};
};

/// The errors of three ranks, of which `culprit` has another setup.
std::vector<std::string> errors(int culprit, std::function<void(setup&)> const& change, bool tcp,
                                std::vector<model::part> const& parts = setup().parts) {
    return errors_over(
        tcp, 3,
        [&](auto& comm) {
            setup mine{.parts = parts};
            if (comm.rank() == culprit) change(mine);
            model net(mine.parts);
            auto trainer = make_trainer(net, comm, mine.options, mine.optimizer, mine.algorithm, mine.buckets);
            trainer.step(numbers{{1}});
        },
        patient());
}

void expect_refusal(int culprit, std::function<void(setup&)> const& change, std::vector<std::string> const& words,
                    bool tcp = false, std::vector<model::part> const& parts = setup().parts) {
    auto const all = errors(culprit, change, tcp, parts);
    for (std::string const& one : all) {
        CAPTURE(one);
        REQUIRE(one == all.front());
        REQUIRE(one.find("DDP-E102") == 0);
        REQUIRE(one.find("rank " + std::to_string(culprit == 0 ? 1 : culprit) + " differs from rank 0") !=
                std::string::npos);
        for (std::string const& word : words) REQUIRE(one.find(word) != std::string::npos);
    }
}

}  // namespace

TEST_CASE("ranks with the same setup agree", "[train]") {
    for (std::string const& one : errors(1, [](setup&) {}, false)) REQUIRE(one == "");
}

TEST_CASE("models that differ are refused on every rank, with the first parameter that differs", "[train]") {
    int const culprit = GENERATE(0, 1, 2);
    expect_refusal(culprit, [](setup& s) { s.parts.push_back({"d", {1}}); }, {"parameter #3", "'d' [1]", "absent"});
    expect_refusal(culprit, [](setup& s) { s.parts.pop_back(); }, {"parameter #2", "'c' [6]", "absent"});
    expect_refusal(culprit, [](setup& s) { std::swap(s.parts[0], s.parts[2]); }, {"parameter #0", "'a'", "'c'"});
    expect_refusal(culprit, [](setup& s) { std::swap(s.parts[0].name, s.parts[2].name); },
                   {"parameter #0", "'a' [2 x 3]", "'c' [2 x 3]"});
    expect_refusal(culprit, [](setup& s) { s.parts[1].name = "bias"; }, {"parameter #1", "'b' [4]", "'bias' [4]"});
    expect_refusal(culprit, [](setup& s) { s.parts[0].shape = {3, 2}; }, {"parameter #0", "[2 x 3]", "[3 x 2]"});
    expect_refusal(culprit, [](setup& s) { s.parts[1].shape = {5}; }, {"parameter #1", "[4]", "[5]"});
    expect_refusal(culprit, [](setup& s) { s.parts[0].strides = {1, 2}; }, {"parameter #0", "strides [1 x 2]"});
}

TEST_CASE("ranks whose elements have another type are refused", "[train]") {
    int const culprit = GENERATE(0, 1, 2);
    for (bool const shares : {false, true}) {
        CAPTURE(culprit, shares);
        auto const all = errors_of_ranks(
            3,
            [&](auto& comm) {
                auto const make = [&]<class E>(E) {
                    one_tensor<E> net;
                    data_parallel trainer{net, sgd{.lr = 1}, comm, training_options{.share_memory = shares}};
                };
                comm.rank() == culprit ? make(float{}) : make(double{});
            },
            patient());
        std::string const zero = culprit == 0 ? "float" : "double", other = culprit == 0 ? "double" : "float";
        for (std::string const& one : all) {
            CAPTURE(one);
            CHECK(one.find("DDP-E102 model differs: rank " + std::to_string(culprit == 0 ? 1 : culprit) +
                           " differs from rank 0: parameter #0 is 'a' [2 x 3] " + zero + " on rank 0 and 'a' [2 x 3] " +
                           other + " on rank ") == 0);
        }
    }
}

TEST_CASE("a difference at the end of a long list of parameters is found", "[train]") {
    expect_refusal(2,
                   [](setup& s) {
                       for (int i = 0; i < 400; ++i) s.parts.push_back({"layer." + std::to_string(i) + ".weight", {1}});
                   },
                   {"parameter #3", "absent", "'layer.0.weight'"});
    auto const all = errors_of_ranks(
        3,
        [&](auto& comm) {
            std::vector<model::part> parts;
            for (int i = 0; i < 1000; ++i) parts.push_back({"layer." + std::to_string(i) + ".weight", {2}});
            if (comm.rank() > 0) parts.back().shape = {3};
            model net(parts);
            auto trainer = make_trainer(net, comm, {}, sgd{.lr = 1}, {}, size_capped_buckets{});
        },
        patient());
    for (std::string const& one : all)
        REQUIRE(one.find("rank 1 differs from rank 0: parameter #999 is 'layer.999.weight' [2]") != std::string::npos);
}

TEST_CASE("trainers with other settings are refused on every rank, with what they differ in", "[train]") {
    int const culprit = GENERATE(0, 2);
    expect_refusal(culprit, [](setup& s) { s.optimizer = sgd{.lr = 0.25}; },
                   {"optimizer or its settings (", "sgd(lr 0.25, momentum 0, weight_decay 0, nesterov false) on rank"});
    expect_refusal(
        culprit, [](setup& s) { s.optimizer = adam{}; },
        {"optimizer or its settings (", "adam(lr 0.001, beta1 0.9, beta2 0.999, eps 1e-08, weight_decay 0) on"});
    expect_refusal(culprit, [](setup& s) { s.algorithm = naive_allreduce{}; },
                   {"allreduce algorithm", "naive on rank"});
    expect_refusal(culprit, [](setup& s) { s.algorithm = ring_allreduce{.segment_bytes = 4096}; },
                   {"allreduce algorithm", "ring(segment_bytes 4096) on rank"});
    expect_refusal(culprit, [](setup& s) { s.algorithm = automatic_allreduce{.cost = network_cost{.message = 1}}; },
                   {"allreduce algorithm", "cost.message 1, "});
    expect_refusal(culprit, [](setup& s) { s.buckets = per_parameter_buckets{}; }, {"bucket policy"});
    expect_refusal(culprit, [](setup& s) { s.buckets = size_capped_buckets{.cap_bytes = 64}; }, {"bucket policy"});
    expect_refusal(culprit, [](setup& s) { s.buckets = scrambled_buckets{}; }, {"bucket policy"});
    expect_refusal(culprit, [](setup& s) { s.options.update = update::replicated; },
                   {"another training_options.update or overlap_gather (", "sharded on rank", "replicated on rank"});
    expect_refusal(culprit, [](setup& s) { s.options.update = update::sharded, s.options.overlap_gather = true; },
                   {"another training_options.update or overlap_gather (", "sharded with overlap_gather on rank"});
    expect_refusal(culprit, [](setup& s) { s.options.schedule = step_decay{}; },
                   {"another training_options.schedule (", "step_decay(every 1000, factor 0.1) on rank"});
    expect_refusal(culprit, [](setup& s) { s.options.schedule = linear_warmup{.steps = 5}; },
                   {"another training_options.schedule (", "constant_rate on rank",
                    "constant_rate after linear_warmup(steps 5, from 0.1) on rank"});
    expect_refusal(culprit, [](setup& s) { s.options.unused = unused::allowed; },
                   {"another training_options.unused or frozen (", "unused::error, nothing frozen on rank",
                    "unused::allowed, nothing frozen on rank"});
    for (auto const& [guard, name] : std::vector<std::pair<nonfinite, std::string>>{
             {nonfinite::stop, "stop"}, {nonfinite::skip, "skip"}, {nonfinite::warn, "warn"}})
        expect_refusal(culprit, [how = guard](setup& s) { s.options.nonfinite = how; },
                       {"another training_options.nonfinite (", "unchecked on rank", name + " on rank"});
    expect_refusal(culprit, [](setup& s) { s.options.buckets_in_flight = 1; },
                   {"another training_options.buckets_in_flight (", "1 on rank", "4 on rank"});
    expect_refusal(culprit, [](setup& s) { s.options.agreement_steps = 7; },
                   {"another training_options.agreement_steps (", "7 on rank"});
    expect_refusal(culprit, [](setup& s) { s.options.clip = clip_by_global_norm{}; },
                   {"another training_options.clip (", "none on rank", "clip_by_global_norm 1 on rank"});
    expect_refusal(culprit, [](setup& s) { s.options.clip = clip_by_value{.limit = 0.25}; },
                   {"another training_options.clip (", "none on rank", "clip_by_value 0.25 on rank"});
    for (auto const& [policy, name] : std::vector<std::pair<buffers, std::string>>{
             {buffers::averaged, "averaged"},
             {buffers::left_alone, "left_alone"},
             {buffers::from_rank_0_at_evaluation, "from_rank_0_at_evaluation"}})
        expect_refusal(culprit, [how = policy](setup& s) { s.options.buffers = how; },
                       {"another training_options.buffers (", "from_rank_0 on rank", name + " on rank"});
    // The optimizer's state and the bucket plan depend on options: what the caller has set is named.
    expect_refusal(0, [](setup& s) { s.optimizer = adam{}, s.options.update = update::replicated; },
                   {"another training_options.update"});
    expect_refusal(culprit, [](setup& s) { s.options.frozen = {"b"}; }, {"another training_options.unused or frozen"});
    // Several are all named.
    expect_refusal(culprit,
                   [](setup& s) {
                       s.optimizer = sgd{.lr = 0.25}, s.options.agreement_steps = 7,
                       s.options.clip = clip_by_value{.limit = 0.25};
                   },
                   {": another training_options.", "; another training_options.", "agreement_steps (", "clip (",
                    "; another optimizer or its settings (sgd(lr "});
    std::vector<model::part> const long_one{{"long", {40'000}}, {"short", {3}}};
    for (auto const& change :
         std::vector<std::function<void(setup&)>>{[](setup& s) { s.options.clip = clip_by_global_norm{}; },
                                                  [](setup& s) { s.options.frozen = {"short"}; }}) {
        expect_refusal(culprit, change, {"another training_options."}, false, long_one);
        for (std::string const& one : errors(culprit, change, false, long_one))
            REQUIRE(one.find("; another") == std::string::npos);
    }
}

TEST_CASE("what differs is said over TCP as well", "[train]") {
    int const culprit = GENERATE(0, 2);
    expect_refusal(culprit, [](setup& s) { s.parts[0].shape = {3, 2}; }, {"parameter #0", "[2 x 3]", "[3 x 2]"}, true);
    expect_refusal(culprit, [](setup& s) { s.parts.pop_back(); }, {"parameter #2", "'c' [6]", "absent"}, true);
    expect_refusal(
        culprit, [](setup& s) { s.options.frozen = {"a"}; },
        {"another training_options.unused or frozen (", "unused::error, frozen 'a' on rank",
         "unused::error, nothing frozen on rank"},
        true);
    expect_refusal(culprit, [](setup& s) { s.optimizer = adam{}; }, {"optimizer"}, true);
}

TEST_CASE("what only one rank's bucket policy does is named", "[train]") {
    struct turned {
        [[nodiscard]] bucket_plan plan(bucket_request const&) const { return {.order = {1, 0}}; }
    };
    struct first_first {
        [[nodiscard]] bucket_plan plan(bucket_request const&) const { return {.cuts = {{1, 0}}, .launch = {0, 1}}; }
    };
    struct halves {
        [[nodiscard]] bucket_plan plan(bucket_request const&) const { return {.cuts = {{1, 0}}}; }
    };
    struct pair {
        any_buckets zeros, ones;
        std::string words;
    };
    for (pair const& differ :
         {pair{single_bucket{}, turned{}, "parameter #0 in place 0 on rank 0, parameter #1 in place 0 on rank 1"},
          pair{single_bucket{}, halves{}, "1 bucket on rank 0, 2 buckets on rank 1"},
          pair{first_first{}, halves{},
               "bucket #0 sent as number 0 on rank 0, bucket #1 sent as number 0 on rank 1"}}) {
        auto const all = errors_of_ranks(
            2,
            [&](auto& comm) {
                model net({{"a", {8}}, {"b", {8}}});
                auto trainer =
                    make_trainer(net, comm, {}, sgd{.lr = 1}, {}, comm.rank() == 0 ? differ.zeros : differ.ones);
            },
            patient());
        for (std::string const& one : all)
            REQUIRE(one.find("rank 1 differs from rank 0: another bucket policy (" + differ.words + ")") !=
                    std::string::npos);
    }
}

TEST_CASE(
    "a model of which one rank's alone is contiguous, or releases values early, is named as that, whatever its bucket "
    "plan",
    "[train]") {
    bool const releases = GENERATE(false, true);
    bool const tcp = GENERATE(false, true), in_memory = GENERATE(false, true);
    int const culprit = GENERATE(0, 2);
    CAPTURE(tcp, in_memory, culprit, releases);
    std::string const other = culprit == 0 ? "1" : "2";
    auto const train = [&](auto& net, auto& comm, training_options const& options) {
        auto trainer = make_trainer(net, comm, options, sgd{.lr = 1}, {}, size_capped_buckets{});
        trainer.step(numbers{{1}});
    };
    for (std::vector<model::part> const& parts :
         {setup().parts, std::vector<model::part>{{"a", {8}}, {"b", {16}}}}) {  // the second has no gaps in any case
        auto const all = errors_over(
            tcp, 3,
            [&](auto& comm) {
                training_options options{.share_memory = in_memory};
                if (comm.rank() == culprit && releases) {
                    releasing net(parts);
                    train(net, comm, options);
                } else if (comm.rank() == culprit) {
                    packed net(parts);
                    train(net, comm, options);
                } else {
                    model net(parts);
                    train(net, comm, options);
                }
            },
            patient());
        for (std::string const& one : all)
            CHECK(one == "DDP-E102 model differs: rank " + other +
                             " differs from rank 0: another value of the model's `contiguous` or `ready_releases`. "
                             "Build the same model with the same trainer settings on all ranks.");
    }
}

TEST_CASE("a model or settings that no rank can train are refused before the first message", "[train]") {
    auto const complaint = [](std::vector<model::part> const& parts, any_optimizer const& optimizer,
                              training_options const& options) {
        return errors_of_ranks(1,
                               [&](auto& comm) {
                                   model net(parts);
                                   auto trainer = make_trainer(net, comm, options, optimizer);
                               })
            .front();
    };
    REQUIRE(complaint({}, sgd{}, {}).find("no parameters") != std::string::npos);
    REQUIRE(complaint({{"a", {1}}, {"a", {1}}}, sgd{}, {}).find("'a' is listed twice") != std::string::npos);
    REQUIRE(complaint({{"a", {1}}}, sgd{.lr = -1}, {}).find("lr") != std::string::npos);
    REQUIRE(complaint({{"a", {1}}}, sgd{}, {.clip = clip_by_global_norm{.max_norm = 0}}).find("max_norm") !=
            std::string::npos);
}

namespace {
/// An optimizer that has no hash_words(); and a model that has.
struct silent_sgd : sgd {
    static constexpr char const* name = "silent";
    std::string hash_words() const = delete;
    [[nodiscard]] double learning_rate() const { return lr; }
};
struct worded_model : model {
    using model::model;
    int depth = 0;
    [[nodiscard]] std::uint64_t hash() const { return static_cast<std::uint64_t>(depth) + 1; }
    [[nodiscard]] std::string hash_words() const { return "width 7; depth " + std::to_string(depth) + "; seed\n3"; }
};
}  // namespace

TEST_CASE("of settings without words the learning rate is shown, of a model's the first part that differs", "[train]") {
    auto const said = errors_of_ranks(
        2,
        [](auto& comm) {
            model net({{"a", {2}}});
            data_parallel trainer{net, silent_sgd{{.lr = comm.rank() == 0 ? 0.5 : 0.25}}, comm};
        },
        patient());
    for (std::string const& one : said)
        CHECK_THAT(one,
                   Catch::Contains("another optimizer or its settings (silent, learning rate 0.5 on rank 0, silent, "
                                   "learning rate 0.25 on rank 1)"));
    auto const of_models = errors_of_ranks(
        2,
        [](auto& comm) {
            worded_model net({{"a", {2}}});
            net.depth = comm.rank();
            data_parallel trainer{net, sgd{}, comm};
        },
        patient());
    for (std::string const& one : of_models)
        CHECK_THAT(one, Catch::Contains("another hash() of the model (depth 0 on rank 0, depth 1 on rank 1)"));
}
