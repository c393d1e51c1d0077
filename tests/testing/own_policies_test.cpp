// The policies of the examples keep what they promise, and the checks that say so find the mistakes of others.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ddp/collective/algorithms/halving_doubling_allreduce.hpp>
#include <ddp/collective/algorithms/ring_allreduce.hpp>
#include <ddp/testing/check_allreduce.hpp>
#include <ddp/testing/check_buckets.hpp>
#include <ddp/testing/check_optimizer.hpp>
#include <ddp/train/data_parallel.hpp>

#include "../../examples/binomial_tree.hpp"
#include "../../examples/equal_buckets.hpp"
#include "../../examples/lion.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "train/patience.hpp"
#include "train/tanh_mlp.hpp"

using namespace ddp;

namespace {

using complaints = std::vector<std::string>;
complaints const none;

bool mentions(complaints const& all, std::string const& words) {
    for (std::string const& one : all)
        if (one.find(words) != std::string::npos) return true;
    return false;
}

/// Lion as its authors write it: whole arrays, one operation after the other. Nothing can be contracted.
template <class E>
struct textbook_lion {
    using array = std::vector<E>;
    E eta, beta1, beta2, lambda;
    array theta, m;

    [[gnu::noinline]] static array times(E factor, array a) {
        for (E& x : a) x *= factor;
        return a;
    }
    [[gnu::noinline]] static array plus(array a, array const& b) {
        for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
        return a;
    }
    static array sign(array a) {
        for (E& x : a) x = x > 0 ? E(1) : x < 0 ? E(-1) : E(0);
        return a;
    }
    void step(array const& g, E rest1, E rest2) {
        array const c = plus(times(beta1, m), times(rest1, g));
        theta = plus(theta, times(-eta, plus(sign(c), times(lambda, theta))));
        m = plus(times(beta2, m), times(rest2, g));
    }
};

std::uint64_t train_with_lion(int ranks, update how, std::size_t bucket_bytes) {
    auto const bits = test::run_ranks(
        ranks,
        [&](auto& comm) {
            test::task_data<float> const data(7, 3, 24);
            test::tanh_mlp<float> model(7, 24, 3, 1);
            data_parallel trainer{model,
                                  ::lion{.lr = 0.01, .weight_decay = 0.1},
                                  comm,
                                  training_options{.update = how},
                                  automatic_allreduce{},
                                  size_capped_buckets{.cap_bytes = bucket_bytes, .first_bytes = bucket_bytes}};
            std::size_t const share = 24 / static_cast<std::size_t>(comm.size());
            std::size_t const first = share * static_cast<std::size_t>(comm.rank());
            for (int step = 0; step < 20; ++step) trainer.step(data.batch(first, first + share));
            return trainer.replicas_identical() ? trainer.digest_of_values() : 0;
        },
        test::patient());
    return bits.front();
}

}  // namespace

TEMPLATE_TEST_CASE("the Lion of the examples is the textbook's to the last bit", "[testing][optimizer]", float,
                   double) {
    using E = TestType;
    ::lion const optimizer{.lr = 0.003, .weight_decay = 0.05};
    std::size_t const count = 333;
    random_stream const draws{5, random_use::user};
    std::vector<E> value(count), momentum(count), gradient(count);
    for (std::size_t i = 0; i < count; ++i) value[i] = draws.at(i).symmetric<E>();
    textbook_lion<E> book{E(optimizer.lr), E(optimizer.beta1), E(optimizer.beta2), E(optimizer.weight_decay), value,
                          momentum};
    for (std::uint64_t step = 1; step <= 30; ++step) {
        for (std::size_t i = 0; i < count; ++i) gradient[i] = draws.at(step * count + i).symmetric<E>();
        std::span<E> slots[] = {momentum};
        optimizer.step({.step = step, .learning_rate = optimizer.lr}, std::span<E const>(gradient), std::span<E>(value),
                       slot_spans<E>(slots));
        book.step(gradient, E(1 - optimizer.beta1), E(1 - optimizer.beta2));
    }
    REQUIRE(value == book.theta);
    REQUIRE(momentum == book.m);
}

