// Parameter groups and clipping by value: each rank steps as a loop written by hand, whatever the policies.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/kernel/norm.hpp>
#include <ddp/kernel/sum.hpp>
#include <ddp/optim/parameter_groups.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

using groups = parameter_groups<any_optimizer>;

struct grouped_recipe {
    std::string name = {};
    groups optimizer;
    any_allreduce algorithm = {};
    any_buckets buckets = size_capped_buckets{};
    training_options options = {};
};

/// Of tanh_mlp's parameters w1, b1, none, w2, b2. State differs in size between the groups.
groups mixed_groups() {
    return {adam{.lr = 0.01},
            {{"b?", sgd{.lr = 0.1, .momentum = 0.9}}, {"*2", adamw{.lr = 0.02, .weight_decay = 0.1}}}};
}
any_optimizer optimizer_of(std::string const& name) {
    if (name == "b1" || name == "b2") return sgd{.lr = 0.1, .momentum = 0.9};
    if (name == "w2") return adamw{.lr = 0.02, .weight_decay = 0.1};
    return adam{.lr = 0.01};
}
schedule warm() {
    return {linear_warmup{.steps = 3, .from = 0.3}, cosine_decay{.steps = 10}};
}

std::vector<std::pair<std::string, std::optional<clipping>>> clippings() {
    return {{"", {}}, {", clipped by value", clip_by_value{.limit = 0.02}}, {", clipped", clip_by_global_norm{0.05}}};
}
training_options options_of(update how, std::optional<clipping> const& clip) {
    return {.update = how, .clip = clip, .schedule = warm()};
}

/// test::train's loop on one rank, with an optimizer and state for each parameter and no library around them.
template <Element E>
std::vector<std::vector<E>> train_by_hand(std::size_t steps, std::optional<clipping> const& clip, std::size_t in,
                                          std::size_t hidden, std::size_t out) {
    static constexpr std::size_t batches[] = {13, 16, 5, 3, 11};
    task_data<E> const data(in, out, 64);
    tanh_mlp<E> model(in, hidden, out, 5);
    auto const parameters = model.parameters();
    std::vector<std::vector<std::vector<E>>> state;
    for (auto const& p : parameters)
        state.emplace_back(optimizer_of(p.name).slot_count(), std::vector<E>(p.value.size()));
    for (std::size_t step = 0; step < steps; ++step) {
        std::size_t const rows = batches[step % 5], offset = step * 7 % (data.rows - rows + 1);
        (void)model.forward(data.batch(offset, offset + rows));
        model.backward({.scale = static_cast<E>(rows)}, [](std::size_t) {});
        std::vector<double> norms;
        for (auto const& p : parameters) {
            scale(p.gradient, static_cast<E>(1.0 / static_cast<double>(rows)));
            std::vector<double> squares(norm_blocks(p.gradient.size()));
            block_squares(std::span<E const>(p.gradient), std::span<double>(squares));
            norms.push_back(tree_sum(squares));
            if (clip && std::holds_alternative<clip_by_value>(*clip)) {
                E const limit = static_cast<E>(std::get<clip_by_value>(*clip).limit);
                for (E& g : p.gradient) g = std::min(std::max(g, -limit), limit);
            }
        }
        double factor = 1;
        if (clip && std::holds_alternative<clip_by_global_norm>(*clip))
            factor = std::get<clip_by_global_norm>(*clip).factor(std::sqrt(tree_sum(norms)));
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            any_optimizer const by = optimizer_of(parameters[i].name);
            std::vector<std::span<E>> slots(state[i].begin(), state[i].end());
            by.step(
                {.step = step + 1, .learning_rate = by.learning_rate() * warm().factor(step), .gradient_scale = factor},
                std::span<E const>(parameters[i].gradient), parameters[i].value, slot_spans<E>(slots));
        }
    }
    std::vector<std::vector<E>> values;
    for (std::size_t i = 0; i < parameters.size(); ++i)
        values.emplace_back(model.value(i).begin(), model.value(i).end());
    return values;
}

