// Large steps are cut into pieces, between which the transport is driven: the same bits, and messages that travel meanwhile.
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/optim/parameter_groups.hpp>
#include <ddp/transport/framed/frame_descriptor.hpp>
#include <ddp/transport/framed/framed.hpp>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;
using namespace std::chrono_literals;

namespace ddp::test::pieces {  // not an unnamed one: coroutines of the library hold its types

/// Counts how often it is driven, and what is sent over it. One rank's: its driver's thread writes.
class watched_transport {
public:
    explicit watched_transport(std::unique_ptr<inproc_transport> inner) : inner_(std::move(inner)) {}

    std::size_t driven = 0, posted = 0;
    std::size_t sent = 0;  // posted before it was driven last: those are on their way

    [[nodiscard]] int rank() const { return inner_->rank(); }
    [[nodiscard]] int size() const { return inner_->size(); }
    void post_send(int peer, tag what, const_bytes out, completion& done) {
        ++posted;
        inner_->post_send(peer, what, out, done);
    }
    void post_receive(int peer, tag what, mutable_bytes in, completion& done) {
        inner_->post_receive(peer, what, in, done);
    }
    bool progress(time_point until) {
        ++driven;
        sent = posted;
        return inner_->progress(until);
    }
    void abort(failure const& record) { inner_->abort(record); }
    [[nodiscard]] std::span<report const> reports() const { return inner_->reports(); }
    void wake() { inner_->wake(); }
    [[nodiscard]] time_point now() const { return inner_->now(); }
    [[nodiscard]] std::unique_ptr<memory_sharing> share_memory() { return inner_->share_memory(); }

private:
    std::unique_ptr<inproc_transport> inner_;
};
static_assert(SharingTransport<watched_transport>);

}  // namespace ddp::test::pieces

namespace {

using pieces::watched_transport;

/// One call of an optimizer, and how things stood then.
struct call {
    std::size_t bytes, driven, sent;
    std::uintptr_t at;
};
/// Gradient descent that writes its calls down, and may fail in one.
struct watchful_sgd {
    watched_transport* over;
    std::vector<call>* calls;
    std::size_t fails_in = 0;  // which call; 0: none

    [[nodiscard]] std::size_t slot_count() const { return 0; }
    [[nodiscard]] double learning_rate() const { return 1; }
    [[nodiscard]] std::uint64_t hash() const { return 1; }
    void step(step_info const& at, std::span<double const> gradient, std::span<double> value,
              slot_spans<double> slots) const {
        calls->push_back(
            {value.size_bytes(), over->driven, over->sent, reinterpret_cast<std::uintptr_t>(value.data())});
        if (calls->size() == fails_in) throw std::runtime_error("half-way through a bucket");
        sgd{.lr = 1}.step(at, gradient, value, slots);
    }
};

/// The calls of each rank's optimizer in one step over parameters of these sizes; and what it threw, if anything.
struct outcome {
    std::vector<call> calls;
    std::string error;
    bool torn = false;
    std::vector<double> first_and_last;
};
template <class Buckets>
std::vector<outcome> one_step(int ranks, std::vector<std::size_t> const& sizes, training_options const& options,
                              Buckets const& buckets, std::size_t fails_in = 0) {
    auto world = inproc_world::create(ranks);
    return on_threads(ranks, [&](int r) {
        outcome result;
        try {
            auto mine = std::make_unique<watched_transport>(world->connect(r));
            watched_transport* const over = mine.get();
            communicator<> comm = any_communicator(std::move(mine), patient());
            std::vector<scripted_model<>::part> parts;
            for (std::size_t i = 0; i < sizes.size(); ++i) parts.push_back({"p" + std::to_string(i), {sizes[i]}});
            scripted_model<> net(parts);
            data_parallel trainer{
                net,    watchful_sgd{over, &result.calls, r == 0 ? fails_in : 0}, comm, options, automatic_allreduce{},
                buckets};
            result.error = thrown_by([&] { trainer.step(numbers{{1}}); });
            result.torn = trainer.torn();
            result.first_and_last = {net.value(0)[0], net.value(sizes.size() - 1)[sizes.back() - 1]};
            if (result.error.empty() && !trainer.replicas_identical()) result.error = "replicas differ";
        } catch (std::exception const& e) {
            result.error = e.what();
        }
        return result;
    });
}

/// Behind the gate of clipping, or of a backward that has to end first, because the model is not one with ready_releases.
training_options gated(update how, std::size_t piece, bool shared = false, bool clips = true) {
    training_options options{.update = how, .share_memory = shared, .step_piece_bytes = piece};
    if (clips) options.clip = clip_by_global_norm{.max_norm = 1e6};
    return options;
}

}  // namespace

