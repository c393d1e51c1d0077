// A mean gradient with NaN or an infinity in it: nothing is changed, or all is, and everybody hears whose it was.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/optim/adam.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/optim/lamb.hpp>
#include <ddp/optim/lars.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/thrown_by.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();

/// One sample, whose gradient is `all` everywhere, but for one element, or for that and all that come after it.
struct sample {
    float all = 1;
    std::size_t parameter = 0, element = 0;
    float there = 1;
    bool and_after = false;
    [[nodiscard]] std::size_t size() const { return 1; }
};

template <bool Releases>
struct model_of {
    using element = float;
    static constexpr bool ready_releases = Releases;
    std::vector<std::pair<std::string, std::size_t>> const parts{{"weight", 1000}, {"bias", 7}, {"head", 30000}};
    std::vector<std::vector<float>> own;
    std::vector<std::span<float>> values, gradients;
    std::shared_ptr<void> owner;
    sample now;

    model_of() {
        for (int k = 0; k < 2; ++k)
            for (auto const& [name, count] : parts) own.emplace_back(count, 0.5f);
        for (std::size_t i = 0; i < parts.size(); ++i)
            values.emplace_back(own[i]), gradients.emplace_back(own[parts.size() + i]);
    }
    model_of(model_of const&) = delete;
    std::vector<parameter<float>> parameters() {
        std::vector<parameter<float>> all;
        for (std::size_t i = 0; i < parts.size(); ++i)
            all.push_back({parts[i].first, {parts[i].second}, values[i], gradients[i]});
        return all;
    }
    void bind(storage<float> memory) { values = memory.values, gradients = memory.gradients, owner = memory.owner; }
    double forward(sample const& one) {
        now = one;
        return 0;
    }
    template <class Ready>
    void backward(pass<float> how, Ready const& ready) {
        for (std::size_t i = parts.size(); i-- > 0;) {
            for (std::size_t j = 0; j < gradients[i].size(); ++j) {
                bool const at = now.parameter == i && now.element == j;
                bool const after = now.parameter < i || (now.parameter == i && now.element < j);
                float const mine = at || (after && now.and_after) ? now.there : now.all;
                gradients[i][j] = (how.accumulate ? gradients[i][j] : 0) + mine * how.scale;
            }
            ready(i);
        }
    }
};

using model = model_of<false>;

/// Every way in which a step is made.
std::vector<training_options> ways(nonfinite decision) {
    std::vector<training_options> all;
    for (bool const shares : {true, false})
        for (ddp::update const by : {update::replicated, update::sharded})
            for (std::optional<clipping> const& clip :
                 {std::optional<clipping>{}, std::optional<clipping>{clip_by_global_norm{0.25}},
                  std::optional<clipping>{clip_by_value{0.25}}}) {  // the last one makes infinities finite
                training_options one{.update = by, .nonfinite = decision, .share_memory = shares};
                one.clip = clip;
                all.push_back(one);
            }
    return all;
}
/// Last rank: NaN, once or everywhere from there on. Rank 0: an infinity, in a parameter that comes later, if `both`.
sample bad_of(int rank, int ranks, bool both = true, bool and_after = false) {
    if (rank == ranks - 1) return {.parameter = 1, .element = 5, .there = nan, .and_after = and_after};
    if (rank == 0 && both)
        return {.parameter = 2, .element = and_after ? 12345u : 29999u, .there = -infinity, .and_after = and_after};
    return {};
}
std::string expected_text(int ranks, bool both = true, bool and_after = false) {
    std::string const last =
        "rank " + std::to_string(ranks - 1) + "'s gradient of parameter \"bias\" is NaN at element 5";
    return ranks == 1 || !both ? last
                               : "rank 0's gradient of parameter \"head\" is -infinity at element " +
                                     std::string(and_after ? "12345; " : "29999; ") + last;
}

