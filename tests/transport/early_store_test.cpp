// The memory for messages that nobody has posted yet.
#include <ddp/transport/framed/frame_early.hpp>

#include <unistd.h>

#include <array>
#include <cstddef>
#include <fstream>

#include "support/catch.hpp"

namespace {

/// Bytes of this process that are in memory.
std::size_t resident() {
    std::size_t all = 0, here = 0;
    std::ifstream("/proc/self/statm") >> all >> here;
    return here * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

TEST_CASE("memory for early messages becomes resident only as it is used", "[transport]") {
    constexpr std::uint32_t blocks = 1 << 16;  // 64 MiB: of 64 peers
    std::size_t const before = resident();
    ddp::early_store store(blocks);
    CHECK(resident() - before < (std::size_t{16} << 20));  // AddressSanitizer marks an eighth of it

    std::array<std::byte, 2500> text{}, out{};
    for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<std::byte>(i * 7);
    std::uint32_t const one = store.open({3, 1, 9}, 77, text.size());
    store.append(one, text);
    REQUIRE(store.find({3, 1, 9}) == one);
    CHECK(store.at(one).fingerprint == 77);
    store.take(one, out.data());
    CHECK(out == text);
    CHECK(store.find({3, 1, 9}) == ddp::early_store::none);
}
