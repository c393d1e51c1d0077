// communicator: who drives when, and how every end of a job reaches every rank.
#include <ddp/comm/communicator.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/collective/algorithms/recursive_doubling_allreduce.hpp>
#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/point_to_point.hpp>
#include <ddp/collective/request.hpp>
#include <ddp/comm/long_operation.hpp>
#include <ddp/transport/inproc.hpp>

#include "support/catch.hpp"
#include "support/no_room_for_stacks.hpp"
#include "support/ranks.hpp"
#include "support/thrown_by.hpp"

using namespace ddp;
using namespace std::chrono_literals;

namespace {

using comm_type = communicator<>;

template <class Comm>
void add_up(Comm& comm, std::vector<float>& data) {
    operation_info what;
    what.name = "allreduce";
    what.count = data.size();
    what.element = "float";
    detail::call(comm, what,
                 [&](auto over) { return direct_allreduce::sum(direct_allreduce{}, over, std::span<float>(data)); });
}
template <class Comm>
float sum_of_ones(Comm& comm) {
    std::vector<float> data(3, 1.0f);
    add_up(comm, data);
    return data[2];
}

timing quick() {
    timing times = timing::for_tests();
    times.collective = 400ms;
    return times;
}
timing patient() {
    timing times = timing::for_tests();
    times.collective = 60s;
    return times;
}

/// inproc with a fault, or without a thread of its own.
class odd_transport {
public:
    explicit odd_transport(std::unique_ptr<inproc_transport> inner, bool own_thread)
        : inner_(std::move(inner)), own_thread_(own_thread) {}
    std::atomic<int> throws_after{1 << 30};  // calls of progress
    std::atomic<bool> throws_a_number{false};
    std::atomic<int> refuses_after{1 << 30};  // calls of post_send and post_receive

    [[nodiscard]] int rank() const noexcept { return inner_->rank(); }
    [[nodiscard]] int size() const noexcept { return inner_->size(); }
    void post_send(int peer, tag what, const_bytes out, completion& done) {
        if (refuses_after.fetch_sub(1) <= 0) throw error(errc::frame, "the cable is cut");
        inner_->post_send(peer, what, out, done);
    }
    void post_receive(int peer, tag what, mutable_bytes in, completion& done) {
        if (refuses_after.fetch_sub(1) <= 0) throw error(errc::frame, "the cable is cut");
        inner_->post_receive(peer, what, in, done);
    }
    std::atomic<std::int64_t> pace_now{0}, paced_callers{0};  // in nanoseconds; how often one was
    std::atomic<int> driven{0};                               // calls of progress

    void pace(nanoseconds least) { pace_now = least.count(); }
    bool progress(time_point until) {
        if (std::this_thread::get_id() == maker_ && pace_now != 0) ++paced_callers;
        ++driven;
        if (throws_after.fetch_sub(1) <= 0) {
            if (throws_a_number) throw 7;
            throw error(errc::frame, "the cable is cut");
        }
        return inner_->progress(until);
    }
    void abort(failure const& record) { inner_->abort(record); }
    [[nodiscard]] std::span<report const> reports() const { return inner_->reports(); }
    void wake() { inner_->wake(); }
    [[nodiscard]] time_point now() const { return inner_->now(); }
    [[nodiscard]] bool may_own_thread() const { return own_thread_; }

private:
    std::unique_ptr<inproc_transport> inner_;
    bool own_thread_;
    std::thread::id maker_ = std::this_thread::get_id();
};
static_assert(Transport<odd_transport>);

template <class Body>
auto run_odd_ranks(int ranks, bool own_thread, timing const& times, Body body) {
    auto const world = inproc_world::create(ranks);
    std::vector<std::future<std::string>> running;
    for (int r = 0; r < ranks; ++r)
        running.push_back(std::async(std::launch::async, [&, r]() -> std::string {
            try {
                communicator<odd_transport> comm(std::make_unique<odd_transport>(world->connect(r), own_thread), times);
                body(comm);
                return {};
            } catch (std::exception const& e) {
                return e.what();
            }
        }));
    std::vector<std::string> said;
    for (auto& f : running) {
        REQUIRE(f.wait_for(60s) == std::future_status::ready);
        said.push_back(f.get());
    }
    return said;
}

/// Two halves of an exchange: posted early, awaited late; both run beside whatever the user calls.
template <Transport T>
struct exchange {
    scheduler<T>& on;
    identity id;
    scratch out{8}, in{8};
    operation sent, received;
    exchange(scheduler<T>& s, std::uint64_t index) : on(s), id{.channel = 12, .index = index} {}
    void post() {
        lane<T> const over{&on, id, 5};
        over.receive(received, 1 - on.rank(), in.bytes());
        over.send(sent, 1 - on.rank(), out.bytes());
    }
    static task<> finish(exchange* self) {
        co_await self->received;
        co_await self->sent;
    }
};

/// A client whose coroutine waits for a peer in the background, begun by mail.
template <Transport T>
class background_wait final : public mailbox_client {
public:
    explicit background_wait(scheduler<T>& on) : work_(on, 1), done_(on), on_(on) { on.add(*this); }
    ~background_wait() { on_.remove(*this); }
    void begin() { mail_.store(true); }
    void collect() override {
        if (!mail_.exchange(false)) return;
        work_.post();
        root_ = run(this);
        root_.start();
    }
    task<> finished() { co_await done_; }

private:
    static task<> run(background_wait* self) {
        try {
            co_await exchange<T>::finish(&self->work_);
        } catch (collective_aborted const&) {
        }
        self->done_.set();
    }
    std::atomic<bool> mail_{false};
    exchange<T> work_;
    event done_;
    scheduler<T>& on_;
    task<> root_;
};

template <class Condition>
void wait_until(Condition const& condition) {
    auto const limit = monotonic_clock::now() + 30s;
    while (!condition() && monotonic_clock::now() < limit) std::this_thread::sleep_for(1ms);
}

void same_on_all(std::vector<std::string> const& said) {
    for (std::string const& text : said) CHECK(text == said.front());
}

}  // namespace

