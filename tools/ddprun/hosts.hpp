/// \file
/// The machines that -H and --hostfile name.
#pragma once

#include <algorithm>
#include <charconv>
#include <fstream>
#include <istream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace ddprun {

/// A command line that makes no sense. The text says what was expected.
class usage_problem : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// A machine of -H or --hostfile, and how many ranks it gets.
struct host {
    std::string name;
    int slots = 1;
};

namespace detail {

/// What a job can have at most, in ranks.
inline constexpr int most_slots = 65536;

/// A text that a user or a file gave, for an error: short, and without what a terminal would obey.
inline std::string shown(std::string_view text) {
    std::string result(text.substr(0, 80));
    for (char& c : result)
        if (c < ' ' || c > '~') c = '?';
    return "'" + result + (text.size() > 80 ? "...'" : "'");
}

inline int parse_integer(std::string_view option, std::string_view text, int least, int most) {
    int value = 0;
    auto const [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc{} || end != text.data() + text.size() || value < least || value > most)
        throw usage_problem(std::string(option) + " takes an integer from " + std::to_string(least) + " to " +
                            std::to_string(most) + ", not " + shown(text));
    return value;
}

/// Characters of names and addresses, and of a user before "@": a name reaches ssh, or a command of the user's, as a word.
inline bool is_host_name(std::string_view name) {
    auto const known = [](char c) {
        return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
               std::string_view("-_.@:[]%").find(c) != std::string_view::npos;
    };
    return !name.empty() && name.size() <= 320 && name.front() != '-' && std::all_of(name.begin(), name.end(), known);
}

inline void expect_host_name(std::string const& name) {
    if (!is_host_name(name))
        throw usage_problem(shown(name) + " is not a host's name; names have letters, digits and -_.@:[]% only");
}

/// "[fd00::2]" and "me@[fd00::2]" without the brackets, which ssh does not know.
inline std::string without_brackets(std::string name) {
    auto const open = name.find('[');
    if (open == std::string::npos || name.back() != ']' || (open > 0 && name[open - 1] != '@')) return name;
    name.pop_back();
    return name.erase(open, 1);
}

inline void add_host(std::vector<host>& hosts, std::string const& text, int slots) {
    std::string const name = without_brackets(text);
    expect_host_name(name);
    int all = slots;
    for (host const& one : hosts) all += one.slots;
    if (all > most_slots)
        throw usage_problem("the hosts have more than " + std::to_string(most_slots) + " slots, which is more than " +
                            "a job can have ranks");
    auto const known = std::find_if(hosts.begin(), hosts.end(), [&](host const& one) { return one.name == name; });
    (known != hosts.end() ? *known : hosts.emplace_back(host{name, 0})).slots += slots;
}

/// "name", "name:slots"; an address of IPv6 as it is, or in brackets: "fe80::1%eth0", "me@[fd00::2]:4".
inline void add_host(std::vector<host>& hosts, std::string const& text) {
    auto const colon = text.rfind(':'), open = text.find('['), close = text.rfind(']');
    bool const bracketed = open != std::string::npos && close != std::string::npos && open < close;
    if (colon == std::string::npos || (bracketed ? colon < close : text.find(':') != colon))
        return add_host(hosts, text, 1);
    std::string const name = text.substr(0, colon);
    expect_host_name(name);
    add_host(hosts, name,
             parse_integer("the number of slots of host " + name, std::string_view(text).substr(colon + 1), 1, 4096));
}

inline std::vector<host> parse_hosts(std::string const& list) {
    std::vector<host> hosts;
    std::istringstream items(list);
    for (std::string item; std::getline(items, item, ',');) add_host(hosts, item);
    return hosts;
}

/// The lines of a file of hosts, called `path` in errors: NAME, NAME:N or NAME slots=N, and comments after #.
inline std::vector<host> read_hosts(std::istream& lines, std::string const& path) {
    std::vector<host> hosts;
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line.substr(0, line.find('#')));
        std::string name, word;
        if (!(words >> name)) continue;
        std::optional<int> slots;
        while (words >> word) {
            if (!word.starts_with("slots="))
                throw usage_problem("--hostfile " + path + ": " + shown(word) +
                                    " is not understood; expected NAME slots=N");
            slots = parse_integer("slots", std::string_view(word).substr(6), 1, 4096);
        }
        if (slots)
            add_host(hosts, name, *slots);
        else
            add_host(hosts, name);
    }
    if (hosts.empty()) throw usage_problem("--hostfile " + path + " names no host");
    return hosts;
}

inline std::vector<host> read_hostfile(std::string const& path) {
    std::ifstream file(path);
    if (!file) throw usage_problem("--hostfile " + path + " cannot be read");
    return read_hosts(file, path);
}

}  // namespace detail

}  // namespace ddprun
