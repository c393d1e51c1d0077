/// \file
/// Who failed first, and how that is said.
#pragma once

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <sys/wait.h>

#include <ddp/checkpoint/stop_signals.hpp>

#include "posix.hpp"

namespace ddprun {

/// How a rank ended.
struct ending {
    int rank = 0;           ///< or the place of the host in the list of hosts
    std::string host = {};  ///< where that is what has ended: a host with its ranks, as "gpu2 (ranks 4 to 7)"
    pid_t pid = -1;
    int status = 0;      ///< as waitpid gives it
    double seconds = 0;  ///< after its start
    int batch = 0;       ///< which look at the children found it: earlier ones ended earlier, within one nobody knows
    bool by_us = false;  ///< after ddprun had begun to end the job
    int passed_on = 0;   ///< the first signal that ddprun had passed on by then, or 0
    bool after_usr1 = false;      ///< ddprun had passed on SIGUSR1 by then
    bool accuses_a_peer = false;  ///< its last words blame another rank
    std::string last_words = {};

    [[nodiscard]] int signal() const noexcept { return WIFSIGNALED(status) ? WTERMSIG(status) : 0; }
    [[nodiscard]] bool failed() const noexcept { return status != 0; }
    /// It has kept what it had, and wants to be started again: see ddp::stop_signals.
    [[nodiscard]] bool to_be_resumed() const noexcept {
        return WIFEXITED(status) && WEXITSTATUS(status) == ddp::exit_to_be_resumed;
    }
    [[nodiscard]] int exit_code() const noexcept { return signal() != 0 ? 128 + signal() : WEXITSTATUS(status); }
};

/// The root cause, or null if no rank failed by itself.
///
/// The rank that ended first, but: one that says itself that a peer failed yields to one that does not, as a rank may
/// take longer to die than its peers to notice; and of those found together one killed by a signal comes first. SIGABRT
/// counts as an exit: it is what an uncaught exception of a survivor looks like.
[[nodiscard]] inline ending const* first_culprit(std::vector<ending> const& all) {
    ending const* first = nullptr;
    auto const order = [](ending const& e) {
        return std::tuple(e.accuses_a_peer, e.batch, e.signal() == 0 || e.signal() == SIGABRT);
    };
    for (ending const& e : all)
        if (e.failed() && !e.by_us && (first == nullptr || order(e) < order(*first))) first = &e;
    return first;
}

namespace detail {

[[nodiscard]] inline std::string how(ending const& e) {
    return e.signal() != 0 ? "killed by " + signal_name(e.signal()) : "exit code " + std::to_string(e.exit_code());
}

[[nodiscard]] inline std::string name_of(std::vector<ending> const& all, int place) {
    for (ending const& e : all)
        if (e.rank == place) return e.host;
    return "";
}

/// "rank 0: exit code 1; ranks 2, 3: ended by ddprun", of all but `culprit`.
[[nodiscard]] inline std::string the_others(std::vector<ending> const& all, ending const* culprit) {
    constexpr std::size_t shown = 16;
    std::map<std::string, std::vector<int>> groups;
    for (ending const& e : all)
        if (&e != culprit) groups[e.by_us ? "ended by ddprun" : how(e)].push_back(e.rank);
    std::string text;
    for (auto const& [what, ranks] : groups) {
        bool const hosts = !all.front().host.empty();
        text += (text.empty() ? "" : "; ") + std::string(hosts ? "host " : "rank ");
        if (ranks.size() > 1) text.insert(text.size() - 1, "s");
        for (std::size_t i = 0; i < std::min(ranks.size(), shown); ++i)
            text += (i == 0 ? "" : ", ") + (hosts ? name_of(all, ranks[i]) : std::to_string(ranks[i]));
        if (ranks.size() > shown) text += " and " + std::to_string(ranks.size() - shown) + " more";
        text += ": " + what;
    }
    return text;
}

/// The rank that the last words of `culprit` blame, if no rank here is that one: another ddprun has started it. Otherwise -1.
[[nodiscard]] inline int accused_elsewhere(ending const& culprit, std::vector<ending> const& all) {
    std::string_view words = culprit.last_words;
    words.remove_prefix(std::min(words.find("DDP-E"), words.size()));
    words.remove_prefix(std::min(words.find(": "), words.size()));  // "DDP-E202 peer closed: rank 3 is gone …"
    constexpr std::string_view before = ": rank ";
    int rank = -1;
    if (!culprit.accuses_a_peer || !culprit.host.empty() || !words.starts_with(before)) return -1;
    words.remove_prefix(before.size());
    std::from_chars(words.data(), words.data() + words.size(), rank);
    return std::ranges::find(all, rank, &ending::rank) == all.end() ? rank : -1;
}

}  // namespace detail

/// The block that ends a failed job's output.
[[nodiscard]] inline std::string describe(ending const& culprit, std::vector<ending> const& all) {
    if (culprit.passed_on != 0)  // the ranks ended because somebody wanted that: none of them is the culprit
        return "ddprun: " + signal_name(culprit.passed_on) +
               " ended the job: it was sent to ddprun, which passed it on to all ranks\n        " +
               detail::the_others(all, nullptr);
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.1f", culprit.seconds);
    std::string text =
        "ddprun: " + (culprit.host.empty() ? "rank " + std::to_string(culprit.rank) : "host " + culprit.host) +
        (all.size() > 1 ? " failed first: " : " failed: ") + detail::how(culprit) + " (";
    if (int const elsewhere = detail::accused_elsewhere(culprit, all); elsewhere >= 0)
        text = "ddprun: rank " + std::to_string(elsewhere) + ", on another machine, failed first. Rank " +
               std::to_string(culprit.rank) + " here: " + detail::how(culprit) + " (";
    if (culprit.host.empty()) {  // of another host, the process here is only the agent that started it, such as ssh
        char host[256] = "?";
        ::gethostname(host, sizeof host - 1);
        text += "pid " + std::to_string(culprit.pid) + " on " + host + ", ";
    }
    text += std::string(seconds) + " s after its start)";
    if (!culprit.last_words.empty()) text += "\n        its last error line: " + culprit.last_words;
    if (culprit.signal() == SIGKILL) text += "\n        ddprun did not send that signal: was memory short? (dmesg)";
    if (culprit.signal() == SIGUSR1 && culprit.after_usr1)
        text += "\n        ddprun passed that signal on; it ends a rank that has no handler (ddp::stop_signals)";
    if (all.size() > 1) text += "\n        the others: " + detail::the_others(all, &culprit);
    return text;
}

}  // namespace ddprun