TEST_CASE("one rank alone needs no thread and no peers", "[comm][communicator]") {
    auto const world = inproc_world::create(1);
    comm_type comm = any_communicator(world->connect(0));
    CHECK_FALSE(comm.has_thread());
    CHECK(sum_of_ones(comm) == 1.0f);
    comm.progress();
    comm.check();
}

TEST_CASE("calls that await nothing drive the transport now and then, for its heartbeats", "[comm][communicator]") {
    run_odd_ranks(1, false, timing::for_tests(), [](communicator<odd_transport>& comm) {
        auto const nothing = []() -> task<> { co_return; };
        int calls = 0;
        auto const end = std::chrono::steady_clock::now() + 20s;
        for (; comm.transport().driven < 5 && std::chrono::steady_clock::now() < end; ++calls) comm.run(nothing);
        CHECK(comm.transport().driven == 5);
        CHECK(calls > 50);  // every 12 ms: a quarter of the time between heartbeats
    });
}

TEST_CASE("a receive that nobody answers ends in time beside calls that await nothing", "[comm][communicator]") {
    bool const own_thread = GENERATE(false, true);
    auto const errors = run_odd_ranks(2, own_thread, quick(), [](communicator<odd_transport>& comm) {
        auto const nothing = []() -> task<> { co_return; };
        std::vector<int> in(1);
        auto const unanswered = comm.rank() == 0 ? start_receive(comm, in, 1) : request();
        auto const end = std::chrono::steady_clock::now() + 20s;
        int const before = comm.transport().driven;
        for (int i = 0; i < 100; ++i) comm.run(nothing);
        if (comm.rank() == 0 && comm.transport().driven - before < 100) throw std::logic_error("it is not driven");
        for (; std::chrono::steady_clock::now() < end; std::this_thread::sleep_for(1ms)) comm.run(nothing);
        throw std::logic_error("no deadline");
    });
    for (std::string const& one : errors) CHECK(one.find("DDP-E204") == 0);
}

TEST_CASE("blocking calls and the communication thread take turns, thousands of times", "[comm][communicator]") {
    int const ranks = GENERATE(2, 3, 4);
    auto const results = test::run_ranks(
        ranks,
        [](comm_type& comm) {
            float total = 0;
            for (int i = 0; i < 300; ++i) {
                total += sum_of_ones(comm);
                if (i % 50 == comm.rank()) std::this_thread::sleep_for(1ms);  // the thread takes over
                comm.check();
            }
            return total;
        },
        patient());
    for (float const r : results) CHECK(r == 300.0f * static_cast<float>(ranks));
}

TEST_CASE("a storm of pokes and progress() from other threads disturbs nobody", "[comm][communicator]") {
    auto const results = test::run_ranks(
        3,
        [](comm_type& comm) {
            std::atomic<bool> stop{false};
            std::thread poker([&] {
                while (!stop.load()) comm.poke();
            });
            std::thread mover([&] {
                while (!stop.load()) comm.progress();
            });
            float total = 0;
            for (int i = 0; i < 200; ++i) total += sum_of_ones(comm);
            stop.store(true);
            poker.join();
            mover.join();
            return total;
        },
        patient());
    for (float const r : results) CHECK(r == 600.0f);
}