TEMPLATE_TEST_CASE("pieces of any size give the same bits", "[train]", float, double) {
    parameter_groups<any_optimizer> const groups{adam{.lr = 0.01}, {{"b?", sgd{.lr = 0.1, .momentum = 0.9}}}};
    struct grouped_recipe {
        std::string name;
        parameter_groups<any_optimizer> optimizer;
        any_allreduce algorithm = {};
        any_buckets buckets = single_bucket{};
        training_options options = {};
    };
    std::vector<std::optional<clipping>> const clippings = {
        {}, clip_by_value{.limit = 0.02}, clip_by_global_norm{0.05}};
    for (auto const& clip : clippings)
        for (int const ranks : {1, 3}) {
            std::optional<std::uint64_t> first;
            for (std::size_t const piece : {std::size_t{1} << 30, std::size_t{0}, std::size_t{64}, std::size_t{1000}})
                for (bool const sharded : {false, true})
                    for (any_buckets const& buckets :
                         {any_buckets(single_bucket{}), any_buckets(scrambled_buckets{})}) {
                        grouped_recipe by{.name = std::to_string(piece) + " bytes", .optimizer = groups};
                        by.buckets = buckets;
                        by.options = options_of(sharded, false);
                        by.options.clip = clip;
                        by.options.step_piece_bytes = piece;
                        CAPTURE(ranks, piece, sharded, clip ? clip->index() : 9);
                        auto const got = run_ranks(
                            ranks, [&](auto& comm) { return train<TestType>(comm, by, 3, 45, 200, 2); }, patient());
                        REQUIRE(got[0].wrong == "");
                        if (!first) first = got[0].digest;
                        REQUIRE(got[0].digest == *first);
                    }
        }
}

