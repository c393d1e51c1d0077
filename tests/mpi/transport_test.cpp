// mpi_transport alone; what it has in common with every transport is in the conformance suite.
#include <ddp/transport/mpi/mpi.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <boost/mpi/collectives.hpp>
#include <boost/mpi/communicator.hpp>
#include <boost/mpi/environment.hpp>

#include "mpi/patience.hpp"
#include "support/catch.hpp"
#include "support/thrown_by.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::op_status;

struct node : ddp::completion {
    int runs = 0;
    node() {
        run = [](ddp::completion& self) noexcept { ++static_cast<node&>(self).runs; };
    }
};

std::vector<std::byte> pattern(std::size_t bytes, std::size_t seed) {
    std::vector<std::byte> data(bytes);
    for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 31 + i / 255 + seed * 7);
    return data;
}

ddp::tag tag_of(std::uint32_t channel, std::uint64_t index, std::uint64_t fingerprint = 0) {
    return {.id = {.group = 0, .channel = channel, .index = index}, .fingerprint = fingerprint};
}

/// Drives until `over()`; false if that takes more than ten seconds.
template <class Over>
bool drive(ddp::mpi_transport& transport, Over const& over) {
    auto const until = transport.now() + 10s;
    while (!over()) {
        if (transport.now() >= until) return false;
        transport.progress(std::min(until, transport.now() + 1s));
    }
    return true;
}

ddp::mpi_options quick(std::size_t piece_bytes = std::size_t{1} << 28) {
    return {.times = ddp::test::patient_times(), .piece_bytes = piece_bytes};
}

int next(ddp::mpi_transport const& t) {
    return (t.rank() + 1) % t.size();
}
int previous(ddp::mpi_transport const& t) {
    return (t.rank() + t.size() - 1) % t.size();
}

}  // namespace

