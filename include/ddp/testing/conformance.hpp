/// \file
/// The conformance suite: tests what a Transport must do beyond what its types show. Standard library only.
///
///     auto const complaints = ddp::testing::check_transport(3, [](int ranks) { return my_world::create(ranks); });
///
/// if ranks can be threads of one process; `complaints` is empty if nothing was found. If ranks are processes, each of
/// them calls run_scenario for every entry of scenarios() that suits the number of ranks, in this order.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/testing/ending_scenarios.hpp>
#include <ddp/testing/message_scenarios.hpp>
#include <ddp/transport/virtual/virtual.hpp>

namespace ddp::testing {

/// One test of a transport.
enum class scenario : std::uint8_t {
    order,                ///< messages of one identity arrive in the order in which they were sent
    independence,         ///< a message without a receive does not delay those of other identities
    sizes,                ///< messages of 0 bytes to 1 MiB arrive unchanged, posted early or late
    empty,                ///< many messages of 0 bytes
    large,                ///< messages of large_bytes between all ranks at once
    many_in_flight,       ///< `many` messages to one peer, received in the opposite order
    early,                ///< early_bytes of messages without a receive use bounded memory and block nothing
    length_mismatch,      ///< a receive of another length ends with op_status::length; later messages arrive
    fingerprint,          ///< a receive has the fingerprint of the sender, whatever its own
    nothing_inside_post,  ///< no completion runs inside post_send or post_receive
    all_to_all,           ///< all ranks send to all others at once
    wake,                 ///< wake() ends progress(), whether called before or during it, also from another thread
    progress_deadline,    ///< progress() returns at its deadline, and immediately if that has passed
    // each of the others ends the transport
    abort,               ///< abort() ends all operations, and its record reaches the peers
    leave,               ///< a rank that leaves is reported as left, and what it has sent can be received
    death,               ///< a rank that dies is reported as closed, and operations with it end
    destruction,         ///< all ranks destroy a transport with operations in flight; their memory can be reused
    destruction_by_one,  ///< rank 0 destroys such a transport first; the others see that it has left
};

/// A scenario, its name, and what it needs.
struct scenario_info {
    scenario which;       ///< the scenario
    char const* name;     ///< its name in complaints and for conformance_options::only
    int least_ranks;      ///< smallest number of ranks for which it can run
    bool ends_transport;  ///< true: run_scenario destroys the transport; false: it can be used again
};

/// All scenarios, in the order in which ranks must run them.
[[nodiscard]] inline std::span<scenario_info const> scenarios() noexcept {
    static constexpr std::array<scenario_info, 18> all{{
        {scenario::order, "order", 2, false},
        {scenario::independence, "independence", 2, false},
        {scenario::sizes, "sizes", 2, false},
        {scenario::empty, "empty", 2, false},
        {scenario::large, "large", 2, false},
        {scenario::many_in_flight, "many_in_flight", 2, false},
        {scenario::early, "early", 2, false},
        {scenario::length_mismatch, "length_mismatch", 2, false},
        {scenario::fingerprint, "fingerprint", 2, false},
        {scenario::nothing_inside_post, "nothing_inside_post", 2, false},
        {scenario::all_to_all, "all_to_all", 2, false},
        {scenario::wake, "wake", 2, false},
        {scenario::progress_deadline, "progress_deadline", 2, false},
        {scenario::abort, "abort", 2, true},
        {scenario::leave, "leave", 2, true},
        {scenario::death, "death", 2, true},
        {scenario::destruction, "destruction", 2, true},
        {scenario::destruction_by_one, "destruction_by_one", 2, true},
    }};
    return all;
}

namespace detail {

template <Transport T>
task<> play(scenario which, stage<T>* s) {
    switch (which) {
        case scenario::order: return order(s);
        case scenario::independence: return independence(s);
        case scenario::sizes: return sizes(s);
        case scenario::empty: return empty(s);
        case scenario::large: return large(s);
        case scenario::many_in_flight: return many_in_flight(s);
        case scenario::early: return early(s);
        case scenario::length_mismatch: return length_mismatch(s);
        case scenario::fingerprint: return fingerprint(s);
        case scenario::nothing_inside_post: return nothing_inside_post(s);
        case scenario::all_to_all: return all_to_all(s);
        case scenario::wake: return wake(s);
        case scenario::progress_deadline: return progress_deadline(s);
        case scenario::abort: return abort(s);
        case scenario::leave: return leave(s);
        case scenario::death: return death(s);
        case scenario::destruction: return destruction(s);
        case scenario::destruction_by_one: return destruction_by_one(s);
    }
    return {};
}

/// A scenario, then the meeting at its end, and what must hold of every operation.
template <Transport T>
task<> whole(scenario_info info, stage<T>* s) {
    co_await play(info.which, s);
    if (s->complaint().empty() && !info.ends_transport) co_await stage<T>::together(s);
    s->check_probes();
    // After a complaint peers wait for us in vain, and memory is posted: the transport ends before the memory does.
    if (!s->complaint().empty() && s->has_transport())
        s->transport().abort(conformance_record(s->rank(), "complains", false));
    if (info.ends_transport || !s->complaint().empty()) s->destroy_transport();
}

inline std::string named(scenario_info const& info, std::string const& complaint) {
    return complaint.empty() ? complaint : std::string(info.name) + ": " + complaint;
}

inline void expect_scenario(std::string const& only) {
    auto const all = scenarios();
    DDP_EXPECTS(only.empty() || std::ranges::any_of(all, [&](scenario_info const& info) { return info.name == only; }),
                "conformance_options::only: there is no scenario '" + only + "'; scenarios() lists them");
}

}  // namespace detail

/// Runs this rank's part of a scenario; all ranks call it. Returns what went wrong; an empty text if nothing did. The
/// transport is null afterwards if the scenario ends it or has failed.
template <Transport T>
[[nodiscard]] std::string run_scenario(scenario_info const& info, std::unique_ptr<T>& transport,
                                       conformance_options const& options = {}) {
    if (info.which == scenario::death && !options.kill) return {};
    stage<T> mine(transport, options, static_cast<std::uint32_t>(info.which) + 1, true);
    try {
        task<> const body = detail::whole(info, &mine);
        body.start();
        body.take();
    } catch (std::exception const& e) {
        mine.expect(false, std::string("an exception: ") + e.what());
        transport.reset();
    }
    return detail::named(info, mine.complaint());
}

/// Runs every scenario with `ranks` threads. `make_world(ranks)` is called once for each scenario and returns a pointer,
/// such as a std::shared_ptr or std::unique_ptr, to an object that connects the ranks and has the members
///
///  connect(rank)  called once on the thread of each rank, at the same time; returns a std::unique_ptr<T> of a Transport
///  kill(rank)     optional: ends this rank as if its process had been killed. Without it, the scenario `death` is left
///                 out
///
/// Returns what went wrong; an empty list if nothing did. An exception of the transport is not passed on but reported in
/// the list.
template <class MakeWorld>
[[nodiscard]] std::vector<std::string> check_transport(int ranks, MakeWorld const& make_world,
                                                       conformance_options const& options = {}) {
    detail::expect_scenario(options.only);
    std::vector<std::string> complaints;
    for (scenario_info const& info : scenarios()) {
        if (ranks < info.least_ranks || (!options.only.empty() && options.only != info.name)) continue;
        auto world = make_world(ranks);
        conformance_options with = options;
        if constexpr (requires { world->kill(0); }) {
            if (!with.kill) with.kill = [&world](int rank) { world->kill(rank); };
        }
        std::vector<std::string> said(static_cast<std::size_t>(ranks));
        std::vector<std::jthread> threads;  // joined where a later one cannot be started
        for (int r = 0; r < ranks; ++r)
            threads.emplace_back([&, r] {
                try {
                    auto transport = world->connect(r);
                    said[static_cast<std::size_t>(r)] = run_scenario(info, transport, with);
                } catch (std::exception const& e) {
                    said[static_cast<std::size_t>(r)] = detail::named(info, std::string("connecting: ") + e.what());
                }
            });
        for (std::jthread& t : threads) t.join();
        for (std::string const& text : said)
            if (!text.empty()) complaints.push_back(text);
    }
    return complaints;
}

/// Runs every scenario over virtual_transport, in virtual time, with all ranks in the calling thread. Returns what went
/// wrong; an empty list if nothing did.
[[nodiscard]] inline std::vector<std::string> check_virtual_transport(int ranks, network_model const& network,
                                                                      conformance_options options = {}) {
    using rank_stage = stage<virtual_transport>;
    detail::expect_scenario(options.only);
    std::vector<std::string> complaints;
    options.threads = false;
    options.early_is_bounded = false;  // this network bounds each early message, not their sum
    for (scenario_info const& info : scenarios()) {
        if (ranks < info.least_ranks || (!options.only.empty() && options.only != info.name)) continue;
        auto const world = virtual_world::create(ranks, network);
        options.kill = [&world](int rank) { world->kill(rank); };
        std::vector<std::unique_ptr<virtual_transport>> transports;
        std::vector<std::unique_ptr<rank_stage>> stages;
        std::vector<task<>> bodies;
        for (int r = 0; r < ranks; ++r) transports.push_back(world->connect(r));
        for (auto& transport : transports)
            stages.push_back(
                std::make_unique<rank_stage>(transport, options, static_cast<std::uint32_t>(info.which) + 1, false));
        for (auto const& s : stages) bodies.push_back(detail::whole(info, s.get()));
        for (task<> const& body : bodies) body.start();
        while (true) {
            time_point next = never;
            bool resumed = false;
            for (std::size_t r = 0; r < stages.size(); ++r) {
                rank_stage& s = *stages[r];
                if (!s.sleeps()) continue;
                if (transports[r]->has_moved() || s.sleeps_until() <= world->now()) {
                    s.resume();
                    resumed = true;
                } else {
                    next = std::min(next, s.sleeps_until());
                }
            }
            if (resumed) continue;
            if (next == never) break;
            world->advance(next);
        }
        for (std::size_t r = 0; r < stages.size(); ++r) {
            bodies[r].take();
            transports[r].reset();
            if (!stages[r]->complaint().empty()) complaints.push_back(detail::named(info, stages[r]->complaint()));
        }
    }
    return complaints;
}

}  // namespace ddp::testing