TEST_CASE("the Lion of the examples trains to the same bits with every update and bucket size",
          "[testing][optimizer]") {
    std::uint64_t const bits = train_with_lion(3, update::replicated, 1 << 20);
    REQUIRE(bits != 0);
    for (auto const how : {update::replicated, update::sharded})
        for (std::size_t const bytes : {64u, 256u, 1024u}) REQUIRE(train_with_lion(3, how, bytes) == bits);
}

TEST_CASE("an optimizer of one's own, checked", "[testing][optimizer]") {
    REQUIRE(ddp::testing::check_optimizer<float>(::lion{}) == std::vector<std::string>{});
    REQUIRE(ddp::testing::check_optimizer<double>(::lion{.weight_decay = 0.1}) == std::vector<std::string>{});
}

namespace {

/// Gradient descent with one mistake.
enum class mistake { own_rate, forgets_scale, looks_left, counts_calls, random_hash, no_kernel };
struct wrong_optimizer {
    mistake wrong;
    std::uint64_t* calls;

    std::size_t slot_count() const { return 0; }
    double learning_rate() const { return 0.1; }
    std::uint64_t hash() const { return wrong == mistake::random_hash ? ++*calls : 1; }
    template <class E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E>) const {
        double const rate = wrong == mistake::own_rate ? learning_rate() : at.learning_rate;
        double const scale = wrong == mistake::forgets_scale ? 1 : at.gradient_scale;
        double const noise = wrong == mistake::counts_calls ? 1 + 0.01 * static_cast<double>(++*calls % 7) : 1;
        for (std::size_t i = 0; i < value.size(); ++i) {
            std::size_t const k = wrong == mistake::looks_left && i > 0 ? i - 1 : i;
            value[i] -= static_cast<E>(rate * noise) * (static_cast<E>(scale) * gradient[k]);
        }
    }
};

}  // namespace

#if DDP_CAN_FORCE_CONTRACTION  // CMakeLists.txt compiles this file with -O2, whatever the others are compiled with
TEST_CASE("check_optimizer finds arithmetic that is not in a kernel", "[testing][optimizer]") {
    if (!__builtin_cpu_supports("fma")) {
        WARN("not tried: this processor has no FMA");
        return;
    }
    std::uint64_t calls = 0;
    REQUIRE(mentions(ddp::testing::check_optimizer<float>(wrong_optimizer{mistake::no_kernel, &calls}),
                     "its arithmetic is not in a DDP_KERNEL function"));
    REQUIRE(mentions(ddp::testing::check_optimizer<double>(wrong_optimizer{mistake::no_kernel, &calls}),
                     "its arithmetic is not in a DDP_KERNEL function"));
    REQUIRE(ddp::testing::check_optimizer<float>(sgd{.momentum = 0.9, .weight_decay = 0.01}) == none);
    REQUIRE(ddp::testing::check_optimizer<double>(adamw{.weight_decay = 0.01}) == none);
}
#else
TEST_CASE("check_optimizer finds arithmetic that is not in a kernel", "[testing][optimizer]") {
    WARN("not tried: contraction, which this compiler cannot be made to do");
}
#endif

TEST_CASE("check_optimizer names what is wrong with an optimizer", "[testing][optimizer]") {
    auto const [wrong, words] = GENERATE(table<mistake, std::string>({
        {mistake::own_rate, "does not use info.learning_rate"},
        {mistake::forgets_scale, "by info.gradient_scale"},
        {mistake::looks_left, "pieces of 37 elements give other bits"},
        {mistake::counts_calls, "keeps something between calls"},
        {mistake::random_hash, "a copy has another hash"},
    }));
    CAPTURE(words);
    std::uint64_t calls = 0;
    REQUIRE(mentions(ddp::testing::check_optimizer(wrong_optimizer{wrong, &calls}), words));
}

