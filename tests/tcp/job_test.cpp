// What is promised of every transport, over TCP on loopback: the conformance suite, all collectives, trainings with the
// bits of inproc. Ranks are threads here; tests/process repeats what matters with processes.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <future>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/point_to_point.hpp>
#include <ddp/comm/long_operation.hpp>
#include <ddp/optim/adam.hpp>
#include <ddp/testing/conformance.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
#include "support/group_checks.hpp"
#include "support/job_checks.hpp"
#include "support/loopback.hpp"
#include "support/on_ranks.hpp"
#include "support/sanitizers.hpp"
#include "train/patience.hpp"
#include "train/tanh_mlp.hpp"

using ddp::test::loopback_world;
using ddp::test::on_ranks;
using namespace std::chrono_literals;

namespace {

/// Every rank's end of a job, each on the host that `places` says: connected here, so that one machine can play several.
std::vector<std::unique_ptr<ddp::tcp_transport>> ranks_on_hosts(std::vector<std::uint64_t> const& places) {
    namespace ip = boost::asio::ip;
    std::vector<std::vector<ddp::framed_peer<ddp::tcp_stream>>> peers(places.size());
    ip::tcp::acceptor acceptor(ddp::tcp_context(), {ip::make_address("127.0.0.1"), 0});
    for (std::size_t a = 0; a < places.size(); ++a)
        for (std::size_t b = 0; b < a; ++b) {
            ddp::tcp_stream::socket one(ddp::tcp_context()), other(ddp::tcp_context());
            one.connect(acceptor.local_endpoint());
            acceptor.accept(other);
            bool const checked = places[a] != places[b];
            peers[a].push_back({static_cast<int>(b), ddp::tcp_stream(std::move(one)), "a peer", checked});
            peers[b].push_back({static_cast<int>(a), ddp::tcp_stream(std::move(other)), "a peer", checked});
        }
    std::vector<std::unique_ptr<ddp::tcp_transport>> all;
    for (std::size_t r = 0; r < places.size(); ++r) {
        ddp::framed_options options;
        options.times = ddp::test::loopback_patience();
        options.host = places[r];
        all.push_back(std::make_unique<ddp::tcp_transport>(static_cast<int>(r), static_cast<int>(places.size()),
                                                           std::move(peers[r]), options));
    }
    return all;
}

/// A few steps of a small model; the digest of its values.
template <class Comm>
std::uint64_t train_a_little(Comm& comm, ddp::update how) {
    using ddp::test::addend;
    ddp::test::tanh_mlp<float> model(3, 5, 2, 7);
    ddp::data_parallel trainer{model, ddp::adamw{.lr = 0.01}, comm,
                               ddp::training_options{.update = how, .share_memory = false}};
    auto const x = addend<float>(ddp::test::values::small_integers, 1, comm.rank(), 3 * 4),
               y = addend<float>(ddp::test::values::small_integers, 2, comm.rank(), 2 * 4);
    for (int step = 0; step < 4; ++step) trainer.step(ddp::test::regression<float>{x, y, 4});
    return trainer.digest_of_values();
}

/// What a check of group_checks.hpp finds on each rank, with collectives that may take one second.
template <class Check>
void check_one_verdict(int ranks, Check const& check) {
    ddp::timing times = ddp::test::loopback_patience();
    times.collective = 1s;
    loopback_world const world(ranks);
    auto const found = ddp::test::on_threads(ranks, [&](int rank) {
        ddp::communicator<> const comm = ddp::any_communicator(world.connect(rank), times);
        std::string text;
        auto wrong = check(comm, text);
        return std::pair(std::move(wrong), std::move(text));
    });
    std::string first;
    for (auto const& [wrong, text] : found) {
        CHECK(wrong == ddp::test::failures{});
        if (first.empty()) first = text;
        CHECK(text == first);
    }
}

}  // namespace

TEST_CASE("TCP keeps the promises of a transport", "[tcp][conformance]") {
    int const ranks = GENERATE(2, 3, 5);
    bool const memory = GENERATE(false, true);
    CAPTURE(ranks, memory);
    if (ranks != 3 && ddp::test::sanitizers_leave_out("conformance", ranks)) return;
    auto const world = [memory](int n) { return std::make_unique<loopback_world>(n, memory); };
    CHECK(ddp::testing::check_transport(ranks, world) == std::vector<std::string>{});
}