TEST_CASE("communicators come and go by the thousand without a hang", "[comm][communicator]") {
    auto done = std::async(std::launch::async, [] {
        for (int i = 0; i < 400; ++i) {
            auto const world = inproc_world::create(2);
            comm_type a = any_communicator(world->connect(0)), b = any_communicator(world->connect(1));
            if (i % 3 == 0) std::this_thread::yield();
            if (i % 5 == 0) a.poke();
        }
    });
    REQUIRE(done.wait_for(60s) == std::future_status::ready);
}

TEST_CASE("mail is collected in the background, and by whoever calls next", "[comm][communicator]") {
    bool const own_thread = GENERATE(true, false);
    auto const said = run_odd_ranks(2, own_thread, patient(), [](auto& comm) {
        std::unique_ptr<background_wait<odd_transport>> work;
        comm.exclusively([&] { work = std::make_unique<background_wait<odd_transport>>(comm.tasks()); });
        work->begin();
        comm.poke();
        comm.progress();
        sum_of_ones(comm);
        comm.run([&] {
            work->collect();
            return work->finished();
        });
        comm.exclusively([&] { work.reset(); });
    });
    CHECK(said == std::vector<std::string>(2));
}

TEST_CASE("who drives between calls: as asked, as the environment says, or by how many cores there are",
          "[comm][communicator]") {
    using enum communication_thread;
    struct answer {
        communication_thread crowded, roomy;
    };
    auto const of = [](communication_thread asked) {
        return answer{detail::chosen_thread(asked, true), detail::chosen_thread(asked, false)};
    };
    CHECK((of(automatic).crowded == rests && of(automatic).roomy == drives));
    CHECK((of(drives).crowded == drives && of(rests).roomy == rests));
    ::setenv("DDP_COMMUNICATION_THREAD", "rests", 1);
    CHECK((of(drives).crowded == rests && of(automatic).roomy == rests));
    ::setenv("DDP_COMMUNICATION_THREAD", "automatic", 1);
    CHECK((of(drives).crowded == rests && of(rests).roomy == drives));
    ::setenv("DDP_COMMUNICATION_THREAD", "no", 1);
    std::string said;
    try {
        static_cast<void>(of(automatic));
    } catch (environment_error const& e) {
        said = e.what();
    }
    ::unsetenv("DDP_COMMUNICATION_THREAD");
    CHECK(said.find("DDP_COMMUNICATION_THREAD is \"no\"; expected automatic, drives or rests") != std::string::npos);

    auto const world = inproc_world::create(2);
    comm_type const quiet = any_communicator(world->connect(0), patient(), rests);
    comm_type const busy = any_communicator(world->connect(1), patient(), drives);
    CHECK((quiet.thread() == rests && !quiet.has_thread()));
    CHECK((busy.thread() == drives && busy.has_thread()));
    comm_type const alone = any_communicator(inproc_world::create(1)->connect(0));
    CHECK(alone.thread() == none);
    CHECK_THROWS_WITH(any_communicator(inproc_world::create(1)->connect(0), patient(), none),
                      Catch::Contains("communication_thread: ask for automatic, drives or rests"));
}

TEST_CASE("only the communication thread reads in batches: whoever waits for an answer gets it at once",
          "[comm][communicator]") {
    auto const said = run_odd_ranks(2, true, patient(), [](auto& comm) {
        odd_transport& at = comm.transport();
        for (int i = 0; i < 20; ++i) {
            sum_of_ones(comm);
            if (i % 5 == 0) wait_until([&] { return at.pace_now == std::chrono::nanoseconds(1ms).count(); });
        }
        if (at.pace_now.load() == 0) wait_until([&] { return at.pace_now != 0; });
        if (at.pace_now == 0) throw std::runtime_error("the thread does not batch");
        if (at.paced_callers != 0) throw std::runtime_error("a caller was paced");
    });
    CHECK(said == std::vector<std::string>(2));
}

