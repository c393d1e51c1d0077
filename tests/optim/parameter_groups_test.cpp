#include <ddp/optim/parameter_groups.hpp>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <ddp/optim/adam.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/optim/sgd.hpp>

#include "optim/textbook.hpp"
#include "support/catch.hpp"

using ddp::any_optimizer, ddp::name_fits;

namespace {

using groups = ddp::parameter_groups<any_optimizer>;

std::vector<std::size_t> groups_of(groups const& optimizer, std::vector<std::string> const& names) {
    std::vector<ddp::parameter<float>> all;
    for (std::string const& name : names) all.push_back({name, {}, {}, {}});
    return optimizer.groups_of(std::span<ddp::parameter<float> const>(all));
}
std::string complaint(groups const& optimizer, std::vector<std::string> const& names) {
    try {
        (void)groups_of(optimizer, names);
        return {};
    } catch (ddp::usage_error const& e) {
        return e.what();
    }
}

}  // namespace

static_assert(ddp::OptimizerFor<groups, float> && ddp::OptimizerFor<groups, double>);

TEST_CASE("a pattern fits whole names", "[optim]") {
    struct {
        char const *pattern, *name;
        bool fits;
    } const cases[] = {{"head.bias", "head.bias", true},
                       {"head.bias", "head.bias2", false},
                       {"head.bias", "a.head.bias", false},
                       {"head.*", "head.bias", true},
                       {"head.*", "head.0.bias", true},
                       {"head.*", "head.", true},
                       {"head.*", "head", false},
                       {"*.bias", "0.bias", true},
                       {"*.bias", "0.bias.bias", true},
                       {"*.bias", "bias", false},
                       {"*bias", "bias", true},
                       {"*.bias", "0.Bias", false},
                       {"?.bias", "0.bias", true},
                       {"?.bias", "10.bias", false},
                       {"*.?.bias", "net.10.3.bias", true},
                       {"a*b*c", "axxbyybzzc", true},
                       {"a*b*c", "axxbyybzz", false},
                       {"*ab", "aaab", true},
                       {"*ab*ab", "abxab", true},
                       {"*ab*ab", "ab", false},
                       {"*", "", true},
                       {"**", "x", true},
                       {"", "", true},
                       {"", "x", false},
                       {"?", "", false}};
    for (auto const& [pattern, name, fits] : cases) {
        CAPTURE(pattern, name);
        CHECK(name_fits(pattern, name) == fits);
    }
    REQUIRE_FALSE(name_fits("*a*a*a*a*a*a*a*a*a*a*b", std::string(2000, 'a')));  // at once: no exponential search
}

TEST_CASE("a parameter belongs to the first group that it fits, or to all others", "[optim]") {
    groups const by{ddp::adamw{}, {{"0.*", ddp::sgd{.lr = 1}}, {"*.bias", ddp::sgd{.lr = 2}}}};
    REQUIRE(groups_of(by, {"0.weight", "0.bias", "2.weight", "2.bias"}) == std::vector<std::size_t>{0, 0, 2, 1});
    REQUIRE(by.learning_rate(0) == 1);
    REQUIRE(by.learning_rate(1) == 2);
    REQUIRE(by.learning_rate(2) == ddp::adamw{}.lr);
    REQUIRE(by.learning_rate() == ddp::adamw{}.lr);

    ddp::parameter_groups const plain{ddp::sgd{.lr = 0.1}, {{"*", ddp::sgd{.lr = 0.5}}}};  // nothing left for others
    ddp::parameter<float> const one{"x", {}, {}, {}};
    REQUIRE(plain.groups_of(std::span(&one, 1)) == std::vector<std::size_t>{0});
}

