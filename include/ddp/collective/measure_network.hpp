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

namespace detail {
/// Every rank sends one number to the next ranks, and receives as many, all posted at once; on two ranks all go to one.
template <Transport T>
task<> exchange_singly(lane<T> over, std::span<float const> out, std::span<float> in) {
    int const me = over.rank(), others = over.size() - 1;
    operations receives(in.size()), sends(out.size());
    auto const distance = [&](std::size_t k) { return 1 + static_cast<int>(k) % others; };
    for (std::size_t k = 0; k < in.size(); ++k)
        over.receive(receives[k], (me + over.size() - distance(k)) % over.size(), as_mutable_bytes(in.subspan(k, 1)));
    for (std::size_t k = 0; k < out.size(); ++k)
        over.send(sends[k], (me + distance(k)) % over.size(), as_const_bytes(out.subspan(k, 1)));
    for (std::size_t k = 0; k < in.size(); ++k) co_await receives[k];
    for (std::size_t k = 0; k < out.size(); ++k) co_await sends[k];
}
}  // namespace detail

/// Measures the constants of network_cost, in microseconds: all ranks at once exchange messages with the ranks P/2 above and
/// below, as in an allreduce, and short ones with up to 32 ranks at once, as direct_allreduce does. Collective; all ranks
/// return the same numbers, those of the slowest rank.
///
///     ddp::automatic_allreduce const fitted{.cost = ddp::measure_network(comm)};
///
/// Cost    up to 50 ms, or more if a message of 64 KiB takes longer than 10 ms. On one rank nothing is measured.
/// Throws  comm_error (the same verdict on every rank).
template <Transport T>
[[nodiscard]] network_cost measure_network(communicator<T> const& comm) {
    network_cost found;
    if (comm.size() == 1) return found;
    constexpr std::size_t large = std::size_t{64} << 10;
    std::size_t const at_once =
        comm.size() == 2 ? 8 : std::min<std::size_t>(32, static_cast<std::size_t>(comm.size()) - 1);
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
    auto const exchange_singly = [&](std::size_t count) {
        detail::call(comm, detail::about<float>("network measurement", count), [&](lane<T> const& over) {
            return detail::exchange_singly(over, out.first(count), in.first(count));
        });
    };
    found.message = measure(5'000, [&] { exchange(1); });
    double const one = measure(2'500, [&] { exchange_singly(1); }),
                 many = measure(2'500, [&] { exchange_singly(at_once); });
    double const whole = measure(20'000, [&] { exchange(out.size()); });
    double const adding = measure(2'000, [&] { combine<sum>(in, in, out); });
    found.post = std::max(0.0, many - one) / static_cast<double>(at_once - 1);
    found.byte = std::max(0.0, whole - found.message) / static_cast<double>(large);
    found.addition = adding / static_cast<double>(large);
    return found;
}

}  // namespace ddp
