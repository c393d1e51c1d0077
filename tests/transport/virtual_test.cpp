// virtual_transport alone: what the network model and the script of faults mean, to the nanosecond.
#include <ddp/transport/virtual/virtual.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "support/catch.hpp"

using namespace ddp;
using namespace std::chrono_literals;

namespace {

struct node : completion {
    nanoseconds at{-1};
    virtual_world* world = nullptr;
    node() {
        completion::run = [](completion& self) noexcept {
            node& n = static_cast<node&>(self);
            n.at = n.world->elapsed();
        };
    }
};

/// Ranks in one thread: post on any, then run() until nothing more happens before `until`.
struct bench {
    explicit bench(int ranks, network_model const& network) : world(virtual_world::create(ranks, network)) {
        world->progress_advances(false);
        for (int r = 0; r < ranks; ++r) transports.push_back(world->connect(r));
    }
    virtual_transport& operator[](int rank) { return *transports[static_cast<std::size_t>(rank)]; }
    void run(nanoseconds until) {
        while (world->elapsed() < until) {
            world->advance(virtual_world::start() + until);
            for (int r = 0; r < world->size(); ++r)
                if (!world->dead(r) && !world->frozen(r) && (*this)[r].has_moved()) (*this)[r].progress(time_point{});
        }
    }
    node& send(int from, int to, std::size_t bytes, std::uint64_t index = 0) {
        node& n = make();
        (*this)[from].post_send(to, {.id = {.index = index}}, memory.emplace_back(bytes), n);
        return n;
    }
    node& receive(int at, int from, std::size_t bytes, std::uint64_t index = 0) {
        node& n = make();
        (*this)[at].post_receive(from, {.id = {.index = index}}, memory.emplace_back(bytes), n);
        return n;
    }
    node& make() {
        node& n = nodes.emplace_back();
        n.world = world.get();
        return n;
    }
    std::deque<std::vector<std::byte>> memory;
    std::deque<node> nodes;
    std::shared_ptr<virtual_world> world;
    std::vector<std::unique_ptr<virtual_transport>> transports;
};

constexpr network_model gigabyte{.latency = 10us, .bytes_per_second = 1e9};

}  // namespace

TEST_CASE("one message takes overhead, latency and size over bandwidth", "[comm][virtual]") {
    network_model network = gigabyte;
    network.overhead = 3us;
    bench b(2, network);
    node const& got = b.receive(1, 0, 5000);
    node const& sent = b.send(0, 1, 5000);
    b.run(1ms);
    CHECK(got.at == 3us + 10us + 5us);
    CHECK(sent.at == got.at);
    CHECK(got.status == op_status::ok);
}

TEST_CASE("messages share the sender's card, and the receiver's", "[comm][virtual]") {
    bench b(4, gigabyte);
    node const& first = b.receive(1, 0, 5000, 1);
    node const& second = b.receive(1, 0, 5000, 2);
    node const& elsewhere = b.receive(2, 0, 5000, 3);
    b.send(0, 1, 5000, 1);
    b.send(0, 1, 5000, 2);
    b.send(0, 2, 5000, 3);
    node const& crowded = b.receive(1, 3, 5000, 4);  // comes to rank 1's card together with the first
    b.send(3, 1, 5000, 4);
    b.run(1ms);
    CHECK(first.at == 15us);
    CHECK(crowded.at == 20us);
    CHECK(second.at == 25us);
    CHECK(elsewhere.at == 25us);
}

TEST_CASE("an early message is kept if it is small; a longer one keeps its sender waiting", "[comm][virtual]") {
    network_model network = gigabyte;
    network.early_bytes = 1000;
    bench b(2, network);
    node const& small = b.send(0, 1, 1000, 1);
    node const& large = b.send(0, 1, 1001, 2);
    b.run(1ms);
    CHECK(small.at == 11us);
    CHECK(large.at == -1ns);
    node const& got = b.receive(1, 0, 1001, 2);
    b.run(2ms);
    CHECK(got.status == op_status::ok);
    CHECK(large.status == op_status::ok);
}

