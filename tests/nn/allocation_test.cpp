// Replaces the global operator new and malloc: nothing else in its program may do so.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <ddp/nn/nn.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

namespace {

std::atomic<std::size_t> news = 0, mallocs = 0;

void* counted(std::size_t bytes, std::size_t alignment) {
    news.fetch_add(1, std::memory_order_relaxed);
    std::size_t const rounded = (bytes + alignment - 1) / alignment * alignment;
    if (void* const memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded)) return memory;
    throw std::bad_alloc();
}

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {  // inlined, GCC takes it and delete for a mismatch
    return counted(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return counted(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, std::nothrow_t const&) noexcept {
    news.fetch_add(1, std::memory_order_relaxed);
    return std::malloc(bytes == 0 ? 1 : bytes);
}
void operator delete(void* memory) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::nothrow_t const&) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
    std::free(memory);
}

// Eigen asks malloc. glibc lets a program put its own in front; a sanitizer has taken the place already.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define MALLOC_IS_TAKEN
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
#define MALLOC_IS_TAKEN
#endif

#if defined(MALLOC_IS_TAKEN)
constexpr bool sees_malloc = false;
#else
constexpr bool sees_malloc = true;
extern "C" void* __libc_malloc(std::size_t) noexcept;
extern "C" void* malloc(std::size_t bytes) noexcept {
    mallocs.fetch_add(1, std::memory_order_relaxed);
    return __libc_malloc(bytes);
}
#endif

using namespace ddp;

namespace {

struct counts {
    std::size_t ours, eigens;
};

/// What three steps on batches up to the size of the first one allocate.
template <class Net>
counts allocated_by_steps(Net net, std::vector<float> const& inputs, std::size_t rows) {
    std::size_t const features = inputs.size() / rows;
    std::vector<std::uint32_t> const labels(rows, 3), samples(rows, 5);
    auto const step = [&](std::size_t count) {
        net.forward(classification_batch<float>{std::span(inputs).first(count * features),
                                                std::span(labels).first(count), count, features,
                                                std::span(samples).first(count)});
        net.backward({}, [](std::size_t) {});
    };
    step(rows);
    news = 0;
    mallocs = 0;
    step(rows);
    step(rows / 2);
    step(rows);
    return {news, mallocs};
}

nn::sequential<> dense(std::size_t features, std::size_t hidden) {
    return nn::sequential{nn::linear(features, hidden), nn::relu(),
                          nn::linear(hidden, hidden),   nn::tanh(),
                          nn::linear(hidden, 10),       nn::softmax_cross_entropy()};
}

}  // namespace

TEST_CASE("the counters see an allocation of each kind", "[nn][allocation]") {
    news = 0;
    mallocs = 0;
    nn::buffer<float> memory;
    REQUIRE(memory.take(3).size() == 3);
    std::size_t const ours = news;
    void* volatile raw = std::malloc(100);
    std::size_t const theirs = mallocs;
    std::free(raw);
    REQUIRE(ours == 1);
    if constexpr (sees_malloc) REQUIRE(theirs >= 1);
}

TEST_CASE("after the first batch a small network allocates nothing at all", "[nn][allocation]") {
    counts const seen = allocated_by_steps(dense(30, 20), test::random_numbers<float>(8 * 30, 1),
                                           8);  // Eigen packs below 128 KiB on the stack
    REQUIRE(seen.ours == 0);
    REQUIRE(seen.eigens == 0);
}

TEST_CASE("after the first batch only Eigen allocates: at most the two packing buffers of each product",
          "[nn][allocation]") {
    counts const seen = allocated_by_steps(dense(784, 256), test::random_numbers<float>(128 * 784, 1), 128);
    CAPTURE(seen.eigens);
    REQUIRE(seen.ours == 0);
    REQUIRE(seen.eigens <= 3 * 8 * 2);                    // steps, products, buffers
    if constexpr (sees_malloc) REQUIRE(seen.eigens > 0);  // else the limit above checks nothing
}

TEST_CASE("nor does any other layer allocate after the first batch", "[nn][allocation]") {
    nn::conv2d first({1, 10, 10}, {.filters = 4, .kernel = 3, .padding = 1});
    nn::max_pool2d half(first.output_shape());
    nn::conv2d second(half.output_shape(), {.filters = 6, .kernel = 3, .stride = 2});
    nn::average_pool2d last(second.output_shape());
    std::size_t const features = last.outputs();
    nn::sequential images{std::move(first),  std::move(half),    nn::relu(),
                          std::move(second), nn::gelu(),         std::move(last),
                          nn::flatten(),     nn::dropout(0.5),   nn::layer_norm(features),
                          nn::relu(),        nn::dropout(0.1),   nn::linear(features, 10),
                          nn::gelu(),        nn::layer_norm(10), nn::softmax_cross_entropy()};
    counts const seen = allocated_by_steps(std::move(images), test::random_numbers<float>(8 * 100, 1), 8);
    REQUIRE(seen.ours == 0);
    REQUIRE(seen.eigens == 0);

    nn::sequential tokens{nn::embedding(7, 5, 3), nn::linear(15, 10), nn::softmax_cross_entropy()};
    counts const looked_up = allocated_by_steps(std::move(tokens), std::vector<float>(8 * 3, 6.0f), 8);
    REQUIRE(looked_up.ours == 0);
    REQUIRE(looked_up.eigens == 0);
}
