/// \file
/// hierarchical_allreduce: the oracle's bits wherever ranks are, the traffic that its docstring states, and how it fails.
#include <ddp/collective/algorithms/hierarchical_allreduce.hpp>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ddp/optim/sgd.hpp>
#include <ddp/sim/cluster.hpp>
#include <ddp/testing/check_allreduce.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/counting_transport.hpp"
#include "support/loopback.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "support/virtual_lanes.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;
using namespace std::chrono_literals;

namespace {

/// The composition of functions x -> a x + b modulo 2^16, with a above b in the word: associative, not commutative.
struct composition {
    static constexpr char const* name = "composition";
    static constexpr std::uint32_t combine(std::uint32_t left, std::uint32_t right) noexcept {
        std::uint32_t const a = left >> 16, b = left & 0xffff;
        return a * (right >> 16) << 16 | ((a * (right & 0xffff) + b) & 0xffff);
    }
};

/// What is drawn: where ranks are, how long the data is, and in what chunks each rank has it under way.
struct shape {
    placement hosts;
    std::size_t count, chunk_bytes;
    std::vector<std::size_t> windows;
};
shape drawn(test_bits& random) {
    std::size_t const ranks = 2 + random.next() % 8, hosts = 1 + random.next() % ranks, how = random.next() % 4;
    shape s;
    for (std::size_t r = 0; r < ranks; ++r) {
        s.hosts.push_back(how == 0 ? random.next() % hosts : how == 1 ? r % hosts : r * hosts / ranks);
        s.windows.push_back(1 + random.next() % 5);
    }
    if (how == 3) std::ranges::reverse(s.hosts);
    std::size_t const counts[] = {0, 1, ranks - 1, ranks, 100, 1003, 3000};
    s.count = counts[random.next() % 7];
    s.chunk_bytes = std::size_t{64} << random.next() % 6;
    return s;
}

using on_type = virtual_cluster::scheduler_type;
hierarchical_allreduce made(shape const& s, on_type& on) {
    hierarchical_allreduce by(on.world(), s.hosts);
    by.chunk_bytes = s.chunk_bytes;
    by.window = s.windows[static_cast<std::size_t>(on.rank())];
    return by;
}

/// All at once, and in halves by uneven cuts with a factor, which is 1 for other operations than sums.
template <class Op, Number E>
task<> both_ways(shape const* of, on_type* on, failures* wrong) {
    std::size_t const me = static_cast<std::size_t>(on->rank());
    int const ranks = on->size();
    auto const inputs =
        addends<E>(std::floating_point<E> && !std::same_as<Op, sum> && !std::same_as<Op, product> ? values::special
                                                                                                  : values::mixed,
                   of->count, ranks, of->count);
    std::vector<E> expected = reference_reduce<Op>(inputs), whole = inputs[me], halves = inputs[me];
    virtual_lane const over = next(*on, on->world()), again = next(*on, on->world());
    co_await hierarchical_allreduce::combine(made(*of, *on), over, std::span<E>(whole), Op{});
    note(*wrong, Op::name, compare(whole, expected));

    auto const cuts = uneven_cuts(of->count, ranks);
    E const factor = std::floating_point<E> && std::same_as<Op, sum> ? E(1) / E(3) : E(1);
    if (factor != E(1))
        for (E& one : expected) one *= factor;
    co_await hierarchical_allreduce::reduce(made(*of, *on), again,
                                            reduction<E, Op>{.data = halves, .cuts = cuts, .factor = &factor});
    std::size_t const first = cuts[me], length = cuts[me + 1] - first;
    note(*wrong, "reduce",
         compare(std::span<E const>(halves).subspan(first, length),
                 std::span<E const>(expected).subspan(first, length)));
    for (std::size_t i = 0; i < halves.size(); ++i)  // what is not ours has to come from its owner
        if (i < first || i >= first + length) halves[i] = E(99);
    co_await hierarchical_allreduce::all_gather(made(*of, *on), again, std::span<E>(halves), cuts);
    note(*wrong, "all_gather", compare(halves, expected));
}

task<> checked(std::size_t what, shape const* of, on_type* on, failures* wrong) {
    switch (what) {
        case 0: return both_ways<sum, double>(of, on, wrong);
        case 1: return both_ways<product, float>(of, on, wrong);
        case 2: return both_ways<minimum, float>(of, on, wrong);
        case 3: return both_ways<maximum, double>(of, on, wrong);
        case 4: return both_ways<sum, std::int64_t>(of, on, wrong);
        case 5: return both_ways<composition, std::uint32_t>(of, on, wrong);
        case 6: return both_ways<maximum, std::int32_t>(of, on, wrong);
        case 7: return both_ways<sum, std::uint64_t>(of, on, wrong);
        default: return both_ways<sum, float>(of, on, wrong);
    }
}

}  // namespace

