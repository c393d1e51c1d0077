/// \file
/// The conformance suite: what a Transport promises, run against yours. Standard library only.
///
///     auto const complaints = ddp::testing::check_transport(3, [](int ranks) { return my_world::create(ranks); });
///
/// where ranks can be threads of one process; complaints is empty if the transport keeps its promises. Where they are
/// processes, each calls run_scenario for every entry of scenarios() that suits the number of ranks, in that order.
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

/// What a transport is asked to do, one after the other.
enum class scenario : std::uint8_t {
    order,
    independence,
    sizes,
    empty,
    large,
    many_in_flight,
    early,
    length_mismatch,
    fingerprint,
    nothing_inside_post,
    all_to_all,
    wake,
    progress_deadline,
    // from here on the transport is used up
    abort,
    leave,
    death,
    destruction,
    destruction_by_one,
};

/// A scenario's name, as conformance_options::only takes it, and what it needs.
struct scenario_info {
    scenario which;       ///< its number
    char const* name;     ///< as complaints call it
    int least_ranks;      ///< with fewer it is left out
    bool ends_transport;  ///< run_scenario destroys it; otherwise it can serve the next scenario as well
};

/// All of them, in the order in which ranks run them.
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

}  // namespace detail

/// This rank's part in one scenario; all ranks call it. Returns what went wrong, empty if nothing did. The transport is
/// null afterwards if the scenario ends it or has failed.
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

/// Runs every scenario with `ranks` threads. `make_world(ranks)` returns a pointer, a std::shared_ptr or
/// std::unique_ptr say, to where the ranks meet: it is called once a scenario, and what it returns has
///
///  connect(rank)  called once on each rank's thread, at the same time: returns a std::unique_ptr<T> of a Transport
///  kill(rank)     optional: that rank is dead as a killed process is. Without it no scenario lets a rank die
///
/// Returns all complaints; none: nothing was found. Throws nothing of the transport's: what it throws is a complaint.
template <class MakeWorld>
[[nodiscard]] std::vector<std::string> check_transport(int ranks, MakeWorld const& make_world,
                                                       conformance_options const& options = {}) {
    std::vector<std::string> complaints;
    for (scenario_info const& info : scenarios()) {
        if (ranks < info.least_ranks || (!options.only.empty() && options.only != info.name)) continue;
        auto world = make_world(ranks);
        conformance_options with = options;
        if constexpr (requires { world->kill(0); }) {
            if (!with.kill) with.kill = [&world](int rank) { world->kill(rank); };
        }
        std::vector<std::string> said(static_cast<std::size_t>(ranks));
        std::vector<std::thread> threads;
        for (int r = 0; r < ranks; ++r)
            threads.emplace_back([&, r] {
                try {
                    auto transport = world->connect(r);
                    said[static_cast<std::size_t>(r)] = run_scenario(info, transport, with);
                } catch (std::exception const& e) {
                    said[static_cast<std::size_t>(r)] = detail::named(info, std::string("connecting: ") + e.what());
                }
            });
        for (std::thread& t : threads) t.join();
        for (std::string const& text : said)
            if (!text.empty()) complaints.push_back(text);
    }
    return complaints;
}

/// The same on virtual time: all ranks in the calling thread.
[[nodiscard]] inline std::vector<std::string> check_virtual_transport(int ranks, network_model const& network,
                                                                      conformance_options options = {}) {
    using rank_stage = stage<virtual_transport>;
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
