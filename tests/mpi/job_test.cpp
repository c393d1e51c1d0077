// What is promised of every transport, over MPI: the conformance suite, all collectives, trainings with the bits of inproc.
#include <memory>
#include <string>

#include <ddp/comm/communicator.hpp>
#include <ddp/testing/conformance.hpp>
#include <ddp/transport/mpi/mpi.hpp>

#include <boost/mpi/communicator.hpp>

#include "support/catch.hpp"
#include "support/group_checks.hpp"
#include "support/job_checks.hpp"

namespace {

ddp::timing patient() {
    ddp::timing times = ddp::timing::for_tests();
    times.collective = std::chrono::seconds(60);  // five ranks on two cores
    return times;
}

std::unique_ptr<ddp::mpi_transport> connect() {
    return std::make_unique<ddp::mpi_transport>(boost::mpi::communicator(), ddp::mpi_options{.times = patient()});
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

TEST_CASE("over MPI trainings have the bits they have over inproc", "[mpi][train]") {
    ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
    auto const [bits, wrong] = ddp::test::train_every_way(comm);
    CHECK(wrong == "");
    CHECK(bits == ddp::test::inproc_bits(comm.size()));
}

TEST_CASE("over MPI buckets are reduced during backward", "[mpi][train]") {
    if (boost::mpi::communicator().size() == 1) return;
    ddp::communicator<> comm = ddp::any_communicator(connect(), patient());
    CHECK(comm.has_thread() == ddp::may_own_thread(comm.transport()));
    CHECK(ddp::test::check_overlap(comm) == ddp::test::failures{});
}