TEST_CASE("the transport is driven before another quarter of a piece's size is stepped, and a piece is no larger",
          "[train]") {
    auto const how = GENERATE(update::replicated, update::sharded);
    bool const shared = GENERATE(false, true), clips = GENERATE(false, true);
    CAPTURE(shared, clips);
    constexpr std::size_t piece = 64 << 10;
    // One huge parameter in one bucket, and many buckets.
    std::vector<std::size_t> many(40, 8192);
    for (auto const& sizes : {std::vector<std::size_t>{100'003}, many})
        for (outcome const& rank : one_step(2, sizes, gated(how, piece, shared, clips), per_parameter_buckets{})) {
            REQUIRE(rank.error == "");
            REQUIRE(rank.first_and_last == std::vector<double>{-1.0, -static_cast<double>(sizes.size())});
            REQUIRE(rank.calls.size() > 5);
            std::size_t since_driven = 0;
            for (std::size_t k = 0; k < rank.calls.size(); ++k) {
                call const& now = rank.calls[k];
                CAPTURE(k, now.bytes, sizes.size());
                REQUIRE(now.at % 64 == 0);
                REQUIRE(now.bytes <= piece);
                if (k > 0 && now.driven != rank.calls[k - 1].driven) since_driven = 0;
                REQUIRE(since_driven < piece / 4);
                since_driven += now.bytes;
            }
        }
}

TEST_CASE("buckets are stepped one after the other, the transport is driven no more often than it has to be",
          "[train]") {
    std::vector<std::size_t> sizes(50, 8);
    sizes.insert(sizes.end(), {40'000, 40'000});  // the first to be full
    constexpr std::size_t piece = 64 << 10;
    for (outcome const& rank : one_step(1, sizes, gated(update::replicated, piece), per_parameter_buckets{})) {
        REQUIRE(rank.error == "");
        REQUIRE(rank.calls.size() >= 60);
        std::size_t turns = 1, jumps = 0;
        for (std::size_t k = 1; k < rank.calls.size(); ++k) {
            call const &before = rank.calls[k - 1], &now = rank.calls[k];
            turns += now.driven != before.driven ? 1 : 0;
            jumps += now.at != before.at + before.bytes ? 1 : 0;  // from a bucket to the one that was full after it
        }
        REQUIRE(jumps == sizes.size() - 1);
        REQUIRE(turns <= 12);  // five pieces each of the large ones, and all small ones at once
    }
}

TEST_CASE("behind a gate the first new values are sent before the last are stepped", "[train]") {
    bool const clips = GENERATE(false, true);
    CAPTURE(clips);
    std::vector<std::size_t> const sizes(12, 8192);  // 32 KiB a rank and bucket, if cut at blocks of 4,096
    auto const sent_meanwhile = [&](std::size_t piece) {
        auto const all = one_step(2, sizes, gated(update::sharded, piece, false, clips), per_parameter_buckets{});
        std::size_t least = ~std::size_t{0};
        for (outcome const& rank : all) {
            REQUIRE(rank.error == "");
            REQUIRE(rank.calls.size() >= sizes.size());
            least = std::min(least, rank.calls.back().sent - rank.calls.front().sent);
        }
        return least;
    };
    REQUIRE(sent_meanwhile(16 << 10) >= sizes.size() - 3);
    if (clips) REQUIRE(sent_meanwhile(std::size_t{1} << 30) == 0);  // in one turn nothing but the optimizer has one
}

namespace {

/// Gradient descent that takes its time over each piece, as if there were a thousand times as many values.
struct slow_sgd {
    std::chrono::milliseconds takes;

    [[nodiscard]] std::size_t slot_count() const { return 0; }
    [[nodiscard]] double learning_rate() const { return 1; }
    [[nodiscard]] std::uint64_t hash() const { return 1; }
    void step(step_info const& at, std::span<double const> gradient, std::span<double> value,
              slot_spans<double> slots) const {
        std::this_thread::sleep_for(takes);
        sgd{.lr = 1}.step(at, gradient, value, slots);
    }
};

constexpr auto dead = 800ms;

/// What two ranks over sockets throw in a step in which rank 0 steps its half of the values for twice `dead`.
std::vector<std::string> errors_of_a_long_step(std::size_t piece) {
    constexpr std::size_t count = std::size_t{16} << 13;  // 8 pieces of 64 KiB for each rank
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    timing times = patient();
    times.dead = dead;
    return on_threads(2, [&](int r) {
        std::vector<framed_peer<descriptor_stream>> peers;
        peers.push_back({1 - r, descriptor_stream(ends[r])});
        communicator<> comm = any_communicator(
            std::make_unique<framed<descriptor_stream>>(r, 2, std::move(peers), framed_options{.times = times}), times);
        scripted_model<> net({{"p", {count}}});
        data_parallel trainer{
            net, slow_sgd{r == 0 ? 2 * dead / (piece < count ? 8 : 1) : 0ms}, comm,
            training_options{.update = update::sharded, .share_memory = false, .step_piece_bytes = piece},
            single_bucket{}};
        return thrown_by([&] { trainer.step(numbers{{1}}); });
    });
}

}  // namespace

TEST_CASE("heartbeats are sent while a rank steps many values for longer than timing.dead", "[train]") {
    CHECK(errors_of_a_long_step(64 << 10) == std::vector<std::string>(2));
    // In one piece none are sent: so the pieces are what does it.
    CHECK_THAT(errors_of_a_long_step(std::size_t{1} << 30)[1], Catch::Contains("rank 0 has sent nothing"));
}

TEST_CASE("an optimizer that throws between pieces fails the step on all ranks, and the values are torn", "[train]") {
    auto const how = GENERATE(update::replicated, update::sharded);
    auto const all = one_step(2, {20'000, 20'000}, gated(how, 8192), per_parameter_buckets{}, 5);
    REQUIRE(all[0].error == "half-way through a bucket");
    REQUIRE_THAT(all[1].error, Catch::Contains("rank 0 failed in its own code during step #1: half-way through"));
    REQUIRE(all[0].torn);
}
