// Bytes from one thread to another through a ring: order, sleeping and waking, and a far end that lies.
#include <ddp/transport/shm/byte_ring.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <semaphore>
#include <span>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "train/patience.hpp"

namespace {

using ddp::byte_ring;
using ddp::const_bytes;
using ddp::mutable_bytes;

struct memory {
    explicit memory(std::size_t capacity) : words((byte_ring::header_bytes + capacity) / 8 + 8) {}
    std::byte* at() {
        auto const address = reinterpret_cast<std::uintptr_t>(words.data());
        return reinterpret_cast<std::byte*>(words.data()) + (64 - address % 64) % 64;
    }
    void set(std::size_t offset, std::uint64_t value) { std::memcpy(at() + offset, &value, sizeof value); }
    std::vector<std::uint64_t> words;
};

std::byte expected(std::uint64_t at) {
    return static_cast<std::byte>((at * 0x9fb21c651e98df25u) >> 40);
}

}  // namespace

TEST_CASE("a ring brings all bytes in order, and nobody oversleeps", "[comm]") {
    std::size_t const capacity = GENERATE(std::size_t{64}, std::size_t{4096}, std::size_t{1} << 17);
    CAPTURE(capacity);
    std::uint64_t const total = (capacity == 64 ? 300'000u : 20'000'000u) / static_cast<unsigned>(ddp::test::fewer);
    memory shared(capacity);
    std::counting_semaphore<> reader_bell(0), writer_bell(0);
    std::atomic<std::uint64_t> slept = 0;

    std::thread writer([&] {
        byte_ring ring(shared.at(), capacity);
        std::uint64_t at = 0;
        ddp::test::test_bits random(7, 0);
        std::vector<std::byte> bytes;
        while (at < total) {
            std::size_t const size = std::min<std::uint64_t>(total - at, 1 + random.next() % (3 * capacity));
            bytes.resize(size);
            for (std::size_t i = 0; i < size; ++i) bytes[i] = expected(at + i);
            std::size_t const first = random.next() % (size + 1);
            for (std::size_t sent = 0; sent < size;) {
                const_bytes const whole = std::span(bytes).subspan(sent);
                std::size_t const cut = sent < first ? first - sent : whole.size();
                std::array<const_bytes, 2> const list{whole.first(cut), whole.subspan(cut)};
                byte_ring::result const r = ring.write(list);
                if (r.wakes) reader_bell.release();
                sent += r.bytes;
                if (r.bytes == 0 && ring.writer_may_sleep()) writer_bell.acquire();
            }
            at += size;
            if (random.next() % 64 == 0) std::this_thread::yield();
        }
    });
    byte_ring ring(shared.at(), capacity);
    std::uint64_t at = 0, wrong = 0;
    ddp::test::test_bits random(11, 0);
    std::vector<std::byte> bytes(2 * capacity);
    while (at < total) {
        std::size_t const size = 1 + random.next() % bytes.size();
        std::array<mutable_bytes, 2> const list{std::span(bytes).first(size / 2),
                                                std::span(bytes).subspan(size / 2, size - size / 2)};
        byte_ring::result const r = ring.take(list);
        if (r.wakes) writer_bell.release();
        for (std::size_t i = 0; i < r.bytes; ++i) wrong += bytes[i] != expected(at + i);
        at += r.bytes;
        if (r.bytes == 0 && ring.reader_may_sleep()) {
            ++slept;
            reader_bell.acquire();
        }
    }
    writer.join();
    CHECK(wrong == 0);
    CHECK(at == total);
    CHECK(slept > 0);
    CHECK_FALSE(ring.has_bytes());
    CHECK_FALSE(ring.broken());
}

TEST_CASE("a ring does not believe counters that the far end cannot have reached", "[comm]") {
    constexpr std::size_t capacity = 128, written = 0, read = 64;
    std::array<std::byte, 100> some{};
    mutable_bytes const in(some);
    const_bytes const out(some);
    for (std::uint64_t const lie : {std::uint64_t{129}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
        memory shared(capacity);
        byte_ring ring(shared.at(), capacity);
        shared.set(written, lie);
        CHECK(ring.take({&in, 1}).bytes == 0);
        CHECK(ring.broken());
        CHECK(ring.has_bytes());  // whoever waits for some is to find out
    }
    for (std::uint64_t const lie : {std::uint64_t{101}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
        memory shared(capacity);
        byte_ring ring(shared.at(), capacity);
        CHECK(ring.write({&out, 1}).bytes == 100);
        shared.set(read, lie);
        CHECK(ring.write({&out, 1}).bytes == 0);
        CHECK(ring.broken());
        CHECK(ring.has_room());
    }
    memory shared(capacity);  // a counter that goes back
    byte_ring ring(shared.at(), capacity);
    shared.set(written, 100);
    CHECK(ring.take({&in, 1}).bytes == 100);
    shared.set(written, 99);
    CHECK(ring.take({&in, 1}).bytes == 0);
    CHECK(ring.broken());
}

TEST_CASE("a ring of a capacity that is no power of two is refused", "[comm]") {
    memory shared(128);
    for (std::size_t const capacity : {std::size_t{0}, std::size_t{96}, ~std::size_t{0}})
        CHECK_THROWS_WITH(byte_ring(shared.at(), capacity),
                          Catch::Contains("byte_ring: the capacity must be a power of two"));
    for (std::size_t const capacity : {std::size_t{1}, std::size_t{128}})
        CHECK_NOTHROW(byte_ring(shared.at(), capacity));
}