TEST_CASE("messages of every size arrive whole, whichever side posts first", "[mpi]") {
    boost::mpi::communicator const world;
    std::size_t const piece = GENERATE(std::size_t{1} << 28, std::size_t{1000});
    ddp::mpi_transport transport(world, quick(piece));
    if (transport.size() == 1) return;
    std::size_t const large = piece == 1000 ? 100'000 : std::size_t{64} << 20;
    std::uint64_t index = 0;
    for (std::size_t const bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{984}, std::size_t{985}, std::size_t{999}, std::size_t{1000},
          std::size_t{1001}, std::size_t{4096}, std::size_t{70'000}, large}) {
        for (bool const receive_first : {true, false}) {
            CAPTURE(piece, bytes, receive_first);
            auto const seed = static_cast<std::size_t>(transport.rank());
            auto const out = pattern(bytes, seed);
            std::vector<std::byte> in(bytes);
            node sent;
            node received;
            auto const mine = static_cast<std::uint64_t>(transport.rank()) + 100;
            auto const theirs = static_cast<std::uint64_t>(previous(transport)) + 100;
            ++index;
            if (receive_first) transport.post_receive(previous(transport), tag_of(0, index, mine), in, received);
            transport.post_send(next(transport), tag_of(0, index, mine), out, sent);
            if (!receive_first) {
                std::this_thread::sleep_for(2ms);
                transport.progress(ddp::time_point{});
                transport.post_receive(previous(transport), tag_of(0, index, mine), in, received);
            }
            CHECK(received.runs == 0);
            REQUIRE(drive(transport, [&] { return sent.runs > 0 && received.runs > 0; }));
            CHECK(sent.runs == 1);
            CHECK(received.runs == 1);
            CHECK(sent.status == op_status::ok);
            CHECK(received.status == op_status::ok);
            CHECK(received.length == bytes);
            CHECK(received.fingerprint == theirs);
            CHECK((in == pattern(bytes, static_cast<std::size_t>(previous(transport)))));
        }
    }
}

TEST_CASE("thousands in flight keep their order within an identity and do not hinder each other across", "[mpi]") {
    boost::mpi::communicator const world;
    ddp::mpi_transport transport(world, quick());
    if (transport.size() == 1) return;
    constexpr std::size_t identities = 40;
    constexpr std::size_t each = 50;
    bool const early = GENERATE(true, false);  // sends before their receives
    auto const size_of = [](std::size_t i, std::size_t k) { return (i * 7 + k * 311) % 1500; };
    std::vector<std::vector<std::byte>> out;
    std::vector<std::vector<std::byte>> in;
    std::vector<node> sends(identities * each);
    std::vector<node> receives(identities * each);
    for (std::size_t i = 0; i < identities; ++i)
        for (std::size_t k = 0; k < each; ++k) {
            out.push_back(pattern(size_of(i, k), i * 1000 + k));
            in.emplace_back(size_of(i, k));
        }
    auto const identity = [](std::size_t i) {  // far apart: nothing is cut to the width of an MPI tag
        return tag_of(static_cast<std::uint32_t>(i * 0x01000001u), std::uint64_t{i} << 40);
    };
    auto const send_all = [&] {  // identities interleaved
        for (std::size_t k = 0; k < each; ++k)
            for (std::size_t i = 0; i < identities; ++i)
                transport.post_send(next(transport), identity(i), out[i * each + k], sends[i * each + k]);
    };
    if (early) send_all();
    if (early) {
        world.barrier();  // everything is on its way
        for (auto const until = transport.now() + 20ms; transport.now() < until;)
            transport.progress(transport.now() + 1ms);
    }
    for (std::size_t i = identities; i-- > 0;)  // in another order than they are sent
        for (std::size_t k = 0; k < each; ++k)
            transport.post_receive(previous(transport), identity(i), in[i * each + k], receives[i * each + k]);
    if (!early) send_all();
    std::size_t right = 0;
    REQUIRE(drive(transport, [&] {
        for (std::size_t i = 0; i < sends.size(); ++i)
            if (sends[i].runs == 0 || receives[i].runs == 0) return false;
        return true;
    }));
    for (std::size_t i = 0; i < sends.size(); ++i)
        right += receives[i].status == op_status::ok && sends[i].status == op_status::ok && in[i] == out[i];
    CHECK(right == sends.size());
}

TEST_CASE("every rank talks to every rank at once", "[mpi]") {
    boost::mpi::communicator const world;
    ddp::mpi_transport transport(world, quick());
    auto const ranks = static_cast<std::size_t>(transport.size());
    auto const me = static_cast<std::size_t>(transport.rank());
    for (std::size_t const bytes : {std::size_t{8}, std::size_t{300'000}}) {
        std::vector<std::vector<std::byte>> out(ranks);
        std::vector<std::vector<std::byte>> in(ranks, std::vector<std::byte>(bytes));
        std::vector<node> nodes(2 * ranks);
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            if (peer == me) continue;
            out[peer] = pattern(bytes, me * 10 + peer);
            transport.post_receive(static_cast<int>(peer), tag_of(5, bytes), in[peer], nodes[2 * peer]);
            transport.post_send(static_cast<int>(peer), tag_of(5, bytes), out[peer], nodes[2 * peer + 1]);
        }
        REQUIRE(drive(transport, [&] {
            for (std::size_t i = 0; i < nodes.size(); ++i)
                if (i / 2 != me && nodes[i].runs == 0) return false;
            return true;
        }));
        for (std::size_t peer = 0; peer < ranks; ++peer)
            if (peer != me) CHECK((in[peer] == pattern(bytes, peer * 10 + me)));
    }
}

TEST_CASE("a receive of the wrong length ends so, writes nothing, and what follows is unharmed", "[mpi]") {
    boost::mpi::communicator const world;
    std::size_t const piece = GENERATE(std::size_t{1000}, std::size_t{1} << 28);
    ddp::mpi_transport transport(world, quick(piece));
    if (transport.size() == 1) return;
    struct lengths {
        std::size_t sent, expected;
    };
    std::uint64_t index = 0;
    for (auto const [sent, expected] :
         {lengths{8, 16}, lengths{16, 8}, lengths{4, 0}, lengths{0, 4}, lengths{5000, 10}, lengths{100, 5000},
          lengths{5500, 5000}, lengths{999, 1001}, lengths{300'000, 10}}) {
        CAPTURE(piece, sent, expected);
        ++index;
        auto const out = pattern(sent, 1);
        auto const after = pattern(3000, 2);
        std::vector<std::byte> in(expected, std::byte{0x55});
        std::vector<std::byte> second(3000);
        node nodes[4];
        transport.post_receive(previous(transport), tag_of(1, index), in, nodes[0]);
        transport.post_receive(previous(transport), tag_of(1, index), second, nodes[1]);
        transport.post_send(next(transport), tag_of(1, index), out, nodes[2]);
        transport.post_send(next(transport), tag_of(1, index), after, nodes[3]);
        REQUIRE(drive(transport, [&] { return nodes[0].runs + nodes[1].runs + nodes[2].runs + nodes[3].runs == 4; }));
        CHECK(nodes[0].status == op_status::length);
        CHECK(nodes[0].length == sent);
        CHECK((in == std::vector<std::byte>(expected, std::byte{0x55})));
        CHECK(nodes[1].status == op_status::ok);
        CHECK(nodes[2].status == op_status::ok);
        CHECK((second == after));
    }
}

TEST_CASE("the user's messages with the same tags and ours never match each other", "[mpi]") {
    boost::mpi::communicator const world;
    ddp::mpi_transport transport(world, quick());
    if (transport.size() == 1) return;
    std::vector<std::byte> const out = pattern(10'000, 3);
    std::vector<std::byte> in(out.size());
    for (int round = 0; round < 20; ++round) {
        node sent;
        node received;
        int theirs[3] = {-1, -1, -1};
        std::vector<boost::mpi::request> requests;
        for (int tag = 0; tag < 3; ++tag)  // 0 is our envelopes', 1 and up our payloads'
            requests.push_back(world.irecv(boost::mpi::any_source, tag, theirs[tag]));
        transport.post_receive(previous(transport), tag_of(0, static_cast<std::uint64_t>(round)), in, received);
        transport.post_send(next(transport), tag_of(0, static_cast<std::uint64_t>(round)), out, sent);
        for (int tag = 0; tag < 3; ++tag) requests.push_back(world.isend(next(transport), tag, 1000 * round + tag));
        REQUIRE(drive(transport, [&] { return sent.runs + received.runs == 2; }));
        boost::mpi::wait_all(requests.begin(), requests.end());
        world.barrier();
        for (int tag = 0; tag < 3; ++tag) CHECK(theirs[tag] == 1000 * round + tag);
        CHECK((in == out));
    }
}

TEST_CASE("two transports over one communicator do not hear each other", "[mpi]") {
    boost::mpi::communicator const world;
    ddp::mpi_transport first(world, quick());
    ddp::mpi_transport second(world, quick());
    if (first.size() == 1) return;
    auto const one = pattern(2000, 1);
    auto const two = pattern(2000, 2);
    std::vector<std::byte> in_one(2000);
    std::vector<std::byte> in_two(2000);
    node nodes[4];
    second.post_send(next(second), tag_of(0, 1), two, nodes[0]);
    first.post_send(next(first), tag_of(0, 1), one, nodes[1]);
    first.post_receive(previous(first), tag_of(0, 1), in_one, nodes[2]);
    second.post_receive(previous(second), tag_of(0, 1), in_two, nodes[3]);
    auto const until = first.now() + 10s;
    while (nodes[0].runs + nodes[1].runs + nodes[2].runs + nodes[3].runs < 4 && first.now() < until) {
        second.progress(ddp::time_point{});
        first.progress(first.now() + 1ms);
    }
    CHECK(nodes[0].runs + nodes[1].runs + nodes[2].runs + nodes[3].runs == 4);
    CHECK((in_one == one));
    CHECK((in_two == two));
}

TEST_CASE("progress keeps its deadline, polls, and returns at once when woken", "[mpi]") {
    boost::mpi::communicator const world;
    ddp::mpi_transport transport(world, quick());
    auto const begin = transport.now();
    CHECK_FALSE(transport.progress(begin + 30ms));
    auto const slept = transport.now() - begin;
    CHECK(slept >= 30ms);
    CHECK(slept < 5s);
    CHECK_FALSE(transport.progress(ddp::time_point{}));
    transport.wake();  // sticky: it comes before the sleep
    CHECK_FALSE(transport.progress(ddp::never));
    if (transport.may_own_thread()) {
        std::thread other([&] {
            std::this_thread::sleep_for(20ms);
            transport.wake();
        });
        CHECK_FALSE(transport.progress(ddp::never));
        other.join();
    }
    world.barrier();  // no goodbye while another rank still counts reports
}

TEST_CASE("abort delivers its record to every rank and ends what was posted", "[mpi]") {
    boost::mpi::communicator const world;
    auto transport = std::make_optional<ddp::mpi_transport>(world, quick());
    if (transport->size() == 1) return;
    bool const speaks = transport->rank() == transport->size() - 1;
    auto const speaker = static_cast<std::size_t>(transport->size() - 1);
    std::vector<std::byte> in(100'000);
    auto const out = pattern(100'000, 1);
    node never_sent;
    node never_received;
    transport->post_receive(previous(*transport), tag_of(0, 1), in, never_sent);
    transport->post_send(next(*transport), tag_of(0, 2), out, never_received);
    if (speaks) {
        ddp::failure record;
        record.kind = ddp::failure_kind::threw;
        record.rank = transport->rank();
        record.text = std::string_view("disk full");
        transport->abort(record);
        CHECK(never_sent.runs == 1);
        CHECK(never_received.runs == 1);
        CHECK(never_sent.status == op_status::aborted);
        CHECK(never_received.status == op_status::aborted);
        record.is_verdict = true;
        record.text = std::string_view("the verdict");
        transport->abort(record);
        CHECK(transport->reports()[speaker].record.text.view() == "the verdict");
    } else {
        bool told = false;
        REQUIRE(drive(*transport, [&] {
            told = transport->progress(ddp::time_point{}) || told;
            return transport->reports()[speaker].record.is_verdict;
        }));
        CHECK(transport->reports()[speaker].is == ddp::report::state::spoke);
        CHECK(transport->reports()[speaker].record.text.view() == "the verdict");
        CHECK(transport->reports()[speaker].record.rank == transport->size() - 1);
        transport->abort({});
        CHECK(never_sent.runs == 1);
        CHECK(never_received.runs == 1);
    }
    node late;
    transport->post_receive(previous(*transport), tag_of(0, 9), in, late);
    CHECK(late.runs == 0);
    transport->progress(transport->now() + 1s);
    CHECK(late.runs == 1);
    CHECK(late.status == op_status::aborted);
    transport.reset();  // before the buffers
}

TEST_CASE("what a rank sent before it left is received; then operations with it end as closed", "[mpi]") {
    boost::mpi::communicator const world;
    auto transport = std::make_optional<ddp::mpi_transport>(world, quick());
    if (transport->size() == 1) return;
    std::size_t const bytes = GENERATE(std::size_t{10}, std::size_t{200'000});
    if (transport->rank() == 0) {
        auto const out = pattern(bytes, 5);
        std::vector<node> sends(static_cast<std::size_t>(transport->size()));
        for (int peer = 1; peer < transport->size(); ++peer)
            transport->post_send(peer, tag_of(0, 1), out, sends[static_cast<std::size_t>(peer)]);
        auto const begin = ddp::monotonic_clock::now();
        transport.reset();
        CHECK(ddp::monotonic_clock::now() - begin < 5s);
        for (int peer = 1; peer < world.size(); ++peer) CHECK(sends[static_cast<std::size_t>(peer)].runs == 1);
    } else {
        std::vector<std::byte> in(bytes);
        std::vector<std::byte> more(bytes);
        node received;
        node nothing;
        node refused;
        node too_late;
        transport->post_receive(0, tag_of(0, 2), more, nothing);
        REQUIRE(drive(*transport, [&] { return nothing.runs > 0; }));
        CHECK(nothing.status == op_status::closed);
        CHECK(transport->reports()[0].is == ddp::report::state::left);
        transport->post_receive(0, tag_of(0, 1), in, received);
        REQUIRE(drive(*transport, [&] { return received.runs > 0; }));
        CHECK(received.status == op_status::ok);
        CHECK((in == pattern(bytes, 5)));
        transport->post_send(0, tag_of(0, 3), in, refused);
        transport->post_receive(0, tag_of(0, 3), in, too_late);
        CHECK(refused.runs == 0);
        REQUIRE(drive(*transport, [&] { return refused.runs + too_late.runs == 2; }));
        CHECK(refused.status == op_status::closed);
        CHECK(too_late.status == op_status::closed);
        transport.reset();
    }
}

TEST_CASE("a transport with work in flight is destroyed in bounded time, every operation run once", "[mpi]") {
    boost::mpi::communicator const world;
    if (world.size() == 1) return;
    bool const throws = GENERATE(false, true);
    std::vector<node> nodes(40);
    std::vector<std::vector<std::byte>> memory;
    for (std::size_t i = 0; i < nodes.size(); ++i) memory.push_back(pattern(i * 20'000, i));
    auto begin = ddp::monotonic_clock::now();
    try {
        auto options = quick();
        options.times.shutdown = 8s;  // not what ends it, unless a goodbye is missing
        ddp::mpi_transport transport(world, options);
        for (std::size_t i = 0; i < nodes.size(); ++i)
            if (i % 4 < 2)  // half of the sends meet a receive
                transport.post_send(next(transport), tag_of(0, i / 4), memory[i], nodes[i]);
            else if (i % 4 == 2)
                transport.post_receive(previous(transport), tag_of(0, i / 4), memory[i - 2], nodes[i]);
            else
                transport.post_receive(previous(transport), tag_of(1, i / 4), memory[i], nodes[i]);
        transport.progress(ddp::time_point{});
        begin = ddp::monotonic_clock::now();
        if (throws) throw std::runtime_error("out of luck");
    } catch (std::runtime_error const&) {
    }
    CHECK(ddp::monotonic_clock::now() - begin < 5s);
    for (node const& each : nodes) {
        CHECK(each.runs == 1);
        CHECK(each.status != op_status::pending);
    }
}

TEST_CASE("a rank that leaves by an exception tells its peers", "[mpi]") {
    boost::mpi::communicator const world;
    if (world.size() == 1) return;
    try {
        ddp::mpi_transport transport(world, quick());
        if (transport.rank() == 0) throw std::runtime_error("out of luck");
        REQUIRE(drive(transport, [&] { return transport.reports()[0].is == ddp::report::state::spoke; }));
        CHECK(transport.reports()[0].record.kind == ddp::failure_kind::threw);
        CHECK(transport.reports()[0].record.rank == 0);
    } catch (std::runtime_error const&) {
        CHECK(world.rank() == 0);
    }
}

TEST_CASE("a rank that never comes, and options that differ, are errors on every rank that runs", "[mpi]") {
    boost::mpi::communicator const world;
    CHECK_THROWS_WITH(ddp::mpi_transport(world, quick(0)),
                      Catch::Contains("mpi_options::piece_bytes must be between 1 and INT_MAX, the largest MPI count"));
    if (world.size() == 1) return;
    auto const own = static_cast<std::size_t>(world.rank() == 1 ? 2000 : 1000);
    CHECK_THROWS_WITH(ddp::mpi_transport(world, quick(own)),
                      Catch::Contains("made mpi_transports that differ: piece_bytes 2000 and 1000"));
    boost::mpi::communicator const copy(world, boost::mpi::comm_duplicate);  // what a late rank breaks stays in here
    auto options = quick();
    options.times.join = 200ms;
    if (world.rank() != 0)
        CHECK_THROWS_WITH(ddp::mpi_transport(copy, options),
                          Catch::Contains("for the other ranks of its communicator: every one of them must call "
                                          "ddp::run, or make an mpi_transport"));
    world.barrier();
    if (world.rank() == 0) {  // MPI wants the call to end somehow before it is finalised
        MPI_Comm dup = MPI_COMM_NULL;
        MPI_Request request = MPI_REQUEST_NULL;
        MPI_Comm_idup(copy, &dup, &request);
        CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS);
    }
    world.barrier();
}

TEST_CASE("posting to oneself or to nobody is the caller's mistake", "[mpi]") {
    boost::mpi::communicator const world;
    ddp::mpi_transport transport(world, quick());
    node done;
    CHECK_THROWS_WITH(transport.post_send(transport.rank(), tag_of(0, 1), {}, done),
                      Catch::Contains("post to another rank of this communicator"));
    CHECK_THROWS_WITH(transport.post_receive(transport.size(), tag_of(0, 1), {}, done),
                      Catch::Contains("post to another rank of this communicator"));
    CHECK_THROWS_WITH(transport.post_receive(-1, tag_of(0, 1), {}, done),
                      Catch::Contains("post to another rank of this communicator"));
    CHECK(done.runs == 0);
}

TEST_CASE("what is no communicator for this process and this thread is refused with advice", "[mpi]") {
    boost::mpi::communicator const world;
    CHECK_THROWS_WITH(ddp::mpi_transport(MPI_COMM_NULL, quick()),
                      Catch::Contains("mpi_transport needs a communicator that this process belongs to"));
    if (boost::mpi::environment::thread_level() < boost::mpi::threading::serialized) {
        auto elsewhere = std::async(std::launch::async,
                                    [&] { return ddp::test::thrown_by([&] { ddp::mpi_transport(world, quick()); }); });
        CHECK(elsewhere.get() ==
              "DDP-E100 usage: below MPI_THREAD_SERIALIZED only the thread that initialised MPI may make an "
              "mpi_transport");
    }
    if (world.size() == 1) return;
    boost::mpi::communicator const half = world.split(world.rank() == 0 ? 0 : 1);
    MPI_Comm between = MPI_COMM_NULL;
    REQUIRE(MPI_Intercomm_create(half, 0, world, world.rank() == 0 ? 1 : 0, 5, &between) == MPI_SUCCESS);
    CHECK_THROWS_WITH(ddp::mpi_transport(between, quick()),
                      Catch::Contains("mpi_transport needs an intracommunicator; merge the two groups first"));
    MPI_Comm_free(&between);
}

TEST_CASE("what MPI itself refuses is an error with its words, and what to do", "[mpi]") {
    boost::mpi::communicator const world;
    ddp::mpi_transport transport(world, quick());
    std::vector<int> const nobody{transport.size() + 7};
    std::string const said = ddp::test::thrown_by([&] { static_cast<void>(transport.second_duplicate(5, nobody)); });
    CAPTURE(said);
    CHECK(said.find("DDP-E202 peer closed: rank " + std::to_string(transport.rank()) + " of " +
                    std::to_string(transport.size()) + ": MPI_Group_incl failed: ") == 0);
    CHECK(said.find(". MPI cannot be relied on after this: end the job and start it again.") != std::string::npos);
}