TEST_CASE("a group without parameters is refused by name", "[optim]") {
    std::vector<std::string> const names = {"0.weight", "0.bias", "2.weight", "2.bias"};
    groups const misspelt{ddp::sgd{}, {{"*.bias", ddp::sgd{}}, {"head.*", ddp::sgd{}}}};
    std::string const text = complaint(misspelt, names);
    CAPTURE(text);
    CHECK(text ==
          "DDP-E100 usage: parameter_groups: no parameter is left for the group 'head.*': the model's are named "
          "'0.weight', '0.bias', '2.weight', '2.bias'. '*' stands for any characters, '?' for one.");

    groups const shadowed{ddp::sgd{}, {{"*.bias", ddp::sgd{}}, {"2.bias", ddp::sgd{}}}};
    std::string const second = complaint(shadowed, names);
    CAPTURE(second);
    CHECK(
        second.find("parameter_groups: no parameter is left for the group '2.bias': '2.bias', for example, matches an "
                    "earlier group. Put the narrower pattern first.") != second.npos);
    CHECK(complaint(groups{ddp::sgd{}, {{"2.bias", ddp::sgd{}}, {"*.bias", ddp::sgd{}}}}, names).empty());
}

TEST_CASE("the hash of groups covers patterns, members and their order", "[optim]") {
    auto const hash = [](groups const& g) { return g.hash(); };
    auto const one = hash({ddp::sgd{}, {{"a", ddp::sgd{.lr = 1}}, {"b", ddp::sgd{.lr = 2}}}});
    CHECK(one == hash({ddp::sgd{}, {{"a", ddp::sgd{.lr = 1}}, {"b", ddp::sgd{.lr = 2}}}}));
    CHECK(one != hash({ddp::sgd{}, {{"b", ddp::sgd{.lr = 2}}, {"a", ddp::sgd{.lr = 1}}}}));
    CHECK(one != hash({ddp::sgd{}, {{"a", ddp::sgd{.lr = 1}}, {"c", ddp::sgd{.lr = 2}}}}));
    CHECK(one != hash({ddp::sgd{}, {{"a", ddp::sgd{.lr = 1}}, {"b", ddp::sgd{.lr = 3}}}}));
    CHECK(one != hash({ddp::adam{}, {{"a", ddp::sgd{.lr = 1}}, {"b", ddp::sgd{.lr = 2}}}}));
    CHECK(one != hash({ddp::sgd{}, {{"a", ddp::sgd{.lr = 1}}}}));
}

TEST_CASE("every member of groups is validated", "[optim]") {
    REQUIRE_NOTHROW(groups{ddp::sgd{}, {{"a", ddp::adam{}}}}.validate());
    REQUIRE_THROWS_WITH((groups{ddp::sgd{.lr = -1}, {{"a", ddp::adam{}}}}.validate()),
                        Catch::Contains("sgd: lr is -1, but must be a finite number >= 0"));
    REQUIRE_THROWS_WITH((groups{ddp::sgd{}, {{"a", ddp::adam{.eps = -1}}}}.validate()),
                        Catch::Contains("adam: eps must be a finite number > 0; 1e-8 is usual"));
}

TEMPLATE_TEST_CASE("a range is stepped as its group's optimizer steps it", "[optim]", float, double) {
    ddp::adam const steady{.lr = 0.1};
    ddp::sgd const quick{.lr = 0.5, .momentum = 0.9}, plain{.lr = 0.5};
    groups const all{steady, {{"a", quick}, {"b", plain}}};
    REQUIRE(all.slot_count() == 2);

    test::mixed_values mixed(1);
    auto const start = mixed.vector<TestType>(100), gradient = mixed.vector<TestType>(100);
    auto const expect_as = [&](auto const& alone, std::size_t group) {
        test::stepped_range<TestType> grouped(start, 2), own(start, alone.slot_count());
        for (std::uint64_t step = 1; step <= 3; ++step) {
            grouped.step(all, {.step = step, .learning_rate = 0.25, .group = group}, gradient);
            own.step(alone, {.step = step, .learning_rate = 0.25}, gradient);
        }
        REQUIRE(test::same_bits(grouped.value, own.value));
        for (std::size_t k = 0; k < own.slots.size(); ++k) REQUIRE(test::same_bits(grouped.slots[k], own.slots[k]));
    };
    expect_as(quick, 0);
    expect_as(plain, 1);
    expect_as(steady, 2);

    test::stepped_range<TestType> range(start, 2);
    REQUIRE_THROWS_WITH(range.step(all, {.step = 1, .learning_rate = 0.25, .group = 3}, gradient),
                        Catch::Contains("parameter_groups: step_info::group must be one that groups_of() gave"));
}