namespace {

/// The same tree, but the farthest pair first: what one gets by halving the distance instead of doubling it.
struct far_first_tree {
    char const* name = "far_first";
    bool canonical = false;

    template <Transport T, Element E>
    static task<> sum(far_first_tree /*self*/, lane<T> over, std::span<E> data) {
        int const me = over.rank(), ranks = over.size();
        scratch memory(data.size_bytes());
        std::span<E> const theirs = memory.template as<E>();
        operation in, out;
        int distance = 1;
        while (distance < ranks) distance *= 2;
        for (distance /= 2; distance > 0 && me < 2 * distance; distance /= 2) {
            if (me >= distance) {
                over.send(out, me - distance, as_const_bytes(data));
                co_await out;
                break;
            }
            if (me + distance >= ranks) continue;
            over.receive(in, me + distance, as_mutable_bytes(theirs));
            co_await in;
            add(data, std::span<E const>(data), std::span<E const>(theirs));
        }
        for (int rank = 1; rank < ranks; ++rank) {
            lane<T> const down = over.phase(1);
            if (me == 0) {
                down.send(out, rank, as_const_bytes(data));
                co_await out;
            } else if (me == rank) {
                down.receive(in, 0, as_mutable_bytes(data));
                co_await in;
            }
        }
    }
};

/// Leaves rank 1 without the last element.
struct forgetful_sum {
    char const* name = "forgetful";
    bool canonical = true;

    template <Transport T, Element E>
    static task<> sum(forgetful_sum /*self*/, lane<T> over, std::span<E> data) {
        E const mine = data.back();
        co_await naive_allreduce::sum({}, over, data);
        if (over.rank() == 1) data.back() = mine;
    }
};

}  // namespace

TEST_CASE("an allreduce of one's own, checked", "[testing][allreduce]") {
    REQUIRE(ddp::testing::check_allreduce(binomial_tree_allreduce{}) == std::vector<std::string>{});
    REQUIRE(ddp::testing::canonical_difference(binomial_tree_allreduce{}) == "");
}

TEST_CASE("is_canonical tells the order of summation", "[testing][allreduce]") {
    REQUIRE(ddp::testing::is_canonical(automatic_allreduce{}));
    REQUIRE(ddp::testing::is_canonical(naive_allreduce{}));
    REQUIRE(!ddp::testing::is_canonical(ring_allreduce{}));
    REQUIRE(ddp::testing::check_allreduce(ring_allreduce{}) == none);
    REQUIRE(ddp::testing::check_allreduce(far_first_tree{}) == none);
    REQUIRE(ddp::testing::canonical_difference(far_first_tree{}).find("with 3 ranks, element ") == 0);

    far_first_tree const boastful{.canonical = true};
    REQUIRE(
        mentions(ddp::testing::check_allreduce(boastful), "it declares itself canonical, but is not: with 3 ranks"));
}

namespace {

/// Leaves the last rank waiting for the sum.
struct deserting_sum {
    char const* name = "deserting";
    bool canonical = true;

    template <Transport T, Element E>
    static task<> sum(deserting_sum /*self*/, lane<T> over, std::span<E> data) {
        int const me = over.rank(), last = over.size() - 1;
        operation in;
        scratch memory(data.size_bytes());
        if (me != last) co_return;
        over.receive(in, 0, as_mutable_bytes(memory.template as<E>()));
        co_await in;
    }
};

}  // namespace

TEST_CASE("check_allreduce says that a rank is left out", "[testing][allreduce]") {
    auto const said = ddp::testing::check_allreduce(deserting_sum{});
    REQUIRE(said.size() == 1);
    CAPTURE(said.front());
    REQUIRE(said.front().find("with 2 ranks and 1 elements some ranks never finish") == 0);
    REQUIRE(ddp::testing::canonical_difference(deserting_sum{}).find("some ranks never finish") != std::string::npos);
    REQUIRE(!ddp::testing::is_canonical(deserting_sum{}));
}

