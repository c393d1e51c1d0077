/// \file
/// What rendezvous/run_tcp.hpp declares.
#pragma once

#include <algorithm>
#include <atomic>
#include <charconv>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/comm/flight_recorder.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/bootstrap.hpp>
#include <ddp/rendezvous/environment.hpp>
#include <ddp/rendezvous/flight_signal.hpp>
#include <ddp/rendezvous/rendezvous_error.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/rendezvous/run_tcp.hpp>
#include <ddp/transport/any.hpp>
#include <ddp/transport/framed/tcp.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL bool tcp::detected() {
    return detail::job_is_named([](std::string const& name) { return detail::environment_variable(name); });
}

[[gnu::cold]] DDP_DECL bool tcp::also_detected() {
    auto const found = job_from_environment();
    return found && found->size > 1;
}

[[gnu::cold]] DDP_DECL void tcp::start(run_options const& options, function_ref<void(communicator<>&)> body) {
    detail::start_tcp(options, nullptr, body);
}

namespace detail {

/// Where ranks may be on other hosts although nothing said so: what to look at if some do not come. Empty if MASTER_ADDR is
/// no name of a loopback address.
[[nodiscard, gnu::cold]] inline std::string advice_about_loopback(job const& j) {
    if (is_loopback(j.master_addr)) return {};
    std::vector<tcp_endpoint> at;
    try {
        at = resolve_master(j, monotonic_clock::now());
    } catch (rendezvous_error const&) {  // it had an address before
        return {};
    }
    for (tcp_endpoint const& one : at)
        if (!one.address().is_loopback()) return {};
    return concat({"On host ", this_host_name(), " MASTER_ADDR \"", j.master_addr, "\" is ",
                   at.front().address().to_string(),
                   " (look at /etc/hosts there; Debian writes such a line for a host's own name), which other hosts "
                   "cannot reach: if ranks are on several, set it to a numeric address of rank 0's host"});
}

/// The text of a rendezvous_error, with what to look at if ranks have not found each other.
[[nodiscard, gnu::cold]] inline std::string with_advice(job const& j, std::string const& text) {
    bool const apart = text.find("never joined") != std::string::npos || text.find("cannot reach") != std::string::npos;
    std::string const advice = !apart ? "" : j.advice.empty() ? advice_about_loopback(j) : j.advice;
    return advice.empty() ? text : concat({text, ". ", advice});
}

/// A rank that never became part of the job leaves a flight record too: when it began to join, and why it gave up. Only the first
/// such attempt of a process does: a program may try again and again.
[[gnu::cold]] inline void record_failed_start(job const& j, time_point began, error const& why) noexcept try {
    static std::atomic<bool> recorded{false};
    if (recorded.exchange(true)) return;
    std::string const text = text_without_code(why);
    flight_ring* const kept = lasting_ring.exchange(nullptr);  // for the next job of this process
    auto const last = std::make_unique<flight_recorder>(j.rank, j.size, "tcp");
    lasting_ring.store(kept);
    failure record{.kind = failure_kind::broke, .code = why.code(), .rank = j.rank, .text = std::string_view(text)};
    if (text.starts_with("rank ")) std::from_chars(text.data() + 5, text.data() + text.size(), record.peer);
    if (record.peer == j.rank && text.find(" cannot reach ") != std::string::npos)
        record.peer = -1;  // not its fault alone
    last->record_at(began, flight::phase, 0, 0, 0, "joining");
    last->fail(record);
    last->adopt(record);
} catch (std::bad_alloc const&) {  // the error matters more
}

}  // namespace detail

[[gnu::cold]] DDP_DECL void detail::start_tcp(run_options const& options, make_security* security,
                                              function_ref<void(communicator<>&)> body) {
    auto const found = job_from_environment();
    if (!found)
        throw environment_error(detail::concat(
            {"transport tcp: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set, so this process does not "
             "know the others. Start it with ddprun -n ",
             std::max(2, options.ranks), " -- PROGRAM, or set them."}));
    if (options.ranks != 0 && options.ranks != found->size)
        throw environment_error(detail::concat({"WORLD_SIZE is ", found->size, ", but ", options.ranks,
                                                " ranks were asked for: ddprun -n ", options.ranks}));
    detail::flight_signal const on_request;
    std::unique_ptr<tcp_transport> transport;
    time_point const began = monotonic_clock::now();
    try {
        transport = connect_tcp(*found, tcp_options{.times = options.times,
                                                    .insecure = options.insecure,
                                                    .encrypt = options.encrypt,
                                                    .thread = options.thread,
                                                    .security = security});
    } catch (rendezvous_error const& e) {
        rendezvous_error const told(detail::with_advice(*found, detail::text_without_code(e)));
        detail::record_failed_start(*found, began, told);
        throw told;
    } catch (error const& e) {
        detail::record_failed_start(*found, began, e);
        throw;
    }
    communicator<> comm = any_communicator(std::move(transport), options.times, options.thread);
    detail::flight_signal::target const whose(comm.driver()->recorder());
    detail::call_body(body, comm);
}

}  // namespace ddp
