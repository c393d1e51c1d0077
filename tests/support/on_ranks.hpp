/// \file
/// on_ranks: the body of a test on ranks that are threads, over TCP on loopback, without Asio in the test's own file.
#pragma once

#include <functional>

#include <ddp/comm/communicator.hpp>
#include <ddp/transport/any.hpp>

#include "support/on_threads.hpp"

namespace ddp::test {

/// What gives each rank of one job its communicator; called on that rank's thread. `memory`: messages go through memory.
std::function<communicator<>(int rank)> loopback_job(int ranks, bool memory);

/// body(comm) on every rank.
template <class Body>
auto on_ranks(int ranks, Body const& body, bool memory = false) {
    auto const join = loopback_job(ranks, memory);
    return on_threads(ranks, [&](int rank) {
        communicator<> comm = join(rank);
        return body(comm);
    });
}

}  // namespace ddp::test
