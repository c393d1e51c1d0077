/// \file
/// run_ranks: the body of a test on every rank of an inproc world, one thread a rank; what they return, or throw.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <ddp/comm/communicator.hpp>
#include <ddp/transport/any.hpp>
#include <ddp/transport/inproc.hpp>

namespace ddp::test {

/// Runs body(comm) on `ranks` threads; returns the results in rank order. The first rank's exception, if any, is thrown.
template <class Body>
auto run_ranks(int ranks, Body body, timing const& times = timing::for_tests()) {
    using result = std::invoke_result_t<Body&, communicator<>&>;
    auto world = inproc_world::create(ranks);
    std::vector<std::future<result>> running;
    for (int r = 0; r < ranks; ++r)
        running.push_back(std::async(std::launch::async, [&world, &body, &times, r] {
            communicator<> comm = any_communicator(world->connect(r), times);
            return body(comm);
        }));
    for (auto& f : running) f.wait();
    if constexpr (std::is_void_v<result>) {
        for (auto& f : running) f.get();
    } else {
        std::vector<result> results;
        for (auto& f : running) results.push_back(f.get());
        return results;
    }
}

/// Runs body(comm) on every rank and returns what left each rank's communicator as an exception, "" where nothing did.
template <class Body>
std::vector<std::string> errors_of_ranks(int ranks, Body body, timing const& times = timing::for_tests()) {
    auto world = inproc_world::create(ranks);
    std::vector<std::future<std::string>> running;
    for (int r = 0; r < ranks; ++r)
        running.push_back(std::async(std::launch::async, [&world, &body, &times, r]() -> std::string {
            try {
                communicator<> comm = any_communicator(world->connect(r), times);
                body(comm);
                return {};
            } catch (std::exception const& e) {
                return e.what();
            }
        }));
    std::vector<std::string> errors;
    for (auto& f : running) errors.push_back(f.get());
    return errors;
}

}  // namespace ddp::test