TEST_CASE("over TCP every collective equals its oracle", "[tcp][collective]") {
    auto const [ranks, memory] =
        GENERATE(table<int, bool>({{1, false}, {2, true}, {3, false}, {3, true}, {4, false}, {7, false}}));
    CAPTURE(ranks, memory);
    if (ranks != (memory ? 3 : 4) && ddp::test::sanitizers_leave_out("collectives", ranks)) return;
    for (auto const& wrong : on_ranks(ranks, [](auto& comm) { return ddp::test::check_all_collectives(comm); }, memory))
        CHECK(wrong == ddp::test::failures{});
}

TEST_CASE("over TCP every collective works in groups of every shape, and in a grid", "[tcp][group]") {
    bool const memory = GENERATE(false, true);  // messages through sockets, or through rings
    CAPTURE(memory);
    auto const check = [](auto& comm) {
        auto all = ddp::test::check_groups(comm);
        for (auto const& each : ddp::test::check_grid(comm, 3)) all.push_back(each);
        return all;
    };
    for (auto const& wrong : on_ranks(6, check, memory)) CHECK(wrong == ddp::test::failures{});
}

TEST_CASE("over TCP a mismatch in one group is one verdict everywhere", "[tcp][group]") {
    check_one_verdict(4, [](auto& comm, std::string& text) { return ddp::test::check_mismatch_in_group(comm, text); });
}

TEST_CASE("over TCP communicators die in any order, and a hundred splits take no descriptor", "[tcp][group]") {
    std::atomic<std::ptrdiff_t> before = 0, after = 0;  // both ranks are of this process
    auto const open = [] {
        return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                             std::filesystem::directory_iterator());
    };
    bool const memory = GENERATE(false, true);
    auto const sums = on_ranks(
        4,
        [&](ddp::communicator<>& comm) {
            std::optional<ddp::communicator<>> whole(comm), half(comm.split(comm.rank() / 2)), copy(half);
            std::optional<ddp::communicator<>> pair(half->split(0));
            half.reset();
            ddp::barrier(comm);
            if (comm.rank() == 0) before = open();
            for (int k = 0; k < 100; ++k) static_cast<void>(comm.split(k % 2, -k));
            ddp::barrier(comm);
            if (comm.rank() == 0) after = open();
            whole.reset();
            double const two = ddp::allreduce(*copy, 1.0);
            copy.reset();
            return two + ddp::allreduce(*pair, 1.0);
        },
        memory);
    for (double const each : sums) CHECK(each == 4.0);
    CHECK(after <= before);  // the rendezvous at rank 0 may have ended meanwhile
}

TEST_CASE("over TCP hosts are groups, also where one machine plays several", "[tcp][group]") {
    std::vector<std::uint64_t> const places = {5, 9, 5, 5, 9};
    auto transports = ranks_on_hosts(places);
    std::vector<std::future<ddp::test::failures>> running;
    for (auto& transport : transports)
        running.push_back(std::async(std::launch::async, [&places, &transport] {
            ddp::communicator<> const comm =
                ddp::any_communicator(std::move(transport), ddp::test::loopback_patience());
            return ddp::test::check_hosts(comm, places);
        }));
    for (auto& r : running) CHECK(r.get() == ddp::test::failures{});
}

TEST_CASE("over TCP groups whose collectives are called in opposite order get one verdict", "[tcp][group]") {
    check_one_verdict(4, [](auto& comm, std::string& text) { return ddp::test::check_opposite_order(comm, text); });
}

TEST_CASE("over TCP waiting is followed across groups to the rank that is late", "[tcp][group]") {
    check_one_verdict(
        4, [](auto& comm, std::string& text) { return ddp::test::check_chain_across_groups(comm, 4s, text); });
}

