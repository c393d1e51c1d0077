#include "support/on_ranks.hpp"

#include <functional>
#include <memory>

#include "support/loopback.hpp"

namespace ddp::test {

std::function<communicator<>(int rank)> loopback_job(int ranks, bool memory) {
    auto const world = std::make_shared<loopback_world const>(ranks, memory);
    return [world](int rank) { return any_communicator(world->connect(rank), loopback_patience()); };
}

}  // namespace ddp::test
