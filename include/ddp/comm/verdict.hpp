/// \file
/// verdict: a fault in words, and the error that every rank throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>

#include <ddp/comm/fault.hpp>
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
    std::string_view const name = of.entered.name.view();
    return name.empty() ? std::string("no operation") : std::string(name);
}

}  // namespace detail

/// What to tell people about a fault. `reports` are those it was found in.
inline std::string describe(fault const& found, std::span<report const> reports) {
    using detail::operation_text;
    using detail::seconds_text;
    failure const& from = found.from;
    auto const number = [](int rank) { return "rank " + std::to_string(rank); };
    auto const record_of = [&](int rank) -> failure const& { return reports[static_cast<std::size_t>(rank)].record; };
    auto const spoke = [&](int rank) {
        return rank >= 0 && static_cast<std::size_t>(rank) < reports.size() &&
               reports[static_cast<std::size_t>(rank)].is == report::state::spoke;
    };
    std::string const own_words(from.text.view());
    std::string const reason = own_words.empty() ? "its connection closed without a word" : own_words;
    constexpr char const* look_there = ". It crashed, was killed or lost its network: look at its own output first.";

    switch (found.rule) {
        case fault_rule::published:
        case fault_rule::named:
        case fault_rule::message: return own_words;
        case fault_rule::threw:
            return number(from.rank) + " failed in its own code" +
                   (from.entered.name.view().empty() ? "" : " during " + operation_text(from)) + ": " + own_words;
        case fault_rule::settings:
            return number(from.rank) + " and " + number(found.other) + " are both in " + operation_text(from) +
                   ", but not with the same settings, or something they did before it differs: another root, another "
                   "count. All ranks must call the same collectives in the same order with the same arguments.";
        case fault_rule::operations:
            return "ranks disagree about operation #" + std::to_string(from.entered.number) + ": " + number(from.rank) +
                   " is in " + operation_text(from) + ", " + number(found.other) + " in " +
                   operation_text(record_of(found.other)) +
                   ". All ranks must call the same collectives in the same order with the same counts.";
        case fault_rule::left:
            return number(found.culprit) + " has ended in good order while " + number(from.rank) + " was in " +
                   operation_text(from) +
                   ": it called fewer collectives or steps than the others. All ranks must take part in all of them; a "
                   "rank that is out of data calls step() without a batch.";
        case fault_rule::closed:
            return number(found.culprit) + " is gone while " + number(from.rank) + " was in " + operation_text(from) +
                   ": " + reason + look_there;
        case fault_rule::gone: return number(found.culprit) + " is gone: " + reason + look_there;
        case fault_rule::silent:
            return number(found.culprit) + " has sent nothing, not even a heartbeat, for " +
                   seconds_text(from.waited_ns) + " (seen by " + number(from.rank) + " in " + operation_text(from) +
                   "). Its process is stopped or swapped out, or its host is unreachable.";
        case fault_rule::late: {
            std::string text = number(found.culprit) + " did not take part in " + operation_text(from) +
                               " in time: " + number(from.rank) + " waited " + seconds_text(from.waited_ns);
            if (found.culprit != from.peer) text += " (through " + number(from.peer) + ")";
            if (spoke(found.culprit))
                text += ". It is alive; the last operation it entered is " + operation_text(record_of(found.culprit));
            else
                text += ". Nothing has been heard from it since";
            return text + ". Look at what it is doing there, or raise timing.collective.";
        }
        case fault_rule::circle: {
            std::string text = "ranks wait for each other";
            char const* between = ": ";
            for (int const rank : found.circle) {
                text += between + number(rank) + " for " + number(record_of(rank).peer) + " in " +
                        operation_text(record_of(rank));
                between = ", ";
            }
            return text + ". Ranks that share several groups must call their collectives in the same order.";
        }
        case fault_rule::broken_link:
        case fault_rule::silent_link:
            return "the connection between " + number(from.rank) + " and " + number(from.peer) +
                   (found.rule == fault_rule::broken_link
                        ? " broke in " + operation_text(from) + " (" + own_words + ")"
                        : " carried nothing, not even a heartbeat, for " + seconds_text(from.waited_ns) + " in " +
                              operation_text(from)) +
                   ", though both are alive. Look at the network between them, or at what keeps their hosts too busy "
                   "to run them.";
        case fault_rule::gave_up: return "a rank gave up: " + own_words;
        case fault_rule::without_reason: return "the job ended without a reason being given";
    }
    return own_words;
}

/// From each rank's report to the verdict that all ranks throw: the culprit, the code, and the words.
inline failure decide(std::span<report const> reports, nanoseconds collective) {
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
