/// \file
/// The ranks' flight records: the directory that they are written to, and what all of them say together.
#pragma once

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "posix.hpp"

namespace ddprun {

/// Where the ranks of one attempt write: a private directory that goes with this object, or one that the user has named
/// (a subdirectory of it for each restart), from which the files of earlier jobs are removed.
class flight_directory {
public:
    flight_directory(std::string const& users, int attempt, int first_rank, int ranks) : kept_(!users.empty()) {
        std::error_code problem;
        if (kept_) {
            path_ = std::filesystem::absolute(users, problem).string();
            if (attempt > 0) path_ += "/restart-" + std::to_string(attempt);
            std::filesystem::create_directories(path_, problem);
            if (!problem && ::access(path_.c_str(), W_OK | X_OK) != 0) problem.assign(errno, std::generic_category());
            if (problem) problem_ = "cannot write into " + path_ + ": " + problem.message();
            for (int rank = first_rank; rank < first_rank + ranks; ++rank)
                for (int again = 0; again < 10; ++again) std::filesystem::remove(file_of(rank, again), problem);
            return;
        }
        std::string name = std::filesystem::temp_directory_path(problem).string() + "/ddprun-XXXXXX";
        if (problem || ::mkdtemp(name.data()) == nullptr) return;
        path_ = name;
        held_ = unique_fd(::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        ::flock(held_.get(), LOCK_SH);  // or systemd-tmpfiles may clear it away during a long job
    }
    flight_directory(flight_directory const&) = delete;
    flight_directory& operator=(flight_directory const&) = delete;
    ~flight_directory() {
        std::error_code problem;
        if (!kept_ && !path_.empty()) std::filesystem::remove_all(path_, problem);
    }

    [[nodiscard]] std::string const& path() const noexcept { return path_; }        ///< empty: none could be made
    [[nodiscard]] std::string const& problem() const noexcept { return problem_; }  ///< of the user's; or empty
    /// Of the communicator that the rank has made last: a second one finds the file of the first there.
    [[nodiscard]] std::string newest_of(int rank) const {
        std::error_code problem;
        int again = 9;
        while (again > 0 && !std::filesystem::exists(file_of(rank, again), problem)) --again;
        return file_of(rank, again);
    }

private:
    [[nodiscard]] std::string file_of(int rank, int again) const {
        return path_ + "/rank-" + std::to_string(rank) + (again == 0 ? "" : "." + std::to_string(again)) + ".jsonl";
    }

    bool kept_;
    std::string path_, problem_;
    unique_fd held_;
};

/// What a rank was doing when it failed, or when it wrote last.
struct flight_state {
    bool wrote = false;
    bool failed = false;     ///< it wrote because the job failed
    bool threw = false;      ///< its own code did, there
    bool waited = false;     ///< for others
    bool gone = false;       ///< it did not write this itself: ddprun did, after its end
    std::string doing = {};  ///< "was in forward of step 57"
    double seconds = 0;      ///< since when
    std::string ended = {};  ///< how, if it is gone: "was killed by SIGKILL"
    std::int64_t asked = 0;  ///< when it wrote because of a signal, in nanoseconds of the monotonic clock
};

namespace detail {

/// Of a line of a flight record, in which no string holds a quotation mark: they are written as \u0022. Never negative, and
/// 0 where there is no such number.
[[nodiscard]] inline std::int64_t number_in(std::string_view line, std::string const& key) {
    std::int64_t value = 0;
    if (auto const at = line.find("\"" + key + "\":"); at != std::string_view::npos)
        std::from_chars(line.data() + at + key.size() + 3, line.data() + line.size(), value);
    return std::max<std::int64_t>(value, 0);
}
/// What is no plain character is shown as a question mark.
[[nodiscard]] inline std::string text_in(std::string_view line, std::string const& key) {
    auto const at = line.find("\"" + key + "\":\"");
    if (at == std::string_view::npos) return "";
    line.remove_prefix(at + key.size() + 4);
    std::string text(line.substr(0, std::min<std::size_t>(line.find('"'), 32)));
    for (char& c : text)
        if (c < ' ' || c > '~' || c == '\\') c = '?';
    return text;
}

/// What stands in a regular file of this user's. Others may be able to write to the directory.
[[nodiscard]] inline std::string own_file(std::string const& path) {
    unique_fd const file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    struct stat info;
    if (!file || ::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != ::geteuid()) return "";
    std::string text;
    char buffer[1 << 16];
    for (ssize_t n; (n = ::read(file.get(), buffer, sizeof buffer)) > 0;)
        text.append(buffer, static_cast<std::size_t>(n));
    return text;
}

[[nodiscard]] inline std::string doing(std::string const& event, std::string const& name, std::string const& number) {
    if (event == "joining") return "tried to join the job";
    if (event == "forward") return "was in forward of step " + number;
    if (event == "backward") return "was in backward of step " + number;
    bool const pass = name == "forward" || name == "backward";
    std::string const what = pass             ? name + " of step " + number
                             : name == "step" ? "step " + number
                                              : name + (number == "0" ? "" : " #" + number);
    if (event == "finished") return "was in the program's own code after " + what;
    return name == "message" || name == "request" ? "waited for a " + name : "waited for the others in " + what;
}

}  // namespace detail

/// What the lines of one rank's record say. A line that has no end, because the rank died, is left out.
[[nodiscard]] inline flight_state state_of_flight(std::string_view rest) {
    flight_state state;
    std::int64_t since = 0, last = 0;
    bool left = false;
    for (std::size_t end; (end = rest.find('\n')) != std::string_view::npos; rest.remove_prefix(end + 1)) {
        std::string_view const line = rest.substr(0, end);
        std::string const event = detail::text_in(line, "event");
        std::int64_t const at = detail::number_in(line, "t_ns");
        state.wrote = true;
        if (event == "dump" && detail::text_in(line, "why") == "SIGUSR2") state.asked = at;
        if (state.failed || left) continue;  // what follows is only how it ended
        left = event == "left";
        state.gone = state.failed = event == "dump" && detail::text_in(line, "why") == "gone";
        last = std::max(last, at);
        if (event == "start") since = at;
        state.failed |= event == "failed";
        state.threw = event == "failed" && detail::text_in(line, "kind") == "threw";
        if (event != "joining" && event != "forward" && event != "backward" && event != "waits" && event != "finished")
            continue;
        since = at;
        state.waited = event == "waits";
        state.doing =
            detail::doing(event, detail::text_in(line, "name"), std::to_string(detail::number_in(line, "number")));
    }
    if (state.doing.empty()) state.doing = "was in the program's own code before any call";
    state.seconds = since == 0 ? 0 : static_cast<double>(last - since) * 1e-9;
    return state;
}

/// What the file of one rank says.
[[nodiscard]] inline flight_state read_flight(std::string const& path) {
    return state_of_flight(detail::own_file(path));
}

/// A few lines, each after a line feed and eight blanks: who did what for how long, those that did not wait first. Ranks
/// that have written nothing come with the words in `silent`. Nothing at all where no rank has written, unless `always`.
[[nodiscard]] inline std::string flight_story(std::map<int, flight_state> const& ranks,
                                              std::map<int, std::string> const& silent, bool always) {
    struct group {
        std::vector<int> ranks;
        double least = 1e9, most = -1;
    };
    std::map<std::tuple<bool, std::string, std::string>, group> groups;  // waited, how it ended, what it did
    bool any = false;
    for (auto const& [rank, state] : ranks) {
        any = any || state.wrote;
        group& all = groups[{state.waited, state.threw ? "threw an exception" : state.ended,
                             state.wrote ? state.doing : silent.at(rank)}];
        all.ranks.push_back(rank);
        if (!state.wrote) continue;
        all.least = std::min(all.least, state.seconds);
        all.most = std::max(all.most, state.seconds);
    }
    if (!any && !always) return "";
    std::string text;
    constexpr std::size_t shown = 16;
    for (auto const& [what, all] : groups) {
        text += all.ranks.size() == 1 ? "\n        rank " : "\n        ranks ";
        for (std::size_t i = 0; i < std::min(shown, all.ranks.size()); ++i)
            text += (i == 0 ? "" : ", ") + std::to_string(all.ranks[i]);
        if (all.ranks.size() > shown) text += " and " + std::to_string(all.ranks.size() - shown) + " more";
        std::string doing = " " + std::get<2>(what),
                    ended = std::get<1>(what).empty() ? "" : ", and " + std::get<1>(what);
        if (all.ranks.size() > 1)
            for (std::string* const words : {&doing, &ended})
                for (auto const& [one, many] : {std::pair(" was ", " were "), std::pair(" it ", " they ")})
                    if (auto const at = words->find(one); at != std::string::npos)
                        words->replace(at, std::string_view(one).size(), many);
        text += doing;
        char time[64] = "";
        if (all.most >= 0 && all.most - all.least < 0.1)
            std::snprintf(time, sizeof time, " for %.1f s", all.most);
        else if (all.most >= 0)
            std::snprintf(time, sizeof time, " for %.1f to %.1f s", all.least, all.most);
        text += time + ended;
    }
    return text;
}

}  // namespace ddprun