/// Steps as sgd, and writes down what it is asked for. Groups matrices (0) and vectors (1), with one learning rate.
struct by_shape {
    struct call {
        std::size_t group, count;
        bool operator==(call const&) const = default;
    };
    std::vector<call>* calls;
    bool grouped = true;

    [[nodiscard]] std::size_t slot_count() const { return 0; }
    [[nodiscard]] double learning_rate() const { return 0.5; }
    [[nodiscard]] std::uint64_t hash() const { return 1; }
    [[nodiscard]] std::vector<std::size_t> groups_of(std::span<parameter<double> const> all) const {
        std::vector<std::size_t> result;
        for (auto const& p : all) result.push_back(grouped && p.shape.size() < 2 ? 1 : 0);
        return result;
    }
    void step(step_info const& at, std::span<double const> gradient, std::span<double> value,
              slot_spans<double> slots) const {
        calls->push_back({at.group, value.size()});
        sgd{}.step(at, gradient, value, slots);
    }
};

}  // namespace

TEMPLATE_TEST_CASE("one rank steps each group as a loop by hand would, to the last bit", "[train]", float, double) {
    constexpr std::size_t steps = 7;
    for (auto const& [clip_name, clip] : clippings()) {
        auto const expected = train_by_hand<TestType>(steps, clip, 45, 200, 2);
        for (auto const& [buckets_name, buckets] : bucket_policies())
            for (update const how : {update::replicated, update::sharded}) {
                CAPTURE(clip_name, buckets_name, how == update::sharded);
                grouped_recipe const by{
                    .optimizer = mixed_groups(), .buckets = buckets, .options = options_of(how, clip)};
                auto const got =
                    run_ranks(1, [&](auto& comm) { return train<TestType>(comm, by, steps, 45, 200, 2); }).front();
                REQUIRE(got.wrong == "");
                for (std::size_t i = 0; i < expected.size(); ++i) {
                    CAPTURE(i);
                    REQUIRE(got.values[i].size() == expected[i].size());
                    REQUIRE((expected[i].empty() || std::memcmp(got.values[i].data(), expected[i].data(),
                                                                expected[i].size() * sizeof(TestType)) == 0));
                }
            }
    }
}

TEST_CASE("groups and clipping by value train to the same bits by every policy, and to one rank's result",
          "[train][same_threads]") {
    constexpr std::size_t steps = fewer == 1 ? 4 : 2;
    int const ranks = GENERATE(1, 2, 3, 4, 5);
    std::size_t combination = 0;
    for (auto const& [clip_name, clip] : clippings()) {
        auto const alone = train_by_hand<double>(steps, clip, 45, 200, 2);
        std::optional<std::uint64_t> first;
        for (auto const& [algorithm_name, algorithm] : canonical_algorithms())
            for (auto const& [buckets_name, buckets] : bucket_policies())
                for (update const how : {update::replicated, update::sharded}) {
                    bool const some = combination++ % 7 == 0;
                    if ((fewer != 1 || ranks == 4) && !some) continue;
                    grouped_recipe const by{.name = algorithm_name + ", " + buckets_name +
                                                    (how == update::sharded ? ", sharded" : "") + clip_name,
                                            .optimizer = mixed_groups(),
                                            .algorithm = algorithm,
                                            .buckets = buckets,
                                            .options = options_of(how, clip)};
                    for (bool const tcp : {false, true}) {
                        if (tcp && !some) continue;
                        auto const got = ranks_over(
                            tcp, ranks, [&](auto& comm) { return train<double>(comm, by, steps, 45, 200, 2); },
                            patient());
                        CAPTURE(ranks, tcp, by.name);
                        for (auto const& one : got) {
                            REQUIRE(one.wrong == "");
                            if (!first) first = one.digest;
                            REQUIRE(one.digest == *first);
                        }
                        double worst = 0;
                        for (std::size_t i = 0; i < alone.size(); ++i)
                            for (std::size_t k = 0; k < alone[i].size(); ++k)
                                worst = std::max(worst, std::abs(got[0].values[i][k] - alone[i][k]));
                        REQUIRE(worst < 1e-9);
                    }
                }
    }
}

