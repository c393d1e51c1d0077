/// \file
/// What comm/verdict.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <ddp/comm/verdict.hpp>
#include <ddp/core/text.hpp>

namespace ddp {
namespace detail {

inline constexpr char const* both_alive =
    ", though both are alive. Look at the network between them, or at what keeps their hosts too busy to run them.";

/// "2.3 s".
[[gnu::cold]] DDP_DECL std::string seconds_text(std::uint64_t nanos) {
    std::uint64_t const tenths = (nanos + 50'000'000) / 100'000'000;
    return concat({tenths / 10, ".", tenths % 10, " s"});
}
[[gnu::cold]] DDP_DECL std::string rank_text(int rank) {
    return concat({"rank ", rank});
}
/// Names the other ranks from which nothing was heard although all were asked; empty if there are none.
[[gnu::cold]] DDP_DECL std::string unheard_text(int culprit, std::span<report const> reports) {
    constexpr int most = 8;
    std::string names;
    int count = 0;
    for (std::size_t r = 0; r < reports.size(); ++r) {
        bool const unheard = reports[r].is == report::state::silent || reports[r].is == report::state::closed;
        if (!unheard || static_cast<int>(r) == culprit || ++count > most) continue;
        names += concat({count == 1 ? "" : ", ", r});
    }
    if (count == 0) return "";
    return concat({" Nothing came from ", count == 1 ? "rank " : "ranks ", names, count > most ? " and others" : "",
                   " either. If they are running, the network is partitioned, and they report the same about the ranks "
                   "on this side."});
}
/// "; it is in forward of step 57"; empty if that is not known.
[[gnu::cold]] DDP_DECL std::string phase_text(mark const& of) {
    return of.phase.view().empty() || of.occupied != 0 ? "" : "; it is in " + printable(of.phase.view());
}
[[gnu::cold]] DDP_DECL std::string_view operation_text(failure const& of) {
    std::string_view const name = of.entered.name.view();
    return name.empty() ? "an operation without a name" : name;
}

}  // namespace detail

[[gnu::cold]] DDP_DECL std::string describe(fault const& found, std::span<report const> reports) {
    using detail::concat, detail::operation_text, detail::rank_text, detail::seconds_text;
    failure const& from = found.from;
    auto const record_of = [&](int rank) -> failure const& { return reports[static_cast<std::size_t>(rank)].record; };
    bool const culprit_spoke = found.culprit >= 0 && static_cast<std::size_t>(found.culprit) < reports.size() &&
                               reports[static_cast<std::size_t>(found.culprit)].is == report::state::spoke;
    std::string_view const own_words = from.text.view();
    std::string_view const reason = own_words.empty() ? "its connection closed without a failure record" : own_words;
    std::string_view const during = operation_text(from);
    std::string const culprit = rank_text(found.culprit), speaker = rank_text(from.rank), peer = rank_text(from.peer);
    std::string const waited = seconds_text(from.waited_ns);
    std::string const unheard = detail::unheard_text(found.culprit, reports);
    constexpr char const* look_there =
        ". It crashed, exited, was killed or lost its network: look at its own output first.";

    switch (found.rule) {
        case fault_rule::published:
        case fault_rule::named:
        case fault_rule::message: return std::string(own_words);
        case fault_rule::threw:
            if (from.entered.name.view().empty()) return concat({speaker, " failed in its own code: ", own_words});
            return concat(
                {speaker, " failed in its own code", from.inside ? " during " : " after ", during, ": ", own_words});
        case fault_rule::broke:
            return concat({"the transport of ", speaker, " failed", from.inside ? " in " : " after ", during, ": ",
                           own_words,
                           ". The state of the other ranks is unknown; look at that rank's host and network."});
        case fault_rule::settings:
            return concat(
                {speaker, " and ", rank_text(found.other), " are both in ", during,
                 ", but with different arguments, such as the root, the count, the list of ranks, or the options "
                 "or hash() of an algorithm, or an earlier operation differed. All ranks must call the same "
                 "collectives in the same order with the same "
                 "arguments."});
        case fault_rule::operations:
            return concat({"ranks disagree about operation #", from.entered.number, ": ", speaker, " is in ", during,
                           ", ", rank_text(found.other), " in ", operation_text(record_of(found.other)),
                           ". All ranks must call the same collectives in the same order with the same counts."});
        case fault_rule::left:
            return concat({culprit, " exited cleanly while ", speaker, " was in ", during,
                           ": it called fewer collectives or steps than the others. All ranks must take part in all of "
                           "them; a rank that is out of data calls trainer.join()."});
        case fault_rule::closed:
            return concat({culprit, " is gone while ", speaker, " was in ", during, ": ", reason, look_there, unheard});
        case fault_rule::stopped:
            return concat({culprit, " was stopped for ", waited, " in ", during,
                           ", longer than timing.dead. Meanwhile ", own_words,
                           ". The others have ended the job without it, or failed: look at their output."});
        case fault_rule::gone: return concat({culprit, " is gone: ", reason, look_there, unheard});
        case fault_rule::silent:
            return concat({culprit, " has sent nothing, not even a heartbeat, for ", waited, " (seen by ", speaker,
                           " in ", during, "). Its process is stopped or swapped out, or its host is unreachable.",
                           own_words.empty() ? "" : " ", own_words, unheard});
        case fault_rule::late: {
            bool const through = found.culprit != from.peer;
            mark const last = culprit_spoke ? record_of(found.culprit).entered : mark{};
            std::string_view const entered = last.name.view();
            return concat({culprit, " did not take part in ", during, " in time: ", speaker, " waited ", waited,
                           through ? " (through " : "", through ? std::string_view(peer) : "", through ? ")" : "",
                           !culprit_spoke    ? ". Nothing has been heard from it since"
                           : entered.empty() ? ". It is alive, and has not entered any operation yet"
                                             : ". It is alive; the last operation it entered is ",
                           entered, detail::phase_text(last),
                           ". Look at what it is doing there, or raise timing.collective (DDP_TIMEOUT_COLLECTIVE)."});
        }
        case fault_rule::circle: {
            std::string text = "ranks wait for each other";
            char const* between = ": ";
            for (int const rank : found.circle) {
                text += concat({between, rank_text(rank), " for ", rank_text(record_of(rank).peer), " in ",
                                operation_text(record_of(rank))});
                between = ", ";
            }
            return text +
                   (found.code == errc::mismatch
                        ? ". Ranks that share several groups must call their collectives in the same order."
                        : ". A message between two of them was lost, each receives before it sends, or their tags "
                          "differ. Look at the network between their hosts, and at their own messages.");
        }
        case fault_rule::broken_link:
            return concat({"the connection between ", speaker, " and ", peer, " broke in ", during, " (", own_words,
                           ")", detail::both_alive});
        case fault_rule::silent_link:
            return concat({"the connection between ", speaker, " and ", peer,
                           " carried nothing, not even a heartbeat, for ", waited, " in ", during,
                           own_words.empty() ? detail::both_alive : ", though both are alive. ", own_words});
        case fault_rule::gave_up:
            return concat({speaker, " gave up in ", during,
                           own_words.empty()
                               ? ", but the record that says why was lost. Look for the first error in the "
                                 "output of the other ranks."
                               : ": ",
                           own_words, unheard});
        case fault_rule::without_reason: return "the job ended without a reason being given";
    }
    return std::string(own_words);
}

namespace detail {

[[gnu::cold]] DDP_DECL void name_process(failure& verdict, std::string_view process) {
    // Where ranks disagree, or a connection between two that are alive is lost, no process is at fault.
    if (static_cast<int>(verdict.code) / 100 != 2 || verdict.code == errc::mismatch) return;
    if (!verdict.text.view().starts_with(rank_text(verdict.peer))) return;
    if (verdict.peer < 0 || process.empty() || verdict.text.view().find(process) != std::string_view::npos) return;
    std::string const longer = concat({verdict.text.view(), " (", rank_text(verdict.peer), ": ", process, ")"});
    if (longer.size() <= verdict.text.chars.size()) verdict.text = std::string_view(longer);
}

[[gnu::cold]] DDP_DECL std::string straggler_text(int rank, failure const& mine, std::span<int const> absent, int named,
                                                  mark const& last, nanoseconds collective, bool on_request,
                                                  bool occupied, std::string_view process) {
    constexpr std::size_t most = 8;
    std::string others;
    for (std::size_t k = 1; k < std::min(absent.size(), most); ++k) others += concat({", ", absent[k]});
    if (absent.size() > most) others += " and others";
    std::string const entered = printable(last.name.view());  // from that rank's heartbeat
    bool const heard = !absent.empty() || !entered.empty();   // otherwise it sends no heartbeats
    bool const all_are_here = absent.empty() && mine.entered.number != 0;
    char const* const which = !heard || mine.entered.number == 0 ? ""
                              : all_are_here   ? ", which has entered it, too, and may wait for another"
                              : others.empty() ? ", which has not entered it"
                                               : ", which have not entered it";
    std::string alive = heard ? concat({". Rank ", named, " is alive"}) : "", earlier;
    if (last.same_group(mine.entered) && last.number < mine.entered.number) {
        std::uint64_t const many = mine.entered.number - last.number;
        earlier = concat({" (", many, many == 1 ? " operation" : " operations", " earlier)"});
    }
    if (heard && last.occupied != 0)
        alive += concat({" and is in a long operation, ", entered});
    else if (heard && !all_are_here)
        alive += entered.empty() ? " and has entered nothing yet" : concat({" and last entered ", entered, earlier});
    alive += phase_text(last);
    std::string_view const open = process.empty() ? "" : "(", shut = process.empty() ? "" : ") ";
    if (on_request) alive += concat({"; send it ", open, process, shut, "SIGUSR2 to see what it is doing"});
    return concat(
        {rank_text(rank), " has waited ", seconds_text(mine.waited_ns), " in ", mine.entered.name.view(), " for ",
         others.empty() ? "rank " : "ranks ", named, others, which, alive,
         occupied ? ". Deadlines are extended until no rank is in a long operation; after that the job fails within "
                  : ". If nothing changes, the job fails after ",
         seconds_text(static_cast<std::uint64_t>(collective.count())), " (timing.collective)"});
}

}  // namespace detail

[[gnu::cold]] DDP_DECL failure decide(std::span<report const> reports, nanoseconds collective) {
    fault const found = find_fault(reports, collective);
    if (found.rule == fault_rule::published) return found.from;
    failure verdict = found.from;
    verdict.peer = found.culprit;
    verdict.code = found.code;
    verdict.is_verdict = true;
    std::string const text = describe(found, reports);
    verdict.text = std::string_view(text);
    return verdict;
}

}  // namespace ddp
