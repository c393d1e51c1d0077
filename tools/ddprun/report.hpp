/// \file
/// What the ddprun on another host reports of its ranks to the one that gave it its orders: a line each in its output.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flight.hpp"

namespace ddprun {

/// What a rank's flight record says, or why there is none.
struct flight_report {
    flight_state state = {};
    std::string silent = {};  ///< "did not answer"
    bool asked = true;        ///< it was sent the last SIGUSR2, or has ended
};
/// By rank.
using flight_reports = std::map<int, flight_report>;

/// The ranks' story, as flight_story tells it.
[[nodiscard]] inline std::string story_of(flight_reports const& all, bool of_a_question) {
    std::map<int, flight_state> states;
    std::map<int, std::string> silent;
    bool somebody_was_not_asked = false;
    for (auto const& [rank, one] : all) {
        states[rank] = one.state;
        silent[rank] = one.silent;
        somebody_was_not_asked |= !one.asked;
    }
    return flight_story(states, silent, of_a_question && somebody_was_not_asked);
}

/// Reports in a stream of lines. They begin with a token that is in the orders, which no program that runs there knows.
class report_lines {
public:
    static constexpr std::size_t longest = 400;

    explicit report_lines(std::string const& token) : head_("ddprun-report " + token + " ") {}

    /// A line for each rank, without its line feed. `question`: how many SIGUSR2 have come; 0: the job has ended.
    [[nodiscard]] static std::vector<std::string> write(std::string const& token, int question,
                                                        flight_reports const& all) {
        std::vector<std::string> lines;
        for (auto const& [rank, one] : all) {
            flight_state const& s = one.state;
            std::string line = "ddprun-report " + token;
            for (long long const number :
                 {static_cast<long long>(question), static_cast<long long>(rank), static_cast<long long>(one.asked),
                  static_cast<long long>(s.wrote), static_cast<long long>(s.threw), static_cast<long long>(s.waited),
                  static_cast<long long>(s.seconds * 1e3)})
                line.append(" ").append(std::to_string(number));
            line.append(" ").append(s.wrote ? s.doing : one.silent);
            lines.push_back((s.ended.empty() ? line : line + "\t" + s.ended).substr(0, longest));
        }
        return lines;
    }

    /// Takes the reports out of `bytes`, and returns the rest. What may be the beginning of one stays here.
    [[nodiscard]] std::string feed(std::string_view bytes) {
        std::string rest;
        for (char const byte : bytes) {
            if (passing_) {
                rest += byte;
                passing_ = byte != '\n';
                continue;
            }
            line_ += byte;
            std::size_t const known = std::min(line_.size(), head_.size());
            if (line_.compare(0, known, head_, 0, known) != 0 || line_.size() > longest + 1) {
                rest += line_;
                line_.clear();
                passing_ = byte != '\n';
            } else if (byte == '\n') {
                take(std::string_view(line_).substr(head_.size(), line_.size() - head_.size() - 1));
                line_.clear();
            }
        }
        return rest;
    }
    /// What has stayed here when the stream ends.
    [[nodiscard]] std::string finish() { return std::exchange(line_, {}); }

    /// The reports that answer this question.
    [[nodiscard]] flight_reports const& of(int question) const {
        static flight_reports const none;
        auto const found = all_.find(question);
        return found == all_.end() ? none : found->second;
    }

private:
    static std::string plain(std::string_view words) {
        std::string text(words);
        for (char& c : text)
            if (c < ' ' || c > '~') c = '?';
        return text;
    }
    void take(std::string_view line) {
        long long numbers[7] = {};
        for (long long& number : numbers) {
            auto const [end, code] = std::from_chars(line.data(), line.data() + line.size(), number);
            if (code != std::errc{} || end == line.data() + line.size() || *end != ' ') return;
            line.remove_prefix(static_cast<std::size_t>(end - line.data()) + 1);
        }
        flight_report one{.asked = numbers[2] != 0};
        if (auto const tab = line.find('\t'); tab != std::string_view::npos) {
            one.state.ended = plain(line.substr(tab + 1));
            line = line.substr(0, tab);
        }
        one.state.wrote = numbers[3] != 0;
        one.state.threw = numbers[4] != 0;
        one.state.waited = numbers[5] != 0;
        one.state.seconds = static_cast<double>(numbers[6]) * 1e-3;
        (one.state.wrote ? one.state.doing : one.silent) = plain(line);
        all_[static_cast<int>(numbers[0])][static_cast<int>(numbers[1])] = one;
    }

    std::string head_, line_;
    bool passing_ = false;  // in a line that is none
    std::map<int, flight_reports> all_;
};

}  // namespace ddprun
