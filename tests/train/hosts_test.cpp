// Ranks on several hosts train in the memory of each, and send only sums of their subtrees: the bits of messages between all.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/collective/host_trees.hpp>
#include <ddp/transport/inproc.hpp>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/counting_transport.hpp"
#include "support/loopback.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;
using namespace std::chrono_literals;

namespace {

template <class Body>
auto on_hosts(placement const& hosts, Body const& body) {
    return ddp::test::on_hosts(hosts, body, patient());
}

/// The digest of a training of so many ranks with each kind of clipping, by messages between all or as `hierarchy` says.
/// Values are released when they are ready, at the end of backward, or copied.
template <memory Kind>
std::pair<std::uint64_t, std::string> digest_of(communicator<>& comm, bool hierarchy, bool everything) {
    digest all;
    for (int const clip : {0, 1, 2})
        for (update const how : {update::automatic, update::replicated, update::sharded}) {
            if (!everything && (how == update::automatic || clip == 2)) continue;
            training_options options{.update = how, .share_memory = hierarchy};
            if (clip == 1) options.clip = clip_by_global_norm{.max_norm = 0.3};
            if (clip == 2) options.nonfinite = nonfinite::stop;
            recipe const by{
                .name = "clip " + std::to_string(clip) + ", update " + std::to_string(static_cast<int>(how)),
                .optimizer = adamw{.lr = 0.01},
                .buckets = size_capped_buckets{.cap_bytes = 20'000, .first_bytes = 512},
                .options = options};
            trained<float> const got = train<float, Kind>(comm, by, 8, 45, 60, 2);
            if (!got.wrong.empty()) return {0, by.name + ": " + got.wrong};
            all.add(got.digest);
        }
    return {all.value(), ""};
}

struct breaking : sgd {
    bool breaks;
    template <class E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> state) const {
        if (breaks && at.step == 2) throw std::runtime_error("the optimizer of rank 2 broke");
        sgd::step(at, gradient, value, state);
    }
};

}  // namespace

/// Counts what is sent, and shares memory.
struct sharing_counter final : counting_transport<inproc_transport> {
    using counting_transport<inproc_transport>::counting_transport;
    [[nodiscard]] std::uint64_t host() const { return inner_->host(); }
    [[nodiscard]] std::unique_ptr<memory_sharing> share_memory() { return inner_->share_memory(); }
};

TEST_CASE("subtrees of hosts join to the canonical tree, however ranks are placed", "[train]") {
    test_bits random(3, 0);
    for (int round = 0; round < 400; ++round) {
        std::size_t const ranks = 2 + random.next() % 16, hosts = 1 + random.next() % ranks, n = 700;
        std::vector<std::size_t> where(ranks);
        for (std::size_t r = 0; r < ranks; ++r) where[r] = random.next() % hosts;
        if (round % 3 == 0)
            for (std::size_t r = 0; r < ranks; ++r) where[r] = r * hosts / ranks;
        std::vector<std::size_t> known;  // numbered as they come
        for (std::size_t& host : where) {
            auto const at = std::find(known.begin(), known.end(), host);
            std::size_t const number = static_cast<std::size_t>(at - known.begin());
            if (at == known.end()) known.push_back(host);
            host = number;
        }
        std::vector<std::vector<float>> addends;
        std::vector<float const*> pointers;
        for (std::size_t r = 0; r < ranks; ++r)
            addends.push_back(addend<float>(values::mixed, 5, static_cast<int>(r), n));
        for (auto const& one : addends) pointers.push_back(one.data());
        std::vector<float> expected(n), got(n);
        combine_tree_scaled<sum>(std::span(expected), std::span<float const* const>(pointers), 0.3f);

        host_trees const trees(where);
        std::vector<std::vector<float>> sums;
        std::vector<float const*> sources;
        std::size_t next = 0;
        for (auto const& tree : trees.subtrees()) {
            REQUIRE(tree.begin == next);
            next = tree.end;
            for (std::size_t r = tree.begin; r < tree.end; ++r) REQUIRE(trees.host_of(r) == tree.host);
            auto& one = sums.emplace_back(n);
            combine_tree<sum>(std::span(one), std::span<float const* const>(pointers).subspan(tree.begin, tree.size()));
        }
        REQUIRE(next == ranks);
        for (auto const& one : sums) sources.push_back(one.data());
        trees.combine<sum>(std::span(got), std::span<float const* const>(sources), 0.3f);
        REQUIRE(std::memcmp(got.data(), expected.data(), n * sizeof(float)) == 0);
        std::vector<float>& in_place = sums[random.next() % sums.size()];
        trees.combine<sum>(std::span(in_place), std::span<float const* const>(sources), 0.3f);
        REQUIRE(std::memcmp(in_place.data(), expected.data(), n * sizeof(float)) == 0);
    }
    host_trees const blocks(std::array<std::size_t, 8>{0, 0, 0, 0, 1, 1, 1, 1});
    CHECK(blocks.subtrees().size() == 2);
    CHECK(blocks.counterpart(1, 1) == 5);
    CHECK(blocks.counterpart(6, 0) == 2);
    CHECK(host_trees(std::array<std::size_t, 4>{0, 1, 0, 1}).subtrees().size() == 4);
    CHECK_THROWS_WITH(host_trees(std::array<std::size_t, 0>{}), Catch::Contains("host_trees: there must be a rank"));
    CHECK(host_trees(std::array<std::size_t, 4>{0, 1, 1, 1}).counterpart(3, 0) == 0);
}

