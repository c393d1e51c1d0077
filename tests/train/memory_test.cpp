// Ranks of one host train in memory that they share: the bits of messages, the same grants, the same failures.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ddp/collective/shared_array.hpp>
#include <ddp/kernel/store.hpp>
#include <ddp/transport/shm/memfd.hpp>
#include <ddp/transport/shm/memory_limits.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/printed_by.hpp"
#include "support/ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;
using namespace std::chrono_literals;

namespace {

/// Every update policy and kind of clipping, in memory and by messages: what differs from the first, or "".
template <memory Kind>
std::string compare(communicator<>& comm, std::uint64_t& digest) {
    std::vector<std::optional<clipping>> const clips{std::nullopt, clip_by_global_norm{.max_norm = 0.3},
                                                     clip_by_value{.limit = 0.01}};
    for (auto const& clip : clips) {
        std::optional<std::uint64_t> first;
        for (update const how : {update::automatic, update::replicated, update::sharded})
            for (bool const shares : {false, true}) {
                recipe const by{.name = "clip " + std::to_string(clip ? clip->index() : 9) + ", update " +
                                        std::to_string(static_cast<int>(how)) + (shares ? ", in memory" : ""),
                                .optimizer = adamw{.lr = 0.01},
                                .buckets = size_capped_buckets{.cap_bytes = 4096, .first_bytes = 512},
                                .options = {.update = how, .clip = clip, .share_memory = shares}};
                trained<float> const got = train<float, Kind>(comm, by, 12, 45, 60, 2);
                if (!got.wrong.empty()) return got.wrong;
                if (!first) first = got.digest;
                if (got.digest != *first) return by.name + ": other bits";
            }
        digest ^= *first;
    }
    return "";
}

/// Counts buckets of parameter 2 that are reduced, where it is given something to count by.
struct small_bucket_counter {
    std::atomic<int>* count;
    void on(bucket_reduced const& event) const {
        if (count != nullptr && event.bucket == 2) ++*count;
    }
};
/// A bucket a parameter: the last one is the slice of one rank.
struct memory_trainer {
    explicit memory_trainer(communicator<>& comm, std::atomic<int>* reduced = nullptr)
        : net({{"a", {3000}}, {"b", {5}}, {"c", {5}}}),
          trainer(net, sgd{.lr = 1}, comm, per_parameter_buckets{}, small_bucket_counter{reduced}) {}
    scripted_model<true, true> net;
    data_parallel<scripted_model<true, true>, any_transport> trainer;
};

/// The abstract name of the socket on which that rank waits for descriptors.
::socklen_t address_of(memory_offer const& of, ::sockaddr_un& to) {
    std::array<char, 40> text{};
    int const length =
        std::snprintf(text.data(), text.size(), "ddp-%016" PRIx64 "%016" PRIx64, of.where[0], of.where[1]);
    to = {};
    to.sun_family = AF_UNIX;
    std::copy_n(text.data(), length, to.sun_path + 1);
    return static_cast<::socklen_t>(sizeof to.sun_family + 1 + static_cast<std::size_t>(length));
}

/// Throws in its second call on rank 0, after it has changed half of what it was given.
struct breaking : sgd {
    bool breaks;
    template <class E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> state) const {
        if (!breaks || at.step == 1) return sgd::step(at, gradient, value, state);
        std::size_t const half = value.size() / 2;
        sgd::step(at, gradient.first(half), value.first(half), state);
        throw std::runtime_error("half-way");
    }
};

std::size_t descriptors() {
    std::size_t count = 0;
    for (int fd = 0; fd < 256; ++fd) count += ::fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
    return count;
}

}  // namespace

