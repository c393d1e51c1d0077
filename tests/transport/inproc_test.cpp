// inproc_transport alone: misuse, death, and races between posting, aborting and leaving. The rest is conformance.
#include <ddp/transport/inproc.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ddp/core/random.hpp>

#include "support/catch.hpp"

using namespace ddp;
using namespace std::chrono_literals;

namespace {

struct node : completion {
    int runs = 0;
    node() {
        completion::run = [](completion& self) noexcept { ++static_cast<node&>(self).runs; };
    }
};

}  // namespace

TEST_CASE("an inproc world refuses what it is not", "[comm][inproc]") {
    CHECK_THROWS_WITH(inproc_world::create(0), Catch::Contains("an inproc world needs at least one rank"));
    CHECK_THROWS_WITH(inproc_world::create(2, {7}),
                      Catch::Contains("inproc_world: `hosts` needs a number for each rank, or none"));
    auto const world = inproc_world::create(2);
    CHECK(world->size() == 2);
    CHECK_THROWS_WITH(world->connect(2), Catch::Contains("connect: there is no rank 2 among 2"));
    CHECK_THROWS_WITH(world->connect(-1), Catch::Contains("connect: there is no rank -1 among 2"));
    auto const t = world->connect(0);
    node n;
    std::byte memory[4];
    CHECK_THROWS_WITH(t->post_send(0, {}, memory, n), Catch::Contains("post to another rank of this world"));
    CHECK_THROWS_WITH(t->post_send(2, {}, memory, n), Catch::Contains("post to another rank of this world"));
    CHECK_THROWS_WITH(t->post_receive(-1, {}, memory, n), Catch::Contains("post to another rank of this world"));
    CHECK(n.runs == 0);
}

TEST_CASE("a send completes when it was received, not before", "[comm][inproc]") {
    auto const world = inproc_world::create(2);
    auto const a = world->connect(0), b = world->connect(1);
    std::vector<std::byte> const out(100, std::byte{7});
    std::vector<std::byte> in(100);
    node sent, got;
    a->post_send(1, {}, out, sent);
    a->progress(time_point{});
    CHECK(sent.runs == 0);
    b->post_receive(0, {}, in, got);
    CHECK(got.runs == 0);
    b->progress(time_point{});
    a->progress(time_point{});
    CHECK((got.runs == 1 && sent.runs == 1));
    CHECK(in == out);
}

TEST_CASE("what a rank sent before it was killed can be received; then it is closed", "[comm][inproc]") {
    auto const world = inproc_world::create(2);
    auto const a = world->connect(0), b = world->connect(1);
    std::vector<std::byte> out(10, std::byte{1}), in(10);
    node sent, got, none, into;
    a->post_send(1, {}, out, sent);
    world->kill(0);
    b->post_receive(0, {}, in, got);
    b->post_receive(0, {}, in, none);
    b->post_send(0, {}, out, into);
    CHECK(b->progress(time_point{}));
    CHECK(got.status == op_status::ok);
    CHECK(none.status == op_status::closed);
    CHECK(into.status == op_status::closed);
    CHECK(b->reports()[0].is == report::state::closed);
    failure const record;
    a->abort(record);  // the dead say nothing
    b->progress(time_point{});
    CHECK(b->reports()[0].is == report::state::closed);
}

TEST_CASE("abort waits for a peer that copies into this rank's memory", "[comm][inproc]") {
    std::vector<std::byte> const out(std::size_t{32} << 20, std::byte{7});
    std::vector<std::byte> in(out.size());
    int met = 0;  // aborts that began while the peer copied
    for (int attempt = 0; attempt < 200 && met < 3; ++attempt) {
        auto const world = inproc_world::create(2);
        auto const a = world->connect(0), b = world->connect(1);
        node sent, got;
        b->post_receive(0, {}, in, got);
        std::atomic<bool> begins = false, ended = false;
        std::thread sender([&] {
            begins = true;
            a->post_send(1, {}, out, sent);
            ended = true;
        });
        while (!begins) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(100) * (attempt % 20));
        bool const in_time = !ended;
        b->abort({});
        int const runs = got.runs;  // before the peer has ended its copy on its own
        sender.join();
        a->progress(time_point{});
        REQUIRE(sent.runs == 1);
        REQUIRE(runs == 1);
        if (in_time && sent.status == op_status::ok) ++met;
    }
    CHECK(met == 3);
}

TEST_CASE("posting, aborting, leaving and dying race without harm", "[comm][inproc]") {
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
        constexpr int ranks = 4;
        auto const world = inproc_world::create(ranks);
        std::vector<std::future<std::string>> running;
        for (int me = 0; me < ranks; ++me)
            running.push_back(std::async(std::launch::async, [&world, me, seed]() -> std::string {
                random_stream const random(seed, random_use::user, static_cast<std::uint64_t>(me));
                std::uint64_t draws = 0;
                auto const draw = [&](std::uint64_t bound) { return random.at(draws++).below(bound); };
                std::deque<node> nodes;
                std::deque<std::vector<std::byte>> memory;
                {
                    auto const t = world->connect(me);
                    auto const end = t->now() + std::chrono::microseconds(200 + draw(2000));
                    while (t->now() < end) {
                        int const peer = (me + 1 + static_cast<int>(draw(ranks - 1))) % ranks;
                        auto& buffer = memory.emplace_back(draw(3) == 0 ? 100'000 : 50);
                        tag const what{.id = {.index = draw(5)}};
                        if (draw(2) == 0)
                            t->post_send(peer, what, buffer, nodes.emplace_back());
                        else
                            t->post_receive(peer, what, buffer, nodes.emplace_back());
                        t->progress(t->now() + std::chrono::microseconds(draw(50)));
                        if (memory.size() > 300) break;
                    }
                    std::uint64_t const way = draw(4);
                    if (way == 0) t->abort({});
                    if (way == 1) world->kill(me);
                    if (way == 0)
                        for (node const& n : nodes)
                            if (n.runs != 1) return "abort left an operation";
                }
                for (auto& buffer : memory) std::fill(buffer.begin(), buffer.end(), std::byte{0xAB});
                std::this_thread::sleep_for(std::chrono::microseconds(draw(500)));
                for (auto const& buffer : memory)
                    for (std::byte const b : buffer)
                        if (b != std::byte{0xAB}) return "memory was written after the transport had gone";
                for (node const& n : nodes)
                    if (n.runs > 1) return "an operation completed twice";
                return {};
            }));
        for (auto& r : running) {
            REQUIRE(r.wait_for(20s) == std::future_status::ready);
            REQUIRE(r.get() == "");
        }
    }
}