TEST_CASE("over TCP a rank that has left is in no long operation", "[tcp][faults]") {
    auto const join = ddp::test::loopback_job(3, false, 1s);
    auto const said = ddp::test::on_threads(3, [&](int rank) -> std::string {
        try {
            ddp::communicator<> comm = join(rank);
            if (rank == 1) {
                ddp::long_operation const scope(comm, "a file", 600s);
                std::this_thread::sleep_for(500ms);  // the others have heard of it, and no heartbeat takes it back
            }
            int number = 0;
            if (rank == 0) ddp::receive(comm, number, 2);
            if (rank == 2) std::this_thread::sleep_for(4s);
            return {};
        } catch (std::exception const& e) {
            return e.what();
        }
    });
    CAPTURE(said[0]);
    CHECK(said[0].starts_with("DDP-E204 deadline: rank 2 "));
}

TEST_CASE("over TCP trainings have the bits they have over inproc", "[tcp][train]") {
    auto const [ranks, memory] = GENERATE(table<int, bool>({{2, false}, {3, true}, {6, false}}));
    CAPTURE(ranks, memory);
    if (ranks == 6 && ddp::test::sanitizers_leave_out("trainings", ranks)) return;
    auto const expected = ddp::test::inproc_bits(ranks);
    auto const train = [](auto& comm) { return ddp::test::train_every_way(comm); };
    for (auto const& [bits, wrong] : on_ranks(ranks, train, memory)) {
        CHECK(wrong == "");
        CHECK(bits == expected);
    }
}

TEST_CASE("over TCP trainers in groups have the bits they have over inproc", "[tcp][train][group]") {
    if (ddp::test::sanitizers_leave_out("trainers in groups", 5)) return;
    for (auto const& wrong : on_ranks(5, [](auto& comm) { return ddp::test::train_in_groups(comm); }))
        CHECK(wrong == ddp::test::failures{});
}

TEST_CASE("over TCP seven and nine ranks hold the bits of the canonical sum, and train to those of inproc",
          "[tcp][collective][train]") {
    auto const [ranks, memory] = GENERATE(table<int, bool>({{7, false}, {9, false}, {9, true}}));
    if (ddp::test::sanitizers_leave_out("canonical sums", ranks)) return;
    auto const check = [](auto& comm) {
        ddp::test::failures all;
        for (auto const& [name, algorithm] : ddp::test::algorithms()) {
            using enum ddp::test::values;
            ddp::test::note(all, name, ddp::test::check_allreduce<float>(comm, algorithm, 1003, mixed));
            ddp::test::note(all, name, ddp::test::check_allreduce<double>(comm, algorithm, 1003, mixed));
            ddp::test::note(all, name, ddp::test::check_reduce_scatter<float>(comm, algorithm, 1003));
        }
        return std::pair(train_a_little(comm, ddp::update::sharded), std::move(all));
    };
    auto const expected = ddp::test::run_ranks(
        ranks, [](auto& comm) { return train_a_little(comm, ddp::update::replicated); }, ddp::test::patient());
    for (auto const& [bits, wrong] : on_ranks(ranks, check, memory)) {
        CHECK(wrong == ddp::test::failures{});
        CHECK(bits == expected.front());
    }
}

TEST_CASE("a communicator that knows its transport's type carries collectives and trainers", "[tcp][train]") {
    constexpr int ranks = 3;
    loopback_world const world(ranks);
    auto const got = ddp::test::on_threads(ranks, [&](int rank) {
        ddp::communicator<ddp::tcp_transport> const comm(world.connect(rank), ddp::test::loopback_patience());
        auto wrong = ddp::test::check_every_collective(comm);
        return std::pair(train_a_little(comm, ddp::update::replicated), std::move(wrong));
    });
    auto const expected = ddp::test::run_ranks(
        ranks, [](auto& comm) { return train_a_little(comm, ddp::update::replicated); }, ddp::test::patient());
    for (auto const& [bits, wrong] : got) {
        CHECK(wrong == ddp::test::failures{});
        CHECK(bits == expected.front());
    }
}

TEST_CASE("over TCP buckets are reduced during backward", "[tcp][train]") {
    int const ranks = GENERATE(2, 3);
    bool const memory = GENERATE(false, true);
    for (auto const& wrong : on_ranks(ranks, [](auto& comm) { return ddp::test::check_overlap(comm); }, memory))
        CHECK(wrong == ddp::test::failures{});
}
