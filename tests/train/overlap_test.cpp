// Buckets are reduced while backward still runs.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

TEST_CASE("a bucket is reduced before backward reports its last gradient", "[train]") {
    int const ranks = GENERATE(2, 3, 5);
    bool const sharded = GENERATE(false, true), clipped = GENERATE(false, true);
    for (char const* const algorithm : {"auto", "direct", "halving_doubling", "ring", "naive"}) {
        recipe const by{
            .name = algorithm, .algorithm = any_allreduce::parse(algorithm), .options = options_of(sharded, clipped)};
        CAPTURE(ranks, sharded, clipped, algorithm);
        for (std::string const& wrong :
             run_ranks(ranks, [&](auto& comm) { return overlap_check::run(comm, by); }, patient()))
            REQUIRE(wrong == "");
    }
}

TEST_CASE("with one bucket in flight the first is reduced all the same", "[train]") {
    recipe by{.name = "one in flight"};
    by.options.buckets_in_flight = 1;
    for (std::string const& wrong : run_ranks(2, [&](auto& comm) { return overlap_check::run(comm, by); }, patient()))
        REQUIRE(wrong == "");
}

namespace {

/// One parameter of five buckets, reported a quarter at a time: `before_last` is called before the first quarter is computed.
struct quartered_model {
    using element = float;
    std::vector<float> value = std::vector<float>(400), gradient = std::vector<float>(400);
    std::function<void()> before_last = {};
    [[nodiscard]] std::vector<parameter<float>> parameters() { return {{"w", {400}, value, gradient}}; }
    double forward(overlap_check::one_sample const&) { return 0; }
    template <class Ready>
    void backward(pass<float> how, Ready const& ready) {
        for (std::size_t first : {304u, 208u, 112u, 0u}) {
            if (first == 0) before_last();
            std::size_t const end = first == 304 ? 400 : first == 0 ? 112 : first + 96;
            for (std::size_t k = first; k < end; ++k) gradient[k] = how.scale * static_cast<float>(k);
            ready(0, first, end - first);
        }
    }
};

}  // namespace

TEST_CASE("the last elements of a gradient are reduced before its first are computed", "[train]") {
    int const ranks = GENERATE(1, 2, 3);
    bool const sharded = GENERATE(false, true);
    CAPTURE(ranks, sharded);
    auto const wrong = run_ranks(
        ranks,
        [&](auto& comm) -> std::string {
            std::atomic<std::uint64_t> reduced = 0;
            quartered_model net;
            bool early = true;
            net.before_last = [&] {
                auto const until = monotonic_clock::now() + std::chrono::seconds(20);
                while ((reduced.load() & 28) != 28 && monotonic_clock::now() < until) {
                    comm.progress();  // moves things on where no thread does
                    if (comm.has_thread()) std::this_thread::sleep_for(std::chrono::microseconds(50));
                }
                early = reduced.load() == 28;  // all but the first quarter's two buckets
            };
            data_parallel trainer{net,
                                  sgd{.lr = 1},
                                  comm,
                                  options_of(sharded, false),
                                  size_capped_buckets{.cap_bytes = 384, .first_bytes = 384},
                                  overlap_check::observer{&reduced}};
            trainer.step(overlap_check::one_sample{});
            if (!early) return "waits for the whole gradient";
            for (std::size_t k = 0; k < 400; ++k)
                if (net.value[k] != -static_cast<float>(k)) return "another value " + std::to_string(k);
            return "";
        },
        patient());
    for (std::string const& one : wrong) REQUIRE(one == "");
}