TEST_CASE("check_allreduce names what is wrong with an algorithm", "[testing][allreduce]") {
    auto const said = ddp::testing::check_allreduce(forgetful_sum{});
    REQUIRE(mentions(said, "not the sum: with 2 ranks, element 0 of 1 on rank 1"));
    REQUIRE(mentions(said, "not the bits of rank 0: with 3 ranks, element 1002 of 1003 on rank 1"));
}

namespace {

/// Sums well, and does everything else wrongly.
struct only_sums {
    char const* name = "only sums";
    bool canonical = true;

    template <Transport T, Element E>
    static task<> sum(only_sums /*self*/, lane<T> over, std::span<E> data) {
        return naive_allreduce::sum({}, over, data);
    }
    template <Transport T, Element E, class Op>
    static task<> combine(only_sums /*self*/, lane<T> over, std::span<E> data, Op /*op*/) {
        return naive_allreduce::sum({}, over, data);
    }
    template <Transport T, Element E>
    static task<> reduce(only_sums /*self*/, lane<T> over, reduction<E> what) {
        co_await naive_allreduce::sum({}, over, what.data);  // forgets the factor
    }
    template <Transport T, Element E>
    static task<> all_gather(only_sums /*self*/, lane<T> /*over*/, std::span<E> data, std::span<std::size_t const>) {
        if (!data.empty()) data.back() = 0;
        co_return;
    }
    [[nodiscard]] bool everywhere(std::size_t /*bytes*/, int /*ranks*/) const { return false; }
};

}  // namespace

TEST_CASE("check_allreduce tries what else an algorithm says that it can", "[testing][allreduce]") {
    auto const said = ddp::testing::check_allreduce(only_sums{});
    CHECK(!mentions(said, "not the sum"));
    CHECK(mentions(said, "reduce: not this rank's slice of the sum, times the factor: with 2 ranks, element 0 of 1 "));
    CHECK(mentions(said, "all_gather: not the slices of all ranks: with 9 ranks, element 0 of 1003 on rank 0"));
    for (char const* const op : {"minimum", "maximum", "product"})
        CHECK(mentions(said, std::string("combine: not the ") + op + ": with 2 ranks, element 0 of 1 on rank 0"));
    for (auto const& sound : {std::vector<std::string>(ddp::testing::check_allreduce(automatic_allreduce{})),
                              ddp::testing::check_allreduce(halving_doubling_allreduce{})})
        CHECK(sound == none);
}

namespace {

struct wrong_buckets {
    enum { moody, ungrained, unordered } wrong;
    mutable std::size_t calls = 0;
    bucket_plan plan(bucket_request const& request) const {
        bucket_plan all;
        if (wrong == moody && ++calls % 2 == 0) all.cuts.push_back({0, 0});
        if (wrong == ungrained) all.cuts.push_back({0, std::min<std::size_t>(request.counts[0], 3)});
        if (wrong == unordered) all.order.assign(request.counts.size(), 0);
        return all;
    }
};

}  // namespace

TEST_CASE("a bucket policy of one's own, checked", "[testing][buckets]") {
    REQUIRE(ddp::testing::check_buckets(equal_buckets{}) == std::vector<std::string>{});
    REQUIRE(ddp::testing::check_buckets(equal_buckets{.count = 100}) == std::vector<std::string>{});
}

TEST_CASE("check_buckets names what is wrong with a bucket policy", "[testing][buckets]") {
    REQUIRE(ddp::testing::check_buckets(size_capped_buckets{.cap_bytes = 1000, .first_bytes = 100}) == none);
    REQUIRE(ddp::testing::check_buckets(per_parameter_buckets{}) == none);
    REQUIRE(mentions(ddp::testing::check_buckets(wrong_buckets{wrong_buckets::moody}), "plan() must be pure"));
    REQUIRE(mentions(ddp::testing::check_buckets(wrong_buckets{wrong_buckets::ungrained}), "only at multiples"));
    REQUIRE(
        mentions(ddp::testing::check_buckets(wrong_buckets{wrong_buckets::unordered}), "every parameter exactly once"));
}