TEST_CASE("in shared memory a training has the bits of messages, whatever is clipped and whoever steps", "[train]") {
    int const ranks = GENERATE(2, 3, 5, 9);
    auto const body = [](communicator<>& comm) {
        std::uint64_t digest = 0;
        std::string wrong = compare<memory::releasing>(comm, digest);
        if (wrong.empty() && comm.size() == 3) wrong = compare<memory::bound>(comm, digest);
        if (wrong.empty() && comm.size() == 3) wrong = compare<memory::copied>(comm, digest);
        return std::pair(digest, wrong);
    };
    auto const threads = run_ranks(ranks, body, patient());
    for (auto const& [digest, wrong] : threads) {
        CHECK(wrong == "");
        CHECK(digest == threads.front().first);
    }
    if (ranks == 9) return;
    for (auto const& [digest, wrong] : on_ranks(ranks, body)) {  // through memfds
        CHECK(wrong == "");
        CHECK(digest == threads.front().first);
    }
}

TEST_CASE("on one host a step and an allreduce in memory send the same few bytes, whatever their size", "[train]") {
    int const ranks = GENERATE(2, 3, 5);
    auto const sent = run_ranks(
        ranks,
        [](communicator<>& comm) {
            std::vector<std::uint64_t> all;
            auto const count = [&](auto const& work) {
                work();  // the first time
                std::uint64_t const before = comm.bytes_sent();
                work();
                all.push_back(comm.bytes_sent() - before);
            };
            for (std::size_t const n : {30'000u, 300'000u}) {
                for (update const how : {update::sharded, update::replicated}) {
                    scripted_model<true, true> net({{"a", {n}}});
                    data_parallel trainer{net, sgd{.lr = 1}, comm, single_bucket{}, training_options{.update = how}};
                    count([&] { trainer.step(numbers{{1}}); });
                }
                shared_array<double> const numbers(comm, n);
                count([&] { allreduce(comm, numbers); });
            }
            return all;
        },
        patient());
    for (auto const& rank : sent)
        for (std::size_t i = 0; i < 3; ++i) {
            CHECK(rank[i] == rank[i + 3]);
            CHECK(rank[i] < 1000);
        }
}

TEST_CASE("ranks share memory where all want to, are on one host and add in the canonical order", "[train]") {
    auto const shares = [](communicator<>& comm) {
        auto const made = [&](auto algorithm, training_options const& options) {
            scripted_model<> net({{"a", {30}}});
            data_parallel trainer{net, sgd{.lr = 1}, comm, options, algorithm};
            trainer.step(numbers{{1}});
            if (net.value(0)[7] != -1) throw std::logic_error("a wrong value");
            return trainer.shares_memory();
        };
        return std::array{made(automatic_allreduce{}, {}),
                          made(any_allreduce::parse("auto"), {}),
                          made(direct_allreduce{}, {}),
                          made(any_allreduce::parse("direct"), {}),
                          made(automatic_allreduce{}, {.share_memory = comm.rank() != 1}),
                          made(ring_allreduce{}, {.update = update::sharded})};
    };
    for (auto const& one : run_ranks(3, shares, patient()))
        CHECK(one == std::array{true, true, false, false, false, false});
    for (auto const& one : on_ranks(3, shares)) CHECK(one == std::array{true, true, false, false, false, false});

    // Two hosts of two ranks: within each, and for all where they may differ from messages between all.
    auto world = inproc_world::create(4, {7, 7, 8, 8});
    std::vector<std::future<std::array<bool, 3>>> running;
    for (int r = 0; r < 4; ++r)
        running.push_back(std::async(std::launch::async, [&world, r] {
            communicator<> const comm = any_communicator(world->connect(r), patient());
            scripted_model<> all({{"a", {30}}}), flat({{"a", {30}}}), mine({{"a", {30}}});
            data_parallel far{all, sgd{.lr = 1}, comm};
            data_parallel by_messages{flat, sgd{.lr = 1}, comm, {.hierarchy = false}};
            data_parallel near{mine, sgd{.lr = 1}, comm.host()};
            far.step(numbers{{1.0 + r}});
            near.step(numbers{{1.0 + r}});
            if (all.value(0)[0] != -2.5) throw std::logic_error("a wrong mean of all");
            if (mine.value(0)[0] != (r < 2 ? -1.5 : -3.5)) throw std::logic_error("a wrong mean of a host");
            return std::array{far.shares_memory(), by_messages.shares_memory(), near.shares_memory()};
        }));
    for (auto& one : running) CHECK(one.get() == std::array{true, false, true});
}

