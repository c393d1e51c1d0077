/// \file
/// measure_network: what messages and additions cost among these ranks.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/network_cost.hpp>
#include <ddp/collective/point_to_point.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/kernel/combine.hpp>

namespace ddp {

/// Measures the constants of network_cost, in microseconds: all ranks at once exchange messages with the ranks P/2 above and
/// below, as in an allreduce. Collective; all ranks return the same numbers, those of the slowest rank.
///
///     ddp::automatic_allreduce const fitted{.cost = ddp::measure_network(comm)};
///
/// Cost    up to 50 ms, or more if a message of 64 KiB takes longer than 10 ms. On one rank nothing is measured.
/// Throws  comm_error (the same verdict on every rank).
template <Transport T>
[[nodiscard]] network_cost measure_network(communicator<T> const& comm) {
    network_cost found;
    if (comm.size() == 1) return found;
    constexpr std::size_t large = std::size_t{64} << 10, at_once = 8;
    int const half = comm.size() / 2, to = (comm.rank() + half) % comm.size(),
              from = (comm.rank() + comm.size() - half) % comm.size();
    std::vector<float> const ones(large / sizeof(float), 1.0f);
    detail::posted const sent(comm, ones), received(comm, ones);
    std::span<float> const out = *sent, in = *received;
    // Microseconds of one of `rounds` calls of f, on the slowest rank.
    auto const time = [&](std::size_t rounds, auto f) {
        auto const since = std::chrono::steady_clock::now();
        for (std::size_t i = 0; i < rounds; ++i) f();
        std::chrono::duration<double, std::micro> const took = std::chrono::steady_clock::now() - since;
        return allreduce(comm, took.count() / static_cast<double>(rounds), maximum{});
    };
    // Two calls first, which tell how many there is time for: the same number on all ranks.
    auto const measure = [&](double budget, auto f) {
        double const once = time(2, f);
        double const rounds = std::clamp(budget / std::max(once, 0.1), 1.0, 200.0);
        return time(static_cast<std::size_t>(rounds), f);
    };
    auto const exchange = [&](std::size_t count) { send_receive(comm, out.first(count), to, in.first(count), from); };
    auto const exchange_many = [&] {
        std::vector<request> all;
        for (std::size_t k = 0; k < at_once; ++k)
            all.push_back(start_send_receive(comm, out.subspan(k, 1), to, in.subspan(k, 1), from));
        for (request& one : all) one.wait();
    };
    found.message = measure(5'000, [&] { exchange(1); });
    double const many = measure(5'000, exchange_many), whole = measure(20'000, [&] { exchange(out.size()); });
    double const adding = measure(2'000, [&] { combine<sum>(in, in, out); });
    found.post = std::max(0.0, many - found.message) / static_cast<double>(at_once - 1);
    found.byte = std::max(0.0, whole - found.message) / static_cast<double>(large);
    found.addition = adding / static_cast<double>(large);
    return found;
}

}  // namespace ddp
