// What is promised of every transport, over MPI: the conformance suite, all collectives, trainings with the bits of inproc.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/checkpoint/checkpoints.hpp>
#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/point_to_point.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/long_operation.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/exchange/narrow.hpp>
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/exchange/sparse.hpp>
#include <ddp/optim/adam.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/rendezvous/run_mpi.hpp>
#include <ddp/strategy/local_parallel.hpp>
#include <ddp/strategy/loose.hpp>
#include <ddp/strategy/stale_synchronous.hpp>
#include <ddp/testing/conformance.hpp>
#include <ddp/train/data_parallel.hpp>
#include <ddp/transport/mpi/mpi.hpp>

#include <boost/mpi/communicator.hpp>

#include "checkpoint/training.hpp"
#include "data/files.hpp"
#include "mpi/patience.hpp"
#include "support/catch.hpp"
#include "support/group_checks.hpp"
#include "support/job_checks.hpp"
#include "support/printed_by.hpp"
#include "train/scripted_model.hpp"
#include "train/tanh_mlp.hpp"

namespace {

ddp::timing patient() {
    ddp::timing times = ddp::test::patient_times();
    times.collective = std::chrono::seconds(60);  // five ranks on two cores
    return times;
}

std::unique_ptr<ddp::mpi_transport> connect(std::uint64_t host = 0) {
    return std::make_unique<ddp::mpi_transport>(boost::mpi::communicator(),
                                                ddp::mpi_options{.times = patient(), .host = host});
}

/// What a check of group_checks.hpp finds, with collectives that may take two seconds; every rank has rank 0's error.
template <class Check>
void check_one_verdict(Check const& check) {
    ddp::timing times = patient();
    times.collective = std::chrono::seconds(2);
    std::string text;
    {
        ddp::communicator<> const comm = ddp::any_communicator(connect(), times);
        CHECK(check(comm, text) == ddp::test::failures{});
    }
    std::vector<char> first(text.begin(), text.end());
    first.resize(4096);
    MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
    CHECK(text == first.data());
}

}  // namespace

TEST_CASE("MPI keeps the promises of a transport", "[mpi][conformance]") {
    boost::mpi::communicator const world;
    std::unique_ptr<ddp::mpi_transport> transport;
    ddp::testing::conformance_options options;
    options.threads = false;  // wake() from another thread needs MPI_THREAD_MULTIPLE
    for (ddp::testing::scenario_info const& info : ddp::testing::scenarios()) {
        if (world.size() < info.least_ranks || info.which == ddp::testing::scenario::death) continue;
        // Each with a transport of its own: a scenario that fails on one rank ends the transport there.
        transport = connect();
        INFO(info.name);
        CHECK(ddp::testing::run_scenario(info, transport, options) == "");
        transport.reset();
    }
}

TEST_CASE("over MPI every collective equals its oracle", "[mpi][collective]") {
    ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
    CHECK(ddp::test::check_all_collectives(comm) == ddp::test::failures{});
}

TEST_CASE("over MPI every collective works in groups of every shape, and in a grid", "[mpi][group]") {
    ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
    if (comm.size() > 1) CHECK(ddp::test::check_groups(comm) == ddp::test::failures{});
    CHECK(ddp::test::check_grid(comm, 2) == ddp::test::failures{});
}

TEST_CASE("over MPI hosts are groups, also where one machine plays several", "[mpi][group]") {
    std::vector<std::uint64_t> const places = {5, 9, 5, 5, 9};
    auto const rank = static_cast<std::size_t>(boost::mpi::communicator().rank());
    ddp::communicator<> const comm = ddp::any_communicator(connect(places[rank]), patient());
    CHECK(ddp::test::check_hosts(comm, places) == ddp::test::failures{});
}