TEST_CASE("many ranks of one host see each other, again and again", "[train]") {
    auto const seen = on_ranks(12, [](communicator<>& comm) {
        int shared = 0;
        for (int i = 0; i < 5; ++i) {
            shared_array<float> const mine(comm, 5000);
            mine[4999] = static_cast<float>(comm.rank());
            allreduce(comm, mine);
            if (mine.memory() != nullptr && mine[4999] == 66) ++shared;
        }
        return shared;
    });
    for (int const shared : seen) CHECK(shared == 5);
}

TEST_CASE("nothing is left of shared memory but what a bound model holds, and descriptors are closed", "[train]") {
    std::size_t const before = descriptors();
    auto const kept = on_ranks(2, [](communicator<>& comm) {
        auto net =
            std::make_unique<scripted_model<true, true>>(std::vector<scripted_model<true, true>::part>{{"a", {3000}}});
        std::size_t const open = descriptors();
        for (int i = 0; i < 50; ++i) {
            data_parallel trainer{*net, sgd{.lr = 1}, comm};
            trainer.step(numbers{{1}});
            if (!trainer.shares_memory()) throw std::logic_error("nothing was shared");
        }
        barrier(comm);
        if (descriptors() > open + 6) throw std::logic_error("descriptors were left open");
        return net->value(0)[2999];  // its memory outlives the trainers
    });
    for (double const value : kept) CHECK(value == -50);
    CHECK(descriptors() <= before);
}

TEST_CASE("a rank that has no room for shared memory is an error on every rank; one that sees none is said once",
          "[train]") {
    /// Refuses on rank 1.
    struct cramped : inproc_transport {
        using inproc_transport::inproc_transport;
        struct full final : memory_sharing {
            std::shared_ptr<std::byte> make(std::size_t, memory_offer&) override {
                throw std::runtime_error("1 MiB: No space left on device");
            }
            bool give(memory_offer const&) noexcept override { return false; }
            void take(std::span<memory_offer const>) noexcept override {}
            std::shared_ptr<std::byte> view(memory_offer const&) noexcept override { return nullptr; }
        };
        /// Sees nobody, on rank 2.
        struct blind final : memory_sharing {
            std::shared_ptr<std::byte> make(std::size_t bytes, memory_offer&) override {
                return std::shared_ptr<std::byte>(new std::byte[bytes + header_bytes](),
                                                  std::default_delete<std::byte[]>());
            }
            bool give(memory_offer const&) noexcept override { return true; }
            void take(std::span<memory_offer const>) noexcept override {}
            std::shared_ptr<std::byte> view(memory_offer const&) noexcept override { return nullptr; }
        };
        std::unique_ptr<memory_sharing> share_memory() {
            if (rank() == culprit) return std::make_unique<full>();
            if (rank() == blinded) return std::make_unique<blind>();
            return inproc_transport::share_memory();
        }
        int culprit = -1, blinded = -1;
    };
    auto const errors = [](int culprit, int blinded) {
        auto world = inproc_world::create(3);
        std::vector<std::future<std::string>> running;
        for (int r = 0; r < 3; ++r)
            running.push_back(std::async(std::launch::async, [&world, r, culprit, blinded] {
                auto end = std::make_unique<cramped>(world, r);
                end->culprit = culprit;
                end->blinded = blinded;
                communicator<> comm = any_communicator(std::move(end), patient());
                std::string said = thrown_by([&] {
                    memory_trainer with(comm);
                    if (with.trainer.shares_memory()) throw std::logic_error("it is shared all the same");
                    memory_trainer again(comm);  // of which nothing more is said
                });
                scripted_model<> net({{"a", {30}}});
                data_parallel trainer{net, sgd{.lr = 1}, comm, {.share_memory = false}};
                trainer.step(numbers{{1}});  // the communicator is as good as before
                return said + (net.value(0)[0] == -1 ? "" : " and a wrong value");
            }));
        std::vector<std::string> all;
        for (auto& one : running) all.push_back(one.get());
        return all;
    };
    for (std::string const& one : errors(1, -1)) {
        CAPTURE(one);
        CHECK(one.find("DDP-E101") == 0);
        for (char const* const word :
             {"rank 1 has no room", "(ranks 0 to 2): 1 MiB: No space left on device", "DDP_SHARE_MEMORY=0"})
            CHECK(one.find(word) != one.npos);
    }
    detail::blindness_said() = false;
    std::string const line = printed_by([&] {
        for (std::string const& one : errors(-1, 2)) CHECK(one == "");  // messages instead
    });
    CHECK(
        line ==
        "ddp: rank 2, on one host with ranks 0 and 1, shares no memory with them (none came: does a sandbox, such as "
        "seccomp or AppArmor, forbid it?): 3 ranks send messages instead of adding up in memory. Remove the cause, or "
        "set DDP_SHARE_MEMORY=0: then no ranks share memory, and this warning is not printed\n");
}