TEST_CASE("a thread that rests still finds a failure while its rank computes, and takes next to no time",
          "[comm][communicator][faults]") {
    auto const world = inproc_world::create(2);
    comm_type computing = any_communicator(world->connect(0), quick(), communication_thread::rests);
    auto fails = std::make_unique<comm_type>(any_communicator(world->connect(1), quick()));
    auto const before = computing.thread_time();
    std::this_thread::sleep_for(300ms);
    CHECK_FALSE(computing.tasks().failed());
    CHECK(computing.thread_time() - before < 30ms);
    CHECK(computing.thread_time() > 0ns);  // it has listened
    fails->fail("out of disk");
    wait_until([&] { return computing.tasks().failed(); });  // nobody calls anything here
    CHECK(computing.tasks().failed());
    std::string said;
    try {
        sum_of_ones(computing);
    } catch (comm_error const& e) {
        said = e.what();
    }
    CHECK(said.find("rank 1 failed in its own code: out of disk") != std::string::npos);
}

TEST_CASE("while the thread rests, requests move on in progress(), and deadlines of what is started hold",
          "[comm][communicator][faults]") {
    auto const world = inproc_world::create(2);
    comm_type a = any_communicator(world->connect(0), quick(), communication_thread::rests);
    comm_type b = any_communicator(world->connect(1), quick(), communication_thread::rests);
    float x = 1, y = 2;
    auto first = start_allreduce(a, std::span<float>(&x, 1)), second = start_allreduce(b, std::span<float>(&y, 1));
    wait_until([&] {
        a.progress();
        b.progress();
        return first.test() && second.test();
    });
    first.wait();
    second.wait();
    CHECK((x == 3 && y == 3));
    auto late = start_allreduce(a, std::span<float>(&x, 1));  // and b never comes; nobody drives but the threads
    auto const start = monotonic_clock::now();
    wait_until([&] { return a.tasks().failed(); });
    CHECK(monotonic_clock::now() - start < 3 * quick().collective + 2s);
    std::string said;
    try {
        late.wait();
    } catch (comm_error const& e) {
        said = e.what();
    }
    CHECK(said.find("DDP-E204") == 0);
}

TEST_CASE("a rank that never comes is named in time, with the same words on every rank",
          "[comm][communicator][faults]") {
    int const ranks = GENERATE(2, 4);
    auto const start = monotonic_clock::now();
    std::atomic<int> failed{0};
    auto const said = test::errors_of_ranks(
        ranks,
        [&](comm_type& comm) {
            sum_of_ones(comm);
            if (comm.rank() == ranks - 1) {
                wait_until([&] { return failed.load() == ranks - 1; });  // busy with something else
            } else {
                try {
                    sum_of_ones(comm);
                } catch (comm_error const& e) {
                    ++failed;
                    if (e.culprit() != ranks - 1) throw std::runtime_error("another culprit");
                    throw;
                }
            }
            sum_of_ones(comm);
        },
        quick());
    CHECK(monotonic_clock::now() - start < 15s);
    CHECK(said.front().find("DDP-E204") == 0);
    CHECK(said.front().find("rank " + std::to_string(ranks - 1) + " did not take part in allreduce #2") !=
          std::string::npos);
    same_on_all(said);
}

TEST_CASE("a rank that leaves while the others are in a collective ends it for them, cleanly",
          "[comm][communicator][faults]") {
    int const ranks = GENERATE(2, 3, 5);
    auto const said = test::errors_of_ranks(
        ranks,
        [&](comm_type& comm) {
            sum_of_ones(comm);
            if (comm.rank() == 1) return;
            for (int i = 0; i < 3; ++i) sum_of_ones(comm);
        },
        patient());
    CHECK(said[1].empty());
    for (int r = 0; r < ranks; ++r) {
        if (r == 1) continue;
        CHECK(said[static_cast<std::size_t>(r)] == said[0]);
    }
    CHECK(said[0].find("rank 1 exited cleanly") != std::string::npos);
    CHECK(said[0].find("DDP-E202") == 0);
}

TEST_CASE("an exception that leaves a communicator's scope is told to the peers", "[comm][communicator][faults]") {
    int const ranks = GENERATE(2, 3, 5);
    int const thrower = GENERATE(0, 1);
    auto const start = monotonic_clock::now();
    auto const said = test::errors_of_ranks(
        ranks,
        [&](comm_type& comm) {
            sum_of_ones(comm);
            if (comm.rank() == thrower) throw std::runtime_error("out of disk");
            sum_of_ones(comm);
        },
        patient());
    CHECK(monotonic_clock::now() - start < 15s);
    for (int r = 0; r < ranks; ++r) {
        if (r == thrower)
            CHECK(said[static_cast<std::size_t>(r)] == "out of disk");
        else
            CHECK(said[static_cast<std::size_t>(r)].find("rank " + std::to_string(thrower) +
                                                         " failed in its own code") != std::string::npos);
        if (r != thrower && r != 1 - thrower)
            CHECK(said[static_cast<std::size_t>(r)] == said[static_cast<std::size_t>(1 - thrower)]);
    }
}