TEST_CASE("over MPI a rank that stops is named after timing.dead, where a thread of ours can say that others run",
          "[mpi][faults]") {
    ddp::timing times = patient();
    times.dead = std::chrono::milliseconds(1500);
    times.suspect = std::chrono::milliseconds(700);
    auto const thread = GENERATE(ddp::communication_thread::drives, ddp::communication_thread::rests);
    auto own = std::make_unique<ddp::mpi_transport>(boost::mpi::communicator(), ddp::mpi_options{.times = times});
    if (own->size() != 3 || !own->may_own_thread()) return;
    std::string text;
    auto waited = std::chrono::nanoseconds{0};
    {
        ddp::communicator<> comm = ddp::any_communicator(std::move(own), times, thread);
        int const rank = comm.rank();
        ddp::barrier(comm);
        std::this_thread::sleep_for(3 * times.heartbeat);  // all have been heard
        auto const begin = ddp::monotonic_clock::now();
        if (rank == 1) {
            std::string const stop = "kill -STOP $PPID; sleep 4; kill -CONT $PPID";
            char shell[] = "/bin/sh", option[] = "-c";
            std::string command = stop;
            char* const words[] = {shell, option, command.data(), nullptr};
            ::pid_t child = 0;
            REQUIRE(::posix_spawn(&child, shell, nullptr, nullptr, words, environ) == 0);
            std::this_thread::sleep_for(std::chrono::milliseconds(500));  // stopped within it
            ::waitpid(child, nullptr, 0);
        }
        std::string const printed = ddp::test::printed_by([&] {
            try {  // what the others had sent it may be enough for one
                for (int i = 0; i < 3; ++i) static_cast<void>(ddp::allreduce(comm, 1.0));
            } catch (ddp::comm_error const& e) {
                text = e.what();
            }
        });
        waited = ddp::monotonic_clock::now() - begin;
        if (rank != 1) CHECK(waited < std::chrono::seconds(4));
        CAPTURE(printed);  // before that, the lowest other rank has said that rank 1 is silent
        CHECK((printed.find("ddp: rank 0 has heard nothing from rank 1 (pid ") != std::string::npos) == (rank == 0));
        if (rank == 0) CHECK(printed.find(" s (silence number 1 of at least 0.7 s). After 1.5 s") != std::string::npos);
    }
    CHECK(text.find("DDP-E203 peer silent: rank 1 has sent nothing, not even a heartbeat, for") == 0);
    int pid = ::getpid();
    MPI_Bcast(&pid, 1, MPI_INT, 1, MPI_COMM_WORLD);
    CHECK(text.find(" (rank 1: pid " + std::to_string(pid) + " on ") != std::string::npos);
    std::vector<char> first(text.begin(), text.end());
    first.resize(4096);
    MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
    CHECK(text == first.data());
}

TEST_CASE("over MPI a long operation is heard of in heartbeats, and waited for", "[mpi][faults]") {
    ddp::timing times = patient();
    times.collective = std::chrono::seconds(1);
    auto own = std::make_unique<ddp::mpi_transport>(boost::mpi::communicator(), ddp::mpi_options{.times = times});
    if (own->size() != 3 || !own->may_own_thread()) return;
    ddp::communicator<> comm = ddp::any_communicator(std::move(own), times, ddp::communication_thread::drives);
    ddp::barrier(comm);
    if (comm.rank() == 1) {
        ddp::long_operation const scope(comm, "evaluation", std::chrono::seconds(60));
        std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    }
    CHECK(ddp::allreduce(comm, 1.0) == 3.0);
}