/// With buffers that lie somewhere else after each forward.
struct with_buffers : model {
    struct state {
        float sum = 0;
        std::int64_t count = 0;
        std::uint8_t marks[3] = {1, 2, 3};
        friend bool operator==(state const&, state const&) = default;
    };
    std::unique_ptr<state> held = std::make_unique<state>();
    std::vector<model_buffer> buffers() {
        return {{"sum", element_type::f32, {}, ddp::bytes_of(held->sum)},
                {"count", element_type::i64, {}, ddp::bytes_of(held->count)},
                {"marks", element_type::u8, {3}, as_mutable_bytes(std::span<std::uint8_t>(held->marks))}};
    }
    double forward(sample const& one) {
        auto next = std::make_unique<state>(*held);
        next->sum += one.all, ++next->count, next->marks[next->count % 3] ^= 0x55;
        *held = {};  // of no use from here on
        held = std::move(next);
        return model::forward(one);
    }
};

struct outcome {
    std::string wrong;
    std::uint64_t digest = 0;
};

}  // namespace

TEMPLATE_TEST_CASE("a step whose gradient is not finite changes nothing, and the next one is as if it had not been",
                   "[train]", model_of<false>, model_of<true>) {
    int const ranks = GENERATE(1, 2, 3, 4);
    bool const over_tcp = GENERATE(false, true);
    // In turn, so that each goes each way: lamb and lars look at gradients before they step.
    any_optimizer const optimizers[] = {adam{.lr = 0.1}, lamb{.lr = 0.1}, lars{.lr = 0.1, .momentum = 0.9}};
    auto turn = static_cast<std::size_t>(ranks + (over_tcp ? 1 : 0));
    for (nonfinite const decision : {nonfinite::stop, nonfinite::skip})
        for (training_options const& options : ways(decision)) {
            any_optimizer const& optimizer = optimizers[(turn + turn / 3) % std::size(optimizers)];
            ++turn;
            auto const follow = [&](auto& comm) {
                outcome all;
                auto const expect = [&](bool right, char const* what) {
                    if (!right) all.wrong += std::string(what) + "; ";
                };
                TestType disturbed, whole;
                data_parallel one{disturbed, optimizer, comm, options, size_capped_buckets{20000, 4000}};
                data_parallel other{whole, optimizer, comm, options, size_capped_buckets{20000, 4000}};
                for (int k = 0; k < 3; ++k) {
                    sample const good{.all = 1 + static_cast<float>(comm.rank() + k)};
                    step_result const result = one.step(good);
                    other.step(good);
                    expect(!result.skipped && result.gradient_norm > 0, "a good step");
                    expect(one.digest_of_values() == other.digest_of_values(), "other values");
                    std::string text;
                    bool skipped = false;
                    try {
                        skipped = one.step(bad_of(comm.rank(), comm.size(), k != 1, k == 2)).skipped;
                    } catch (error const& e) {
                        text = e.what();
                        expect(e.code() == errc::nonfinite, "another code");
                    }
                    expect(skipped == (decision == nonfinite::skip), "skipped");
                    expect(decision == nonfinite::skip ||
                               text.find("finite: " + expected_text(comm.size(), k != 1, k == 2)) != std::string::npos,
                           text.c_str());
                    expect(one.digest_of_values() == other.digest_of_values(), "changed");
                    expect(one.completed_steps() == other.completed_steps() && !one.torn(), "counted");
                }
                expect(one.replicas_identical(), "replicas differ");
                all.digest = one.digest_of_values();
                return all;
            };
            auto got = over_tcp ? on_ranks(ranks, follow) : run_ranks(ranks, follow, patient());
            if (!over_tcp && ranks > 2)  // two hosts
                for (outcome const& one :
                     on_hosts(ranks == 3 ? placement{7, 4, 4} : placement{7, 4, 7, 4}, follow, patient()))
                    got.push_back(one);
            CAPTURE(ranks, over_tcp, decision == nonfinite::stop, static_cast<int>(options.update),
                    options.share_memory);
            for (auto const& one : got) {
                CHECK(one.wrong == "");
                CHECK(one.digest == got.front().digest);
            }
        }
}

