// Over MPI, too, ddp allocates nothing after the first step. MPI itself does, by malloc: what is counted is operator new,
// which sanitizers want for themselves.
#include "support/catch.hpp"
#include "train/patience.hpp"

#if !defined(DDP_TEST_SANITIZED)

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/rendezvous/run_mpi.hpp>

#include "support/training_checks.hpp"

namespace {
std::atomic<std::size_t> news = 0;

void* counted(std::size_t bytes, std::size_t alignment) {
    news.fetch_add(1, std::memory_order_relaxed);
    std::size_t const whole = (bytes + alignment - 1) / alignment * alignment;
    if (void* const memory = std::aligned_alloc(alignment, whole == 0 ? alignment : whole)) return memory;
    throw std::bad_alloc();
}
}  // namespace

// Not inlined: GCC would see that what new returns is given to free.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    return counted(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return counted(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
    std::free(memory);
}

using namespace ddp;
using namespace ddp::test;

TEST_CASE("over MPI steps soon allocate nothing", "[mpi][train]") {
    for (char const* const name : {"auto", "direct", "halving_doubling", "ring", "naive"})
        for (bool const sharded : {false, true}) {
            CAPTURE(name, sharded);
            auto comm = mpi_communicator(MPI_COMM_WORLD);
            task_data<float> const data(45, 2, 64);
            tanh_mlp<float> model(45, 200, 2, 1);
            data_parallel trainer{model,
                                  adam{},
                                  comm,
                                  options_of(sharded, true),
                                  any_allreduce::parse(name),
                                  size_capped_buckets{.cap_bytes = 8192, .first_bytes = 512}};
            // A slot is made for each envelope that comes earlier than ever before: in ever fewer windows.
            int quiet = 0;  // windows without an allocation, one after the other
            for (int window = 0; window < 60 && quiet < 8; ++window) {
                std::size_t const before = news.load();
                for (std::size_t step = 0; step < 5; ++step) trainer.step(data.batch(step, step + 4));
                quiet = news.load() == before ? quiet + 1 : 0;
                quiet = allreduce(comm, quiet, minimum{});  // all ranks train equally often
            }
            CHECK(quiet == 8);
        }
}

#else
TEST_CASE("over MPI, steps allocate nothing", "[mpi][train]") {
    WARN("not tried: counting allocations over MPI, since sanitizers replace operator new");
}
#endif