TEST_CASE("on several hosts a training has the bits of messages, wherever the ranks are", "[train]") {
    auto const hosts = GENERATE(placement{7, 7, 4, 4}, placement{7, 4, 7, 4}, placement{7, 7, 7, 4}, placement{7, 4, 4},
                                placement{1, 1, 1, 2, 2, 2}, placement{1, 2, 2, 2, 2, 3, 3});
    CAPTURE(hosts);
    bool const everything = hosts.size() < 5 && fewer == 1;
    auto const body = [&](communicator<>& comm) {
        std::vector<std::pair<std::uint64_t, std::string>> all;
        for (bool const hierarchy : {false, true}) {
            all.push_back(digest_of<memory::releasing>(comm, hierarchy, everything));
            if (everything) all.push_back(digest_of<memory::bound>(comm, hierarchy, everything));
            if (everything) all.push_back(digest_of<memory::copied>(comm, hierarchy, everything));
        }
        return all;
    };
    for (auto const& all : on_hosts(hosts, body))
        for (std::size_t i = 0; i < all.size(); ++i) {
            CHECK(all[i].second == "");
            CHECK(all[i].first == all[i % (all.size() / 2)].first);
        }
}

TEST_CASE("slices of many chunks travel between hosts as those of one do", "[train][same_threads]") {
    auto const body = [](communicator<>& comm) {
        std::vector<std::pair<std::uint64_t, std::string>> all;
        for (bool const hierarchy : {false, true})
            for (update const how : {update::sharded, update::replicated}) {
                recipe const by{.name = "large",
                                .optimizer = sgd{.lr = 0.1, .momentum = 0.9},
                                .buckets = single_bucket{},
                                .options = {.update = how, .share_memory = hierarchy}};
                auto const got = train<float, memory::releasing>(comm, by, 3, 45, fewer == 1 ? 60'000 : 25'000, 2);
                all.emplace_back(got.digest, got.wrong);
            }
        return all;
    };
    std::optional<std::uint64_t> first;
    for (auto const& all : on_hosts({1, 1, 2, 2}, body))
        for (auto const& [digest, wrong] : all) {
            CHECK(wrong == "");
            if (!first) first = digest;
            CHECK(digest == *first);
        }
}

