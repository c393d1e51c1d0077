#include "support/on_ranks.hpp"

#include <functional>
#include <memory>
#include <optional>

#include "support/loopback.hpp"

namespace ddp::test {

std::function<communicator<>(int rank)> loopback_job(int ranks, bool memory,
                                                     std::optional<timing::milliseconds> collective) {
    auto const world = std::make_shared<loopback_world const>(ranks, memory);
    timing times = loopback_patience();
    if (collective) times.collective = *collective;
    return [world, times](int rank) { return any_communicator(world->connect(rank), times); };
}

}  // namespace ddp::test