TEST_CASE("a killed rank's last messages arrive if its card had sent them; then its peers see it closed",
          "[comm][virtual]") {
    network_model network = gigabyte;
    network.detection = 500us;
    bench b(3, network);
    b.world->kill(0, 7us);
    node const& out = b.receive(1, 0, 5000, 1);
    node const& lost = b.receive(1, 0, 5000, 2);
    b.send(0, 1, 5000, 1);
    b.send(0, 1, 5000, 2);
    node const& into = b.send(2, 0, 5000, 3);
    b.run(2ms);
    CHECK(b.world->dead(0));
    CHECK((out.status == op_status::ok && out.at == 15us));
    CHECK((lost.status == op_status::closed && lost.at == 517us));
    CHECK((into.status == op_status::closed && into.at == 517us));
    CHECK(b[1].reports()[0].is == report::state::closed);
    node const& late = b.receive(1, 0, 8, 9);
    CHECK(late.at == -1ns);
    b[1].progress(time_point{});
    CHECK(late.status == op_status::closed);
}

TEST_CASE("a death that is seen at once still lets arrive what was on its way", "[comm][virtual]") {
    network_model network = gigabyte;
    network.detection = 0us;
    bench b(3, network);
    b.world->kill(0, 6us);
    node const& crowd = b.receive(1, 2, 100'000, 1);
    node const& last = b.receive(1, 0, 5000, 2);
    b.send(2, 1, 100'000, 1);  // occupies rank 1's card until 110 us
    b.send(0, 1, 5000, 2);
    b.run(2ms);
    CHECK(crowd.at == 110us);
    CHECK((last.status == op_status::ok && last.at == 115us));
    CHECK(b[1].reports()[0].is == report::state::closed);
}

TEST_CASE("a rank killed at its k-th message sends k - 1", "[comm][virtual]") {
    bench b(2, gigabyte);
    b.world->kill_at_message(0, 3);
    std::vector<node*> got;
    for (std::uint64_t i = 0; i < 4; ++i) got.push_back(&b.receive(1, 0, 0, i));
    for (std::uint64_t i = 0; i < 4; ++i) b.send(0, 1, 0, i);
    b.run(10ms);
    // The first two had left the card before the third was posted.
    CHECK(got[0]->status == op_status::ok);
    CHECK(got[1]->status == op_status::ok);
    CHECK(got[2]->status == op_status::closed);
    CHECK(got[3]->status == op_status::closed);
}

TEST_CASE("what reaches a frozen rank reaches it when it thaws, in order", "[comm][virtual]") {
    bench b(2, gigabyte);
    b.world->freeze(1, 1us, 3ms);
    node const& first = b.receive(1, 0, 100, 1);
    node const& second = b.receive(1, 0, 100, 1);
    b.send(0, 1, 100, 1);
    b.run(2ms);
    CHECK(b.world->frozen(1));
    CHECK(first.at == -1ns);
    b.send(0, 1, 100, 1);
    b.run(4ms);
    CHECK_FALSE(b.world->frozen(1));
    CHECK((first.at >= 3ms && first.at < 3ms + 50us));
    CHECK(second.at >= first.at);
}

TEST_CASE("a blackhole swallows one direction from its time on, records included", "[comm][virtual]") {
    bench b(2, gigabyte);
    b.world->blackhole(0, 1, 100us);
    node const& before = b.receive(1, 0, 8, 1);
    b.send(0, 1, 8, 1);
    b.run(200us);
    node const& after = b.receive(1, 0, 8, 2);
    node const& back = b.receive(0, 1, 8, 3);
    b.send(0, 1, 8, 2);
    b.send(1, 0, 8, 3);
    b.run(1ms);
    CHECK(before.status == op_status::ok);
    CHECK(after.at == -1ns);
    CHECK(back.status == op_status::ok);
    failure record;
    record.text = std::string_view("unheard");
    b[0].abort(record);
    b.run(2ms);
    CHECK(b[1].reports()[0].is == report::state::silent);
    b[1].abort(record);
    b.run(3ms);
    CHECK(b[0].reports()[1].is == report::state::spoke);
}

TEST_CASE("a slow link delays one direction, takes one message after the other, and keeps their order",
          "[comm][virtual]") {
    bench b(3, gigabyte);
    b.world->slow_down(0, 1, 1ms, 7us, 1e8);
    node const& before = b.receive(1, 0, 5000, 1);
    b.send(0, 1, 5000, 1);
    b.run(2ms);
    CHECK(before.at == 15us);
    node const& first = b.receive(1, 0, 5000, 2);
    node const& second = b.receive(1, 0, 2000, 3);
    node const& back = b.receive(0, 1, 5000, 4);
    node const& elsewhere = b.receive(2, 0, 5000, 5);
    b.send(0, 1, 5000, 2);
    b.send(0, 1, 2000, 3);
    b.send(1, 0, 5000, 4);
    b.send(0, 2, 5000, 5);
    b.run(4ms);
    CHECK(first.at == 2ms + 50us + 7us + 15us);          // through the link, and then as any other
    CHECK(second.at == 2ms + 50us + 20us + 7us + 12us);  // waits for the first at the link
    CHECK(back.at == 2ms + 15us);
    CHECK(elsewhere.at == 2ms + 7us + 15us);  // 7000 bytes left before it
    CHECK_THROWS_WITH(b.world->slow_down(0, 1, 0ms, 0us, 0),
                      Catch::Contains("virtual_world::slow_down: bytes_per_second must be positive"));
}

TEST_CASE("progress moves the clock to its deadline if nothing happens, and no further", "[comm][virtual]") {
    auto const world = virtual_world::create(2, gigabyte);
    auto const a = world->connect(0), b = world->connect(1);
    a->progress(virtual_world::start() + 5ms);
    CHECK(world->elapsed() == 5ms);
    std::byte out[8] = {}, in[8] = {};
    node sent, got;
    sent.world = got.world = world.get();
    b->post_receive(0, {}, in, got);
    a->post_send(1, {}, out, sent);
    b->progress(never);
    CHECK(got.at == 5ms + 10us + 8ns);
    a->progress(time_point{});
    CHECK(sent.status == op_status::ok);
    CHECK_THROWS_WITH(b->progress(never),
                      Catch::Contains("virtual time: every rank waits, and no event is left that could wake one"));
}

TEST_CASE("random delays never reorder an identity, and the same seed delays alike", "[comm][virtual]") {
    auto const arrivals = [](std::uint64_t seed) {
        network_model network = gigabyte;
        network.extra_delay = 1ms;
        network.seed = seed;
        bench b(2, network);
        std::vector<node*> got;
        for (std::uint64_t i = 0; i < 60; ++i) got.push_back(&b.receive(1, 0, 10 + i, i % 2));
        for (std::uint64_t i = 0; i < 60; ++i) b.send(0, 1, 10 + i, i % 2);
        b.run(10ms);
        std::vector<nanoseconds> at;
        for (node const* n : got) {
            CHECK(n->status == op_status::ok);  // lengths differ: another order would show
            at.push_back(n->at);
        }
        return at;
    };
    CHECK(arrivals(1) == arrivals(1));
    CHECK(arrivals(1) != arrivals(2));
}

TEST_CASE("a world without ranks, or with a network that moves nothing, is refused", "[comm][virtual]") {
    CHECK_THROWS_WITH(virtual_world::create(0), Catch::Contains("a virtual world needs at least one rank"));
    for (double const speed : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()})
        CHECK_THROWS_WITH(virtual_world::create(2, {.bytes_per_second = speed}),
                          Catch::Contains("network_model::bytes_per_second must be positive"));
    bench b(2, gigabyte);
    for (int const rank : {-1, 2})
        CHECK_THROWS_WITH(b.world->connect(rank),
                          Catch::Contains("connect: there is no rank " + std::to_string(rank) + " among "));
    std::byte memory[4];
    for (int const peer : {-1, 0, 2}) {
        CHECK_THROWS_WITH(b[0].post_send(peer, {}, memory, b.make()),
                          Catch::Contains("post to another rank of this world"));
        CHECK_THROWS_WITH(b[0].post_receive(peer, {}, memory, b.make()),
                          Catch::Contains("post to another rank of this world"));
    }
}