TEST_CASE("NaN in a micro-batch of one rank makes the step one of nobody, and nothing of it is left", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    nonfinite const decision = GENERATE(nonfinite::stop, nonfinite::skip);
    if (ranks != 3 && sanitizers_leave_out("NaN in a micro-batch", ranks)) return;
    auto const follow = [&](communicator<>& comm, training_options const& options, int culprit) {
        std::string wrong;
        auto const expect = [&](bool right, std::string const& what) {
            if (!right) wrong += what + "; ";
        };
        model disturbed, whole;
        data_parallel one{disturbed, adam{.lr = 0.1}, comm, options}, other{whole, adam{.lr = 0.1}, comm, options};
        auto const step = [](auto& trainer, sample const& first, sample const& second, bool guarded) {
            trainer.forward(first);
            if (guarded) {
                auto const guard = trainer.no_sync();
                trainer.backward();
            } else {
                trainer.accumulate();
            }
            trainer.forward(second);
            trainer.backward();
            return trainer.finish();
        };
        sample const bad{.parameter = 1, .element = 5, .there = NAN};
        for (bool const guarded : {false, true}) {
            sample const good{.all = 1 + static_cast<float>(comm.rank())};
            std::string text;
            finish_result done;
            try {
                done = step(one, comm.rank() == culprit ? bad : good, good, guarded);
            } catch (error const& e) {
                text = e.what();
            }
            expect(done.skipped == (decision == nonfinite::skip), "skipped");
            expect(decision == nonfinite::skip
                       ? done.weight == 2 * static_cast<std::uint64_t>(comm.size())
                       : text.find("finite: rank " + std::to_string(culprit) +
                                   "'s gradient of parameter \"bias\" is NaN at element 5. Nothing") != text.npos,
                   "said: " + text);
            expect(one.digest_of_values() == other.digest_of_values(), "changed");
            done = step(one, good, {}, !guarded);
            expect(!done.skipped && done.weight == step(other, good, {}, !guarded).weight, "the next step");
            expect(one.digest_of_values() == other.digest_of_values(), "other values");
        }
        expect(one.completed_steps() == 2 && one.replicas_identical(), "replicas");
        return wrong;
    };
    auto const got = ranks_over(
        tcp, ranks,
        [&](communicator<>& comm) {
            std::string all;
            for (training_options const& options : ways(decision))
                for (int culprit = 0; culprit < comm.size(); culprit += std::max(1, comm.size() - 1))
                    all += follow(comm, options, culprit);
            return all;
        },
        patient());
    CAPTURE(ranks, tcp, decision == nonfinite::stop);
    for (std::string const& wrong : got) CHECK(wrong == "");
}

TEST_CASE("a step that is not made leaves buffers as they were, wherever they lie", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    for (buffers const policy :
         {buffers::from_rank_0, buffers::averaged, buffers::left_alone, buffers::from_rank_0_at_evaluation})
        for (nonfinite const decision : {nonfinite::stop, nonfinite::skip}) {
            auto const got = ranks_over(
                tcp, ranks,
                [&](communicator<>& comm) {
                    training_options const options{.nonfinite = decision, .buffers = policy};
                    with_buffers disturbed, whole;
                    data_parallel one{disturbed, adam{.lr = 0.1}, comm, options};
                    data_parallel other{whole, adam{.lr = 0.1}, comm, options};
                    std::string wrong;
                    for (int k = 0; k < 3; ++k) {
                        sample const good{.all = 1 + static_cast<float>(comm.rank() + k)};
                        one.step(good), other.step(good);
                        if (*disturbed.held != *whole.held) wrong += "after a step; ";
                        std::string const said = thrown_by([&] {
                            if (k != 1) return void(one.step(bad_of(comm.rank(), comm.size(), false)));
                            one.forward(bad_of(comm.rank(), comm.size()));  // first and last rank
                            one.accumulate();
                            one.forward(good);
                            one.backward();
                            one.finish();
                        });
                        if (said.empty() == (decision == nonfinite::stop)) wrong += "said: " + said + "; ";
                        if (*disturbed.held != *whole.held)
                            wrong += "after a step that was not made: " + std::to_string(disturbed.held->count) + "; ";
                        if (!one.replicas_identical()) wrong += "ranks differ; ";
                    }
                    one.synchronise_buffers(), other.synchronise_buffers();
                    return wrong + (*disturbed.held == *whole.held ? "" : "at the end");
                },
                patient());
            CAPTURE(ranks, tcp, static_cast<int>(policy), decision == nonfinite::stop);
            for (std::string const& wrong : got) CHECK(wrong == "");
        }
}

