// After the first step ddp allocates nothing. Counts malloc, which operator new asks, in the whole program; where a
// sanitizer has taken its place, by the sanitizer's hook. glibc lets a program put its own malloc in front.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/exchange/narrow.hpp>
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/exchange/sparse.hpp>
#include <ddp/optim/parameter_groups.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

namespace {
std::atomic<std::size_t> allocations = 0;  // of all threads
std::atomic<std::size_t> allocated = 0;    // bytes
constinit thread_local std::size_t of_this_thread = 0;

void count_one(std::size_t bytes) noexcept {
    allocations.fetch_add(1, std::memory_order_relaxed);
    allocated.fetch_add(bytes, std::memory_order_relaxed);
    ++of_this_thread;
}
}  // namespace

#if defined(DDP_TEST_SANITIZED)
// As in <sanitizer/allocator_interface.h>, which GCC 12 comes without.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*)(void const volatile*, std::size_t),
                                                         void (*)(void const volatile*));
[[maybe_unused]] static int const hooked = __sanitizer_install_malloc_and_free_hooks(
    [](void const volatile*, std::size_t bytes) { count_one(bytes); }, [](void const volatile*) {});
#else
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) noexcept {
    count_one(bytes);
    return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) noexcept {
    count_one(count * bytes);
    return __libc_calloc(count, bytes);
}
void* realloc(void* memory, std::size_t bytes) noexcept {
    count_one(bytes);
    return __libc_realloc(memory, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
    count_one(bytes);
    return __libc_memalign(alignment, bytes);
}
}
#endif

using namespace ddp;
using namespace ddp::test;