TEST_CASE("the oracle's bits by hosts: any placement, size, operation and type, whatever the delays",
          "[collective][hierarchical]") {
    for (std::uint64_t seed = 0; seed < 1500 / fewer; ++seed) {
        test_bits random(seed, 0);
        shape const s = drawn(random);
        std::size_t const what = random.next() % 10;
        CAPTURE(seed, what, s.hosts, s.count, s.chunk_bytes, s.windows);
        virtual_cluster cluster(static_cast<int>(s.hosts.size()),
                                {.latency = 20us,
                                 .bytes_per_second = random.next() % 2 == 0 ? 1e6 : 1e9,
                                 .extra_delay = nanoseconds(static_cast<std::int64_t>(random.next() % 300'000)),
                                 .early_bytes = random.next() % 2 == 0 ? 0u : 65536u,
                                 .seed = seed},
                                timing::for_tests());
        std::vector<failures> wrong(s.hosts.size());
        auto const outcome = cluster.run(
            [&](int rank, on_type& on) { return checked(what, &s, &on, &wrong[static_cast<std::size_t>(rank)]); });
        for (std::size_t r = 0; r < wrong.size(); ++r) {
            REQUIRE(outcome.ranks[r].finished);
            REQUIRE(wrong[r] == failures{});
        }
    }
}

TEST_CASE("a rank that is killed at any message of a sum by hosts is named by all others",
          "[collective][hierarchical]") {
    shape const s{{1, 1, 2, 2, 2}, 400, 64, {2, 2, 2, 2, 2}};
    for (int victim = 0; victim < 5; ++victim) {
        bool fine = false;
        std::uint64_t messages = 0;
        for (std::uint64_t k = 1; !fine; ++k) {  // until it has not so many to send
            CAPTURE(victim, k);
            REQUIRE(k < 1000);
            virtual_cluster cluster(5, {.latency = 20us}, timing::for_tests());
            cluster.world().kill_at_message(victim, k);
            std::vector<std::vector<float>> data(5, std::vector<float>(s.count, 1));
            auto const outcome = cluster.run([&](int rank, on_type& on) {
                return hierarchical_allreduce::sum(made(s, on), next(on, on.world()),
                                                   std::span<float>(data[static_cast<std::size_t>(rank)]));
            });
            std::vector<std::string> said;
            for (rank_outcome const& one : outcome.ranks)
                if (!one.dead && one.verdict) {
                    CHECK(one.verdict->peer == victim);
                    said.emplace_back(one.verdict->text.view());
                }
            for (std::string const& text : said) CHECK(text == said.front());
            fine = !outcome.ranks[static_cast<std::size_t>(victim)].dead;
            if (!fine) {
                CHECK(said.size() == 4);
                messages = k;
            }
        }
        CHECK(messages >= 35);  // of all stages
    }
}

namespace {

/// Counts what goes to other hosts apart.
struct hosts_counter : counting_transport<inproc_transport> {
    hosts_counter(std::unique_ptr<inproc_transport> inner, placement hosts)
        : counting_transport(std::move(inner)), hosts_(std::move(hosts)) {}
    void post_send(int peer, tag what, const_bytes out, completion& done) {
        if (hosts_[static_cast<std::size_t>(peer)] != hosts_[static_cast<std::size_t>(rank())]) {
            ++across.messages;
            across.bytes += out.size();
        }
        counting_transport::post_send(peer, what, out, done);
    }
    [[nodiscard]] std::uint64_t host() const { return inner_->host(); }

    traffic across;

private:
    placement hosts_;
};

}  // namespace

TEST_CASE("between hosts a sum sends what the docstring says", "[collective][hierarchical][cost]") {
    auto const [hosts, trees] = GENERATE(table<placement, std::vector<std::size_t>>({{{1, 1, 2, 2}, {1, 1}},
                                                                                     {{1, 1, 1, 1, 2, 2, 2, 2}, {1, 1}},
                                                                                     {{1, 1, 2, 2, 3, 3}, {1, 1, 1}},
                                                                                     {{1, 2, 1, 2}, {2, 2}},
                                                                                     {{1, 2, 2, 2}, {1, 2}},
                                                                                     {{1, 1, 1, 2, 2, 2}, {2, 2}},
                                                                                     {{1, 2, 3}, {1, 1, 1}},
                                                                                     {{1, 1, 1}, {1}}}));
    std::size_t const ranks = hosts.size(), each = 64, chunk = 16;  // elements of a slice, and of a chunk
    CAPTURE(hosts);
    auto const world = inproc_world::create(static_cast<int>(ranks), hosts);
    struct sent {
        traffic all, across;
    };
    auto const got = on_threads(static_cast<int>(ranks), [&, &where = hosts](int rank) {
        communicator<hosts_counter> comm(std::make_unique<hosts_counter>(world->connect(rank), where), patient());
        hierarchical_allreduce by(comm);
        by.chunk_bytes = chunk * sizeof(float);
        std::vector<float> data(ranks * each, 1);
        comm.exclusively([&] { std::ignore = comm.transport().take_sent(), comm.transport().across = {}; });
        allreduce(comm, data, by);
        return comm.exclusively([&] { return sent{comm.transport().take_sent(), comm.transport().across}; });
    });
    for (std::uint64_t host = 1; host <= trees.size(); ++host) {
        std::size_t const g = static_cast<std::size_t>(std::ranges::count(hosts, host)), k = trees[host - 1],
                          slices = k * (ranks - g) + (trees.size() - 1) * g;
        traffic across, inside;
        for (std::size_t r = 0; r < ranks; ++r)
            if (hosts[r] == host) {
                across.messages += got[r].across.messages, across.bytes += got[r].across.bytes;
                inside.messages += got[r].all.messages - got[r].across.messages;
                inside.bytes += got[r].all.bytes - got[r].across.bytes;
            }
        CHECK(across == traffic{slices * each / chunk, slices * each * sizeof(float)});
        CHECK(inside == traffic{2 * (g - 1) * ranks * each / chunk, 2 * (g - 1) * ranks * each * sizeof(float)});
    }
}

TEST_CASE("hierarchical_allreduce serves every call that takes an algorithm", "[collective][hierarchical]") {
    for (placement const& hosts : {placement{5}, placement{5, 5, 5}, placement{7, 7, 4, 4}, placement{1, 2, 2, 2, 1}}) {
        CAPTURE(hosts);
        auto const wrong = on_hosts(
            hosts,
            [&](communicator<>& comm) {
                failures all;
                hierarchical_allreduce tiny(comm);
                note(all, "hosts", compare(tiny.hosts(), std::span<std::size_t const>(host_numbers(hosts))));
                tiny.chunk_bytes = 200;
                std::vector<any_allreduce> const both{any_allreduce::parse("hierarchical", comm), tiny};
                for (any_allreduce const& by : both) {
                    if (by.name != std::string("hierarchical") || !by.canonical) all.push_back("another name");
                    for (std::size_t const count : sizes(comm.size()))
                        note(all, "sum", check_allreduce<float>(comm, by, count, values::mixed));
                    note(all, "minimum", check_combine<minimum, double>(comm, by, 1003, values::special));
                    note(all, "reduce_scatter", check_reduce_scatter<float, minimum>(comm, by, 1003));
                    std::vector<std::size_t> const cuts = uneven_cuts(1003, comm.size());
                    note(all, "halves", check_halves<float>(comm, by, cuts, 0.3f, values::mixed));
                }
                note(all, "in flight", check_in_flight<double>(comm, {both[0], direct_allreduce{}, both[1], both[0]}));
                return all;
            },
            patient());
        for (failures const& of_rank : wrong) CHECK(of_rank == failures{});
    }
}

TEST_CASE("over TCP the hosts are those that the ranks' options name", "[collective][hierarchical][tcp]") {
    for (auto const& names : {std::vector<char const*>{"left", "left", "right", "right"},
                              std::vector<char const*>{"left", "right", "right", "right"}}) {
        listener const at;
        auto const wrong = on_threads(4, [&](int rank) {
            job where;
            where.rank = where.local_rank = rank;
            where.size = where.local_size = 4;
            where.master_port = at.port;
            tcp_options own;
            own.host = names[static_cast<std::size_t>(rank)];
            own.times = loopback_patience();
            if (rank == 0) own.listen_descriptor = at.inherit();
            communicator<> comm = any_communicator(connect_tcp(where, std::move(own)), loopback_patience());
            hierarchical_allreduce const by(comm);
            failures all;
            if (by.hosts()[3] != 1 || by.hosts()[1] != (names[1] == names[0] ? 0u : 1u)) all.push_back("other hosts");
            for (std::size_t const count : {std::size_t{3}, std::size_t{1003}, std::size_t{700'000}})
                note(all, std::to_string(count), check_allreduce<float>(comm, by, count, values::mixed));
            return all;
        });
        for (failures const& of_rank : wrong) CHECK(of_rank == failures{});
    }
}

TEST_CASE("hierarchical_allreduce is refused in another group, and with other options on some ranks",
          "[collective][hierarchical][mismatch]") {
    auto const said = [](auto const& body) {
        return on_hosts(
            {1, 1, 2, 2},
            [&](communicator<>& comm) -> std::string {
                try {
                    body(comm);
                    return "no error";
                } catch (std::exception const& e) {
                    return e.what();
                }
            },
            timing::for_tests());
    };
    // Refused before anything is sent: the job goes on.
    for (std::string const& one : said([](communicator<>& comm) {
             hierarchical_allreduce const by(comm);
             communicator<> const inside = comm.host();
             std::vector<float> data(10, 1);
             std::size_t refused = 0;
             auto const refuses = [&](auto const& call) {
                 try {
                     call();
                 } catch (usage_error const& e) {
                     if (std::string(e.what()).find("hierarchical_allreduce: it was made for other ranks") !=
                         std::string::npos)
                         ++refused;
                 }
             };
             refuses([&] { allreduce(inside, data, by); });
             refuses([&] { reduce_scatter(inside, data, any_allreduce(by)); });
             refuses([&] { std::ignore = start_allreduce(inside, data, minimum{}, by); });
             allreduce(comm, data, by);
             allreduce(comm.split(0), data, by);  // another group of the same ranks
             throw std::runtime_error(std::to_string(refused) + " refused, " + std::to_string(data[9]));
         }))
        CHECK(one == "3 refused, 16.000000");

    auto const with = [](bool chunks) {
        return [chunks](communicator<>& comm) {
            std::uint64_t const places[] = {0, 0, 1, 1}, others[] = {0, 1, 1, 1};
            bool const odd = comm.rank() == 2;
            hierarchical_allreduce by(comm.members(), odd && !chunks ? others : places);
            if (hierarchical_allreduce(comm.members(), places).hash() ==
                hierarchical_allreduce(comm.members(), others).hash())
                throw std::logic_error("ranks compare no placement");
            if (odd && chunks) by.chunk_bytes = 100;
            std::vector<float> data(1000);
            allreduce(comm, data, by);
        };
    };
    for (bool const chunks : {false, true})
        for (std::string const& one : said(with(chunks))) {
            CAPTURE(one, chunks);
            CHECK(one.find("DDP-E205") == 0);
            CHECK(one.find("allreduce #1 of 1000 float (hierarchical)") != std::string::npos);
        }
}

namespace {

/// One that finds out where it is at each call: for checks that use one algorithm among different ranks.
struct pairs_a_host {
    static constexpr char const* name = "pairs_a_host";
    static constexpr bool canonical = true;
    std::optional<hierarchical_allreduce> held = {};

    template <class Communicator>
    [[nodiscard]] pairs_a_host fitted_to(Communicator const& comm) const {
        return {hierarchical_allreduce(comm, static_cast<std::uint64_t>(comm.rank() / 2))};
    }
    template <Transport T, Element E>
    static task<> sum(pairs_a_host self, lane<T> over, std::span<E> data) {
        return hierarchical_allreduce::sum(*self.held, over, data);
    }
};

}  // namespace

TEST_CASE("hierarchical_allreduce passes the checks of an allreduce", "[collective][hierarchical]") {
    CHECK(testing::check_allreduce(pairs_a_host{}) == std::vector<std::string>{});
}

TEST_CASE("a trainer by hosts has the digest of the default, and refuses an algorithm of another group",
          "[collective][hierarchical][train]") {
    for (placement const& hosts : {placement{1, 1, 2, 2}, placement{1, 2, 2, 2, 1}}) {
        auto const got = on_hosts(
            hosts,
            [](communicator<>& comm) {
                hierarchical_allreduce tiny(comm);
                tiny.chunk_bytes = 200;
                std::vector<std::pair<std::uint64_t, std::string>> all;
                for (any_allreduce const& by : {any_allreduce(), any_allreduce(tiny)})
                    for (update const how : {update::sharded, update::replicated}) {
                        recipe const with{.name = by.name,
                                          .optimizer = sgd{.lr = 0.1, .momentum = 0.9},
                                          .algorithm = by,
                                          .buckets = size_capped_buckets{.cap_bytes = 2000, .first_bytes = 512},
                                          .options = {.update = how, .share_memory = false}};
                        auto const trained = train<float, memory::releasing>(comm, with, 8, 45, 60, 2);
                        all.emplace_back(trained.digest, trained.wrong);
                    }
                communicator<> const inside = comm.host();
                std::string refused = "not refused";
                scripted_model<> net({{"a", {30}}});
                try {
                    data_parallel trainer{net, sgd{.lr = 1}, inside, tiny};
                } catch (usage_error const& e) {
                    if (std::string(e.what()).find("hierarchical_allreduce: it was made for other ranks") !=
                        std::string::npos)
                        refused = "";
                }
                all.emplace_back(all.front().first, refused);
                return all;
            },
            patient());
        for (auto const& of_rank : got)
            for (auto const& [digest, wrong] : of_rank) {
                CHECK(wrong == "");
                CHECK(digest == got[0][0].first);
            }
    }
}