TEST_CASE("with a warning the step is made, unchecked nobody looks", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    for (nonfinite const decision : {nonfinite::warn, nonfinite::unchecked})
        for (training_options const& options : ways(decision)) {
            auto const got = ranks_over(
                tcp, ranks,
                [&](auto& comm) {
                    model one;
                    data_parallel trainer{one, adam{.lr = 0.1}, comm, options};
                    step_result const result = trainer.step(bad_of(comm.rank(), comm.size()));
                    return !result.skipped && trainer.completed_steps() == 1 && std::isnan(one.values[1][5]);
                },
                patient());
            CAPTURE(ranks, tcp, decision == nonfinite::warn, options.update == update::sharded, options.share_memory);
            CHECK(got == decltype(got)(static_cast<std::size_t>(ranks), true));
        }
}

TEST_CASE("finite gradients whose sum is not finite are said to be that", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    if (ranks == 1) return;  // whose sum is its own gradient
    for (nonfinite const decision : {nonfinite::stop, nonfinite::skip})
        for (training_options const& options : ways(decision)) {
            CAPTURE(ranks, tcp, options.update == update::sharded, options.share_memory, options.clip.has_value());
            auto const got = ranks_over(
                tcp, ranks,
                [&](auto& comm) {
                    model one;
                    data_parallel trainer{one, adam{}, comm, options};
                    std::uint64_t const before = trainer.digest_of_values();
                    bool skipped = false;
                    std::string text = thrown_by([&] { skipped = trainer.step(sample{.all = 3e38f}).skipped; });
                    if (skipped == text.empty() && trainer.digest_of_values() == before) return text;
                    return text + " and something was changed";
                },
                patient());
            std::string const said =
                "DDP-E105 not finite: step 1: the mean gradient is not finite: each rank's own gradient is finite, but "
                "their sum, its norm, what the exchange sends of it (half_exchange: numbers from 65520 on become "
                "infinite), or what an observer made of it, is not. Nothing was changed";
            for (auto const& text : got) {
                CAPTURE(text);
                bool const right = decision == nonfinite::skip
                                       ? text.empty()
                                       : text.find(said) == 0 && text.find("and something") == text.npos;
                CHECK(right);
            }
        }
}

TEST_CASE("three ranks are named, and the others counted", "[train]") {
    std::vector<detail::nonfinite_place> places(7);
    for (std::size_t const r : {1u, 2u, 4u, 5u, 6u}) places[r] = {r % 2, 10 * r, infinity};
    auto const name_of = [](std::size_t i) -> std::string_view { return i == 0 ? "weight" : "bi\033as"; };
    std::vector<int> const members{9, 11, 2, 3, 14, 5, 6};  // of a group: ranks of the job
    CHECK(detail::describe(places, members, name_of) ==
          "rank 11's gradient of parameter \"bi\\x1bas\" is infinity at element 10; rank 2's gradient of parameter "
          "\"weight\" is infinity at element 20; rank 14's gradient of parameter \"weight\" is infinity at element 40; "
          "2 more of the ranks have such elements");
}

TEST_CASE("rank 0 says which step was skipped, or applied anyway, and why", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    std::FILE* const file = std::tmpfile();
    REQUIRE(file != nullptr);
    std::fflush(stderr);
    int const before = ::dup(2);
    ::dup2(::fileno(file), 2);
    for (nonfinite const decision : {nonfinite::skip, nonfinite::warn})
        ranks_over(
            tcp, ranks,
            [&](auto& comm) {
                model one;
                data_parallel trainer{one, adam{}, comm, training_options{.nonfinite = decision}};
                trainer.step(sample{});
                for (int k = 0; k < (decision == nonfinite::skip ? 5 : 1); ++k)
                    trainer.step(bad_of(comm.rank(), comm.size()));
                return 0;
            },
            patient());
    std::fflush(stderr);
    ::dup2(before, 2);
    ::close(before);
    std::rewind(file);
    std::string text(4096, ' ');
    text.resize(std::fread(text.data(), 1, text.size(), file));
    std::fclose(file);
    std::string const why = ": the mean gradient is not finite: " + expected_text(ranks);
    CHECK(text == "ddp: step 2 was skipped" + why + " (such steps so far: 1)\n" +      //
                      "ddp: step 3 was skipped" + why + " (such steps so far: 2)\n" +  //
                      "ddp: step 5 was skipped" + why + " (such steps so far: 4)\n" + "ddp: step 2 was applied anyway" +
                      why + " (such steps so far: 1)\n");
}
