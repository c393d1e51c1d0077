#include <ddp/testing/check_model.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include <ddp/testing/archetypes.hpp>

#include "support/catch.hpp"
#include "train/tanh_mlp.hpp"

using namespace ddp;

namespace {

/// A model with one mistake: y = a x + b, half the squared error, written as a user would.
enum class mistake {
    none,
    wrong_gradient,
    never_adds,
    never_assigns,
    ignores_scale,
    reports_twice,
    reports_none,
    reports_early,
    stray_report,
    changes_values,
    reads_released,
    reads_old_memory,
    drops_owner,
    forgetful,
    same_names,
    wrong_shape,
    needs_late,
    stray_need,
};

struct line_model {
    using element = double;
    static constexpr bool ready_releases = true;
    mistake wrong;
    std::vector<double> own = {0.5, -0.25, 0, 0};  // a, b and their gradients
    std::span<double> a{own.data(), 1}, b{own.data() + 1, 1}, da{own.data() + 2, 1}, db{own.data() + 3, 1};
    std::shared_ptr<void> owner = {};
    std::vector<double> x = {}, error = {};
    int calls = 0;

    explicit line_model(mistake with) : wrong(with) {}
    std::vector<parameter<double>> parameters() {
        return {{"a", {wrong == mistake::wrong_shape ? 2u : 1u}, a, da},
                {wrong == mistake::same_names ? "a" : "b", {1}, b, db}};
    }
    void bind(storage<double> memory) {
        if (wrong != mistake::reads_old_memory) a = memory.values[0];
        b = memory.values[1], da = memory.gradients[0], db = memory.gradients[1];
        if (wrong != mistake::drops_owner) owner = memory.owner;
    }
    double forward(std::vector<double> const& batch) {
        x = batch;
        error.clear();
        double sum = 0;
        for (double const at : x) {
            error.push_back(a[0] * at + b[0] - at * at);
            sum += error.back() * error.back() / 2;
        }
        if (wrong == mistake::forgetful) sum += ++calls;
        return sum / static_cast<double>(x.size());
    }
    template <class Needed>
    double forward(std::vector<double> const& batch, Needed const& needed) {
        needed(0);
        if (wrong != mistake::needs_late) needed(1);
        double const loss = forward(batch);
        if (wrong == mistake::needs_late) needed(1);
        if (wrong == mistake::stray_need) needed(2);
        return loss;
    }
    template <class Ready>
    void backward(pass<double> how, Ready const& ready) {
        double const factor = (wrong == mistake::ignores_scale ? 1 : how.scale) / static_cast<double>(x.size());
        bool const add = wrong == mistake::never_assigns || (how.accumulate && wrong != mistake::never_adds);
        if (!add) da[0] = db[0] = 0;
        for (double const e : error) db[0] += factor * e;
        if (wrong == mistake::reports_early) ready(0);
        ready(1);
        if (wrong == mistake::reads_released) da[0] += 0 * b[0];
        for (std::size_t i = 0; i < x.size(); ++i)
            da[0] += factor * error[i] * (wrong == mistake::wrong_gradient ? 1 : x[i]);
        if (wrong == mistake::changes_values) a[0] += 1;
        if (wrong == mistake::reports_none || wrong == mistake::reports_early) return;
        ready(wrong == mistake::stray_report ? 7 : 0);
        if (wrong == mistake::reports_twice) ready(0);
    }
};

std::string complaint_about(mistake wrong) {
    line_model model(wrong);
    auto const all = testing::check_model(model, std::vector<double>{1, 2, -0.5});
    return all.empty() ? "" : all.front();
}

}  // namespace

TEMPLATE_TEST_CASE("check_model finds nothing wrong with good models", "[testing]", float, double) {
    test::task_data<TestType> const data(5, 3, 8);
    test::tanh_mlp<TestType, test::memory::copied> copied(5, 6, 3, 1);
    REQUIRE(testing::check_model(copied, data.batch(0, 8)) == std::vector<std::string>{});
    test::tanh_mlp<TestType> releasing(5, 6, 3, 1);
    REQUIRE(testing::check_model(releasing, data.batch(0, 8)) == std::vector<std::string>{});
    testing::model_archetype<TestType> least(3);
    REQUIRE(testing::check_model(least, testing::batch_archetype{{1, 2}}) == std::vector<std::string>{});
    REQUIRE(complaint_about(mistake::none) == "");
}

namespace {
/// Its sum depends on where its weight begins, as vectorised code's does.
struct place_model {
    using element = float;
    std::vector<float> weight = std::vector<float>(4, 0.5f), slope = std::vector<float>(4);
    std::vector<parameter<float>> parameters() { return {{"w", {4}, weight, slope}}; }
    double forward(std::vector<float> const&) {
        return static_cast<double>(weight[0] + weight[1] + weight[2] + weight[3]);
    }
    template <class Ready>
    void backward(pass<float> how, Ready const& ready) {
        auto const place = reinterpret_cast<std::uintptr_t>(weight.data()) % 64;
        for (float& s : slope) s = (how.accumulate ? s : 0) + how.scale * (1 + static_cast<float>(place) * 0x1p-23f);
        ready(0);
    }
};
}  // namespace

TEST_CASE("check_model_placement says of a model without bind that its bits depend on its place", "[testing]") {
    auto const all = testing::check_model_placement([] { return place_model{}; }, std::vector<float>{1});
    REQUIRE(all.size() == 1);
    CAPTURE(all.front());
    REQUIRE(all.front().find("parameter 'w': equal models give other gradients") == 0);
    test::task_data<float> const data(5, 3, 8);
    auto const plain = [] { return test::tanh_mlp<float, test::memory::copied>(5, 6, 3, 1); };
    REQUIRE(testing::check_model_placement(plain, data.batch(0, 8)) == std::vector<std::string>{});
}