TEST_CASE("neighbours of one group come in one call, and without groups a bucket does", "[train]") {
    using model = scripted_model<true, false>;
    auto const calls_with = [](bool grouped) {
        return run_ranks(1, [&](auto& comm) {
            // In elements 6, 4, 0, 8, 3, 2: each begins at a multiple of eight.
            model net({{"m1", {2, 3}}, {"m2", {4, 1}}, {"none", {0}}, {"m3", {8, 1}}, {"v1", {3}}, {"v2", {2}}});
            std::vector<by_shape::call> calls;
            data_parallel trainer{
                net, by_shape{&calls, grouped}, comm, training_options{}, automatic_allreduce{}, single_bucket{}};
            trainer.step(numbers{{1.0}});
            return std::pair(calls, std::vector(net.value(3).begin(), net.value(3).end()));
        })[0];
    };
    auto const [grouped, grouped_values] = calls_with(true);
    auto const [plain, plain_values] = calls_with(false);
    REQUIRE(grouped == std::vector<by_shape::call>{{0, 24}, {1, 16}});
    REQUIRE(plain == std::vector<by_shape::call>{{0, 40}});
    REQUIRE(grouped_values == plain_values);
    REQUIRE(plain_values.front() == -0.5 * 4);
}

TEST_CASE("a user's optimizer that names too few groups is told so", "[train]") {
    struct forgetful : by_shape {
        std::vector<std::size_t> groups_of(std::span<parameter<double> const>) const { return {0}; }
    };
    REQUIRE(errors_of_ranks(1,
                            [](auto& comm) {
                                scripted_model<> net({{"a", {1}}, {"b", {1}}});
                                data_parallel trainer{net, forgetful{}, comm};
                            })[0]
                .find("the optimizer's groups_of() must return one group a parameter") != std::string::npos);
}

TEST_CASE("ranks with other groups are refused when the trainers are made", "[train]") {
    auto const errors = [](auto const& optimizer_of_rank) {
        return errors_of_ranks(2, [&](auto& comm) {
            scripted_model<> net({{"a.bias", {2}}, {"b.bias", {2}}});
            data_parallel trainer{net, optimizer_of_rank(comm.rank()), comm};
        });
    };
    auto const refused = [](std::string const& text) {
        return text.find("E102") != text.npos && text.find("optimizer or its settings") != text.npos;
    };
    using sgds = parameter_groups<sgd>;
    for (std::string const& text :
         errors([](int rank) { return sgds{sgd{}, {{"a.*", sgd{.lr = rank == 0 ? 0.5 : 0.25}}}}; }))
        CHECK(refused(text));
    for (std::string const& text : errors([](int rank) { return sgds{sgd{}, {{rank == 0 ? "a.*" : "b.*", sgd{}}}}; }))
        CHECK(refused(text));
    // Hashes that are the same, and groups that are not.
    for (std::string const& text : errors([](int rank) { return by_shape{nullptr, rank == 0}; })) CHECK(refused(text));
    for (std::string const& text : errors([](int) { return sgds{sgd{}, {{"c.*", sgd{}}}}; }))
        CHECK(text.find("'c.*'") != text.npos);
}

TEST_CASE("ranks with other clipping are refused when the trainers are made", "[train]") {
    auto const errors = [](std::optional<clipping> zero, std::optional<clipping> one) {
        return errors_of_ranks(2, [&](auto& comm) {
            scripted_model<> net({{"a", {2}}});
            data_parallel trainer{net, sgd{}, comm, training_options{.clip = comm.rank() == 0 ? zero : one}};
        });
    };
    auto const refused = [](std::string const& text) {
        return text.find("another training_options.clip") != text.npos;
    };
    for (auto const& text : errors(clip_by_value{.limit = 1}, clip_by_value{.limit = 2})) CHECK(refused(text));
    for (auto const& text : errors(clip_by_value{.limit = 1}, {})) CHECK(refused(text));
    for (auto const& text : errors(clip_by_value{.limit = 1}, clip_by_global_norm{.max_norm = 1}))
        CHECK((refused(text) || text.find("bucket policy") != text.npos));
    for (auto const& text : errors(clip_by_value{.limit = -1}, clip_by_value{.limit = -1}))
        CHECK(text.find("clip_by_value: limit") != text.npos);
}

