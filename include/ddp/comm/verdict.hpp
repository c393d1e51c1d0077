/// \file
/// verdict: from what the ranks have said to the one rank that is at fault. Pure, so that every rank finds the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/core/error.hpp>

namespace ddp {

/// A peer, or the way to it, failed: the verdict of all ranks. what() says who, in which operation, and why.
class comm_error : public error {
public:
    explicit comm_error(failure const& verdict)
        : error(verdict.code, std::string(verdict.text.view())), verdict_(verdict) {}

    [[nodiscard]] failure const& verdict() const noexcept { return verdict_; }
    /// The rank that is at fault; -1 where it cannot be told.
    [[nodiscard]] int culprit() const noexcept { return verdict_.peer; }

private:
    failure verdict_;
};

namespace detail {

inline std::string seconds_text(std::uint64_t nanos) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(nanos) * 1e-9);
    return text;
}

inline std::string operation_text(failure const& of) {
    return of.name.view().empty() ? std::string("no operation") : std::string(of.name.view());
}

/// The order in which records of one kind decide: the least operation, an operation being (step, channel), then rank.
inline auto precedence(failure const& f) {
    return std::tuple(f.operation.index, f.operation.channel, f.rank);
}

}  // namespace detail

/// From each rank's report to the verdict. `collective` is the deadline of one wait.
///
///  1. A verdict that a rank has published already is adopted (the least rank's).
///  2. Else the first kind present wins: threw, mismatch, closed, silent; within it the least (operation, rank). A rank
///     that has spoken is alive: records that call it closed or silent do not count.
///     A mismatch of models, gradients or batches says which; otherwise the next rule says more.
///  3. Ranks that entered the same operation with other fingerprints: a mismatch, whatever they wait for.
///  4. Deadlines alone: from the least waiting record follow the edges "waits for" to a rank that waits for nobody or
///     has not spoken; it is the culprit, not the neighbour that everybody was waiting for. A wait younger than half
///     the deadline accuses nobody: who has just arrived is late itself. Where they lead round in a circle, the longest
///     wait in it accuses: the others began after that, as when a message is lost on its way.
///  5. Else, if ranks that were called closed or silent have spoken, a connection is at fault; its far end is named.
inline failure decide(std::span<report const> reports, nanoseconds collective) {
    using detail::operation_text;
    auto const spoke = [&](int rank) {
        return rank >= 0 && static_cast<std::size_t>(rank) < reports.size() &&
               reports[static_cast<std::size_t>(rank)].is == report::state::spoke;
    };
    auto const record_of = [&](int rank) -> failure const& { return reports[static_cast<std::size_t>(rank)].record; };
    auto const number = [](int rank) { return "rank " + std::to_string(rank); };
    auto const finish = [](failure const& from, int culprit, errc code, std::string const& text) {
        failure v = from;
        v.peer = culprit;
        v.code = code;
        v.text = std::string_view(text);
        v.is_verdict = true;
        return v;
    };
    auto const least = [&](failure_kind kind, auto const& counts) -> failure const* {
        failure const* best = nullptr;
        for (report const& r : reports)
            if (r.is == report::state::spoke && r.record.kind == kind && counts(r.record) &&
                (best == nullptr || detail::precedence(r.record) < detail::precedence(*best)))
                best = &r.record;
        return best;
    };

    for (report const& r : reports)
        if (r.is == report::state::spoke && r.record.is_verdict) return r.record;

    if (auto const* f = least(failure_kind::threw, [](failure const&) { return true; }))
        return finish(*f, f->rank, errc::remote_exception,
                      number(f->rank) + " failed in its own code" +
                          (f->name.view().empty() ? "" : " during " + operation_text(*f)) + ": " +
                          std::string(f->text.view()));

    // A model, a gradient, a batch: the record says which.
    auto const particular = [](failure const& r) { return r.code != errc::mismatch; };
    if (auto const* f = least(failure_kind::mismatch, particular))
        return finish(*f, f->peer >= 0 ? f->peer : f->rank, f->code, std::string(f->text.view()));

    // Equal operations, other fingerprints: says more than the record of whoever stumbled over it first.
    for (std::size_t a = 0; a < reports.size(); ++a)
        for (std::size_t b = a + 1; b < reports.size(); ++b) {
            if (!spoke(static_cast<int>(a)) || !spoke(static_cast<int>(b))) continue;
            failure const &x = reports[a].record, &y = reports[b].record;
            if (x.fingerprint == 0 || y.fingerprint == 0 || x.entered != y.entered || x.fingerprint == y.fingerprint)
                continue;
            if (x.name.view() == y.name.view())
                return finish(x, static_cast<int>(b), errc::mismatch,
                              number(static_cast<int>(a)) + " and " + number(static_cast<int>(b)) + " are both in " +
                                  operation_text(x) +
                                  ", but not with the same settings, or something they did before it differs: another "
                                  "root, another count. All ranks must call the same collectives in the same order "
                                  "with the same arguments.");
            return finish(x, static_cast<int>(b), errc::mismatch,
                          "ranks disagree about operation #" + std::to_string(x.entered.index) + ": " +
                              number(static_cast<int>(a)) + " is in " + operation_text(x) + ", " +
                              number(static_cast<int>(b)) + " in " + operation_text(y) +
                              ". All ranks must call the same collectives in the same order with the same counts.");
        }

    if (auto const* f = least(failure_kind::mismatch, [](failure const&) { return true; }))
        return finish(*f, f->peer >= 0 ? f->peer : f->rank, f->code, std::string(f->text.view()));

    if (auto const* f = least(failure_kind::closed, [&](failure const& r) { return !spoke(r.peer); })) {
        if (f->peer >= 0 && static_cast<std::size_t>(f->peer) < reports.size() &&
            reports[static_cast<std::size_t>(f->peer)].is == report::state::left)
            return finish(*f, f->peer, errc::peer_closed,
                          number(f->peer) + " has ended in good order while " + number(f->rank) + " was in " +
                              operation_text(*f) +
                              ": it called fewer collectives or steps than the others. All ranks must take part in all "
                              "of them; a rank that is out of data calls step() without a batch.");
        return finish(
            *f, f->peer, f->code == errc::frame ? errc::frame : errc::peer_closed,
            number(f->peer) + " is gone while " + number(f->rank) + " was in " + operation_text(*f) + ": " +
                (f->text.view().empty() ? "its connection closed without a word" : std::string(f->text.view())) +
                ". It crashed, was killed or lost its network: look at its own output first.");
    }
    for (std::size_t r = 0; r < reports.size(); ++r)
        if (reports[r].is == report::state::closed) {
            failure from = reports[r].record;
            from.kind = failure_kind::closed;
            return finish(from, static_cast<int>(r), from.code == errc::frame ? errc::frame : errc::peer_closed,
                          number(static_cast<int>(r)) + " is gone: " +
                              (from.text.view().empty() ? "its connection closed without a word"
                                                        : std::string(from.text.view())) +
                              ". It crashed, was killed or lost its network: look at its own output first.");
        }

    if (auto const* f = least(failure_kind::silent, [&](failure const& r) { return !spoke(r.peer); }))
        return finish(*f, f->peer, errc::peer_silent,
                      number(f->peer) + " has sent nothing, not even a heartbeat, for " +
                          detail::seconds_text(f->waited_ns) + " (seen by " + number(f->rank) + " in " +
                          operation_text(*f) + "). Its process is stopped or swapped out, or its host is unreachable.");

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
        if (accuses(culprit)) {  // they wait in a circle
            int const start = culprit;
            f = &record_of(start);
            for (int rank = f->peer; rank != start; rank = record_of(rank).peer)
                if (record_of(rank).waited_ns > f->waited_ns) f = &record_of(rank);
            culprit = f->peer;
        }
        std::string text = number(culprit) + " did not take part in " + operation_text(*f) +
                           " in time: " + number(f->rank) + " waited " + detail::seconds_text(f->waited_ns);
        if (culprit != f->peer) text += " (through " + number(f->peer) + ")";
        if (spoke(culprit))
            text += ". It is alive; the last operation it entered is " + operation_text(record_of(culprit));
        else
            text += ". Nothing has been heard from it since";
        return finish(*f, culprit, errc::deadline,
                      text + ". Look at what it is doing there, or raise timing.collective.");
    }

    // Whoever was called closed or silent has spoken to somebody: what is lost is the connection, not the rank.
    for (failure_kind const kind : {failure_kind::closed, failure_kind::silent})
        if (auto const* f = least(kind, [](failure const& r) { return r.peer >= 0; }))
            return finish(*f, f->peer, f->code,
                          "the connection between " + number(f->rank) + " and " + number(f->peer) +
                              (kind == failure_kind::closed
                                   ? " broke in " + operation_text(*f) + " (" + std::string(f->text.view()) + ")"
                                   : " carried nothing, not even a heartbeat, for " +
                                         detail::seconds_text(f->waited_ns) + " in " + operation_text(*f)) +
                              ", though both are alive. Look at the network between them, or at what keeps their hosts "
                              "too busy to run them.");

    for (report const& r : reports)
        if (r.is == report::state::spoke)
            return finish(r.record, -1, r.record.code, "a rank gave up: " + std::string(r.record.text.view()));
    failure nothing;
    return finish(nothing, -1, errc::peer_closed, "the job ended without a reason being given");
}

}  // namespace ddp