TEST_CASE("who leaves by an exception says the verdict before it goes: nobody waits for another to find one",
          "[comm][communicator][faults]") {
    timing slow = patient();
    slow.verdict = 6s;  // what ranks that have not spoken are waited for, and then the least of them again
    auto const start = monotonic_clock::now();
    auto const said = test::errors_of_ranks(
        3,
        [](comm_type& comm) {
            sum_of_ones(comm);
            if (comm.rank() == 0) throw std::runtime_error("out of disk");
            sum_of_ones(comm);
        },
        slow);
    CHECK(monotonic_clock::now() - start < 5s);
    CHECK(said[0] == "out of disk");
    CHECK(said[1] == said[2]);
    CHECK(said[1].find("rank 0 failed in its own code") != std::string::npos);
}

TEST_CASE("times that nobody has set: silence is noticed in seconds, slowness forgiven for minutes",
          "[comm][communicator]") {
    timing const times;
    CHECK_NOTHROW(times.validate());
    CHECK(times.heartbeat == 250ms);
    CHECK(times.dead == 3s);
    CHECK(times.collective == 2min);
    CHECK(times.straggler == 5s);
    CHECK((times.end_of_file == 100ms && times.verdict == 300ms));
    CHECK((times.handshake == 3s && times.join == 30s && times.shutdown == 5s));
}

TEST_CASE("a time that is none is refused by its name", "[comm][communicator]") {
    struct field {
        char const* name;
        timing::milliseconds timing::* value;
    };
    for (auto const& [name, value] :
         {field{"heartbeat", &timing::heartbeat}, field{"suspect", &timing::suspect}, field{"dead", &timing::dead},
          field{"collective", &timing::collective}, field{"straggler", &timing::straggler},
          field{"end_of_file", &timing::end_of_file}, field{"verdict", &timing::verdict},
          field{"handshake", &timing::handshake}, field{"join", &timing::join}, field{"shutdown", &timing::shutdown}})
        for (auto const wrong :
             {timing::milliseconds{0}, timing::milliseconds{-1}, timing::milliseconds{604'800'001}}) {
            timing times;
            times.*value = wrong;
            CHECK_THROWS_WITH(
                any_communicator(inproc_world::create(1)->connect(0), times),
                Catch::Contains("ddp::timing::" + std::string(name) + " is " + std::to_string(wrong.count()) +
                                " ms, but every time must be positive and at most a week"));
        }
    CHECK_THROWS_WITH(
        (timing{.heartbeat = 500ms, .dead = 999ms}.validate()),
        Catch::Contains("dead, 999 ms, must be at least twice heartbeat, 500 ms, or a healthy peer is taken for dead"));
}

TEST_CASE("a communication thread that does not start is an error there, and the others hear of it",
          "[comm][communicator][faults]") {
    auto const world = inproc_world::create(2);
    communicator<> const other = any_communicator(world->connect(1), patient(), communication_thread::rests);
    std::string said;
    {
        test::no_room_for_stacks const while_it_starts;
        said = test::thrown_by(
            [&] { static_cast<void>(any_communicator(world->connect(0), patient(), communication_thread::drives)); });
    }
    CHECK(said.find("DDP-E101 environment: the communication thread did not start: ") == 0);
    CHECK(said.find(". Raise the limit on threads (ulimit -u) or memory (ulimit -v), or start fewer ranks on this "
                    "host.") != std::string::npos);
    CHECK_THROWS_WITH(barrier(other), Catch::Contains("rank 0 failed in its own code: its communication thread did not "
                                                      "start"));
}

