/// \file
/// run_ranks: the body of a test on every rank of an inproc world, one thread a rank; what they return, or throw.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <type_traits>
#include <vector>

#include <ddp/comm/communicator.hpp>
#include <ddp/transport/any.hpp>
#include <ddp/transport/inproc.hpp>

#include "support/on_threads.hpp"

namespace ddp::test {

/// body(comm) on `ranks` threads; returns the results in rank order. The first rank's exception, if any, is thrown.
template <class Body>
auto run_ranks(int ranks, Body body, timing const& times = timing::for_tests()) {
    auto world = inproc_world::create(ranks);
    return on_threads(ranks, [&](int rank) {
        communicator<> comm = any_communicator(world->connect(rank), times);
        return body(comm);
    });
}

using placement = std::vector<std::uint64_t>;  // the host of each rank

/// run_ranks, with ranks on hosts as placed.
template <class Body>
auto on_hosts(placement const& hosts, Body const& body, timing const& times) {
    auto const world = inproc_world::create(static_cast<int>(hosts.size()), hosts);
    return on_threads(static_cast<int>(hosts.size()), [&](int rank) {
        communicator<> comm = any_communicator(world->connect(rank), times);
        return body(comm);
    });
}

/// Runs body(comm) on every rank and returns what left each rank's communicator as an exception, "" where nothing did.
template <class Body>
std::vector<std::string> errors_of_ranks(int ranks, Body body, timing const& times = timing::for_tests()) {
    auto world = inproc_world::create(ranks);
    return on_threads(ranks, [&](int rank) -> std::string {
        try {
            communicator<> comm = any_communicator(world->connect(rank), times);
            body(comm);
            return {};
        } catch (std::exception const& e) {
            return e.what();
        }
    });
}

}  // namespace ddp::test