namespace {

/// A thread's start may allocate, and a busy machine comes to it late. Returns when all threads but this one sleep.
void wait_for_threads() {
    for (int tries = 0; tries < 10000; ++tries) {
        bool asleep = true;
        for (auto const& task : std::filesystem::directory_iterator("/proc/self/task")) {
            if (task.path().filename() == std::to_string(::gettid())) continue;
            std::string line;  // 1234 (name) S …
            std::getline(std::ifstream(task.path() / "stat"), line);
            std::size_t const name = line.rfind(") ");
            asleep = asleep && name != line.npos && line[name + 2] == 'S';
        }
        if (asleep) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw std::runtime_error("ten seconds, and a thread is still busy");
}

/// Allocations in each of `windows` windows of `steps` steps, after the first step.
template <memory Kind, class Comm, class Recipe>
std::vector<std::size_t> count_allocations(Comm& comm, Recipe const& by, std::size_t windows, std::size_t steps) {
    task_data<float> const data(45, 2, 64);
    tanh_mlp<float, Kind> model(45, 200, 2, 1);
    data_parallel trainer{model, by.optimizer, comm, by.options, by.algorithm, by.buckets};
    std::vector<std::size_t> counts(windows);
    barrier(comm);
    trainer.step(data.batch(0, 4));
    if (comm.size() > 1 && comm.rank() == 0) wait_for_threads();
    for (std::size_t& count : counts) {
        barrier(comm);
        auto const so_far = [&] { return comm.size() == 1 ? of_this_thread : allocations.load(); };
        std::size_t const before = so_far();
        barrier(comm);
        for (std::size_t step = 0; step < steps; ++step) trainer.step(data.batch(step, step + 4));
        barrier(comm);
        count = so_far() - before;
    }
    return counts;
}

std::vector<recipe> recipes() {
    std::vector<recipe> all;
    for (bool const sharded : {false, true})
        for (bool const clipped : {false, true})
            for (any_optimizer const& optimizer :
                 {any_optimizer(sgd{}), any_optimizer(sgd{.momentum = 0.9}), any_optimizer(adam{})})
                for (any_allreduce const& algorithm :
                     {any_allreduce(automatic_allreduce{}), any_allreduce(direct_allreduce{.chunk_bytes = 256}),
                      any_allreduce(halving_doubling_allreduce{.chunk_bytes = 256}),
                      any_allreduce(ring_allreduce{.segment_bytes = 256}), any_allreduce(naive_allreduce{})})
                    all.push_back({.name = std::string(algorithm.name) + (sharded ? ", sharded" : ", replicated") +
                                           (clipped ? ", clipped" : ""),
                                   .optimizer = optimizer,
                                   .algorithm = algorithm,
                                   .buckets = size_capped_buckets{.cap_bytes = 8192, .first_bytes = 512},
                                   .options = options_of(sharded, clipped)});
    return all;
}

}  // namespace

TEST_CASE("what allocates is seen", "[train]") {
    std::size_t const before = allocations.load();
    int* const volatile one = new int(1);  // volatile: compilers leave out what nobody sees
    delete one;
    REQUIRE(allocations.load() > before);
}

TEST_CASE("what the direct algorithm needs beside the data is as large as slices, where these are shorter than chunks",
          "[train]") {
    std::atomic<std::size_t> before = 0, after = 0;
    run_ranks(4, [&](auto& comm) {
        std::vector<float> data(100, 1.0f);
        barrier(comm);
        if (comm.rank() == 0) before = allocated.load();
        barrier(comm);
        allreduce(comm, data, direct_allreduce{.chunk_bytes = std::size_t{1} << 20});
        barrier(comm);
        if (comm.rank() == 0) after = allocated.load();
        barrier(comm);
        return data[99];
    });
    CHECK(after - before < 256 * 1024);  // of four ranks; three chunks each would be 12 MiB
}

TEST_CASE("one rank allocates nothing after its first step", "[train]") {
    for (recipe const& by : recipes()) {
        CAPTURE(by.name);
        REQUIRE(run_ranks(1, [&](auto& comm) { return count_allocations<memory::releasing>(comm, by, 2, 10); })[0] ==
                std::vector<std::size_t>{0, 0});
        REQUIRE(run_ranks(1, [&](auto& comm) { return count_allocations<memory::copied>(comm, by, 2, 10); })[0] ==
                std::vector<std::size_t>{0, 0});
    }
}

// How many buckets are in the same stage at once depends on who is fast: the pool is filled for all of them.
TEST_CASE("several ranks allocate nothing after their first step", "[train]") {
    for (recipe const& by : recipes()) {
        CAPTURE(by.name);
        auto const counts = run_ranks(
            2, [&](auto& comm) { return count_allocations<memory::releasing>(comm, by, 12, 5); }, patient())[0];
        REQUIRE(counts == std::vector<std::size_t>(12));
    }
}

TEST_CASE("over TCP, too, several ranks allocate nothing after their first step", "[train]") {
    for (char const* const name : {"auto", "direct", "halving_doubling", "ring", "naive"})
        for (bool const sharded : {false, true}) {
            CAPTURE(name, sharded);
            recipe const by{.name = name,
                            .optimizer = adam{},
                            .algorithm = any_allreduce::parse(name),
                            .buckets = size_capped_buckets{.cap_bytes = 8192, .first_bytes = 512},
                            .options = options_of(sharded, true)};
            auto const counts =
                on_ranks(2, [&](auto& comm) { return count_allocations<memory::releasing>(comm, by, 6, 5); })[0];
            REQUIRE(counts == std::vector<std::size_t>(6));
        }
}

TEST_CASE("parameter groups and clipping by value allocate nothing after the first step", "[train]") {
    struct {
        parameter_groups<any_optimizer> optimizer{adam{}, {{"b?", sgd{.momentum = 0.9}}, {"w2", sgd{}}}};
        any_allreduce algorithm = direct_allreduce{.chunk_bytes = 256};
        any_buckets buckets = size_capped_buckets{.cap_bytes = 8192, .first_bytes = 512};
        training_options options = {.clip = clip_by_value{.limit = 0.01}};
    } by;
    for (update const how : {update::replicated, update::sharded}) {
        CAPTURE(how == update::sharded);
        by.options.update = how;
        REQUIRE(run_ranks(1, [&](auto& comm) { return count_allocations<memory::releasing>(comm, by, 2, 10); })[0] ==
                std::vector<std::size_t>{0, 0});
        REQUIRE(run_ranks(
                    2, [&](auto& comm) { return count_allocations<memory::releasing>(comm, by, 12, 5); },
                    patient())[0] == std::vector<std::size_t>(12));
    }
}

TEST_CASE("exchanges that send less allocate nothing after the first step", "[train]") {
    auto const counted = [](auto const& exchange) {
        struct {
            any_optimizer optimizer = adam{};
            std::decay_t<decltype(exchange)> algorithm;
            any_buckets buckets = size_capped_buckets{.cap_bytes = 8192, .first_bytes = 512};  // which cut a matrix
            training_options options = {};
        } by{.algorithm = exchange};
        for (update const how : {update::replicated, update::sharded})
            for (nonfinite const what : {nonfinite::unchecked, nonfinite::skip}) {
                CAPTURE(exchange.name, how == update::sharded, what == nonfinite::skip);
                by.options.update = how;
                by.options.nonfinite = what;
                CHECK(run_ranks(1, [&](auto& comm) {
                          return count_allocations<memory::releasing>(comm, by, 2, 10);
                      })[0] == std::vector<std::size_t>{0, 0});
                CHECK(run_ranks(
                          2, [&](auto& comm) { return count_allocations<memory::releasing>(comm, by, 6, 5); },
                          patient())[0] == std::vector<std::size_t>(6));
            }
    };
    counted(bfloat16_exchange{});
    counted(half_exchange{});
    counted(int8_exchange{});
    counted(top_k_exchange{.ratio = 0.1});
    counted(random_k_exchange{.ratio = 0.1});
    counted(power_sgd_exchange{.rank = 2});
}

TEST_CASE("with a sharded update all ranks together hold one optimizer's state", "[train]") {
    constexpr std::size_t ranks = 4, count = 200'000;
    auto const bytes_of_trainers = [](update how) {
        std::size_t const before = allocated.load();
        run_ranks(static_cast<int>(ranks), [&](auto& comm) {
            scripted_model<> model(std::vector<scripted_model<>::part>{{"w", {count}}});
            auto trainer = make_trainer(model, comm, training_options{.update = how}, adam{});
        });
        return allocated.load() - before;
    };
    std::size_t const state = adam{}.slot_count() * count * sizeof(double);
    std::size_t const replicated = bytes_of_trainers(update::replicated), sharded = bytes_of_trainers(update::sharded);
    CAPTURE(replicated, sharded, state);
    CHECK(replicated >= ranks * state);
    CHECK(replicated - sharded >= (ranks - 1) * state - state / 2);
}