TEST_CASE("a coroutine of the user's own that forgets to post, or to await, gets an error", "[comm][communicator]") {
    struct of_a_user {
        static task<> never_posted() {
            operation some;
            co_await some;
        }
        static task<> left(lane<any_transport> over, mutable_bytes in) {
            operation some;
            over.receive(some, 1 - over.rank(), in);
            if (over.rank() == 1) throw std::runtime_error("out of ideas");
            co_await some;
        }
    };
    auto said = test::errors_of_ranks(
        2,
        [](comm_type& comm) {
            barrier(comm);
            if (comm.rank() == 1) comm.run([] { return of_a_user::never_posted(); });
            barrier(comm);
        },
        patient());
    constexpr char const* words =
        "an operation was awaited that was never posted: pass it to lane.send or lane.receive";
    for (std::string const& text : said) CHECK(text.find(words) != std::string::npos);
    CHECK(said[1].find("DDP-E100 usage: ") == 0);

    said = test::errors_of_ranks(
        2,
        [](comm_type& comm) {
            operation_info what;
            what.name = "exchange";
            std::byte in[8];
            detail::call(comm, what, [&](auto over) { return of_a_user::left(over, in); });
        },
        patient());
    CHECK(said[1] == "out of ideas");
    CHECK(said[0].find("a collective was left by an exception") != std::string::npos);
}

TEST_CASE("after a failure every call throws the same verdict again", "[comm][communicator][faults]") {
    auto const said = test::errors_of_ranks(
        3,
        [](comm_type& comm) {
            if (comm.rank() == 2) {
                comm.fail("said by hand");
                comm.fail("too late");
            }
            std::string first;
            for (int i = 0; i < 3; ++i) {
                try {
                    if (i == 1)
                        comm.check();
                    else
                        sum_of_ones(comm);
                    throw std::logic_error("no verdict");
                } catch (comm_error const& e) {
                    if (first.empty()) first = e.what();
                    if (first != e.what()) throw std::logic_error("another verdict");
                }
            }
            sum_of_ones(comm);
        },
        patient());
    same_on_all(said);
    CHECK(said[0].find("said by hand") != std::string::npos);
}

TEST_CASE("what a task throws comes back to its caller as itself, and to the others as its words",
          "[comm][communicator][faults]") {
    auto const said = test::errors_of_ranks(
        3,
        [](comm_type& comm) {
            sum_of_ones(comm);
            if (comm.rank() == 1)
                comm.run([]() -> task<> {
                    throw std::out_of_range("index 7");
                    co_return;
                });
            sum_of_ones(comm);
        },
        patient());
    CHECK(said[1] == "index 7");
    CHECK(said[0] == said[2]);
    CHECK(said[0].find("rank 1 failed in its own code") != std::string::npos);
    CHECK(said[0].find("index 7") != std::string::npos);
}

TEST_CASE("a killed rank is named by all, at its next call at the latest", "[comm][communicator][faults]") {
    int const ranks = GENERATE(2, 3, 5);
    int const victim = GENERATE(0, 1);
    auto const world = inproc_world::create(ranks);
    std::vector<std::future<std::string>> running;
    std::atomic<bool> over{false};
    for (int r = 0; r < ranks; ++r)
        running.push_back(std::async(std::launch::async, [&, r]() -> std::string {
            try {
                comm_type comm = any_communicator(world->connect(r), patient());
                sum_of_ones(comm);
                if (r == victim) {
                    world->kill(r);
                    wait_until([&] { return over.load(); });
                    return {};
                }
                sum_of_ones(comm);
                return "nothing";
            } catch (std::exception const& e) {
                return e.what();
            }
        }));
    std::vector<std::string> said;
    for (int r = 0; r < ranks; ++r)
        if (r != victim) said.push_back(running[static_cast<std::size_t>(r)].get());
    over.store(true);
    CHECK(running[static_cast<std::size_t>(victim)].get().empty());
    same_on_all(said);
    CHECK(said[0].find("rank " + std::to_string(victim) + " is gone") != std::string::npos);
}