TEST_CASE("over MPI a failed call writes nothing into its memory once it has thrown", "[mpi][faults]") {
    boost::mpi::communicator const world;
    if (world.size() < 2) return;
#if defined(__SANITIZE_THREAD__)
    WARN("not tried: two threads are in MPI, whose order ThreadSanitizer cannot see");
    return;
#endif
    std::vector<std::uint8_t> data(std::size_t{32} << 20, 1);  // outlives the transport: MPI may read it until then
    ddp::timing times = patient();
    times.verdict = std::chrono::seconds(10);  // how long a call waits for MPI to be done with its memory
    ddp::communicator<> comm = ddp::any_communicator(connect(), times);
    world.barrier();         // not one of ours, which the failure could still meet
    if (comm.rank() == 1) {  // fails in the middle of a message
        ddp::request const sending = ddp::start_send(comm, data, 0);
        comm.progress();
        comm.fail("it gives up");
    } else if (comm.rank() == 0) {
        CHECK_THROWS_WITH(ddp::receive(comm, data, 1), Catch::Contains("it gives up"));
        CHECK(!comm.transport().still_writes());
        std::fill(data.begin(), data.end(), std::uint8_t{7});
    }
    // MPI is driven on both sides: what it still had to write would be written now.
    auto const until = ddp::monotonic_clock::now() + std::chrono::milliseconds(300);
    while (ddp::monotonic_clock::now() < until) {
        int some = 0;
        MPI_Iprobe(MPI_ANY_SOURCE, 0, MPI_COMM_WORLD, &some, MPI_STATUS_IGNORE);
    }
    if (comm.rank() == 0) CHECK(std::count(data.begin(), data.end(), std::uint8_t{7}) == std::ssize(data));
}

TEST_CASE("over MPI ranks learn long before the deadline that they have called different collectives",
          "[mpi][faults]") {
    if (boost::mpi::communicator().size() < 2) return;
    for (bool const leaves_out : {false, true}) {
        CAPTURE(leaves_out);
        ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
        bool const other = comm.rank() == comm.size() - 1;
        std::vector<double> ten(10, 1.0);
        auto const began = ddp::monotonic_clock::now();
        auto const calls = [&] {
            if (!other) ddp::barrier(comm);
            if (other || leaves_out) ddp::allreduce(comm, ten);
            ddp::barrier(comm);
        };
        CHECK_THROWS_WITH(calls(), Catch::StartsWith("DDP-E205 mismatch: ranks disagree about operation #"));
        CHECK(ddp::monotonic_clock::now() - began < patient().collective / 4);
    }
}

TEST_CASE("over MPI groups whose collectives are called in opposite order get one verdict", "[mpi][group]") {
    if (boost::mpi::communicator().size() < 2) return;
    check_one_verdict([](auto& comm, std::string& text) { return ddp::test::check_opposite_order(comm, text); });
}

TEST_CASE("over MPI a mismatch in one group is one verdict everywhere", "[mpi][group]") {
    if (boost::mpi::communicator().size() < 3) return;
    check_one_verdict([](auto& comm, std::string& text) { return ddp::test::check_mismatch_in_group(comm, text); });
}

TEST_CASE("over MPI waiting is followed across groups to the rank that is late", "[mpi][group]") {
    if (boost::mpi::communicator().size() != 3) return;  // once is enough: it takes its time
    check_one_verdict([](auto& comm, std::string& text) {
        return ddp::test::check_chain_across_groups(comm, std::chrono::seconds(5), text);
    });
}

TEST_CASE("over MPI trainings have the bits they have over inproc", "[mpi][train]") {
    ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
    auto const [bits, wrong] = ddp::test::train_every_way(comm);
    CHECK(wrong == "");
    CHECK(bits == ddp::test::inproc_bits(comm.size()));
}