namespace {
/// Half the squared length of w, its gradient reported in ranges of two elements.
struct ranged_model {
    using element = double;
    static constexpr bool ready_releases = true;
    std::vector<std::pair<std::size_t, std::size_t>> ranges;  // first, count
    bool rest = false, early = false;  // ready(0) at the end; a range is written after its report
    bool reads_released = false;
    std::vector<double> own = {0.5, -0.25, 1, 2, 0, 0, 0, 0};
    std::span<double> w{own.data(), 4}, g{own.data() + 4, 4};
    std::shared_ptr<void> owner = {};

    std::vector<parameter<double>> parameters() { return {{"w", {4}, w, g}}; }
    void bind(storage<double> const& memory) { w = memory.values[0], g = memory.gradients[0], owner = memory.owner; }
    double forward(std::vector<double> const&) { return (w[0] * w[0] + w[1] * w[1] + w[2] * w[2] + w[3] * w[3]) / 2; }
    template <class Ready>
    void backward(pass<double> how, Ready const& ready) {
        auto const write = [&](std::size_t k) { g[k] = (how.accumulate ? g[k] : 0) + how.scale * w[k]; };
        for (std::size_t k = 4; k-- > 2;) write(k);
        if (!early) write(1), write(0);
        if (reads_released) g[0] -= how.scale * w[0];
        for (auto const& [first, count] : ranges) ready(0, first, count);
        if (early) write(1), write(0);
        if (reads_released) g[0] += how.scale * (w[0] + 0 * w[3]);
        if (rest) ready(0);
    }
};
std::string complaint_about(ranged_model model) {
    model.w = std::span(model.own).first(4), model.g = std::span(model.own).last(4);
    auto const all = testing::check_model(model, std::vector<double>{1});
    return all.empty() ? "" : all.front();
}
}  // namespace

TEST_CASE("check_model finds a model that reports ranges of a gradient wrongly", "[testing]") {
    REQUIRE(complaint_about(ranged_model{.ranges = {{2, 2}, {0, 2}}}) == "");
    REQUIRE(complaint_about(ranged_model{.ranges = {{3, 1}, {1, 2}}, .rest = true}) == "");
    REQUIRE(complaint_about(ranged_model{.ranges = {{2, 2}}, .rest = true, .early = true}) == "");
    using Catch::Matchers::Contains;
    REQUIRE_THAT(complaint_about(ranged_model{.ranges = {{2, 2}}}),
                 Contains("backward never reports the first 2 elements of parameter 'w'"));
    REQUIRE_THAT(complaint_about(ranged_model{.ranges = {{2, 2}, {0, 2}}, .rest = true}),
                 Contains("backward calls ready(0) 2 times for parameter 'w'"));
    REQUIRE_THAT(complaint_about(ranged_model{.ranges = {{2, 2}, {2, 2}}, .rest = true}),
                 Contains("backward calls ready(0, 2, 2) for parameter 'w', of which the first 2 elements are left"));
    REQUIRE_THAT(complaint_about(ranged_model{.ranges = {{3, 2}}, .rest = true}),
                 Contains("ready(0, 3, 2) for parameter 'w', of which the first 4 elements are left"));
    REQUIRE_THAT(complaint_about(ranged_model{.ranges = {{0, 2}}, .rest = true}), Contains("without gaps"));
    REQUIRE_THAT(complaint_about(ranged_model{.ranges = {{2, 2}, {0, 2}}, .early = true}),
                 Contains("parameter 'w': its gradient changes after ready(0)"));
    REQUIRE_THAT(complaint_about(ranged_model{.ranges = {{2, 2}}, .rest = true, .reads_released = true}),
                 Contains("parameter 'w' is read after ready(0), although the model declares ready_releases"));
}

TEST_CASE("check_model names what is wrong with a model", "[testing]") {
    auto const [wrong, words] = GENERATE(table<mistake, std::string>({
        {mistake::wrong_gradient, "parameter 'a', element 0: backward says"},
        {mistake::never_adds, "a pass that accumulates must add"},
        {mistake::never_assigns, "must overwrite what was there"},
        {mistake::ignores_scale, "3 times the gradient"},
        {mistake::reports_twice, "backward calls ready(0) 2 times for parameter 'a'"},
        {mistake::reports_none, "backward calls ready(0) 0 times for parameter 'a'"},
        {mistake::reports_early, "parameter 'a': its gradient changes after ready(0)"},
        {mistake::stray_report, "that is not a parameter's"},
        {mistake::changes_values, "changes values"},
        {mistake::reads_released,
         "parameter 'b' is read after ready(1), although the model declares ready_releases: the gradient of parameter "
         "'a' depends on it"},
        {mistake::reads_old_memory, "after bind: the loss is not finite"},
        {mistake::drops_owner, "bind must keep storage.owner"},
        {mistake::forgetful, "forward gives another loss the second time"},
        {mistake::same_names, "parameter 'a' is listed twice"},
        {mistake::wrong_shape, "as many elements as its shape says"},
        {mistake::needs_late, "parameter 'b' is read before forward(batch, needed) has called needed(1)"},
        {mistake::stray_need, "needed(i) with an i that is not a parameter's"},
    }));
    CAPTURE(words);
    std::string const said = complaint_about(wrong);
    CAPTURE(said);
    REQUIRE(said.find(words) != std::string::npos);
}