TEST_CASE("while a rank is in a long operation, deadlines of the others are extended, and then hold again",
          "[comm][communicator]") {
    timing times = timing::for_tests();
    times.collective = 1s;
    auto const chain = [](comm_type& comm) {  // rank 2 waits for rank 0, which waits for rank 1
        if (comm.rank() == 1) {
            long_operation const outer(comm, "evaluation", 60s);
            {
                long_operation const inner(comm, "a file", 1ms);  // whose end, or limit, is not that of the other
                std::this_thread::sleep_for(50ms);
            }
            std::this_thread::sleep_for(1850ms);
        }
        if (comm.rank() == 1) std::this_thread::sleep_for(250ms);  // at least half of `collective` remains afterwards
        int number = 0;
        if (comm.rank() == 1) ddp::send(comm, 7, 0);
        if (comm.rank() == 0) ddp::receive(comm, number, 1);
        if (comm.rank() == 0) ddp::send(comm, number, 2);
        if (comm.rank() == 2) ddp::receive(comm, number, 0);
        return sum_of_ones(comm);
    };
    CHECK(ddp::test::run_ranks(3, chain, times) == std::vector<float>{3, 3, 3});

    auto const begun = std::chrono::steady_clock::now();
    std::vector<std::string> const late = ddp::test::errors_of_ranks(
        3,
        [](comm_type& comm) {
            sum_of_ones(comm);
            if (comm.rank() == 1) {
                long_operation const scope(comm, "evaluation", 1500ms);
                std::this_thread::sleep_for(6s);
            }
            sum_of_ones(comm);
        },
        times);
    for (std::string const& text : late) CHECK(text.find("DDP-E204 deadline: rank 1 did not take part") != text.npos);
    CHECK(late[0].find("waited 2.") != std::string::npos);  // all of it, not only what was granted last
    CHECK(std::chrono::steady_clock::now() - begun < 30s);

    ddp::test::run_ranks(1, [](comm_type& comm) {
        for (nanoseconds const wrong : {nanoseconds{0}, nanoseconds{-5s}, nanoseconds{std::chrono::hours{169}}})
            CHECK_THROWS_WITH(long_operation(comm, "evaluation", wrong),
                              Catch::Contains("long_operation: the limit must be between 1 ms and a week"));
        for (char const* const nothing : {"", static_cast<char const*>(nullptr)})
            CHECK_THROWS_WITH(long_operation(comm, nothing, 1s),
                              Catch::Contains("long_operation: say what it is, such as"));
    });
}

TEST_CASE("a long computation of one's own makes nobody late: the deadline counts from the await",
          "[comm][communicator]") {
    // Posted at once, awaited after three deadlines; with a communication thread and without one.
    bool const own_thread = GENERATE(true, false);
    auto const said = run_odd_ranks(2, own_thread, quick(), [](auto& comm) {
        exchange<odd_transport> early(comm.tasks(), 1);
        comm.exclusively([&] { early.post(); });
        std::this_thread::sleep_for(comm.rank() == 0 ? 1200ms : 1100ms);
        comm.run([&] { return exchange<odd_transport>::finish(&early); });
    });
    CHECK(said == std::vector<std::string>(2));
}

TEST_CASE("where nobody drives, time spent in one's own code counts for no wait in the background",
          "[comm][communicator]") {
    auto const said = run_odd_ranks(2, false, quick(), [](auto& comm) {
        background_wait<odd_transport> work(comm.tasks());
        work.begin();
        comm.progress();                      // the wait begins
        std::this_thread::sleep_for(1200ms);  // three deadlines of backward without a hook
        comm.run([&] {
            work.collect();
            return work.finished();
        });
    });
    CHECK(said == std::vector<std::string>(2));
}

/// A client that stands still once, in the middle of the communication thread's turn, as a stopped process does.
class standstill final : public mailbox_client {
public:
    explicit standstill(scheduler<odd_transport>& on) : on_(on) { on.add(*this); }
    ~standstill() { on_.remove(*this); }
    std::atomic<bool> due{false}, over{false};
    void collect() override {
        if (!due.exchange(false)) return;
        std::this_thread::sleep_for(1200ms);
        over = true;
    }

private:
    scheduler<odd_transport>& on_;
};

TEST_CASE("a process that is stopped in the midst of a turn has not waited meanwhile", "[comm][communicator]") {
    auto const said = run_odd_ranks(2, false, quick(), [](auto& comm) {
        background_wait<odd_transport> work(comm.tasks());
        standstill stop(comm.tasks());
        work.begin();
        comm.progress();  // the wait begins
        stop.due = true;
        comm.progress();
        wait_until([&] { return stop.over.load(); });
        comm.run([&] {
            work.collect();
            return work.finished();
        });
    });
    CHECK(said == std::vector<std::string>(2));
}

TEST_CASE("an error of the transport itself ends the job, and leaves no coroutine behind",
          "[comm][communicator][faults]") {
    bool const own_thread = GENERATE(true, false);
    int const after = GENERATE(0, 1, 3, 10);
    auto const said = run_odd_ranks(3, own_thread, patient(), [&](auto& comm) {
        sum_of_ones(comm);
        if (comm.rank() == 1) comm.transport().throws_after.store(after);
        for (int i = 0; i < 50; ++i) sum_of_ones(comm);
    });
    for (std::string const& text : said) {
        CAPTURE(text);
        CHECK(text == said.front());
        bool const in_a_call = text.find("DDP-E208 transport: the transport of rank 1 failed in allreduce") == 0;
        bool const between = text.find("DDP-E208 transport: the transport of rank 1 failed after allreduce") == 0;
        CHECK((in_a_call || between));  // the communication thread looks for messages between two calls, too
        CHECK(text.find("the cable is cut") != std::string::npos);
    }
}

