// check_exchange finds what is wrong with an exchange, and nothing in those of the library.
#include <ddp/testing/check_exchange.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

#include <ddp/collective/algorithms/naive_allreduce.hpp>
#include <ddp/exchange/narrow.hpp>
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/exchange/sparse.hpp>

#include "../../examples/rounded_exchange.hpp"
#include "support/catch.hpp"

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
enum class flaw : std::uint8_t { own_bits, forgets_sharding, counts_nothing, hides_state, dirty_gaps, shares_its_own };
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
            visit({.of = "exchange", .name = "steps", .type = element_type::u64, .bytes = bytes_of(steps)});
        }
        void for_each_shared(shared_state_visitor visit) const {
            std::uint64_t const own = static_cast<std::uint64_t>(plan.rank);
            if (kind == flaw::shares_its_own) visit(bytes_of(own));
        }
    };
    [[nodiscard]] std::uint64_t hash() const { return 1; }
    [[nodiscard]] state prepare(exchange_plan<float> const& plan) const { return {0, plan.sharded, plan, kind}; }
    [[nodiscard]] bool everywhere(exchange_plan<float> const&, std::size_t) const { return true; }
    template <Transport T>
    static task<> exchange(flawed self, lane<T> over, state& kept, bucket_exchange<float> what) {
        co_await *what.go;
        co_await naive_allreduce::sum({}, over, what.data);
        if (self.kind == flaw::counts_nothing || *what.factor != 0) ++kept.steps;
        if (*what.factor == 0) co_return;
        for (float& x : what.data) x *= *what.factor;
        if (self.kind == flaw::hides_state) what.data[0] += static_cast<float>(++kept.hidden);
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
    REQUIRE_THAT(complaint(flaw::dirty_gaps), Contains("something is left between the parameters of a bucket"));
    REQUIRE_THAT(
        complaint(flaw::shares_its_own),
        Contains("with 3 ranks the ranks do not hold the same bits: DDP-E106") && Contains("what the exchange keeps"));
}