namespace {

/// Whether this rank's digests, none of which may be 0, are those of the same training on threads of this process.
template <class Train>
void check_bits_of_inproc(Train const& train) {
    std::vector<std::uint64_t> got;
    int rank = 0, size = 0;
    {
        ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
        rank = comm.rank(), size = comm.size();
        got = train(comm);
    }
    auto const expected = ddp::test::run_ranks(size, train, ddp::test::patient());
    CHECK(got == expected[static_cast<std::size_t>(rank)]);
    CHECK(std::count(got.begin(), got.end(), std::uint64_t{0}) == 0);
}

/// A few steps by each exchange that sends less and each strategy that passes: digests of this rank's values, and at the end
/// of all ranks' steps.
std::vector<std::uint64_t> train_with_little(ddp::communicator<>& comm) {
    ddp::test::task_data<float> const data(7, 3, 64);
    ddp::sgd const by{.lr = 0.05, .momentum = 0.9};
    auto const batch = [&](std::size_t step) {
        std::size_t const from = 3 * step + 4 * static_cast<std::size_t>(comm.rank());
        return data.batch(from, from + 2 + (step + static_cast<std::size_t>(comm.rank())) % 3);
    };
    std::vector<std::uint64_t> all;
    auto const exchanging = [&](auto const& exchange) {
        for (ddp::update const how : {ddp::update::replicated, ddp::update::sharded}) {
            ddp::test::tanh_mlp<float> net(7, 24, 3, 5);
            ddp::data_parallel trainer{net, by, comm, ddp::training_options{.update = how}, exchange};
            for (std::size_t step = 0; step < 5; ++step) trainer.step(batch(step));
            all.push_back(trainer.replicas_identical() ? trainer.digest_of_values() : 0);
        }
    };
    auto const meeting = [&](auto const& strategy) {
        ddp::test::tanh_mlp<float> net(7, 24, 3, 5);
        ddp::local_parallel trainer{net, by, comm, strategy};
        // One rank has less data than the others.
        for (std::size_t step = 0; step < (comm.rank() == 1 ? 4u : 6u); ++step) trainer.step(batch(step));
        all.push_back(trainer.digest_of_values());  // of this rank
        while (trainer.join()) {
        }
        trainer.synchronise();
        all.push_back(trainer.replicas_identical() ? trainer.digest_of_values() : 0);
    };
    exchanging(ddp::bfloat16_exchange{.feedback = true});
    exchanging(ddp::int8_exchange{});
    exchanging(ddp::top_k_exchange{.ratio = 0.25});
    exchanging(ddp::power_sgd_exchange{.rank = 2, .start_step = 2});
    meeting(ddp::gossip{.graph = ddp::gossip_graph::ring});
    meeting(ddp::gossip{.graph = ddp::gossip_graph::exponential});
    meeting(ddp::stale_synchronous{.staleness = 2});
    return all;
}

}  // namespace

TEST_CASE("over MPI exchanges that send less, and strategies that do not wait, have the bits they have over inproc",
          "[mpi][train]") {
    check_bits_of_inproc(train_with_little);
}