TEST_CASE("what a transport throws when it is given an operation is its own error, too",
          "[comm][communicator][faults]") {
    bool const own_thread = GENERATE(true, false);
    int const after = GENERATE(0, 1, 2, 3, 10);
    auto const said = run_odd_ranks(3, own_thread, patient(), [&](auto& comm) {
        sum_of_ones(comm);
        if (comm.rank() == 1) comm.transport().refuses_after.store(after);
        for (int i = 0; i < 50; ++i) sum_of_ones(comm);
    });
    for (std::string const& text : said) {
        CAPTURE(text);
        CHECK(text == said.front());
        CHECK(text.find("DDP-E208 transport: the transport of rank 1 failed in allreduce") == 0);
        CHECK(text.find("the cable is cut") != std::string::npos);
    }
}

TEST_CASE("a transport that fails between two calls has failed after the last one", "[comm][communicator][faults]") {
    auto const said = run_odd_ranks(3, true, patient(), [&](auto& comm) {
        sum_of_ones(comm);
        barrier(comm);
        if (comm.rank() == 1) {
            comm.transport().throws_after = 0;
            comm.transport().wake();
            wait_until([&] { return comm.transport().throws_after < 0; });
        }
        for (int i = 0; i < 50; ++i) sum_of_ones(comm);
    });
    for (std::string const& text : said) {
        CHECK(text == said.front());
        CHECK(text.find("DDP-E208 transport: the transport of rank 1 failed after barrier") == 0);
    }
}

TEST_CASE("what is thrown and is no std::exception is said to be that", "[comm][communicator][faults]") {
    auto said = test::errors_of_ranks(
        2,
        [](comm_type& comm) {
            try {
                if (comm.rank() == 1)
                    comm.run([]() -> task<> {
                        throw 7;
                        co_return;
                    });
                barrier(comm);
            } catch (int) {
                throw std::runtime_error("its own number");
            }
        },
        patient());
    CHECK(said[1] == "its own number");
    CHECK(said[0].find("rank 1 failed in its own code: an exception that is not a std::exception") !=
          std::string::npos);
    said = run_odd_ranks(2, false, patient(), [](auto& comm) {
        sum_of_ones(comm);
        comm.transport().throws_a_number = true;
        if (comm.rank() == 1) comm.transport().throws_after = 0;
        for (int i = 0; i < 50; ++i) sum_of_ones(comm);
    });
    for (std::string const& text : said) {
        CAPTURE(text);
        CHECK(text.find("DDP-E208 transport: the transport of rank 1 failed in allreduce") == 0);
        CHECK(text.find(": an exception that is not a std::exception. The state of the other ranks is unknown") !=
              std::string::npos);
    }
}

TEST_CASE("what is thrown between calls is not said to be within one", "[comm][communicator][faults]") {
    auto const said = test::errors_of_ranks(
        2,
        [](comm_type& comm) {
            barrier(comm);
            if (comm.rank() == 1) {
                comm.fail("out of paper");
                throw std::runtime_error("out of paper");
            }
            barrier(comm);
        },
        patient());
    CHECK(said[0].find("rank 1 failed in its own code after barrier #1: out of paper") != std::string::npos);
}

TEST_CASE("a transport that keeps failing does not keep a thread busy", "[comm][communicator][faults]") {
    std::atomic<int> calls{0};
    run_odd_ranks(2, true, patient(), [&](auto& comm) {
        sum_of_ones(comm);
        if (comm.rank() == 1) comm.transport().throws_after.store(0);
        try {
            for (int i = 0; i < 50; ++i) sum_of_ones(comm);
        } catch (comm_error const&) {
        }
        if (comm.rank() != 1) return;
        int const before = comm.transport().throws_after.load();
        std::this_thread::sleep_for(300ms);
        calls = before - comm.transport().throws_after.load();
    });
    CHECK(calls < 200);
}

TEST_CASE("a call that is wrong on one rank fails there and ends the others", "[comm][communicator][faults]") {
    auto const said = test::errors_of_ranks(
        2,
        [](comm_type& comm) {
            std::vector<float> data(comm.rank() == 0 ? 10 : 11);
            add_up(comm, data);
        },
        patient());
    same_on_all(said);
    CHECK(said[0].find("DDP-E205") == 0);
    CHECK(said[0].find("allreduce #1") != std::string::npos);
}
