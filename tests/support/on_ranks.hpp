/// \file
/// on_ranks: the body of a test on ranks that are threads, over TCP on loopback, without Asio in the test's own file.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ddp/comm/communicator.hpp>
#include <ddp/transport/any.hpp>

#include "support/catch.hpp"
#include "support/on_threads.hpp"
#include "support/ranks.hpp"

namespace ddp::test {

/// What gives each rank of one job its communicator; called on that rank's thread. `memory`: messages go through memory.
/// `collective`: how long a wait may take, where loopback_patience's is too long for a test.
std::function<communicator<>(int rank)> loopback_job(int ranks, bool memory,
                                                     std::optional<timing::milliseconds> collective = {});

/// body(comm) on every rank.
template <class Body>
auto on_ranks(int ranks, Body const& body, bool memory = false) {
    auto const join = loopback_job(ranks, memory);
    return on_threads(ranks, [&](int rank) {
        communicator<> comm = join(rank);
        return body(comm);
    });
}

/// The same body over TCP, or as run_ranks has it in one process.
template <class Body>
auto ranks_over(bool tcp, int ranks, Body const& body, timing const& times) {
    return tcp ? on_ranks(ranks, body) : run_ranks(ranks, body, times);
}

/// How many ranks, and whether over TCP: for GENERATE.
inline auto ways_to_run() {
    return Catch::Generators::table<int, bool>(
        {{1, false}, {1, true}, {2, false}, {2, true}, {3, false}, {3, true}, {4, false}, {4, true}, {7, false}});
}

/// What left each rank as an exception, as errors_of_ranks has it.
template <class Body>
std::vector<std::string> errors_over(bool tcp, int ranks, Body const& body, timing const& times) {
    if (!tcp) return errors_of_ranks(ranks, body, times);
    auto const join = loopback_job(ranks, false);
    return on_threads(ranks, [&](int rank) -> std::string {
        try {
            communicator<> comm = join(rank);
            body(comm);
            return {};
        } catch (std::exception const& e) {
            return e.what();
        }
    });
}

}  // namespace ddp::test
