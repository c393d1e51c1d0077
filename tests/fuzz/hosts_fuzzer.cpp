// Throws arbitrary texts at what reads lists of hosts: Slurm's node lists and task counts, ddprun's -H and the lines of its
// --hostfile. Each refuses a text, or what it makes of it is sound: compared with a list that is written out, host by host,
// where it is short. Anything else, and whatever a sanitizer sees, ends the program.
//
// The first byte chooses the reader, or has a list written from what follows, which then has to be read as it was meant.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ddp/rendezvous/slurm_node_list.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "../../tools/ddprun/hosts.hpp"
#include "input.hpp"

namespace {

using fuzz::expect;

// The hosts of "a[1-3,07]b": every range written out, from the left, the last range running fastest. Nothing if `text` is no
// such item. Slow and simple, and only for short ones.
constexpr std::size_t most_written = 4096;
std::optional<std::vector<std::string>> written_out(std::string_view text) {
    std::vector<std::string> all{""};
    while (!text.empty()) {
        std::vector<std::string> parts;
        if (text.front() == '[') {
            std::size_t const end = text.find(']');
            if (end == text.npos) return std::nullopt;
            std::istringstream ranges(std::string(text.substr(1, end - 1)));
            for (std::string range; std::getline(ranges, range, ',');) {
                std::size_t const dash = range.find('-');
                std::string const low = range.substr(0, dash), high = dash == range.npos ? low : range.substr(dash + 1);
                for (std::string const& one : {low, high})
                    if (one.empty() || one.size() > 9 || one.find_first_not_of("0123456789") != one.npos)
                        return std::nullopt;
                for (long at = std::stol(low); at <= std::stol(high); ++at) {
                    std::string number = std::to_string(at);
                    number.insert(0, low.size() - std::min(low.size(), number.size()), '0');
                    parts.push_back(number);
                    if (parts.size() > most_written) return std::nullopt;
                }
            }
            text.remove_prefix(end + 1);
        } else {
            parts.emplace_back(1, text.front());
            text.remove_prefix(1);
        }
        if (all.size() * parts.size() > most_written) return std::nullopt;
        std::vector<std::string> longer;
        for (std::string const& head : all)
            for (std::string const& tail : parts) longer.push_back(head + tail);
        all = std::move(longer);
    }
    return all;
}

// The items of a list: commas inside brackets divide ranges.
std::vector<std::string> items_of(std::string_view text) {
    std::vector<std::string> items{""};
    bool inside = false;
    for (char const c : text) {
        inside = c == '[' || (inside && c != ']');
        if (c == ',' && !inside)
            items.emplace_back();
        else
            items.back() += c;
    }
    return items;
}

bool is_plain(std::string_view name) {
    return std::all_of(name.begin(), name.end(), [](char c) {
        return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_' ||
               c == '.';
    });
}

void nodes(std::string const& text) {
    auto const list = ddp::detail::slurm_node_list::parse(text);
    if (!list) return;
    expect(list->count >= 1 && list->count <= 1'000'000, "there are hosts, and no more than the limit");
    expect(!list->first.empty() && list->first.size() <= 253 && list->first.front() != '-' && is_plain(list->first),
           "the first is a host's name");
    std::size_t count = 0;
    std::string first;
    for (std::string const& item : items_of(text)) {
        auto const hosts = written_out(item);
        if (!hosts) return;  // too many to write out
        if (first.empty()) first = hosts->front();
        count += hosts->size();
    }
    expect(list->count == count, "as many hosts are counted as are written out");
    expect(list->first == first, "the first is the first that is written out");
    auto const twice = ddp::detail::slurm_node_list::parse(text + "," + text);
    expect(!twice || (twice->count == 2 * list->count && twice->first == list->first),
           "a list twice names twice as many");
}

void counts(std::string const& text) {
    std::vector<std::uint32_t> here;
    std::uint32_t total = 0;
    for (std::uint32_t node = 0;; ++node) {
        auto const all = ddp::detail::slurm_task_counts::parse(text, node);
        if (!all) break;
        expect(all->here >= 1 && all->here <= all->tasks && all->tasks <= 1'000'000,
               "a node has tasks, within the limit");
        expect(all->nodes >= 1 && all->nodes <= all->tasks && node < all->nodes, "no node is without tasks");
        if (node == 0) total = all->tasks;
        expect(all->tasks == total, "every node sees the same tasks");
        here.push_back(all->here);
        if (here.size() == 64) return;
    }
    std::uint32_t sum = 0;
    for (std::uint32_t const one : here) sum += one;
    expect(sum == total, "the tasks of all nodes are all tasks");
}

void sound(std::vector<ddprun::host> const& hosts) {
    int slots = 0;
    for (std::size_t i = 0; i < hosts.size(); ++i) {
        std::string const& name = hosts[i].name;
        expect(!name.empty() && name.front() != '-', "a name is no option of ssh");
        for (char const c : name) expect(c > ' ' && c < 127 && c != '\'' && c != '$', "a name is a word for any shell");
        expect(hosts[i].slots >= 1, "a host has slots");
        for (std::size_t j = 0; j < i; ++j) expect(hosts[j].name != name, "a host is there once");
        slots += hosts[i].slots;
    }
    expect(slots <= 65536, "a job has no more ranks than it can have");
}

template <class Read>
void names(Read const& read) {
    try {
        sound(read());
    } catch (ddprun::usage_problem const& e) {
        std::string_view const said = e.what();
        expect(said.size() < 1000, "what is said has bounds");
        for (char const c : said) expect(c >= ' ' && c <= '~', "what is said is for a terminal");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    fuzz::reader in({data, size});
    std::uint8_t const which = in.byte();
    std::string const text = fuzz::reader(in).text(size);
    switch (which % 5) {
        case 0: nodes(text); break;
        case 1: counts(text); break;
        case 2: names([&] { return ddprun::detail::parse_hosts(text); }); break;
        case 3:
            names([&] {
                std::istringstream lines(text);
                return ddprun::detail::read_hosts(lines, "hosts");
            });
            break;
        default: {  // a file and a list of the same hosts
            std::string lines, list;
            for (int i = 0; i < 20 && !in.empty(); ++i) {
                std::string const name(1, static_cast<char>('a' + in.byte() % 4));
                int const slots = 1 + in.byte() % 9;
                int const form = in.byte() % 3;
                lines += form == 0   ? name + ":" + std::to_string(slots) + " # one\n"
                         : form == 1 ? "\t" + name + "  slots=" + std::to_string(slots) + "\r\n"
                                     : "\n#\n" + name + ":" + std::to_string(slots) + "\n";
                list += (list.empty() ? "" : ",") + name + ":" + std::to_string(slots);
            }
            if (list.empty()) break;
            std::istringstream file(lines);
            auto const a = ddprun::detail::read_hosts(file, "hosts"), b = ddprun::detail::parse_hosts(list);
            sound(a);
            expect(std::equal(a.begin(), a.end(), b.begin(), b.end(),
                              [](auto const& x, auto const& y) { return x.name == y.name && x.slots == y.slots; }),
                   "a file of hosts reads as the list of the same");
        }
    }
    return 0;
}