TEST_CASE("between hosts a rank sends its share of the sums and of the values, and no more", "[train]") {
    constexpr std::size_t n = 160'000;
    struct sent {
        std::size_t with, without;
    };
    auto const measure = [](placement const& hosts) {
        auto const world = inproc_world::create(static_cast<int>(hosts.size()), hosts);
        std::vector<std::future<sent>> running;
        for (std::size_t r = 0; r < hosts.size(); ++r)
            running.push_back(std::async(std::launch::async, [&, r] {
                auto transport = std::make_unique<sharing_counter>(world->connect(static_cast<int>(r)));
                sharing_counter& counter = *transport;
                communicator<> comm = any_communicator(std::move(transport), patient());
                auto const steps = [&](bool hierarchy) {
                    scripted_model<true, true> net({{"a", {n}}});
                    data_parallel trainer{net, sgd{.lr = 1}, comm, single_bucket{},
                                          training_options{.update = update::sharded, .hierarchy = hierarchy}};
                    if (trainer.shares_memory() != hierarchy) throw std::logic_error("it does not do as told");
                    trainer.step(numbers{{1}});
                    std::ignore = counter.take_sent();
                    trainer.step(numbers{{1}});
                    return counter.take_sent().bytes / sizeof(double);
                };
                std::size_t const with = steps(true);
                return sent{with, steps(false)};
            }));
        std::vector<sent> all;
        for (auto& one : running) all.push_back(one.get());
        return all;
    };
    for (sent const& rank : measure({1, 1, 2, 2})) {
        CHECK(std::llabs(static_cast<long long>(rank.with) - static_cast<long long>(n / 2)) <
              200);  // 2 n (h-1) / (h g)
        CHECK(std::llabs(static_cast<long long>(rank.without) - static_cast<long long>(n * 3 / 2)) < 200);
    }
    // Placed round-robin every addend travels, and still each new slice once a host.
    for (sent const& rank : measure({1, 2, 1, 2}))
        CHECK(std::llabs(static_cast<long long>(rank.with) - static_cast<long long>(n * 3 / 4)) < 200);
}

TEST_CASE("collectives inside hosts and across them make up an allreduce, as the page says", "[train]") {
    for (placement const& hosts : {placement{1, 1, 2, 2}, placement{1, 1, 2, 2, 3, 3}})
        for (std::string const& wrong : on_hosts(hosts, [](communicator<>& comm) -> std::string {
                 std::vector<float> by_steps(1000), at_once(1000);
                 for (std::size_t i = 0; i < by_steps.size(); ++i)
                     by_steps[i] = at_once[i] =
                         1.0f / static_cast<float>(i + 3 * static_cast<std::size_t>(comm.rank()) + 1);
                 allreduce(comm, at_once);
                 communicator<> const inside = comm.host(), across = comm.across_hosts();
                 std::span<float> const slice = reduce_scatter(inside, by_steps);
                 allreduce(across, slice);
                 std::vector<float> const mine(slice.begin(), slice.end());
                 all_gather(inside, mine, by_steps);
                 return by_steps == at_once ? "" : "other bits";
             }))
            CHECK(wrong == "");
}

