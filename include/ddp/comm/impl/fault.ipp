/// \file
/// What comm/fault.hpp declares.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>

#include <ddp/comm/fault.hpp>

namespace ddp {
namespace detail {

/// The order in which records of one kind decide: the least operation, an operation being (step, channel), then rank.
inline auto precedence(failure const& f) {
    return std::tuple(f.operation.index, f.operation.channel, f.rank);
}

/// Of the words for an operation those that do not depend on which groups a rank has (see group::words).
inline std::string_view without_group(std::string_view words) {
    return words.substr(0, words.find(" in group {"));
}

}  // namespace detail

[[gnu::cold]] DDP_DECL fault find_fault(std::span<report const> reports, nanoseconds collective) {
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

    if (auto const* f = least(failure_kind::broke, any)) return {fault_rule::broke, *f, f->rank, f->code};

    // For a model, a gradient, a batch or values, the record describes the mismatch, and says which rank differs, if one does.
    if (auto const* f = least(failure_kind::mismatch, [](failure const& r) { return r.code != errc::mismatch; }))
        return {fault_rule::named, *f, f->peer, f->code};

    // Equal numbers, other fingerprints: says more than the record of the rank that received the wrong message first.
    fault differs;
    for (std::size_t a = 0; a < reports.size(); ++a)
        for (std::size_t b = a + 1; b < reports.size(); ++b) {
            if (!spoke(static_cast<int>(a)) || !spoke(static_cast<int>(b))) continue;
            failure const &x = reports[a].record, &y = reports[b].record;
            if (!x.entered.contradicts(y.entered)) continue;
            if (differs.other >= 0 && differs.from.entered.number <= x.entered.number) continue;
            bool const same_name =
                detail::without_group(x.entered.name.view()) == detail::without_group(y.entered.name.view());
            differs = {same_name ? fault_rule::settings : fault_rule::operations, x, static_cast<int>(b),
                       errc::mismatch, static_cast<int>(b)};
            differs.from.rank = static_cast<std::int32_t>(a);
        }
    if (differs.other >= 0) return differs;

    if (auto const* f = least(failure_kind::mismatch, any))
        return {fault_rule::message, *f, f->peer >= 0 ? f->peer : f->rank, f->code};

    if (auto const* f = least(failure_kind::closed, [&](failure const& r) { return !spoke(r.peer); })) {
        if (known(f->peer) && reports[static_cast<std::size_t>(f->peer)].is == report::state::left)
            return {fault_rule::left, *f, f->peer, errc::peer_closed};
        return {fault_rule::closed, *f, f->peer, closing(*f)};
    }
    if (auto const* f = least(failure_kind::silent, [](failure const& r) { return r.peer == r.rank; }))
        return {fault_rule::stopped, *f, f->rank, errc::peer_silent};
    for (std::size_t r = 0; r < reports.size(); ++r)
        if (reports[r].is == report::state::closed) {
            failure from = reports[r].record;
            from.kind = failure_kind::closed;
            return {fault_rule::gone, from, static_cast<int>(r), closing(from)};
        }

    if (auto const* f = least(failure_kind::silent, [&](failure const& r) { return !spoke(r.peer); }))
        return {fault_rule::silent, *f, f->peer, errc::peer_silent};

    // A rank that was called closed has published a record: the connection is lost, not the rank.
    auto const of_a_peer = [](failure const& r) { return r.peer >= 0; };
    if (auto const* f = least(failure_kind::closed, of_a_peer)) return {fault_rule::broken_link, *f, f->peer, f->code};

    auto const waited = [](failure const& f) {  // sent by a peer: it may be any number
        return nanoseconds(static_cast<std::int64_t>(std::min<std::uint64_t>(f.waited_ns, INT64_MAX)));
    };
    auto const old = [&](failure const& f) { return waited(f) >= collective / 2; };
    // A connection that carries nothing makes others wait too: deadlines count only if one has been reached.
    failure const* const unheard = least(failure_kind::silent, of_a_peer);
    bool const expired = least(failure_kind::waiting, [](failure const& f) { return f.expired; }) != nullptr;
    if (auto const* f = unheard == nullptr || expired ? least(failure_kind::waiting, old) : nullptr) {
        std::vector<bool> seen(reports.size(), false);
        failure const* last = f;  // the record that waits for the culprit
        int culprit = f->peer;
        auto const accuses = [&](int rank) {
            return spoke(rank) && record_of(rank).kind == failure_kind::waiting && old(record_of(rank));
        };
        while (accuses(culprit) && !seen[static_cast<std::size_t>(culprit)]) {
            seen[static_cast<std::size_t>(culprit)] = true;
            last = &record_of(culprit);
            culprit = last->peer;
        }
        if (!accuses(culprit))  // in another group, the operation that it is late for is another
            return {fault_rule::late, last->entered.same_group(f->entered) ? *f : *last, culprit, errc::deadline};

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
        return {fault_rule::circle, *f, crosses ? f->peer : -1, crosses ? errc::mismatch : errc::deadline, -1,
                std::move(circle)};
    }

    if (unheard != nullptr) return {fault_rule::silent_link, *unheard, unheard->peer, unheard->code};

    for (report const& r : reports)
        if (r.is == report::state::spoke) return {fault_rule::gave_up, r.record, -1, r.record.code};
    return {};
}

}  // namespace ddp