TEST_CASE("values that a failed step has begun to change are torn, and nobody changes them after the error",
          "[train]") {
    // Rank 1 fails in backward when a bucket has been stepped that most ranks have no slice of.
    std::atomic<int> reduced = 0;  // by all ranks: they are threads
    auto const body = [&](communicator<>& comm) -> std::string {
        memory_trainer with(comm, &reduced);
        with.trainer.step(numbers{{1}});
        if (with.trainer.torn()) return "torn after a whole step";
        barrier(comm);
        if (comm.rank() == 0) reduced = 0;
        barrier(comm);
        with.net.leaves_out = [&](std::size_t i) {
            if (i != 0) return false;
            auto const until = monotonic_clock::now() + 20s;
            while (reduced < comm.size() && monotonic_clock::now() < until) std::this_thread::sleep_for(1ms);
            if (comm.rank() == 1) throw std::runtime_error("no more");
            return false;
        };
        std::string const said = thrown_by([&] { with.trainer.step(numbers{{1}}); });
        std::vector<double> const now(with.net.value(0).begin(), with.net.value(0).end());
        if (said.empty()) return "the step did not fail";
        if (!with.trainer.torn()) return "not torn";
        if (with.trainer.completed_steps() != 1) return "another number of steps";
        std::this_thread::sleep_for(20ms);
        return std::vector<double>(with.net.value(0).begin(), with.net.value(0).end()) == now ? "" : "changed since";
    };
    for (std::string const& wrong : run_ranks(3, body, patient())) CHECK(wrong == "");
    for (std::string const& wrong : on_ranks(3, body)) CHECK(wrong == "");
}

TEST_CASE("nobody writes values before backward has ended here, however long that takes", "[train]") {
    auto const body = [](communicator<>& comm) -> std::string {
        scripted_model<true, false> net({{"a", {3000}}, {"b", {3000}}});  // ready releases nothing
        data_parallel trainer{net, sgd{.lr = 1}, comm, per_parameter_buckets{}};
        if (!trainer.shares_memory()) return "nothing was shared";
        bool early = false;
        net.leaves_out = [&](std::size_t i) {
            if (i != 0 || comm.rank() != 1) return false;
            std::this_thread::sleep_for(100ms);  // the others have long ended theirs
            for (double const value : net.value(1)) early = early || value != 0;
            return false;
        };
        trainer.step(numbers{{1}});
        if (early) return "values changed during backward";
        return net.value(1)[2999] == -2 ? "" : "wrong values";
    };
    for (std::string const& wrong : run_ranks(3, body, patient())) CHECK(wrong == "");
}