TEST_CASE("clipping by value clips the mean, leaves it in memory, and NaN shows", "[train]") {
    update const how = GENERATE(update::replicated, update::sharded);
    auto const values = run_ranks(2, [&](auto& comm) {
        scripted_model<> net({{"a", {3}}, {"b", {2}}});  // gradients: 1 and 2 times the mean sample
        data_parallel trainer{net, sgd{.lr = 1}, comm,
                              training_options{.update = how, .clip = clip_by_value{.limit = 3.5}}};
        // Rank 0 alone is beyond the limit; the mean is 3 for a and 6 for b.
        step_result const result = trainer.step(numbers{{comm.rank() == 0 ? 5.0 : 1.0}});
        double const kept = trainer.parameters()[how == update::replicated ? 1 : 0].gradient[0];
        double const a = net.value(0)[0], b = net.value(1)[1];
        trainer.step(numbers{{comm.rank() == 0 ? std::nan("") : 1.0}});
        return std::vector<double>{a, b, result.gradient_norm, comm.rank() == 0 ? kept : 0, net.value(0)[0]};
    });
    for (auto const& of_rank : values) {
        CHECK(of_rank[0] == -3);
        CHECK(of_rank[1] == -3.5);
        CHECK(of_rank[2] == 0);  // nobody asked for a norm
        CHECK(std::isnan(of_rank[4]));
    }
    CHECK(values[0][3] == (how == update::replicated ? 3.5 : 3));
}

TEST_CASE("clipping by value lets buckets be stepped while backward runs; by norm, none is", "[train]") {
    /// Counts its calls, for whoever watches from another thread.
    struct counting : sgd {
        std::atomic<int>* calls;
        void step(step_info const& at, std::span<double const> gradient, std::span<double> value,
                  slot_spans<double> slots) const {
            sgd::step(at, gradient, value, slots);
            calls->fetch_add(1);
        }
    };
    bool const in_memory = GENERATE(true, false);
    auto const stepped_early = [&](std::optional<clipping> const& clip, std::chrono::milliseconds patience) {
        auto const of_ranks = run_ranks(
            2,
            [&](auto& comm) {
                scripted_model<true, true> net({{"a", {100}}, {"b", {100}}});
                std::atomic<int> calls = 0;
                int early = 0;
                net.leaves_out = [&](std::size_t i) {  // asked before gradient i is written
                    auto const until = monotonic_clock::now() + patience;
                    while (i == 0 && calls == 0 && monotonic_clock::now() < until) {
                        comm.progress();
                        std::this_thread::sleep_for(std::chrono::microseconds(50));
                    }
                    if (i == 0) early = calls;
                    return false;
                };
                data_parallel trainer{net,
                                      counting{{}, &calls},
                                      comm,
                                      training_options{.clip = clip, .share_memory = in_memory},
                                      automatic_allreduce{},
                                      per_parameter_buckets{}};
                trainer.step(numbers{{1.0}});
                return early;
            },
            patient());
        return std::min(of_ranks[0], of_ranks[1]);
    };
    CHECK(stepped_early({}, std::chrono::seconds(20)) == 1);
    CHECK(stepped_early(clip_by_value{.limit = 0.5}, std::chrono::seconds(20)) == 1);
    CHECK(stepped_early(clip_by_global_norm{.max_norm = 0.5}, std::chrono::milliseconds(50)) == 0);
}

TEST_CASE("a trainer is the last to hold its job, after every communicator", "[train]") {
    auto const world = inproc_world::create(2);
    auto const said = on_threads(2, [&](int rank) {
        std::optional<communicator<>> last(any_communicator(world->connect(rank), patient()));
        std::optional<communicator<>> group(last->split(0, -rank));
        scripted_model<> net({{"a", {30}}});
        data_parallel trainer{net, sgd{.lr = 0.1}, *group};
        last.reset();
        group.reset();
        for (int step = 0; step < 3; ++step) trainer.step(numbers{{1.0 + rank}});
        return trainer.replicas_identical() ? std::string() : std::string("replicas differ");
    });
    for (std::string const& wrong : said) CHECK(wrong == "");
}
