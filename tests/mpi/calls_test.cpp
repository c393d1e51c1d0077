// Who calls MPI, and what becomes of the errors that it returns. This program's functions stand before MPI's own.
#include <ddp/transport/mpi/mpi.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/rendezvous/run_mpi.hpp>
#include <ddp/train/data_parallel.hpp>

#include <boost/mpi/communicator.hpp>

#include "mpi/patience.hpp"
#include "support/catch.hpp"
#include "support/group_checks.hpp"
#include "train/scripted_model.hpp"

namespace {
std::atomic<int> sends_to_refuse = 0, tests_to_refuse = 0, tests_of_many_to_refuse = 0;
std::atomic<int> communicators_made = 0;
std::atomic<int> foreign_calls = 0;  // of threads other than `home`, while that is set
std::atomic<std::thread::id> home{};

void note_caller() {
    std::thread::id const at_home = home.load();
    if (at_home != std::thread::id() && at_home != std::this_thread::get_id()) foreign_calls.fetch_add(1);
}
}  // namespace

extern "C" int MPI_Isend(void const* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                         MPI_Request* request) {
    note_caller();
    if (sends_to_refuse.load() > 0 && sends_to_refuse.fetch_sub(1) > 0) {
        MPI_Comm_call_errhandler(comm, MPI_ERR_OTHER);  // ends the job, unless somebody has asked for codes
        return MPI_ERR_OTHER;
    }
    return PMPI_Isend(data, count, type, to, tag, comm, request);
}
extern "C" int MPI_Test(MPI_Request* request, int* over, MPI_Status* status) {
    note_caller();
    if (tests_to_refuse.load() > 0 && tests_to_refuse.fetch_sub(1) > 0) return MPI_ERR_OTHER;
    return PMPI_Test(request, over, status);
}
extern "C" int MPI_Testsome(int in, MPI_Request* requests, int* out, int* indices, MPI_Status* statuses) {
    note_caller();
    if (tests_of_many_to_refuse.load() > 0 && tests_of_many_to_refuse.fetch_sub(1) > 0) return MPI_ERR_OTHER;
    return PMPI_Testsome(in, requests, out, indices, statuses);
}

// All by which this version of MPI makes a communicator out of another one.
extern "C" int MPI_Comm_create(MPI_Comm from, MPI_Group of, MPI_Comm* made) {
    ++communicators_made;
    return PMPI_Comm_create(from, of, made);
}
extern "C" int MPI_Comm_create_group(MPI_Comm from, MPI_Group of, int tag, MPI_Comm* made) {
    ++communicators_made;
    return PMPI_Comm_create_group(from, of, tag, made);
}
extern "C" int MPI_Comm_split(MPI_Comm from, int color, int key, MPI_Comm* made) {
    ++communicators_made;
    return PMPI_Comm_split(from, color, key, made);
}
extern "C" int MPI_Comm_split_type(MPI_Comm from, int type, int key, MPI_Info info, MPI_Comm* made) {
    ++communicators_made;
    return PMPI_Comm_split_type(from, type, key, info, made);
}
extern "C" int MPI_Comm_dup(MPI_Comm from, MPI_Comm* made) {
    ++communicators_made;
    return PMPI_Comm_dup(from, made);
}
extern "C" int MPI_Comm_dup_with_info(MPI_Comm from, MPI_Info info, MPI_Comm* made) {
    ++communicators_made;
    return PMPI_Comm_dup_with_info(from, info, made);
}
extern "C" int MPI_Comm_idup(MPI_Comm from, MPI_Comm* made, MPI_Request* request) {
    ++communicators_made;
    return PMPI_Comm_idup(from, made, request);
}

using namespace std::chrono_literals;

