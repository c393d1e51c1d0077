/// \file
/// fault: from what the ranks have said to the one rank that is at fault. Pure, so that every rank finds the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/core/error.hpp>

namespace ddp {

/// Which rule named the culprit; the verdict's words follow it.
enum class fault_rule : std::uint8_t {
    published,      ///< a rank has published a verdict already
    threw,          ///< user code threw on the culprit
    named,          ///< a mismatch whose record says which: a model, a gradient, a batch
    settings,       ///< two ranks are in the same operation with other settings
    operations,     ///< two ranks are in different operations of one number
    message,        ///< a message of another length or operation
    left,           ///< the culprit ended cleanly while others still needed it
    closed,         ///< the culprit's connection closed while somebody waited
    gone,           ///< the culprit's connection closed while nobody waited
    silent,         ///< the culprit sends no heartbeats
    late,           ///< the culprit did not take part in time
    circle,         ///< ranks of several groups wait for each other
    broken_link,    ///< both ends are alive, their connection closed
    silent_link,    ///< both ends are alive, their connection carries nothing
    gave_up,        ///< a rank has spoken, and nothing says why
    without_reason  ///< nobody has spoken
};

/// What decides a failure: the rule, the record that it rests on, and the ranks concerned.
struct fault {
    fault_rule rule = fault_rule::without_reason;
    failure from = {};  ///< the record that decided
    int culprit = -1;   ///< -1 where it cannot be told
    errc code = errc::peer_closed;
    int other = -1;                ///< the second rank of a mismatch
    std::vector<int> circle = {};  ///< ranks that wait for one another, each for the next, the last for the first
};

namespace detail {

/// The order in which records of one kind decide: the least operation, an operation being (step, channel), then rank.
inline auto precedence(failure const& f) {
    return std::tuple(f.operation.index, f.operation.channel, f.rank);
}

}  // namespace detail

/// From each rank's report to the fault. `collective` is the deadline of one wait.
///
///  1. A verdict that a rank has published already is adopted (the least rank's).
///  2. Else the first kind present wins: threw, mismatch, closed, silent; within it the least (operation, rank). A rank
///     that has spoken is alive: records that call it closed or silent do not count.
///     A mismatch of models, gradients or batches says which; otherwise the next rule says more.
///  3. Ranks that entered different things under one number of one group: a mismatch, whatever they wait for.
///  4. Deadlines alone: from the least waiting record follow the edges "waits for", which may cross groups, to a rank that
///     waits for nobody or has not spoken; it is the culprit, not the neighbour that everybody was waiting for. A wait
///     younger than half the deadline accuses nobody: who has just arrived is late itself. Where the edges lead round in a
///     circle, groups were used in different orders if it crosses groups; within one group the longest wait in it
///     accuses: the others began after that, as when a message is lost on its way.
///  5. Else, if ranks that were called closed or silent have spoken, a connection is at fault; its far end is named.
inline fault find_fault(std::span<report const> reports, nanoseconds collective) {
    auto const known = [&](int rank) { return rank >= 0 && static_cast<std::size_t>(rank) < reports.size(); };
    auto const spoke = [&](int rank) {
        return known(rank) && reports[static_cast<std::size_t>(rank)].is == report::state::spoke;
    };
    auto const record_of = [&](int rank) -> failure const& { return reports[static_cast<std::size_t>(rank)].record; };
    auto const least = [&](failure_kind kind, auto const& counts) -> failure const* {
        failure const* best = nullptr;
        for (report const& r : reports)
            if (r.is == report::state::spoke && r.record.kind == kind && counts(r.record) &&
                (best == nullptr || detail::precedence(r.record) < detail::precedence(*best)))
                best = &r.record;
        return best;
    };
    auto const any = [](failure const&) { return true; };
    auto const closing = [](failure const& f) { return f.code == errc::frame ? errc::frame : errc::peer_closed; };

    for (report const& r : reports)
        if (r.is == report::state::spoke && r.record.is_verdict)
            return {fault_rule::published, r.record, r.record.peer, r.record.code};

    if (auto const* f = least(failure_kind::threw, any))
        return {fault_rule::threw, *f, f->rank, errc::remote_exception};

    // A model, a gradient, a batch: the record says which.
    if (auto const* f = least(failure_kind::mismatch, [](failure const& r) { return r.code != errc::mismatch; }))
        return {fault_rule::named, *f, f->peer >= 0 ? f->peer : f->rank, f->code};

    // Equal numbers, other fingerprints: says more than the record of whoever received the wrong message first.
    for (std::size_t a = 0; a < reports.size(); ++a)
        for (std::size_t b = a + 1; b < reports.size(); ++b) {
            if (!spoke(static_cast<int>(a)) || !spoke(static_cast<int>(b))) continue;
            failure const &x = reports[a].record, &y = reports[b].record;
            if (!x.entered.contradicts(y.entered)) continue;
            bool const same_name = x.entered.name.view() == y.entered.name.view();
            failure from = x;
            from.rank = static_cast<std::int32_t>(a);
            return {same_name ? fault_rule::settings : fault_rule::operations, from, static_cast<int>(b),
                    errc::mismatch, static_cast<int>(b)};
        }

    if (auto const* f = least(failure_kind::mismatch, any))
        return {fault_rule::message, *f, f->peer >= 0 ? f->peer : f->rank, f->code};

    if (auto const* f = least(failure_kind::closed, [&](failure const& r) { return !spoke(r.peer); })) {
        if (known(f->peer) && reports[static_cast<std::size_t>(f->peer)].is == report::state::left)
            return {fault_rule::left, *f, f->peer, errc::peer_closed};
        return {fault_rule::closed, *f, f->peer, closing(*f)};
    }
    for (std::size_t r = 0; r < reports.size(); ++r)
        if (reports[r].is == report::state::closed) {
            failure from = reports[r].record;
            from.kind = failure_kind::closed;
            return {fault_rule::gone, from, static_cast<int>(r), closing(from)};
        }

    if (auto const* f = least(failure_kind::silent, [&](failure const& r) { return !spoke(r.peer); }))
        return {fault_rule::silent, *f, f->peer, errc::peer_silent};

    auto const old = [&](failure const& f) {
        return nanoseconds(static_cast<std::int64_t>(f.waited_ns)) * 2 >= collective;
    };
    if (auto const* f = least(failure_kind::waiting, old)) {
        std::vector<bool> seen(reports.size(), false);
        int culprit = f->peer;
        auto const accuses = [&](int rank) {
            return spoke(rank) && record_of(rank).kind == failure_kind::waiting && old(record_of(rank));
        };
        while (accuses(culprit) && !seen[static_cast<std::size_t>(culprit)]) {
            seen[static_cast<std::size_t>(culprit)] = true;
            culprit = record_of(culprit).peer;
        }
        if (!accuses(culprit)) return {fault_rule::late, *f, culprit, errc::deadline};

        std::vector<int> circle;
        bool crosses = false;
        f = &record_of(culprit);
        int rank = culprit;
        do {
            circle.push_back(rank);
            failure const& here = record_of(rank);
            if (here.waited_ns > f->waited_ns) f = &here;
            crosses = crosses || !here.entered.same_group(record_of(culprit).entered);
            rank = here.peer;
        } while (rank != culprit);
        return {crosses ? fault_rule::circle : fault_rule::late, *f, f->peer,
                crosses ? errc::mismatch : errc::deadline,       -1, std::move(circle)};
    }

    // Whoever was called closed or silent has spoken to somebody: what is lost is the connection, not the rank.
    for (failure_kind const kind : {failure_kind::closed, failure_kind::silent})
        if (auto const* f = least(kind, [](failure const& r) { return r.peer >= 0; }))
            return {kind == failure_kind::closed ? fault_rule::broken_link : fault_rule::silent_link, *f, f->peer,
                    f->code};

    for (report const& r : reports)
        if (r.is == report::state::spoke) return {fault_rule::gave_up, r.record, -1, r.record.code};
    return {};
}

}  // namespace ddp
