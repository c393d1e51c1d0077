// check_exchange finds what is wrong with an exchange, and nothing in those of the library.
#include <ddp/testing/check_exchange.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <ddp/collective/algorithms/naive_allreduce.hpp>
#include <ddp/exchange/narrow.hpp>
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/exchange/sparse.hpp>

#include "../../examples/rounded_exchange.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"

using namespace ddp;

TEST_CASE("check_exchange finds nothing in the library's own", "[exchange]") {
    REQUIRE(testing::check_exchange(int8_exchange{}).empty());
    REQUIRE(testing::check_exchange(top_k_exchange{.ratio = 0.1}).empty());
    REQUIRE(testing::check_exchange(random_k_exchange{.ratio = 0.1}).empty());
    REQUIRE(testing::check_exchange(power_sgd_exchange{.rank = 1}).empty());
    REQUIRE(testing::check_exchange(bfloat16_exchange{}).empty());
    REQUIRE(testing::check_exchange(half_exchange{.feedback = true}).empty());
}

TEST_CASE("check_exchange finds nothing in the example of docs/own_exchange.md", "[exchange]") {
    REQUIRE(testing::check_exchange(rounded_exchange{}).empty());
    REQUIRE(testing::check_exchange(rounded_exchange{.feedback = false}).empty());
}

namespace {
/// What goes wrong with an exchange.
enum class flaw : std::uint8_t {
    own_bits,
    forgets_sharding,
    counts_nothing,
    hides_state,
    dirty_gaps,
    shares_its_own,
    never_repeats,
    shows_more_later,
    shows_less_later,
    sends_less
};
std::atomic<std::uint64_t> prepared[6][5];  // by number of ranks and rank
struct flawed {
    static constexpr char const* name = "flawed";
    flaw kind;

    struct state {
        std::uint64_t steps = 0;
        bool sharded = false;
        exchange_plan<float> plan = {};
        flaw kind = {};
        std::uint64_t hidden = 0;
        void for_each_state(state_visitor visit) {
            if (kind == (steps != 0 ? flaw::shows_more_later : flaw::shows_less_later))
                visit({.of = "exchange", .name = "hidden", .type = element_type::u64, .bytes = bytes_of(hidden)});
            visit({.of = "exchange", .name = "steps", .type = element_type::u64, .bytes = bytes_of(steps)});
        }
        void for_each_shared(shared_state_visitor visit) const {
            std::uint64_t const own = static_cast<std::uint64_t>(plan.rank);
            if (kind == flaw::shares_its_own) visit(bytes_of(own));
        }
    };
    [[nodiscard]] std::uint64_t hash() const { return 1; }
    [[nodiscard]] state prepare(exchange_plan<float> const& plan) const {
        std::uint64_t const before = prepared[plan.ranks][plan.rank]++;  // trainers of so many ranks
        return {0, plan.sharded, plan, kind, kind == flaw::never_repeats ? before : 0};
    }
    [[nodiscard]] bool everywhere(exchange_plan<float> const&, std::size_t) const { return true; }
    template <Transport T>
    static task<> exchange(flawed self, lane<T> over, state& kept, bucket_exchange<float> what) {
        co_await *what.go;
        bool const less = self.kind == flaw::sends_less && over.rank() == 1;
        co_await naive_allreduce::sum({}, over, what.data.first(what.data.size() - (less ? 1 : 0)));
        if (self.kind == flaw::counts_nothing || *what.factor != 0) ++kept.steps;
        if (*what.factor == 0) co_return;
        for (float& x : what.data) x *= *what.factor;
        if (self.kind == flaw::hides_state) what.data[0] += static_cast<float>(++kept.hidden);
        if (self.kind == flaw::never_repeats) what.data[0] += static_cast<float>(kept.hidden);
        auto const& pieces = kept.plan.buckets[what.bucket].pieces;
        for (std::size_t i = 1; self.kind == flaw::dirty_gaps && i < pieces.size(); ++i)
            for (std::size_t k = pieces[i - 1].begin + pieces[i - 1].count; k < pieces[i].begin; ++k) what.data[k] = 1;
        if (self.kind == flaw::own_bits && over.rank() == 1 && !what.data.empty()) what.data[0] += 1;
        if (self.kind == flaw::forgets_sharding && kept.sharded && !what.data.empty()) what.data[0] += 1;
    }
    template <Transport T>
    static task<> gather(flawed, lane<T>, state&, bucket_exchange<float>) {
        co_return;
    }
};
}  // namespace

namespace {
/// Two values, whose gradient is NaN.
struct without_numbers {
    using element = float;
    struct batch {
        [[nodiscard]] std::size_t size() const noexcept { return 1; }
    };
    float value[2] = {}, gradient[2] = {};
    [[nodiscard]] std::vector<parameter<float>> parameters() { return {{"a", {2}, value, gradient}}; }
    double forward(batch const& /*of*/) { return 0; }
    template <class Ready>
    void backward(pass<float> /*how*/, Ready const& ready) {
        gradient[0] = gradient[1] = std::numeric_limits<float>::quiet_NaN();
        ready(0);
    }
};
}  // namespace

TEST_CASE("an exchange whose state has another size after a step than before it cannot take the step back",
          "[exchange]") {
    for (flaw const kind : {flaw::shows_more_later, flaw::shows_less_later}) {
        auto const thrown = ddp::test::errors_of_ranks(1, [&](auto& comm) {
            without_numbers net;
            data_parallel trainer{net, sgd{}, comm, training_options{.nonfinite = nonfinite::skip}, flawed{kind}};
            trainer.step(without_numbers::batch{});
        });
        REQUIRE_THAT(
            thrown[0],
            Catch::Contains("flawed: its state shows another size after an exchange than before it; make all of "
                            "it in prepare()"));
    }
}

TEST_CASE("check_exchange says what is wrong", "[exchange]") {
    auto const complaint = [](flaw kind) {
        auto const all = testing::check_exchange(flawed{kind});
        std::string text;
        for (std::string const& one : all) text += one + "; ";
        return text;
    };
    using Catch::Matchers::Contains;
    REQUIRE_THAT(complaint(flaw::own_bits), Contains("with 2 ranks ranks end a step with different bits"));
    REQUIRE_THAT(complaint(flaw::forgets_sharding), Contains("sharded and replicated updates give different bits"));
    REQUIRE_THAT(complaint(flaw::counts_nothing), Contains("in which no rank has samples changes the state"));
    REQUIRE_THAT(
        complaint(flaw::hides_state),
        Contains("with 1 ranks a training that goes on with values and state from for_each_state gives other bits"));
    REQUIRE_THAT(complaint(flaw::never_repeats), Contains("with 2 ranks a second training gives other bits"));
    REQUIRE_THAT(complaint(flaw::shows_more_later),
                 Contains("with 3 ranks two trainers of the same model show different state"));
    REQUIRE_THAT(complaint(flaw::sends_less),
                 Contains("with 5 ranks some ranks never finish: ") && !Contains("with 1 ranks"));
    REQUIRE_THAT(complaint(flaw::dirty_gaps), Contains("something is left between the parameters of a bucket"));
    REQUIRE_THAT(
        complaint(flaw::shares_its_own),
        Contains("with 3 ranks the ranks do not hold the same bits: DDP-E106") && Contains("what the exchange keeps"));
}