TEST_CASE("memory kept after a failure is seen by nobody else, and stays where it is", "[train]") {
    memfd_sharing one, other;
    std::array<memory_offer, 2> offers;
    offers[0].bytes = offers[1].bytes = 10000;
    auto const mine = one.make(10000, offers[0]);
    auto const theirs = other.make(10000, offers[1]);
    CHECK(one.give(offers[1]));
    CHECK(other.give(offers[0]));
    one.take(offers);
    other.take(offers);
    auto const seen = other.view(offers[0]);
    REQUIRE(seen != nullptr);
    REQUIRE(one.view(offers[1]) != nullptr);
    constexpr std::size_t header = memory_sharing::header_bytes;
    mine.get()[header + 5] = std::byte{1};
    CHECK(seen.get()[header + 5] == std::byte{1});
    REQUIRE(one.keep(header + 6000));
    CHECK(mine.get()[header + 5] == std::byte{1});
    seen.get()[header + 5] = std::byte{2};
    CHECK(mine.get()[header + 5] == std::byte{1});
    CHECK(seen.get()[header + 5] == std::byte{2});
}

TEST_CASE("only what comes with the number that a rank gave is mapped, and only if nobody can shrink it", "[train]") {
    memfd_sharing one, other;
    std::array<memory_offer, 2> offers;
    offers[0].bytes = offers[1].bytes = 5000;
    auto const mine = one.make(5000, offers[0]);
    auto const theirs = other.make(5000, offers[1]);

    // A stranger that has found the socket's name sends what it likes.
    auto const send = [&](std::array<std::uint64_t, 2> number, int how_many, bool sealed, std::size_t bytes,
                          std::optional<std::array<std::uint64_t, 2>> inside = {}) {
        int const memory = ::memfd_create("stranger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        REQUIRE(::ftruncate(memory, static_cast<::off_t>(bytes)) == 0);
        std::array<std::uint64_t, 2> const shown = inside.value_or(number);
        REQUIRE(::pwrite(memory, shown.data(), sizeof shown, 0) == sizeof shown);
        if (sealed) REQUIRE(::fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
        ::sockaddr_un to;
        ::iovec words{number.data(), sizeof number};
        alignas(::cmsghdr) std::array<char, CMSG_SPACE(2 * sizeof(int))> control{};
        ::msghdr message{};
        message.msg_namelen = address_of(offers[0], to);
        message.msg_name = &to;
        message.msg_iov = &words;
        message.msg_iovlen = 1;
        if (how_many != 0) {
            std::size_t const count = static_cast<std::size_t>(how_many);
            std::array<int, 2> const both{memory, memory};
            message.msg_control = control.data();
            message.msg_controllen = CMSG_SPACE(count * sizeof(int));
            ::cmsghdr* const header = CMSG_FIRSTHDR(&message);
            *header = {CMSG_LEN(count * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
            std::memcpy(CMSG_DATA(header), both.data(), count * sizeof(int));
        }
        int const from = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        CHECK(::sendmsg(from, &message, 0) == sizeof number);
        ::close(from);
        ::close(memory);
    };
    std::array<std::uint64_t, 2> const right{offers[1].where[2], offers[1].where[3]};
    constexpr std::size_t bytes = 3 * 4096;  // header and 5,000
    std::size_t const before = descriptors();
    SECTION("another number") {
        send({1, 2}, 1, true, bytes);
        one.take(offers);
        CHECK(descriptors() == before);  // closed at once
        CHECK(one.view(offers[1]) == nullptr);
    }
    SECTION("two descriptors") {
        for (int i = 0; i < 5; ++i) send(right, 2, true, bytes);
        one.take(offers);
        CHECK(descriptors() <= before + 5);  // one of each
        CHECK(one.view(offers[1]) != nullptr);
        one.settle();
        CHECK(descriptors() == before - 2);
    }
    SECTION("no descriptor") {
        send(right, 0, true, bytes);
        one.take(offers);
        CHECK(one.view(offers[1]) == nullptr);
    }
    SECTION("memory that can shrink") {
        send(right, 1, false, bytes);
        one.take(offers);
        CHECK(one.view(offers[1]) == nullptr);
        CHECK(descriptors() == before);
    }
    SECTION("the right number, and another one in the memory") {
        send(right, 1, true, bytes, std::array<std::uint64_t, 2>{right[0], right[1] + 1});
        one.take(offers);
        CHECK(one.view(offers[1]) == nullptr);
        CHECK(descriptors() == before);
    }
    SECTION("too little of it") {
        send(right, 1, true, 4096);
        one.take(offers);
        CHECK(one.view(offers[1]) == nullptr);
    }
    SECTION("a queue that is full") {
        int sent = 0;
        while (sent < 10000 && other.give(offers[0])) ++sent;
        CHECK(sent < 10000);  // says no, and does not wait
        one.take(offers);
        CHECK(one.view(offers[1]) != nullptr);
        CHECK(other.give(offers[0]));
    }
    SECTION("the right one") {
        CHECK(other.give(offers[0]));
        one.take(offers);
        CHECK(one.view(offers[1]) != nullptr);
        CHECK(one.view(offers[1]) == nullptr);  // once
    }
}

TEST_CASE("what an optimizer leaves half done is torn on its own rank too", "[train]") {
    bool const shares = GENERATE(true, false);
    auto const body = [&](communicator<>& comm) -> std::string {
        scripted_model<> net({{"a", {3000}}});
        data_parallel trainer{net, breaking{{.lr = 1}, comm.rank() == 0}, comm, {.share_memory = shares}};
        trainer.step(numbers{{1}});
        // By messages the other rank may have all that it needs by then.
        if (thrown_by([&] { trainer.step(numbers{{1}}); }).empty())
            return comm.rank() == 0 || trainer.completed_steps() != 2 ? "nothing was thrown" : "";
        if (trainer.torn()) return "";
        // Not begun, or all of it done before it heard of the other rank's failure.
        double const expected = trainer.completed_steps() == 2 && comm.rank() != 0 ? -2 : -1;
        for (double const value : net.value(0))
            if (value != expected) return "neither whole nor torn";
        return "";
    };
    for (std::string const& wrong : run_ranks(2, body, patient())) CHECK(wrong == "");
}

TEST_CASE("a finish() that is refused leaves memory shared", "[train]") {
    auto const wrong = run_ranks(2, [](communicator<>& comm) -> std::string {
        scripted_model<> inner_net({{"a", {3000}}}), outer_net({{"a", {3000}}});
        data_parallel inner{inner_net, sgd{.lr = 1}, comm};
        /// Calls what an observer may not.
        struct meddler {
            std::function<void()> call;
            void on(step_finished const&) const { call(); }
        };
        std::string said;
        data_parallel outer{outer_net, sgd{.lr = 1}, comm, meddler{[&] { said = thrown_by([&] { inner.finish(); }); }}};
        inner.forward(numbers{{1}});
        inner.backward();
        outer.step(numbers{{1}});
        (void)thrown_by([&] { inner.finish(); });  // the refused call has ended the step for this side
        return said.find("DDP-E100") == 0 ? "" : "said: " + said;
    });
    for (std::string const& one : wrong) CHECK(one == "");
}

TEST_CASE("a limit on the size of files or of memory refuses shared memory with words, not with a signal", "[train]") {
    auto const refused = [](int which, ::rlim_t most) {
        ::rlimit before{};
        REQUIRE(::getrlimit(static_cast<__rlimit_resource>(which), &before) == 0);
        ::rlimit const less{most, before.rlim_max};
        REQUIRE(::setrlimit(static_cast<__rlimit_resource>(which), &less) == 0);
        memfd_sharing one;
        memory_offer offer;
        std::string said = thrown_by([&] {
            if (one.make(std::size_t{1} << 29, offer) == nullptr) throw std::runtime_error("null");
        });
        REQUIRE(::setrlimit(static_cast<__rlimit_resource>(which), &before) == 0);
        return said + ", " + std::string(offer.text.view());
    };
    // Its own memory is mapped, and there is no room for that of another.
    memfd_sharing one, other;
    std::array<memory_offer, 2> offers;
    offers[0].bytes = offers[1].bytes = std::size_t{64} << 20;
    auto const mine = one.make(offers[0].bytes, offers[0]), theirs = other.make(offers[1].bytes, offers[1]);
    REQUIRE(one.give(offers[1]));
    CHECK(one.problem().refused == 0);
    other.take(offers);
    std::size_t pages = 0;  // of this process
    std::ifstream("/proc/self/statm") >> pages;
    ::rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_AS, &before) == 0);
    ::rlimit const less{(pages << 12) + (std::size_t{32} << 20), before.rlim_max};
    if (!sanitizers_leave_out("too little address space")) {
        REQUIRE(::setrlimit(RLIMIT_AS, &less) == 0);
        CHECK(other.view(offers[0]) == nullptr);
        REQUIRE(::setrlimit(RLIMIT_AS, &before) == 0);
        CHECK(other.problem().refused == 1);
        CHECK(other.problem().reason() == "65 MiB of address space for another rank's: Cannot allocate memory");
    }

    CHECK(refused(RLIMIT_FSIZE, 1 << 20) == "null, ulimit -f: File too large");
    if (fewer == 1)  // sanitizers reserve more
        CHECK(refused(RLIMIT_AS, std::size_t{1} << 29).find(" MiB of address space: Cannot allocate memory, ") !=
              std::string::npos);
}

TEST_CASE("what a host and its containers leave is read from /proc and the cgroups, nested, of both versions",
          "[train]") {
    using memory_limits = ddp::detail::memory_limits;
    struct tree {
        std::string root = "/tmp/ddp-limits-XXXXXX";
        tree() { REQUIRE(::mkdtemp(root.data()) != nullptr); }
        ~tree() { std::filesystem::remove_all(root); }
        void file(std::string const& path, std::string const& text) const {
            std::filesystem::path const at = root + path;
            std::filesystem::create_directories(at.parent_path());
            std::ofstream(at) << text;
        }
        void unified(std::string const& group, char const* most, long used, char const* more = "") const {
            file(group + "/memory.max", most + std::string("\n"));
            file(group + "/memory.current", std::to_string(used << 20) + "\n");
            file(group + "/memory.stat",
                 "anon 7\nfile 99999999\ninactive_file 3145728\nactive_file 2097152\n" + std::string(more));
        }
        void legacy(std::string const& group, long most, long used) const {
            file(group + "/memory.limit_in_bytes", std::to_string(most << 20) + "\n");
            file(group + "/memory.usage_in_bytes", std::to_string(used << 20) + "\n");
            file(group + "/memory.stat",
                 "inactive_file 1\nactive_file 1\ntotal_inactive_file 4194304\ntotal_active_file 0\n");
        }
        [[nodiscard]] std::string left() const {
            auto const now = memory_limits(root).left();
            return std::to_string(now.bytes >> 20) + ", " + now.limit;
        }
    } const at;
    CHECK(memory_limits(at.root).left().bytes == std::numeric_limits<std::uint64_t>::max());
    std::string const memory = "MemTotal: 9999999 kB\nMemFree:  1 kB\nMemAvailable:   1048576 kB\n";
    at.file("/proc/meminfo", memory + "SwapTotal: 1 kB\nSwapFree: 2048 kB\n");
    CHECK(at.left() == "1026, MemAvailable of its host");
    at.file("/proc/meminfo", memory + "SwapFree: 0 kB\n");

    SECTION("version 2: the tightest on the way up") {
        at.file("/proc/self/cgroup", "0::/pod/box/task\n");
        at.file("/proc/self/mountinfo",
                "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
        at.unified("/sys/fs/cgroup/pod/box/task", "max", 10);
        at.unified("/sys/fs/cgroup/pod/box", "104857600", 40);
        at.unified("/sys/fs/cgroup/pod", "1073741824", 200);
        CHECK(at.left() == "65, memory.max is 100 MiB");  // files can be dropped
        at.unified("/sys/fs/cgroup/pod", "209715200", 180);
        CHECK(at.left() == "25, memory.max is 200 MiB");
        at.unified("/sys/fs/cgroup/pod/box/task", "1048576", 10);
        CHECK(at.left() == "0, memory.max is 1 MiB");
    }
    SECTION("version 2: swap counts as far as the group may use it") {
        at.file("/proc/meminfo", memory + "SwapFree: 51200 kB\n");
        at.file("/proc/self/cgroup", "0::/\n");
        at.file("/proc/self/mountinfo", "30 23 0:26 /../../box /sys/fs/cgroup rw - cgroup2 cgroup rw\n");
        at.unified("/sys/fs/cgroup", "104857600", 40);
        CHECK(at.left() == "115, memory.max is 100 MiB");
        at.file("/sys/fs/cgroup/memory.swap.max", "10485760\n");
        at.file("/sys/fs/cgroup/memory.swap.current", "1048576\n");
        CHECK(at.left() == "74, memory.max is 100 MiB");
    }
    SECTION("version 1, beside a version 2 that has no memory: a container shows its own group as the root") {
        at.file("/proc/self/cgroup", "5:devices:/a\n4:cpu,memory:/docker/box/task\n0::/\n");
        at.file("/proc/self/mountinfo",
                "34 31 0:34 /docker/box /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
                "35 31 0:35 /docker/box /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n"
                "41 31 0:41 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
        at.legacy("/sys/fs/cgroup/memory", 100, 40);
        CHECK(at.left() == "64, memory.limit_in_bytes is 100 MiB");
        at.legacy("/sys/fs/cgroup/memory/task", 50, 40);
        CHECK(at.left() == "14, memory.limit_in_bytes is 50 MiB");
        at.file("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "104857600\n");
        at.file("/sys/fs/cgroup/memory/memory.memsw.usage_in_bytes", "101711872\n");
        CHECK(at.left() == "7, memory.limit_in_bytes is 100 MiB");
    }
    SECTION("version 1: a place that is not below what is mounted") {
        at.file("/proc/self/cgroup", "4:memory:/elsewhere\n");
        at.file("/proc/self/mountinfo", "35 31 0:35 /else /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
        at.legacy("/sys/fs/cgroup/memory", 100, 40);
        at.legacy("/sys/fs/cgroup/memory/where", 1, 1);
        CHECK(at.left() == "64, memory.limit_in_bytes is 100 MiB");
    }

    constexpr std::size_t mib = std::size_t{1} << 20;
    CHECK(memory_limits::step({10000 * mib, ""}, 100 * mib) == 16 * mib);
    CHECK(memory_limits::step({10000 * mib, ""}, 3 * mib) == 3 * mib);
    CHECK(memory_limits::step({100 * mib, ""}, 50 * mib) == 100 * mib / 256);  // others look, too, before they take
    CHECK(memory_limits::step({mib, ""}, 50 * mib) == mib / 256);
    CHECK(memory_limits::step({1000, ""}, 50 * mib) == mib / 256);
    for (std::uint64_t const ranks : {2U, 50U, 67U, 200U})  // all look, then all take what they may
        for (std::uint64_t const each : {mib, 10 * mib, 17 * mib + 4096, 100 * mib}) {
            CAPTURE(ranks, each);
            std::uint64_t left = ranks * each * 3 / 4, missing = each;
            while (memory_limits::fits({left, ""}, missing)) {
                std::uint64_t const taken = ranks * memory_limits::step({left, ""}, missing);
                REQUIRE(taken <= left);  // the kernel would kill
                left -= taken;
                missing -= taken / ranks;
                REQUIRE(missing > 0);
            }
        }
    CHECK(memory_limits::fits({100 * mib, ""}, 98 * mib));
    CHECK_FALSE(memory_limits::fits({100 * mib, ""}, 99 * mib));
    CHECK_FALSE(memory_limits::fits({100 * mib, ""}, 101 * mib));
}

TEST_CASE("what is streamed arrives, from and to any boundary", "[train]") {
    std::vector<float> from(300), to(300);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i + 1);
    for (std::size_t begin = 0; begin < 18; ++begin)
        for (std::size_t const count : {0u, 1u, 3u, 4u, 5u, 15u, 16u, 17u, 33u, 250u}) {
            std::fill(to.begin(), to.end(), 0.0f);
            stream(std::span(to).subspan(begin, count), std::span<float const>(from).subspan(3, count));
            finish_streams();
            for (std::size_t i = 0; i < to.size(); ++i) {
                bool const inside = i >= begin && i < begin + count;
                REQUIRE(to[i] == (inside ? from[3 + i - begin] : 0));
            }
        }
}
