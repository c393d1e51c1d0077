// Layouts and bucket plans are pure functions: what must hold for any sizes of parameters.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/random.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/step_mail.hpp>

#include "support/catch.hpp"
#include "support/training_checks.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

/// Sizes of parameters, by what is awkward about them.
std::vector<std::pair<std::string, std::vector<std::size_t>>> size_lists() {
    random_stream const draws(3, random_use::user);
    std::vector<std::size_t> mixed, tiny(3000, 1), small(500);
    for (std::size_t i = 0; i < 60; ++i) mixed.push_back(draws.at(i).below(i % 3 == 0 ? 3 : i % 3 == 1 ? 300 : 20'000));
    for (std::size_t i = 0; i < small.size(); ++i) small[i] = draws.at(1000 + i).below(40);
    return {{"one element", {1}},
            {"nothing at all", {0, 0, 0}},
            {"empty ones between", {0, 5, 0, 0, 4096, 0}},
            {"one huge", {1'000'003}},
            {"huge between small", {10, 7, 1'000'003, 3, 64}},
            {"exact multiples", {4096, 8192, 16, 4096 * 3}},
            {"mixed", mixed},
            {"thousands tiny", tiny},
            {"small", small}};
}

struct geometry {
    std::size_t element_bytes, grain;
};
constexpr geometry geometries[] = {{4, 16}, {8, 8}, {4, statistics_block}, {8, statistics_block}};

/// "" if every element is in exactly one bucket and the plan's numbers agree with each other.
std::string check_map(layout const& where, detail::bucket_map const& map, std::size_t grain) {
    if (map.count() == 0 || map.begin(0) != 0 || map.end(map.count() - 1) != where.size()) return "does not cover";
    std::vector<std::size_t> covered(where.parameters(), 0);
    std::vector<std::vector<std::size_t>> touches(where.parameters());
    std::string wrong;
    for (std::size_t b = 0; b < map.count(); ++b) {
        if (map.end(b) < map.begin(b) || (b > 0 && map.begin(b) != map.end(b - 1))) return "buckets do not follow";
        std::size_t members = 0;
        where.for_each_in(map.begin(b), map.end(b), [&](std::size_t i, std::size_t from, std::size_t to) {
            if (from != where.begin(i) + covered[i]) wrong = "elements left out or taken twice";
            if ((from - where.begin(i)) % grain != 0) wrong = "a cut is off the grain";
            covered[i] += to - from;
            touches[i].push_back(b);
            ++members;
        });
        if (members != map.members(b)) wrong = "counts other members";
    }
    for (std::size_t i = 0; i < where.parameters(); ++i) {
        if (covered[i] != where.count(i)) wrong = "elements without a bucket";
        if (!std::equal(touches[i].begin(), touches[i].end(), map.touches(i).begin(), map.touches(i).end()))
            wrong = "other touches";
    }
    std::vector<std::size_t> launch(map.launch().begin(), map.launch().end());
    std::sort(launch.begin(), launch.end());
    for (std::size_t b = 0; b < launch.size(); ++b)
        if (launch.size() != map.count() || launch[b] != b) wrong = "launches are no permutation";
    return wrong;
}

/// The same by looking at every parameter: what binary searches have to find.
std::vector<std::size_t> plain_slices(layout const& where, std::size_t from, std::size_t to, std::size_t parts,
                                      std::size_t grain) {
    std::vector<std::size_t> cuts(parts + 1, to);
    cuts[0] = from;
    for (std::size_t p = 1; p < parts; ++p) {
        std::size_t const target = from + (to - from) / parts * p + (to - from) % parts * p / parts;
        std::size_t best = from;
        for (std::size_t const i : where.order()) {
            std::size_t const a = std::max(from, where.begin(i)), b = std::min(to, where.end(i));
            if (a >= b || a > target) continue;
            std::size_t const inside = std::min(target, b) - where.begin(i);
            best = std::max(best, std::max(a, where.begin(i) + inside / grain * grain));
        }
        cuts[p] = std::max(best, cuts[p - 1]);
    }
    return cuts;
}

std::string check_slices(layout const& where, std::size_t from, std::size_t to, std::size_t parts, std::size_t grain) {
    auto const cuts = where.slices(from, to, parts, grain);
    if (cuts.size() != parts + 1 || cuts.front() != from || cuts.back() != to) return "slices do not cover";
    if (cuts != plain_slices(where, from, to, parts, grain)) return "other slices than those of a plain search";
    std::string wrong;
    for (std::size_t p = 0; p < parts; ++p) {
        if (cuts[p + 1] < cuts[p]) return "slices do not ascend";
        if (cuts[p + 1] - cuts[p] > (to - from) / parts + grain + 32) return "slices are far from even";
        where.for_each_in(cuts[p], cuts[p + 1], [&](std::size_t i, std::size_t a, std::size_t) {
            if (a != from && (a - where.begin(i)) % grain != 0) wrong = "a slice begins off the grain";
        });
    }
    return wrong;
}

}  // namespace

TEST_CASE("the parameters in a range are those that a look at each would find", "[train]") {
    random_stream const draws(11, random_use::user);
    std::uint64_t draw = 0;
    std::size_t looked_at = 0;
    for (auto const& [name, counts] : size_lists()) {
        std::vector<std::size_t> order(counts.size());
        std::iota(order.rbegin(), order.rend(), std::size_t{0});
        layout const where(counts, order, 4);
        for (int k = 0; k < 50; ++k) {
            std::size_t from = draws.at(draw++).below(where.size() + 1), to = draws.at(draw++).below(where.size() + 1);
            if (from > to) std::swap(from, to);
            CAPTURE(name, from, to);
            std::vector<std::array<std::size_t, 3>> plain, found;
            for (std::size_t const i : order) {
                std::size_t const a = std::max(from, where.begin(i)), b = std::min(to, where.end(i));
                if (a < b) plain.push_back({i, a, b});
            }
            where.for_each_in(from, to,
                              [&](std::size_t i, std::size_t a, std::size_t b) { found.push_back({i, a, b}); });
            REQUIRE(found == plain);
            looked_at += found.size();
        }
    }
    REQUIRE(looked_at > 1000);
}

TEST_CASE("a look at each of many buckets does not look at all parameters", "[train]") {
    std::vector<std::size_t> const counts(100'000, 3);
    auto const since = std::chrono::steady_clock::now();
    layout const where(counts, {}, 4);
    detail::bucket_map const buckets(per_parameter_buckets{}.plan({counts, 4, 16}), where, 16);
    REQUIRE(buckets.count() == counts.size());
    std::size_t found = 0;
    for (std::size_t b = 0; b < buckets.count(); ++b)
        where.for_each_in(buckets.begin(b), buckets.end(b),
                          [&](std::size_t, std::size_t from, std::size_t to) { found += to - from; });
    CHECK(found == 300'000);
    CHECK(std::chrono::steady_clock::now() - since < std::chrono::seconds(5));  // 10^10 looks: a minute
}

TEST_CASE("a layout puts every parameter at 64 bytes, in the order it is given", "[train]") {
    for (auto const& [name, counts] : size_lists())
        for (std::size_t const bytes : {std::size_t{4}, std::size_t{8}}) {
            CAPTURE(name, bytes);
            std::vector<std::size_t> order(counts.size());
            std::iota(order.rbegin(), order.rend(), std::size_t{0});
            layout const where(counts, order, bytes);
            std::size_t end = 0, blocks = 0;
            for (std::size_t const i : order) {
                REQUIRE(where.begin(i) >= end);
                REQUIRE(where.begin(i) < end + 64 / bytes);
                REQUIRE(where.begin(i) * bytes % 64 == 0);
                REQUIRE(where.count(i) == counts[i]);
                REQUIRE(where.first_block(i) == blocks);
                end = where.end(i);
                blocks += (counts[i] + statistics_block - 1) / statistics_block;
            }
            REQUIRE(where.size() >= end);
            REQUIRE(where.blocks() == blocks);

            layout const packed(counts, {}, bytes, parameter_placement::contiguous);
            end = 0;
            for (std::size_t i = 0; i < counts.size(); ++i) {
                REQUIRE(packed.begin(i) == end);
                end += counts[i];
            }
            REQUIRE(packed.size() == end);
            REQUIRE(packed.blocks() == blocks);
            if (counts.size() > 1)
                CHECK_THROWS_WITH(layout(counts, order, bytes, parameter_placement::contiguous),
                                  Catch::Contains("list what is frozen last"));
        }
}

TEST_CASE("every element is in exactly one bucket, and cuts are on the grain", "[train]") {
    for (auto const& [name, counts] : size_lists())
        for (auto const& [policy_name, policy] : bucket_policies())
            for (geometry const& g : geometries) {
                if (name == "one huge" && policy_name == "capped") continue;  // thousands of buckets tell no more
                CAPTURE(name, policy_name, g.element_bytes, g.grain);
                bucket_plan const plan = policy.plan({counts, g.element_bytes, g.grain});
                layout const where(counts, plan.order, g.element_bytes);
                detail::bucket_map const map(plan, where, g.grain);
                REQUIRE(check_map(where, map, g.grain) == "");
            }
}

TEST_CASE("capped buckets keep to their caps, the first one to fill to its own, and waste none", "[train]") {
    for (auto const& [name, counts] : size_lists())
        for (geometry const& g : geometries)
            for (size_capped_buckets const policy :
                 {size_capped_buckets{}, size_capped_buckets{.cap_bytes = 100'000, .first_bytes = 5000},
                  size_capped_buckets{.cap_bytes = 5000, .first_bytes = 100'000}}) {
                CAPTURE(name, g.element_bytes, g.grain, policy.cap_bytes, policy.first_bytes);
                bucket_plan const plan = policy.plan({counts, g.element_bytes, g.grain});
                layout const where(counts, plan.order, g.element_bytes);
                detail::bucket_map const map(plan, where, g.grain);
                REQUIRE(check_map(where, map, g.grain) == "");
                auto const bytes = [&](std::size_t b) { return (map.end(b) - map.begin(b)) * g.element_bytes; };
                std::size_t const grain_bytes = g.grain * g.element_bytes, last = map.count() - 1;
                for (std::size_t b = 0; b <= last; ++b) REQUIRE(bytes(b) <= std::max(policy.cap_bytes, grain_bytes));
                REQUIRE(bytes(last) <= std::max(policy.first_bytes, grain_bytes));
                REQUIRE((bytes(last) > 0 || where.size() == 0));
                for (std::size_t b = 0; b + 2 <= last; ++b)  // two neighbours would not have fitted into one
                    REQUIRE(bytes(b) + bytes(b + 1) + 2 * grain_bytes > policy.cap_bytes);
                REQUIRE(map.launch().front() == last);
                REQUIRE(map.launch().back() == 0);
            }
}

TEST_CASE("slices cover a bucket evenly on the grain", "[train]") {
    for (auto const& [name, counts] : size_lists())
        for (geometry const& g : geometries) {
            if (counts.size() > 1000 && g.grain == statistics_block) continue;
            bucket_plan const plan = size_capped_buckets{.cap_bytes = 200'000, .first_bytes = 20'000}.plan(
                {counts, g.element_bytes, g.grain});
            layout const where(counts, plan.order, g.element_bytes);
            detail::bucket_map const map(plan, where, g.grain);
            for (std::size_t b = 0; b < map.count(); ++b)
                for (std::size_t const parts : {1u, 2u, 3u, 5u, 8u, 17u}) {
                    CAPTURE(name, g.element_bytes, g.grain, b, parts);
                    REQUIRE(check_slices(where, map.begin(b), map.end(b), parts, g.grain) == "");
                }
        }
}

TEST_CASE("a plan that makes no sense is refused with advice", "[train]") {
    layout const where({100, 50}, {}, 4);
    auto const refusal = [&](bucket_plan const& plan) {
        try {
            detail::bucket_map const map(plan, where, 16);
            return std::string();
        } catch (usage_error const& e) {
            return std::string(e.what());
        }
    };
    REQUIRE(refusal({}) == "");
    REQUIRE(refusal({.cuts = {{2, 0}}}).find("after the last parameter") != std::string::npos);
    REQUIRE(refusal({.cuts = {{0, 17}}})
                .find("a bucket plan cuts inside a parameter only at multiples of the requested grain") !=
            std::string::npos);
    REQUIRE(refusal({.cuts = {{1, 0}, {0, 16}}}).find("a bucket plan's cuts must ascend") != std::string::npos);
    REQUIRE(refusal({.cuts = {{1, 0}}, .launch = {0}}).find("a bucket plan launches every bucket exactly once") !=
            std::string::npos);
    REQUIRE(refusal({.cuts = {{1, 0}}, .launch = {1, 1}}).find("a bucket plan launches every bucket exactly once") !=
            std::string::npos);
    REQUIRE_THROWS_WITH(layout({1, 2}, {0}, 4),
                        Catch::Contains("a bucket plan's order must name every parameter exactly once"));
    REQUIRE_THROWS_WITH(layout({1, 2}, {0, 0}, 4),
                        Catch::Contains("a bucket plan's order must name every parameter exactly once"));
    REQUIRE_THROWS_WITH(size_capped_buckets{.cap_bytes = 0}.plan({{}, 4, 16}),
                        Catch::Contains("size_capped_buckets: caps are positive numbers of bytes"));
}

TEST_CASE("the hash of a plan covers cuts, launches and the order of equally long parameters", "[train]") {
    std::vector<std::size_t> const counts = {64, 64, 64};
    auto const hash = [&](bucket_plan const& plan) {
        layout const where(counts, plan.order, 4);
        return detail::bucket_map(plan, where, 16).hash(where);
    };
    std::uint64_t const plain = hash({.cuts = {{1, 0}}});
    REQUIRE(hash({.order = {0, 1, 2}, .cuts = {{1, 0}}, .launch = {1, 0}}) == plain);  // what the defaults stand for
    REQUIRE(hash({.cuts = {{2, 0}}}) != plain);
    REQUIRE(hash({.cuts = {{1, 0}}, .launch = {0, 1}}) != plain);
    REQUIRE(hash({.order = {1, 0, 2}, .cuts = {{1, 0}}}) != plain);
}

TEST_CASE("a bucket is full with the report of its last element, whatever ranges gradients are reported in",
          "[train]") {
    random_stream const draws(29, random_use::user);
    std::uint64_t drawn = 0;
    auto const below = [&](std::size_t n) { return static_cast<std::size_t>(draws.at(drawn++).below(n)); };
    for (auto const& [name, counts] : size_lists())
        for (std::size_t const cap : {std::size_t{256}, std::size_t{70'000}}) {
            CAPTURE(name, cap);
            if (counts.size() > 100) continue;  // as the others, for longer
            bucket_plan const plan = size_capped_buckets{.cap_bytes = cap, .first_bytes = 128}.plan({counts, 4, 16});
            layout const where(counts, plan.order, 4);
            detail::bucket_map const map(plan, where, 16);
            detail::step_mail mail(map);
            std::vector<std::uint8_t> silent(map.count());
            for (int pass = 0; pass < 2; ++pass) {
                std::vector<std::size_t> left = counts, posted(map.count());
                std::vector<std::size_t> open(counts.size());
                std::iota(open.begin(), open.end(), std::size_t{0});
                bool wrong = false;
                mail.begin(map, silent);
                mail.take([](std::size_t) {});  // "begun", and buckets of nothing
                while (!open.empty()) {         // ranges of any parameter, each from the end backwards
                    std::size_t const at = below(open.size()), i = open[at];
                    std::size_t const first = left[i] < 64 || below(3) == 0 ? 0 : below(left[i]);
                    bool const said = mail.ready(map, silent, i, first == 0 ? 0 : where.begin(i) + first);
                    std::vector<std::size_t> expected;
                    for (std::size_t const b : map.touches(i)) {
                        bool full = posted[b] == 0;
                        std::size_t own = 0;  // elements of bucket b that this report has made final
                        where.for_each_in(map.begin(b), map.end(b), [&](std::size_t k, std::size_t from, std::size_t) {
                            std::size_t const until = k == i ? first : left[k];
                            full = full && from - where.begin(k) >= until;
                            if (k == i) own = from;
                        });
                        if (full && own < where.begin(i) + left[i]) expected.push_back(b);
                    }
                    std::vector<std::size_t> got;
                    mail.take([&](std::size_t b) { got.push_back(b); });
                    std::sort(got.begin(), got.end());
                    wrong = wrong || got != expected || said != !expected.empty();
                    for (std::size_t const b : got) ++posted[b];
                    left[i] = first;
                    if (first == 0) open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
                }
                for (std::size_t b = 0; b < map.count(); ++b)
                    wrong = wrong || posted[b] != (map.members(b) > 0 ? 1u : 0u);
                REQUIRE(!wrong);
            }
        }
}