TEST_CASE("a send that MPI refuses closes the peer and ends no job", "[mpi]") {
    boost::mpi::communicator const world;
    if (world.size() == 1) return;
    std::vector<ddp::completion> ended(2);
    std::array<std::byte, 10> bytes{};
    MPI_Comm strict = MPI_COMM_NULL;  // Boost.MPI asks for codes on the world; a program of one's own may not
    REQUIRE(MPI_Comm_dup(world, &strict) == MPI_SUCCESS);
    MPI_Comm_set_errhandler(strict, MPI_ERRORS_ARE_FATAL);
    {
        ddp::mpi_transport transport(strict, {.times = ddp::test::patient_times()});
        int const peer = (world.rank() + 1) % world.size();
        for (ddp::completion& each : ended) each.run = [](ddp::completion&) noexcept {};
        transport.post_receive(peer, {}, bytes, ended[0]);
        sends_to_refuse = 1;
        transport.post_send(peer, {}, bytes, ended[1]);
        sends_to_refuse = 0;
        while (ended[0].status == ddp::op_status::pending || ended[1].status == ddp::op_status::pending)
            transport.progress(transport.now() + 10ms);
        auto const about = static_cast<std::size_t>(peer);
        CHECK(transport.reports()[about].is == ddp::report::state::closed);
        CHECK(transport.reports()[about].record.text.view().find("MPI_ERR_OTHER") != std::string_view::npos);
    }
    for (ddp::completion const& each : ended) CHECK(each.status == ddp::op_status::closed);
    MPI_Comm_free(&strict);
    world.barrier();
}

TEST_CASE("an error of MPI while the transport looks for progress is one verdict, in MPI's words", "[mpi][faults]") {
    boost::mpi::communicator const world;
    if (world.size() == 1) return;
    bool const of_many = GENERATE(false, true);
    std::string text;
    {
        std::vector<double> data(1 << 16, 1.0);  // outlives the transport
        ddp::communicator<> comm = ddp::mpi_communicator(world, ddp::test::patient_times());
        world.barrier();  // not one of ours, which the failure could still meet
        if (comm.rank() == 1) (of_many ? tests_of_many_to_refuse : tests_to_refuse) = 1;
        try {
            for (int i = 0; i < 10; ++i) ddp::allreduce(comm, data);
        } catch (ddp::comm_error const& e) {
            text = e.what();
        }
        tests_to_refuse = tests_of_many_to_refuse = 0;
    }
    CAPTURE(of_many, text);
    CHECK(text.find("DDP-E208 transport: the transport of rank 1 failed") == 0);
    CHECK(text.find(of_many ? "MPI_Testsome failed: MPI_ERR_OTHER" : "MPI_Test failed: MPI_ERR_OTHER") !=
          std::string::npos);
    world.barrier();
}

TEST_CASE("groups make no communicators of MPI's", "[mpi][group]") {
    boost::mpi::communicator const world;
    if (world.size() == 1) return;
    communicators_made = 0;
    ddp::communicator<> const comm = ddp::mpi_communicator(world, ddp::test::patient_times());
    CHECK(communicators_made == 1);
    CHECK(ddp::test::check_grid(comm, 2) == ddp::test::failures{});
    ddp::communicator<> const odd = comm.split(comm.rank() % 2, -comm.rank()), inner = odd.split(0);
    ddp::barrier(inner);
    ddp::barrier(comm.host());
    ddp::barrier(comm.across_hosts());
    if (auto const first = comm.subgroup({1, 0})) ddp::barrier(*first);
    CHECK(ddp::test::check_any_order(comm) == ddp::test::failures{});
    for (int round = 0; round < 200; ++round) static_cast<void>(comm.split((comm.rank() + round) % 2));
    CHECK(communicators_made == 1);
}

TEST_CASE("below MPI_THREAD_MULTIPLE no thread of a model's own calls MPI", "[mpi]") {
    boost::mpi::communicator const world;
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    if (level == MPI_THREAD_MULTIPLE) return;
    ddp::communicator<> comm = ddp::mpi_communicator(world, ddp::test::patient_times());
    ddp::test::scripted_model<> model({{"a", {3}}, {"b", {2}}});
    model.leaves_out = [](std::size_t i) { return i == 0; };
    auto trainer = ddp::test::make_trainer(model, comm);
    model.at_end = [&](auto const& ready) {
        std::jthread([&] {
            for (double& g : trainer.parameters()[0].gradient) g = 5;
            ready(0);
        });
    };
    foreign_calls = 0;
    home = std::this_thread::get_id();
    for (int i = 0; i < 5; ++i) trainer.step(ddp::test::numbers{{1}});
    home = std::thread::id();
    CHECK(foreign_calls == 0);
    CHECK(model.value(0)[0] == -25.0);
}
