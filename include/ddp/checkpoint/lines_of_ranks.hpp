/// \file
/// Lists of lines that ranks merge: names of state, most of which are the same on all ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/collective/all_gather.hpp>
#include <ddp/collective/broadcast.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/posted.hpp>

namespace ddp::detail {

/// Collective: returns rank 0's text.
template <Transport T>
[[nodiscard]] std::string text_of_rank_0(communicator<T> const& comm, std::string text) {
    posted const size(comm, std::uint64_t{text.size()});
    broadcast(comm, *size, 0);
    text.resize(static_cast<std::size_t>(*size));
    posted const words(comm, std::move(text));
    broadcast(comm, std::span<char>(*words), 0);
    return std::move(*words);
}

[[nodiscard]] inline std::string joined_lines(std::vector<std::string> const& lines) {
    std::string text;
    for (std::string const& line : lines) (text += line) += '\n';
    return text;
}
[[nodiscard]] inline std::vector<std::string> lines_of(std::string_view text) {
    std::vector<std::string> lines;
    for (std::size_t end = 0; (end = text.find('\n')) != text.npos; text.remove_prefix(end + 1))
        lines.emplace_back(text.substr(0, end));
    return lines;
}
inline void sort_unique(std::vector<std::string>& lines) {
    std::sort(lines.begin(), lines.end());
    lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
}

/// Collective: the lines of all ranks, sorted, each once. Cost: the lines of rank 0 are broadcast, and others gathered.
template <Transport T>
[[nodiscard]] std::vector<std::string> lines_of_all(communicator<T> const& comm, std::vector<std::string> mine) {
    sort_unique(mine);
    std::vector<std::string> all =
        lines_of(text_of_rank_0(comm, comm.rank() == 0 ? joined_lines(mine) : std::string()));
    std::erase_if(mine, [&](std::string const& line) { return std::binary_search(all.begin(), all.end(), line); });
    std::string const more = joined_lines(mine);
    std::vector<std::size_t> const counts = all_gather(comm, more.size());
    std::size_t total = 0;
    for (std::size_t const count : counts) total += count;
    posted const rest(comm, std::string(total, '\0'));
    all_gather(comm, std::span<char const>(more), std::span<std::size_t const>(counts), std::span<char>(*rest));
    for (std::string& line : lines_of(*rest)) all.push_back(std::move(line));
    sort_unique(all);
    return all;
}

}  // namespace ddp::detail