TEST_CASE("over MPI a training is saved and resumed, goes on over inproc, and back, to the same bits", "[mpi][train]") {
#if defined(__SANITIZE_THREAD__)
    WARN("not tried: two threads are in MPI, whose order ThreadSanitizer cannot see");
    return;
#endif
    ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
    std::optional<::test::scratch_directory> scratch;  // of rank 0
    std::vector<char> path(4096);
    if (comm.rank() == 0) {
        std::string const text = scratch.emplace().path().string();
        std::copy(text.begin(), text.end(), path.begin());
    }
    MPI_Bcast(path.data(), static_cast<int>(path.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
    std::string const in = path.data();
    for (bool const sharded : {false, true}) {
        CAPTURE(sharded);
        ddp::test::kept_recipe by{.options = ddp::test::options_of(sharded, true), .rounded = true};
        by.options.share_memory = !sharded;
        std::string const kind = sharded ? "-sharded" : "-replicated";
        // From a checkpoint to step `end`, where another is saved.
        auto const go = [&](auto& on, std::string const& from, std::uint64_t end, std::string const& to) {
            ddp::test::kept_recipe other = by;
            other.seed = from.empty() ? by.seed : 99;
            ddp::test::kept_training one(on, other);
            if (!from.empty()) {
                auto const found = ddp::checkpoints(in + "/" + from + kind).resume(one.trainer, one.batches);
                if (!found || one.trainer.completed_steps() != found->step) return std::uint64_t{1};
            }
            one.go_to(end);
            if (!to.empty()) {
                ddp::checkpoints kept(in + "/" + to + kind, {.background = sharded});
                kept.save(one.trainer, one.batches);
                kept.wait();
            }
            return one.digest();
        };
        auto const over_inproc = [&](std::string const& from, std::uint64_t end, std::string const& to) {
            std::uint64_t digest = 0;
            if (comm.rank() == 0)
                digest = ddp::test::run_ranks(
                             comm.size(), [&](auto& on) { return go(on, from, end, to); }, ddp::test::patient())
                             .front();
            MPI_Bcast(&digest, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
            return digest;
        };
        std::uint64_t const expected = over_inproc("", 11, "");
        CHECK(expected > 1);
        CHECK(go(comm, "", 5, "first") > 1);
        CHECK(go(comm, "first", 11, "") == expected);     // MPI, MPI
        CHECK(over_inproc("first", 11, "") == expected);  // MPI, inproc
        CHECK(over_inproc("first", 8, "second") > 1);
        CHECK(go(comm, "second", 11, "") == expected);  // and back
    }
    ddp::barrier(comm);  // all have read what rank 0 removes
}

TEST_CASE("over MPI trainers in groups have the bits they have over inproc", "[mpi][train][group]") {
    if (boost::mpi::communicator().size() < 3) return;
    ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
    CHECK(ddp::test::train_in_groups(comm) == ddp::test::failures{});
}

namespace {
/// Two trainers inside a step at the same time, one on all ranks but the last, one on all but the first (who is left out trains
/// alone): digests of their values.
std::vector<std::uint64_t> train_overlapping(ddp::communicator<>& comm) {
    int const rank = comm.rank();
    ddp::communicator<> const front = comm.split(rank == comm.size() - 1 ? 1 : 0), back = comm.split(rank == 0 ? 1 : 0);
    ddp::test::task_data<float> const data(7, 3, 64);
    std::vector<std::uint64_t> all;
    for (bool const sharded : {false, true}) {
        ddp::test::tanh_mlp<float> one(7, 24, 3, 5), other(7, 24, 3, 6);
        auto const options = [](bool by_shards) {
            return ddp::training_options{.update = by_shards ? ddp::update::sharded : ddp::update::replicated};
        };
        ddp::data_parallel first{one, ddp::adam{.lr = 0.01}, front, options(sharded)};
        ddp::data_parallel second{other, ddp::adam{.lr = 0.01}, back, options(!sharded)};
        for (std::size_t step = 0; step < 6; ++step) {
            std::size_t const from = 3 * step + 4 * static_cast<std::size_t>(rank);
            auto const batch = data.batch(from, from + 3);
            first.forward(batch);
            second.forward(batch);
            if ((static_cast<std::size_t>(rank) + step) % 2 == 0) {  // neighbours in other orders
                first.backward();
                second.backward();
            } else {
                second.backward();
                first.backward();
            }
            second.finish();
            first.finish();
        }
        all.push_back(first.replicas_identical() ? first.digest_of_values() : 0);
        all.push_back(second.replicas_identical() ? second.digest_of_values() : 0);
    }
    return all;
}
}  // namespace

TEST_CASE("over MPI trainers on groups that overlap are inside a step at the same time", "[mpi][train][group]") {
    check_bits_of_inproc(train_overlapping);
}

TEST_CASE("over MPI ranks of several hosts, of uneven size, train in the memory of each: the same bits",
          "[mpi][train]") {
    std::vector<std::uint64_t> const places = {5, 9, 5, 5, 9};
    boost::mpi::communicator const world;
    if (world.size() < 3) return;  // two ranks would be on two hosts
    ddp::communicator<> comm =
        ddp::any_communicator(connect(places[static_cast<std::size_t>(world.rank())]), patient());
    if (world.size() == 5) {  // once is enough: it takes ten seconds
        auto const [bits, wrong] = ddp::test::train_every_way(comm);
        CHECK(wrong == "");
        CHECK(bits == ddp::test::inproc_bits(comm.size()));
    }
    for (bool const hierarchy : {true, false}) {
        ddp::test::scripted_model<> net({{"a", {300}}});
        ddp::data_parallel trainer{net, ddp::sgd{.lr = 1}, comm, ddp::training_options{.hierarchy = hierarchy}};
        CHECK(trainer.shares_memory() == hierarchy);
        trainer.step(ddp::test::numbers{{1.0 + comm.rank()}});
        CHECK(net.value(0)[299] == -0.5 - 0.5 * comm.size());
    }
}

TEST_CASE("over MPI a gradient that is not finite changes nothing, and every rank hears whose it was", "[mpi][train]") {
    ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
    int const last = comm.size() - 1;
    std::string const whose = "rank " + std::to_string(last) + "'s gradient of parameter \"a\" is NaN at element 0";
    for (auto const decision : {ddp::nonfinite::stop, ddp::nonfinite::skip})
        for (bool const shares : {true, false}) {
            CAPTURE(decision == ddp::nonfinite::stop, shares);
            ddp::test::scripted_model<> net({{"a", {300}}, {"b", {5}}});
            ddp::training_options const options{.nonfinite = decision, .share_memory = shares};
            ddp::data_parallel trainer{net, ddp::sgd{.lr = 1}, comm, options};
            ddp::test::numbers const good{{1}};
            ddp::test::numbers const bad{{comm.rank() == last ? std::nan("") : 1}};
            trainer.step(good);
            auto const before = trainer.digest_of_values();
            if (decision == ddp::nonfinite::stop)
                CHECK_THROWS_WITH(trainer.step(bad), Catch::Contains("finite: " + whose));
            else
                CHECK(trainer.step(bad).skipped);
            CHECK(trainer.digest_of_values() == before);
            CHECK((trainer.completed_steps() == 1 && !trainer.torn()));
            CHECK_FALSE(trainer.step(good).skipped);
            CHECK(net.value(0)[299] == -2);
        }
}

TEST_CASE("over MPI a rank that holds other values is named on every rank", "[mpi][train]") {
    ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
    if (comm.size() < 3) return;  // of two nobody is in the majority
    ddp::test::scripted_model<> net({{"a", {300}}});
    ddp::training_options const options{.update = ddp::update::replicated, .share_memory = false, .agreement_steps = 1};
    ddp::data_parallel trainer{net, ddp::sgd{.lr = 1}, comm, options};
    ddp::test::numbers const good{{1}};
    trainer.step(good);
    if (comm.rank() == 1) net.value(0)[7] += 1;
    CHECK_THROWS_WITH(trainer.step(good),
                      Catch::StartsWith("DDP-E106 replicas differ: ") &&
                          Catch::Contains("rank 1 holds other values (or another optimizer state) than the other " +
                                          std::to_string(comm.size() - 1)));
}

TEST_CASE("over MPI buckets are reduced during backward", "[mpi][train]") {
    if (boost::mpi::communicator().size() == 1) return;
    bool allowed = false;
    {  // one after the other: two threads in MPI have an order that ThreadSanitizer cannot see
        ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
        allowed = ddp::may_own_thread(comm.transport());
        CHECK((comm.thread() != ddp::communication_thread::none) == allowed);
        CHECK(comm.has_thread() == (allowed && !ddp::shares_cores(comm.transport())));
        CHECK(ddp::test::check_overlap(comm) == ddp::test::failures{});
    }
    for (auto const asked : {ddp::communication_thread::drives, ddp::communication_thread::rests}) {
        ddp::communicator<> other = ddp::any_communicator(connect(), patient(), asked);
        if (allowed) CHECK(other.thread() == asked);
        CHECK(ddp::test::check_overlap(other) == ddp::test::failures{});
    }
}

TEST_CASE("another number of ranks than mpirun has started is refused, with its option", "[mpi]") {
    int const size = boost::mpi::communicator().size();
    CHECK_THROWS_WITH(
        ddp::run<ddp::mpi>({.transport = "mpi", .ranks = size + 1}, [](ddp::communicator<>&) {}),
        Catch::Contains("mpirun started " + std::to_string(size) + " ranks, but " + std::to_string(size + 1) +
                        " were asked for: give mpirun -n " + std::to_string(size + 1)));
}