TEST_CASE("on several hosts nobody writes values before backward has ended on their rank", "[train]") {
    int const last = GENERATE(1, 2);  // a rank of either host
    CAPTURE(last);
    std::atomic<int> done = 0;  // ranks at the end of their backward
    auto const body = [&](communicator<>& comm) -> std::string {
        scripted_model<true, false> net({{"a", {3000}}, {"b", {3000}}});  // ready releases nothing
        data_parallel trainer{net, sgd{.lr = 1}, comm, training_options{.update = update::sharded},
                              per_parameter_buckets{}};
        if (!trainer.shares_memory()) return "nothing was shared";
        bool early = false;
        net.at_end = [&](auto const&) { ++done; };
        net.leaves_out = [&](std::size_t i) {
            if (i != 0 || comm.rank() != last) return false;
            for (int waits = 0; done < 3 && waits < 20'000; ++waits) std::this_thread::sleep_for(1ms);
            if (done < 3) throw std::logic_error("the other ranks do not end their backward");
            std::this_thread::sleep_for(150ms);  // "b" is full on all ranks: now it would be stepped
            for (double const value : net.value(1)) early = early || value != 0;
            return false;
        };
        trainer.step(numbers{{1}});
        if (early) return "values changed during backward";
        return net.value(1)[2999] == -2 ? "" : "wrong values";
    };
    for (std::string const& wrong : on_hosts({1, 1, 2, 2}, body)) CHECK(wrong == "");
}

TEST_CASE("a rank that throws on one of several hosts ends the step on all", "[train]") {
    bool const steps = GENERATE(false, true);  // in the optimizer, or in forward
    auto const body = [steps](communicator<>& comm) -> std::string {
        scripted_model<true, true> net({{"a", {300'000}}, {"b", {5}}});
        breaking by;
        by.lr = 1;
        by.breaks = steps && comm.rank() == 2;
        data_parallel trainer{net, by, comm, per_parameter_buckets{}};
        try {
            trainer.step(numbers{{1}});
            if (!steps && comm.rank() == 2)
                net.in_forward = [] { throw std::runtime_error("the forward of rank 2 broke"); };
            trainer.step(numbers{{1}});
        } catch (std::exception const& e) {
            return e.what();
        }
        return "no error";
    };
    std::vector<std::string> const said = on_hosts({1, 1, 2, 2, 2}, body);
    for (std::size_t r = 0; r < said.size(); ++r) {
        CAPTURE(said[r]);
        CHECK(said[r].find(r == 2 ? "broke" : "rank 2") != std::string::npos);
        if (r != 2) CHECK(said[r] == said[r == 0 ? 1 : 0]);
    }
}

TEST_CASE("processes on several hosts, as their transport sees it, have the bits of one host", "[train][tcp]") {
    auto const body = [](communicator<>& comm) {
        std::vector<std::pair<std::uint64_t, std::string>> all;
        for (bool const hierarchy : {false, true}) all.push_back(digest_of<memory::releasing>(comm, hierarchy, false));
        return all;
    };
    listener const at;
    std::vector<std::future<std::vector<std::pair<std::uint64_t, std::string>>>> running;
    for (int rank = 0; rank < 4; ++rank)
        running.push_back(std::async(std::launch::async, [&, rank] {
            job where;
            where.rank = where.local_rank = rank;
            where.size = where.local_size = 4;
            where.master_port = at.port;
            tcp_options own;
            own.host = rank < 2 ? "left" : "right";
            own.times = loopback_patience();
            if (rank == 0) own.listen_descriptor = at.inherit();
            auto transport = connect_tcp(where, std::move(own));
            if (transport->in_memory(rank ^ 1) != true || transport->in_memory(rank ^ 2) != false)
                throw std::logic_error("messages take another path");
            communicator<> comm = any_communicator(std::move(transport), loopback_patience());
            return body(comm);
        }));
    std::optional<std::uint64_t> first;
    for (auto& one : running)
        for (auto const& [digest, wrong] : one.get()) {
            CHECK(wrong == "");
            if (!first) first = digest;
            CHECK(digest == *first);
        }
}

TEST_CASE("ranks that disagree about the hierarchy are told so, all alike", "[train]") {
    auto const said = on_hosts({1, 1, 2, 2}, [](communicator<>& comm) -> std::string {
        scripted_model<> net({{"a", {30}}});
        try {
            data_parallel trainer{net, sgd{.lr = 1}, comm, {.hierarchy = comm.rank() != 2}};
            return "no error";
        } catch (comm_error const& e) {
            return e.what();
        }
    });
    for (std::string const& one : said) {
        CAPTURE(one);
        CHECK(one == said.front());
        CHECK(one.find("DDP-E205") == 0);
        CHECK(one.find("with training_options::hierarchy") != std::string::npos);
        CHECK(one.find("without training_options::hierarchy") != std::string::npos);
    }
}

TEST_CASE("groups that mix ranks of several hosts train in shared memory, to the bits of messages", "[train]") {
    auto const got = on_hosts({7, 4, 7, 4, 7, 4, 4}, [](communicator<>& comm) {
        // {6, 3, 0} with two ranks on one host, and {5, 4, 2, 1} with two on each, each at the same time.
        communicator<> part = comm.split(comm.rank() % 3 == 0 ? 1 : 0, -comm.rank());
        scripted_model<> net({{"a", {3000}}});
        bool const shares = data_parallel{net, sgd{.lr = 0.1}, part}.shares_memory();
        return std::tuple(digest_of<memory::releasing>(part, true, false),
                          digest_of<memory::releasing>(part, false, false), shares);
    });
    for (std::size_t r = 0; r < got.size(); ++r) {
        CAPTURE(r);
        auto const& [shared, by_messages, shares] = got[r];
        CHECK(shared.second == "");
        CHECK(shared == by_messages);
        CHECK(shares);
        CHECK(shared.first == std::get<0>(got[r % 3 == 0 ? 0 : 1]).first);
    }
    CHECK(std::get<0>(got[0]).first != std::get<0>(got[1]).first);
}
